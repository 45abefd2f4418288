"""The guide to notebooks in a real kernel of Jupyter."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from ..examples.run import ROOT
from .blocks import blocks

for name in ("nbformat", "nbclient", "ipykernel", "tqdm"):
    pytest.importorskip(name, reason=f"an optional package is not installed: {name} (of the group pages)")

WATCHED = """
def watched():
    acc = Accelerator(mixed_precision="fp32", cpu=True, log_with="console")
    model, data = nn.Linear(8, 1), DataLoader(torch.ones(8, 8))
    model, optimizer, loader = acc.prepare(model, torch.optim.SGD(model.parameters(), 0.1), data)
    for inputs in loader:
        acc.backward(model(inputs).mean())
        optimizer.step()
    acc.end_training()

notebook_launcher(watched, num_processes=2)
"""
BROKEN = """
def broken():
    raise ValueError("in the function")

notebook_launcher(broken, num_processes=2)
"""


def said(cell: Any) -> str:
    return "".join(output.get("text", "") + output.get("evalue", "") for output in cell.outputs)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_guide_runs_in_a_kernel_and_processes_show_their_line(tmp_path: Path, monkeypatch: Any) -> None:
    import nbclient
    import nbformat

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *sys.path]))  # the kernel is a new process
    page = "docs/guides/notebooks.md"
    code = [b.code for b in blocks(page, (ROOT / page).read_text(encoding="utf-8")) if b.language == "python"]
    cells = [nbformat.v4.new_code_cell(text) for text in (*code, WATCHED, BROKEN, "print('alive')")]
    book = nbformat.v4.new_notebook(cells=cells)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(book, timeout=250, resources=resources, allow_errors=True).execute()
    *guide, watched, broken, alive = book.cells
    assert not [output for cell in guide for output in cell.outputs if output.output_type == "error"]
    assert re.search(r"100%\|.*\| epoch 1  step 4  loss .* in all", said(watched)), said(watched)
    assert "ValueError: in the function" in said(broken)
    assert said(alive) == "alive\n"
