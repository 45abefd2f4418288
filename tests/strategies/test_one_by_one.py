"""Param groups with tensors in parts and whole ones: torch's lists of tensors, its choice on accelerators, do not take them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from easymp import PrepareError
from easymp.strategies.fsdp import one_by_one


def both() -> list[nn.Parameter]:
    part = nn.Parameter(torch.ones(2))
    part.to_local = lambda: part  # type: ignore[attr-defined]  # as a DTensor has
    return [part, nn.Parameter(torch.ones(2))]


def test_only_groups_of_both_step_one_tensor_at_a_time() -> None:
    optimizer = torch.optim.AdamW([{"params": both()}, {"params": both()[:1]}, {"params": both()[1:]}])
    one_by_one(optimizer, "split", "unsplit")
    assert [group["foreach"] for group in optimizer.param_groups] == [False, None, None]


@pytest.mark.parametrize("word", ["fused", "foreach"])
def test_lists_that_were_asked_for_are_refused(word: str) -> None:
    optimizer = torch.optim.AdamW(both(), **{word: True})
    with pytest.raises(
        PrepareError, match=f"AdamW has {word}=True for split and unsplit parameters together"
    ):
        one_by_one(optimizer, "split", "unsplit")
