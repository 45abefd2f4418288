"""The world on accelerators, as far as it shows without one: what torch is asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import easymp.distributed.process_group as of_world
from easymp.distributed import Ranks, World

CPU = torch.device("cpu")


@pytest.mark.parametrize("device", [torch.device("cuda", 1), torch.device("xpu", 3)])
def test_a_ranks_device_becomes_its_current_one(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(getattr(torch, device.type), "set_device", chosen.append)
    World(Ranks(), device)
    assert chosen == [device]
    World(Ranks(), torch.device("mps"))
    World(Ranks(), CPU)
    assert chosen == [device]


@pytest.mark.parametrize(
    ("device", "binds", "backend", "bound"),
    [
        (torch.device("cuda", 1), True, "cpu:gloo,cuda:nccl", torch.device("cuda", 1)),
        (torch.device("cuda", 1), False, "cpu:gloo,cuda:nccl", None),
        (torch.device("xpu", 1), True, "cpu:gloo,xpu:xccl", None),
        (CPU, True, "gloo", None),
    ],
)
def test_a_group_has_a_backend_for_the_host_and_is_bound_where_it_can_be_split(
    device: torch.device, binds: bool, backend: str, bound: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **how: asked.update(how, backend=backend))
    monkeypatch.setattr(of_world, "BINDS", binds)
    world = World(Ranks(), CPU)
    world.device = device
    world._connect(dist.HashStore())
    assert (asked["backend"], asked["device_id"]) == (backend, bound)
