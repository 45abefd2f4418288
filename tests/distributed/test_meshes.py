"""Worlds that follow each other in one process: the later one computes as if there had been no other."""

from __future__ import annotations

import gc
import os
from typing import Any

import torch

from easymp.base import env

from ..strategies.models import BATCH, make, mean_square, under, whole
from ..versions import TORCH


def gathered() -> list[str]:
    """Parameters that a step of length 0 changes, on a mesh of two dimensions, with shards of unequal length."""
    with under("tensor_parallel", {"size": 2}, timeout=30) as acc:
        script_model = make("mlp")
        model, optimizer = acc.prepare(script_model, torch.optim.SGD(script_model.parameters(), lr=0.0, momentum=0.9))
        acc.backward(mean_square(model(torch.ones(BATCH, 12))))
        acc.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        weights = {name: whole(p) for name, p in script_model.named_parameters()}
    return [name for name, p in make("mlp").named_parameters() if not torch.equal(p, weights[name])]


def meshes() -> list[Any]:
    from torch.distributed.device_mesh import DeviceMesh

    gc.collect()
    return [candidate for candidate in gc.get_objects() if isinstance(candidate, DeviceMesh)]


def as_one_rank_and_another() -> tuple[list[str], list[str], int]:
    """What is wrong as the rank that the launcher says, and when ranks 2 and 3 have changed places.

    And how many meshes outlive that.
    """
    before = meshes()  # what earlier tests of this process left is theirs
    first = gathered()
    rank = {"2": "3", "3": "2"}.get(os.environ["RANK"], os.environ["RANK"])
    with env.override(RANK=rank, LOCAL_RANK=rank):
        second = gathered()
    return first, second, len([mesh for mesh in meshes() if all(mesh is not earlier for earlier in before)])


def test_a_process_may_be_another_rank_in_its_next_world(ranks: Any) -> None:
    """torch keeps lengths of shards in caches, under equal meshes: those of the rank that asked first."""
    results = ranks(as_one_rank_and_another, processes=4)
    assert [changed for *changed, _ in results] == [[[], []]] * 4
    if not (2, 10) <= TORCH < (2, 13):  # torch's C++ keeps operands of its own, in no cache: 2.11 does
        assert [meshes for *_, meshes in results] == [0] * 4
