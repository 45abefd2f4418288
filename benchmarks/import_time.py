"""What `import easymp` adds to `import torch`, beside Accelerate and Fabric; and how long `easymp --help` takes.

    python benchmarks/import_time.py         # one table; --keep writes it to benchmarks/results

Every figure is from interpreters started afresh, in turns, so that all meet the same neighbours; the median, with
quartiles. Times beyond torch are taken inside the interpreter, after torch has been imported, so they hold nothing of
torch's own second. The program of one step begins after torch._dynamo, which torch imports at an optimizer's first
step, and ends before the interpreter does, whose end takes a second that differs by more than the row. Byte code is
written and used, as in an installed package, also where PYTHONDONTWRITEBYTECODE is set.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import report

FRESH = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
GOALS = {"easymp": 30, "easymp --help": 150, "program": 60}  # ms

# One update of a small model; the words in braces are what plain torch and each wrapper say differently.
PROGRAM = """
import torch
{begin}
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(64, 8)), batch_size=64)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters())
{prepare}
for (inputs,) in loader:
    {backward}(model(inputs).square().mean())
    optimizer.step()
    optimizer.zero_grad()
{end}
"""
PREPARED = "model, optimizer, loader = acc.prepare(model, optimizer, loader)"
PROGRAMS = {
    "plain torch": PROGRAM.format(begin="", prepare="", backward="torch.Tensor.backward", end=""),
    "easymp": PROGRAM.format(
        begin="from easymp import Accelerator; acc = Accelerator(cpu=True)",
        prepare=PREPARED,
        backward="acc.backward",
        end="acc.end_training()",
    ),
    "Accelerate": PROGRAM.format(
        begin="from accelerate import Accelerator; acc = Accelerator(cpu=True)",
        prepare=PREPARED,
        backward="acc.backward",
        end="acc.end_training()",
    ),
    "Fabric": PROGRAM.format(
        begin="from lightning_fabric import Fabric; acc = Fabric(accelerator='cpu', devices=1)",
        prepare="model, optimizer = acc.setup(model, optimizer); loader = acc.setup_dataloaders(loader)",
        backward="acc.backward",
        end="",
    ),
}


def inside(before: str, timed: str) -> Callable[[], float]:
    """Milliseconds of the statement `timed`, after `before`, in a fresh interpreter."""
    code = f"import time\n{before}\nbegin = time.perf_counter()\n{timed}\nprint((time.perf_counter() - begin) * 1e3)"

    def once() -> float:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=FRESH)
        return float(done.stdout.split()[-1])

    return once


def whole(*command: str) -> Callable[[], float]:
    """Milliseconds of a command, from start to end."""

    def once() -> float:
        begin = time.perf_counter()
        subprocess.run(command, capture_output=True, check=True, env=FRESH)
        return (time.perf_counter() - begin) * 1e3

    return once


def processor_time(program: str) -> float:
    """Milliseconds of processor time, user and system, of `program` after the imports that plain torch needs, too."""
    code = (
        "import time, torch, torch._dynamo\n"
        f"begin = time.process_time()\n{program}\nprint((time.process_time() - begin) * 1e3)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=FRESH)
    return float(done.stdout.split()[-1])


def beyond_torch(name: str) -> Callable[[], float]:
    """Processor time of the one-step program of `name` beyond that of plain torch, run just before."""
    return lambda: -processor_time(PROGRAMS["plain torch"]) + processor_time(PROGRAMS[name])


def command_line() -> list[str]:
    """``easymp`` as it is installed beside this interpreter, else as a module."""
    script = Path(sys.executable).with_name("easymp")
    return [str(script)] if script.exists() else [sys.executable, "-m", "easymp"]


def refuse_torch() -> None:
    """Whether ``easymp --help`` leaves torch alone, as told by the interpreter that ran it."""
    code = "import sys; from easymp.cli import main; main(['--help']); sys.exit('torch' in sys.modules)"
    if subprocess.run([sys.executable, "-c", code], capture_output=True, env=FRESH).returncode:
        raise SystemExit("`easymp --help` failed, or imports torch")


CASES: list[tuple[str, str, Callable[[], float]]] = [
    ("`import torch`", "", inside("", "import torch")),
    ("`import easymp` alone", "", inside("", "import easymp")),
    (
        "`from easymp import Accelerator`, after torch",
        "easymp",
        inside("import torch", "from easymp import Accelerator"),
    ),
    (
        "`from lightning_fabric import Fabric`, after torch",
        "",
        inside("import torch", "from lightning_fabric import Fabric"),
    ),
    (
        "`from accelerate import Accelerator`, after torch",
        "",
        inside("import torch", "from accelerate import Accelerator"),
    ),
    ("`python -c pass`, the whole command", "", whole(sys.executable, "-c", "pass")),
    ("`easymp --help`, the whole command", "easymp --help", whole(*command_line(), "--help")),
    ("a program of one step, processor time beyond plain torch: easymp", "program", beyond_torch("easymp")),
    ("the same: Accelerate", "", beyond_torch("Accelerate")),
    ("the same: Fabric", "", beyond_torch("Fabric")),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="fresh interpreters a row (15)")
    report.options(parser, "import-time")
    asked = parser.parse_args()
    where = report.here("accelerate", "lightning-fabric")
    refuse_torch()
    times: dict[str, list[float]] = {name: [] for name, _, _ in CASES}
    for k in range(asked.rounds + 1):
        for name, _, once in CASES:
            figure = once()
            if k:  # the first round writes byte code and fills the page cache
                times[name].append(figure)
    rows = []
    for name, goal, _ in CASES:
        low, middle, high = statistics.quantiles(times[name] * 2, n=4)  # twice: one round has quartiles too
        limit = GOALS.get(goal)
        told = "" if limit is None else f"{limit}, {'met' if middle <= limit else 'MISSED'}"
        rows.append([name, f"{middle:.1f}", f"{low:.0f} … {high:.0f}", told])
    text = "\n".join(
        [
            "# Import time",
            "",
            (
                f"Milliseconds: the median and quartiles of {asked.rounds} fresh interpreters a row, in turns. "
                "`easymp --help` does not import torch."
            ),
            "",
            report.table(["", "ms", "quartiles", "goal"], rows),
            "",
            where,
        ]
    )
    report.hand_in(text, asked.out)


if __name__ == "__main__":
    main()
