"""The benchmarks run, with tiny counts: what they say is looked at by people, on a quiet machine."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from .examples import run as script

MISSING = [name for name in ("accelerate", "lightning_fabric") if find_spec(name) is None]

pytestmark = pytest.mark.skipif(
    bool(MISSING), reason=f"optional packages are not installed: {' and '.join(MISSING)} (the extra 'bench')"
)


def run(name: str, *arguments: object) -> str:
    """What a benchmark prints; with ``--out`` it is also in that file."""
    words = list(map(str, arguments))
    told = script.run(f"benchmarks/{name}.py", *words)
    assert "--out" not in words or Path(words[-1]).read_text() == told
    return told


def test_call_path() -> None:
    told = run("call_path")
    assert "easymp, backward" in told and "easymp, micro-step" in told


CHECKPOINT = "checkpoint --size tiny --rounds 1 --folder . --case "
CHECKSUMS = ["CRC-32 is computed by", "| warm load, live, s |"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "only", "rows"),
    [
        ("import_time --rounds 1", [], ["`easymp --help` does not import torch"]),
        ("overhead --rounds 2 --steps 4 --processes 1", ["bf16 + clip"], ["| bf16 + clip, 1 process"]),
        ("overhead --rounds 2 --steps 4 --processes 2", ["accumulation 4"], ["| accumulation 4, 2 process"]),
        ("strategies --size tiny --rounds 2", ["single"], ["| single, "]),
        ("strategies --size tiny --rounds 2", ["zero1"], ["| zero1, "]),
        ("linear_cross_entropy --size tiny --rounds 1", [], ["| plain pair ", "| easymp "]),
        ("llm --rehearse", [], ["## tiny, 2 processes, bf16", "| by hand again ", "of Accelerate's tokens/s"]),
        ("sharded_step --layers 2", [], ["| 4 tensors, easymp fsdp ", "| 4 tensors, fully_shard, fused "]),
        ("fused_step --smoke", [], ["| tiny, clip, 1 thread ", "| tiny, loss scale and clip, 1 thread "]),
        (CHECKPOINT + "one", ["easymp", "DCP"], [*CHECKSUMS, "| plain write and read ", "| easymp ", "| DCP "]),
        (CHECKPOINT + "fsdp", ["DCP, async", "Accelerate"],
         [*CHECKSUMS, "| DCP, async ", "- Accelerate: left out: on CPUs it"]),
        ("gpu --rehearse --folder .", ["fsdp", "checkpoint", "timeline"],
         ["## fsdp: ", "## checkpoint: ", "## timeline: "]),
    ],
)  # fmt: skip
def test_each_tells_its_rows(words, only, rows, tmp_path) -> None:
    arguments = [str(tmp_path) if word == "." else word for word in words.split()]
    arguments += ["--only", *only] if only else []
    arguments += ["--out", str(tmp_path / "told.md")] if arguments[0] != "import_time" else []
    told = run(*arguments)
    assert all(row in told for row in rows)
    if arguments[0] == "gpu":
        assert "ends with code" not in told
        assert told.count("- yes: ") + told.count("- NO: ") == 7
    if arguments[0] == "checkpoint":
        assert "fails" not in told and "hangs" not in told
        assert os.listdir(tmp_path) == ["told.md"], "checkpoints are left on the disk"


def cells(told: str) -> list[list[str]]:
    return [[cell.strip() for cell in row.split("|")] for row in told.splitlines() if row.startswith("| ")]


@pytest.mark.slow
def test_memory_words_and_sharded_memory() -> None:
    """Predicted bytes of gradients are those that are there; of activations, gradients of activations come on top."""
    off = {row[1]: float(row[4].rstrip("%")) for row in cells(run("memory_words")) if "%" in row[4]}
    assert len(off) == 15
    assert all(-10 <= difference <= 30 for difference in off.values()), off
    rows = {row[1]: row[2:] for row in cells(run("sharded_memory"))}
    for precision in ("fp32", "bf16", "fp16"):
        assert rows[f"{precision}, easymp fsdp"] == rows[f"{precision}, fully_shard"]
