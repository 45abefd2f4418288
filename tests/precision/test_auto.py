"""Precision "auto": a rule decides, so that two runs with one seed are equal bit for bit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import easymp
from easymp import Accelerator, EasympError, resolve

from ..hardware.machines import MACHINES

README = Path(__file__).parents[2] / "README.md"


def quick_start(capsys: Any) -> tuple[str, dict[str, torch.Tensor]]:
    """What the README's first script prints, and the weights that it trains."""
    script = re.search(r'```python title="train.py"\n(.*?)```', README.read_text(), re.DOTALL)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(script[1], "train.py", "exec"), names)
    return capsys.readouterr().out, names["model"].state_dict()


@pytest.mark.parametrize(
    ("machine", "precision"),
    [("laptop CPU", "fp32"), ("Zen 4 server", "fp32"), ("Graviton 4", "fp32"), ("Sapphire Rapids", "bf16")],
)
def test_the_quick_start_trains_alike_each_time(machine: str, precision: str, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(easymp.hardware, "detect", lambda *_, **__: MACHINES[machine])
    (printed, weights), (printed_again, weights_again) = quick_start(capsys), quick_start(capsys)
    assert printed == printed_again and printed.count("loss") == 3
    assert re.search(rf"^precision +{precision} ", printed, re.MULTILINE)
    assert all(torch.equal(weights[name], weights_again[name]) for name in weights)


def test_removed_words_name_what_to_use(monkeypatch: Any) -> None:
    with pytest.raises(EasympError, match=r"no argument 'probe'.*follows a rule, and easymp compare measures"):
        Accelerator(cpu=True, probe=False)
    for precision in ("mxfp8", "nvfp4"):
        with pytest.raises(EasympError, match=r"removed\. Instead: use fp8 or bf16"):
            Accelerator(cpu=True, mixed_precision=precision)
    monkeypatch.setenv("EASYMP_PROBE", "0")
    with pytest.raises(EasympError, match=r"EASYMP_PROBE .* removed. Instead: .*easymp compare measures"):
        resolve()
