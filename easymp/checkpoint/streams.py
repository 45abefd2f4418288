"""Where a process's random streams stand, as words, numbers and tensors, and back."""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Sequence
from typing import Any

import torch


def states(devices: Sequence[torch.device]) -> dict[str, Any]:
    """Where this process's streams stand: Python's, NumPy's where it is loaded, torch's on the CPU and on accelerators `devices`.

    Words, numbers and tensors only.
    """
    version, words, gauss = random.getstate()
    found: dict[str, Any] = {
        "python": {"version": version, "words": torch.tensor(words), "gauss": gauss},
        "torch": torch.get_rng_state(),
        "devices": {
            device.type: [_device_state(d) for d in devices if d.type == device.type] for device in devices
        },
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, key, place, has_gauss, cached = numpy.random.get_state()
        found["numpy"] = {
            "kind": kind,
            "words": torch.tensor(key.tolist()),
            "rest": [place, has_gauss, cached],
        }
    return found


def put_states(found: dict[str, Any], devices: Sequence[torch.device]) -> None:
    """Let this process's streams go on where `found`, from `states`, was taken. Devices come in the same order."""
    python = found["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    if "numpy" in found:
        numpy = importlib.import_module("numpy")  # it was loaded then, and will be
        kept = found["numpy"]
        numpy.random.set_state(
            (kept["kind"], numpy.array(kept["words"].tolist(), dtype=numpy.uint32), *kept["rest"])
        )
    torch.set_rng_state(found["torch"])
    for device, state in zip(devices, found["devices"].get(devices[0].type, []) if devices else []):
        _rng(device).set_rng_state(state, *_place(device))


def _device_state(device: torch.device) -> torch.Tensor:
    state: torch.Tensor = _rng(device).get_rng_state(*_place(device))
    return state.cpu()


def _rng(device: torch.device) -> Any:
    return torch.get_device_module(device)


def _place(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type == "mps" else (device,)  # there is but one, and its functions take none
