"""The public face: exactly what is visible, loaded late, and one door to the environment."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import easymp
from easymp import Accelerator
from easymp.registry import PRECISIONS, STRATEGIES

PACKAGE = Path(easymp.__file__).parent


def test_all_is_exactly_what_is_visible() -> None:
    assert sorted(easymp.__all__) == dir(easymp)
    assert len(set(easymp.__all__)) == len(easymp.__all__)
    namespace: dict[str, object] = {}
    exec("from easymp import *", namespace)
    assert set(namespace) - {"__builtins__"} == set(easymp.__all__)


def test_type_checkers_see_each_name_where_it_is() -> None:
    """They read no table of names, but the imports under TYPE_CHECKING, which are to be the same."""
    assert (PACKAGE / "py.typed").exists()
    for folder in ("", "checkpoint", "hardware", "launcher", "optim", "profiling"):
        package = importlib.import_module(f"easymp.{folder}".rstrip("."))
        tree = ast.parse((PACKAGE / folder / "__init__.py").read_text())
        lines = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level == 1]
        seen = {name.asname: line.module for line in lines for name in line.names if name.asname}
        assert set(seen) == set(package.__all__), folder
        for name, module in seen.items():
            home = f"{package.__name__}.{module}"
            found = sys.modules.get(f"{home}.{name}", getattr(importlib.import_module(home), name))
            assert getattr(package, name) is found


def test_a_wrong_name() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Acelerator'"):
        easymp.Acelerator  # noqa: B018
    with pytest.raises(ImportError):
        exec("from easymp import Acelerator")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: easymp.gather_object([1], every=2),
            r"no argument 'every': gather \[object\], and take every n-th",
        ),
        (lambda: easymp.broadcast_object_list([1], world=None), "has no argument 'world': leave it out"),
        (lambda: easymp.broadcast(torch.ones(1), world=None), "has no argument 'world': leave it out"),
        (lambda: Accelerator(scheduler_steps_per_process=True), "'scheduler_steps_per_process': leave it out"),
    ],
)
def test_former_words_are_refused_with_what_to_use(call: Callable[[], object], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        call()


OPTIONAL = "cupy matplotlib tensorboard wandb mlflow sklearn tqdm pandas pynvml accelerate lightning".split()


def loaded_by(*statements: str) -> list[set[str]]:
    """Modules in a fresh interpreter after each of `statements`."""
    said = "import json, sys; print('modules', json.dumps(list(sys.modules)))"
    code = "\n".join(f"{statement}\n{said}" for statement in statements)
    how = {"capture_output": True, "text": True, "check": True, "timeout": 100, "cwd": PACKAGE.parent}
    done = subprocess.run([sys.executable, "-c", code], **how)
    lines = (line for line in done.stdout.splitlines() if line.startswith("modules "))
    return [set(json.loads(line.removeprefix("modules "))) for line in lines]


def test_import_easymp_imports_nothing_heavy() -> None:
    (used,) = loaded_by("import easymp; dir(easymp); easymp.__version__")
    assert used.isdisjoint({"torch", "numpy", "psutil", "safetensors", *OPTIONAL})


def test_what_an_accelerator_loads_and_when() -> None:
    """Plan, settings, records, data, strategies … are loaded when an Accelerator is made.

    Records are slow to define.
    """
    torchs, imported, made, whole = loaded_by(
        "import torch, torch.distributed, torch.utils.data, torch.nn.parallel",
        "from easymp import Accelerator",
        "Accelerator(cpu=True).close()",
        "from easymp import *",
    )
    ours = {name for name in imported if name.startswith("easymp.")}
    late = (
        "cuda. data. hardware. launcher. optim. precision. strategies. trackers. plan options settings training.prepare"
    )
    assert not [name for name in ours if name.startswith(tuple(f"easymp.{word}" for word in late.split()))]
    assert len(ours) < 40
    assert not [name for name in made if name.startswith("easymp.profiling.")]
    assert "fsspec" not in made
    assert (whole - torchs).isdisjoint(OPTIONAL)  # what torch brings along is torch's


STEP = """
import torch
from easymp import Accelerator
acc = Accelerator(cpu=True, mixed_precision="no")
model = torch.nn.Linear(2, 1)
model, optimizer = acc.prepare(model, torch.optim.AdamW(model.parameters()))
acc.backward(model(torch.ones(3, 2)).sum())
acc.clip_grad_norm_(model.parameters(), 1.0)
optimizer.step()
acc.close()
"""


@pytest.mark.slow
@pytest.mark.cold
def test_a_step_on_one_cpu_process_loads_what_it_runs() -> None:
    (used,) = loaded_by(STEP)
    homes = [*STRATEGIES.homes.values(), *PRECISIONS.homes.values()]
    others = {f"easymp.{home.partition(':')[0]}" for home in homes}
    assert used & others <= {"easymp.strategies.single", "easymp.precision.policies"}
    assert not [name for name in used if name.startswith("easymp.cuda.")]
