"""Optimizers follow parameters that are replaced, by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from easymp import PrepareError
from easymp.base.dtensor import follow, names_of


def test_state_that_would_belong_to_nothing_is_refused() -> None:
    model, other = nn.Linear(2, 1), nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with pytest.raises(PrepareError, match=r"AdamW has state for parameter 'weight'.*before its first step"):
        names_of(model, [optimizer])
    assert len(names_of(other, [optimizer])) == 2


@pytest.mark.parametrize(
    ("how", "counter"), [({}, "cpu"), ({"fused": True}, "meta"), ({"capturable": True}, "meta")]
)
def test_what_an_optimizer_remembers_follows_its_parameters(how: dict[str, bool], counter: str) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.state[model.bias]["factors"] = [torch.ones(2), 0.5]  # as optimizers of others have
    optimizer.param_groups[0].update(how)
    for parameter in model.parameters():
        torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach().to("meta")))
    moved = {p: dict(state) for p, state in zip(model.parameters(), optimizer.state.values(), strict=True)}
    optimizer.state.clear()
    optimizer.state.update(moved)
    follow(optimizer, {})
    for state in optimizer.state.values():
        assert {key: state[key].device.type for key in ("step", "exp_avg", "exp_avg_sq")} == {
            "step": counter,
            "exp_avg": "meta",
            "exp_avg_sq": "meta",
        }
    factors = optimizer.state[model.bias]["factors"]
    assert factors[0].is_meta and factors[1] == 0.5
