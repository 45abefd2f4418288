"""What a GPU has to show, in at most nine minutes: tests, fused step, training, fsdp, checkpoints and waits.

    make gpu                                 # on a machine with one NVIDIA GPU; again: goes on where it stopped
    python benchmarks/gpu.py --rehearse      # tiny sizes on the CPU, the same code

Each part is a process of its own, whose output and verdict go into a record as soon as it ends; a second run makes only
the parts that the record lacks. A part prints what it would need to claim and whether it got that. The result file has
the device, its driver, the versions, and all parts.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import report
import torch
from torch import Tensor, nn

import easymp

HERE = Path(__file__).parent
WARM, STEPS, SAVES = 3, 10, 3
WAITS = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize")


# -- parts that run other benchmarks -----------------------------------------------------------------------------------


def commands(rehearse: bool, folder: Path) -> dict[str, tuple[list[str], int]]:
    """Each part: its command, and the seconds that it may take."""
    python = [sys.executable, "-W", "ignore"]

    def benchmark(name: str, *words: str) -> list[str]:
        return [*python, str(HERE / f"{name}.py"), *words]

    tests = [*python, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE.parent / "tests")]
    record = ["--record", str(folder / "fused_step.json")]
    small = ["--rehearse"] if rehearse else ["--rounds", "12", "--seconds", "20"]
    return {
        "gpu tests": ([*tests, "-m", "gpu", *(["--collect-only"] if rehearse else [])], 150),
        "fused step": (
            benchmark("fused_step", *(["--smoke"] if rehearse else ["--size", "10M", "124M", "1.5B", *record])),
            120,
        ),
        "training": (benchmark("llm", *small), 240),
        "fsdp": (benchmark("llm", "--fsdp", *small), 90),
        "checkpoint": (benchmark("gpu", "--part", "checkpoint", *small[:1] * rehearse), 90),
        "timeline": (benchmark("gpu", "--part", "timeline", *small[:1] * rehearse), 60),
    }


# -- parts of this file ------------------------------------------------------------------------------------------------


def made(device: torch.device, width: int, layers: int) -> tuple[nn.Module, torch.optim.AdamW]:
    torch.manual_seed(0)
    with device:
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def claim(text: str, met: bool) -> None:
    print(f"- {'yes' if met else 'NO'}: {text}")


def checkpoint(device: torch.device, rehearse: bool) -> None:
    """A save while training goes on.

    How long the loop is blocked, how much slower its steps are, when the files are on disk.
    """
    width, layers = (64, 4) if rehearse else (4096, 20)  # 335M parameters, 4.0 GB with AdamW's states
    found = {name: saved(device, width, layers, way) for name, way in WAYS.items()}
    head = ["", "blocked, s", "steps meanwhile, beside others", "durable, s"]
    rows = [[name, *(f"{statistics.median(column):.3f}" for column in zip(*each))] for name, each in found.items()]
    print(report.table(head, rows))
    ours, theirs = ([statistics.median(column) for column in zip(*each)] for each in found.values())
    words = (
        "the loop is blocked no longer than by DCP",
        "steps meanwhile are no slower",
        "files are durable no later",
    )
    for word, mine, other in zip(words, ours, theirs):
        claim(f"{word}: {mine:.3f}, {other:.3f}", mine <= other)


def by_easymp(device: torch.device, model: nn.Module, optimizer: Any, folder: Path) -> Any:
    accelerator = easymp.Accelerator(cpu=device.type == "cpu", project_dir=folder, mixed_precision="no")
    model, optimizer = accelerator.prepare(model, optimizer)

    def save(path: Path) -> Callable[[], Any]:
        accelerator.save_state(path, async_=True)
        return accelerator._settle_saves

    return model, optimizer, accelerator.backward, save, accelerator.end_training


def by_dcp(device: torch.device, model: nn.Module, optimizer: Any, folder: Path) -> Any:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    storage: dict[str, Any] = {}
    if device.type == "cuda":
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        pinned = StagingOptions(use_pinned_memory=True, use_shared_memory=True)
        storage["async_stager"] = DefaultStager(pinned)

    def save(path: Path) -> Callable[[], Any]:
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
        pending: Any = dcp.async_save(state, checkpoint_id=path, **storage)
        pending = getattr(pending, "upload_completion", pending)
        return pending.result

    return model, optimizer, Tensor.backward, save, lambda: None


WAYS = {"easymp": by_easymp, "DCP, async": by_dcp}


def saved(device: torch.device, width: int, layers: int, way: Any) -> list[tuple[float, float, float]]:
    """Of each save after the first one.

    Seconds blocked, step time meanwhile / before, seconds until the files are on disk.
    """
    found = []
    with tempfile.TemporaryDirectory() as there:
        model, optimizer, backward, save, close = way(device, *made(device, width, layers), Path(there))
        x = torch.randn(256, width, device=device)

        def step() -> float:
            start = time.perf_counter()
            backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            if device.type == "cuda":
                torch.cuda.synchronize()
            return time.perf_counter() - start

        for number in range(1 + SAVES):
            before = statistics.median([step() for _ in range(WARM + STEPS)][WARM:])
            start = time.perf_counter()
            finished = save(Path(there) / str(number))
            blocked = time.perf_counter() - start
            beside = statistics.median([step() for _ in range(STEPS)])
            finished()
            os.sync()  # DCP leaves its files to the system
            if number:
                found.append((blocked, beside / before, time.perf_counter() - start))
        close()
    return found


@contextmanager
def no_waits(device: torch.device) -> Any:
    """Makes an error of whatever waits for the GPU."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def timeline(device: torch.device, rehearse: bool) -> None:
    """Steps under each precision, with clipping and accumulation, in which nothing waits for the device."""
    width, layers = (64, 4) if rehearse else (2048, 8)
    for precision in ("no", "bf16") if device.type == "cpu" else ("no", "bf16", "fp16"):
        model, optimizer = made(device, width, layers)
        accelerator = easymp.Accelerator(
            cpu=device.type == "cpu", mixed_precision=precision, gradient_accumulation_steps=2
        )
        model, optimizer = accelerator.prepare(model, optimizer)
        x = torch.randn(64, width, device=device)

        def steps(
            count: int, model: Any = model, optimizer: Any = optimizer, acc: Any = accelerator, x: Any = x
        ) -> None:
            for _ in range(2 * count):
                with acc.accumulate(model):
                    acc.backward(model(x).square().mean())
                    if acc.sync_gradients:
                        acc.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()

        steps(WARM)
        why = ""
        with torch.profiler.profile() as profile:
            try:
                with no_waits(device):
                    steps(STEPS)
            except RuntimeError as error:
                why = str(error).splitlines()[0]
        waits = [event.name for event in profile.events() if event.name in WAITS]
        waits = waits[:-1] if device.type == "cuda" else waits  # the profiler's own, at its end
        claim(f"{precision}: no wait in {STEPS} steps: {why or len(waits)}", not why and not waits)
        accelerator.end_training()


# -- all ---------------------------------------------------------------------------------------------------------------


def device_line() -> str:
    if not torch.cuda.is_available():
        return "no GPU: a rehearsal on the CPU, whose figures say nothing"
    words = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        driver = "unknown"
    return f"{torch.cuda.get_device_name()}, driver {driver}, CUDA {torch.version.cuda}"


def run(words: list[str], seconds: float) -> dict[str, Any]:
    """What a command prints, and whether it ends well in time."""
    begun = time.monotonic()
    path = os.pathsep.join([str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    try:
        told, code = process.communicate(timeout=max(seconds, 1))[0], process.returncode
    except subprocess.TimeoutExpired:
        process.kill()
        told, code = process.communicate()[0] + f"\nstopped after {seconds:.0f} s", -1
    return {"told": told.strip(), "code": code, "seconds": round(time.monotonic() - begun, 1)}


def main() -> None:
    begun = time.monotonic()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes, on the CPU")
    parser.add_argument("--again", action="store_true", help="forget the record")
    parser.add_argument("--only", nargs="*", metavar="PART", help="these parts")
    parser.add_argument("--seconds", type=float, default=530, help="for all of it (530)")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "easymp-gpu", help="of the record")
    parser.add_argument("--part", choices=["checkpoint", "timeline"], help=argparse.SUPPRESS)
    gpu = torch.cuda.is_available() and "--rehearse" not in sys.argv
    report.options(parser, "gpu" if gpu else "gpu-rehearsal", torch.cuda.get_device_name() if gpu else None)
    asked = parser.parse_args()
    if asked.part:
        warnings.simplefilter("ignore")
        logging.disable(logging.INFO)
        {"checkpoint": checkpoint, "timeline": timeline}[asked.part](
            torch.device("cuda" if gpu else "cpu"), asked.rehearse
        )
        return
    if not gpu and not asked.rehearse:
        parser.error("there is no NVIDIA GPU here: --rehearse runs tiny sizes on the CPU")
    asked.folder.mkdir(parents=True, exist_ok=True)
    record = asked.folder / ("rehearsal.json" if asked.rehearse else "gpu.json")
    done: dict[str, Any] = {} if asked.again or not record.exists() else json.loads(record.read_text())
    for name, (words, most) in commands(asked.rehearse, asked.folder).items():
        left = asked.seconds - (time.monotonic() - begun)
        if (asked.only and name not in asked.only) or done.get(name, {}).get("code") == 0:
            continue
        if left < 20:
            print(f"{name}: no time is left; the next run makes it", file=sys.stderr)
            continue
        done[name] = run(words, min(left, most))
        print(f"{name}: {done[name]['seconds']} s, exit code {done[name]['code']}", file=sys.stderr, flush=True)
        record.write_text(json.dumps(done))
    parts = ["# On one GPU", report.here() + f"\n- {device_line()}"]
    for name, one in done.items():
        ended = "" if one["code"] == 0 else f", which ends with code {one['code']}"
        parts += [f"## {name}: {one['seconds']} s{ended}", f"````text\n{one['told']}\n````"]
    report.hand_in("\n\n".join(parts), asked.out)
    missing = [name for name in commands(asked.rehearse, asked.folder) if done.get(name, {}).get("code") != 0]
    if missing and not asked.only:
        raise SystemExit(f"not shown yet: {', '.join(missing)}")


if __name__ == "__main__":
    main()
