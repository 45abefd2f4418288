"""Rehearses rows of `tests.pairs` on a recorded node of eight H100: `python -m tests.rehearsals FOLDER NUMBER...`.

Prints the faults as JSON: errors, such as a tensor on the wrong device, and lines of easymp at which the host waits for
the device inside an update, beside those of `WAITS`.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from easymp.base import env
from easymp.cli.harness import Script
from easymp.cli.rehearse import ENDED, OFF, device
from easymp.cli.rehearse.rank import Rehearsal
from easymp.settings import overrides

from . import pairs

SCRIPT = """
from tests import pairs

row = pairs.rows()[{number}]
training = pairs.Training(row, row["strategy"], {folder!r}, 1, False)
with training.acc:
    training.fit(0, pairs.HALFWAY)
"""
WAITS_FOR = device.waits_for
# Functions, by file, that wait for the device inside an update, each with the reason, as docs/guarantees.md has it.
WAITS = {
    "torch_step.py _values_changed": "gradients are compared in updates 0 to 2 and each hundredth",
    "nonfinite.py _judge_update": "nonfinite='raise' decides before the step",
    "nonfinite.py loss": "nonfinite='raise' reads the loss",
    "process_group.py any": "nonfinite='raise' asks all ranks",
    "optimizer.py step_was_skipped": "a scheduler does not step where the update was skipped",
    "local_averaging.py stepped": "local_sgd counts updates that were not skipped",
    "engine.py _step_by_torch": "an optimizer that does not know a loss scale steps or not",
    "tensor_parallel.py _compare_gradients": "the first step compares gradients of whole parameters",
    "masters.py average": "low-precision parameters without a gradient on this rank may have one on others",
    "pipeline_run.py _run_schedule": "a pipeline asks whether a stage has failed",
    "__init__.py _statistics": "SyncBatchNorm on devices that are not NVIDIA's counts its values",
    "ddp.py __init__": "DistributedDataParallel is made",
    "ddp.py join": "torch's Join asks which ranks have ended",
    "": "torch's own threads",
}


def caller() -> str:
    """The innermost file and function that are neither torch's nor the rehearsal's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if "torch" not in path.parts and path.parent != Path(device.__file__).parent and path != Path(__file__):
            return f"{path.name} {frame.f_code.co_name}"
        frame = frame.f_back
    return ""


def rehearse(folder: Path, number: int) -> list[str]:
    row = pairs.rows()[number]
    size = pairs.RANKS.get(row["strategy"], 2)
    world = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    folder.mkdir()
    script = folder / "row.py"
    script.write_text(SCRIPT.format(number=number, folder=str(folder)))
    Script(str(script)).write_task(folder, processes=size, machine="8xH100", updates=sys.maxsize)
    settings = [f"{name}={value}" for name, value in {**OFF, "cpu": "false"}.items()]
    callers: set[str] = set()

    def waits_for(*arguments: Any) -> bool:
        if waits := WAITS_FOR(*arguments):
            callers.add(caller())
        return waits

    waiting = patch.object(device, "waits_for", waits_for)
    with patch.dict(os.environ, world), env.override(**overrides(settings)), waiting:
        rehearsal = Rehearsal(folder, 0)
        report: dict[str, Any] = rehearsal.run_script()
    pairs.close_all()
    dist.destroy_process_group()
    faults = [f"waits at {name}" for name in callers - WAITS.keys() if not name.startswith("pairs.py")]
    if report["end"] != ENDED:
        faults.append(report["why"].split("\n")[0])
    words = sorted(set(row.values()) - set(pairs.PLAIN.values()))
    return [f"row {number} ({', '.join(words)}): {fault}" for fault in faults]


def main(folder: str, *numbers: str) -> None:
    warnings.simplefilter("ignore")
    faults = [fault for number in numbers for fault in rehearse(Path(folder) / number, int(number))]
    print(json.dumps(faults))


if __name__ == "__main__":
    main(*sys.argv[1:])
