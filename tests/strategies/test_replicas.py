"""Ranks that must hold equal parameters compare them.

What drifts apart is an error on all ranks, with the parameter's name.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from easymp import Accelerator, DataLoaderConfiguration, EasympError, PrepareError, StepError

from .models import Of, under
from .ways import WAYS

ALL = {label: way for label, way in WAYS.items() if way.sizes[0] > 1 and " " not in label and label != "pipeline"}


def net() -> nn.Module:
    torch.manual_seed(0)
    call = lambda m, x: m.head(m.adapter(m.norm(m.body(x))))  # noqa: E731
    head = nn.Linear(8, 2).requires_grad_(False)
    return Of(call, body=nn.Linear(4, 8), norm=nn.LayerNorm(8), adapter=nn.Identity(), head=head)


def started(acc: Accelerator) -> tuple[Any, Any]:
    model = net()
    return acc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def in_full(run: Callable[..., Any], strategy: str = "ddp", options: Any = None, **settings: Any) -> Any:
    """What `run` makes of an Accelerator, or what easymp said."""
    try:
        with under(strategy, options, cpu=True, **settings) as acc:
            return run(acc)
    except EasympError as error:
        return f"{type(error).__name__}: {error}"


def update(acc: Accelerator, model: Any, optimizer: Any, call: Any = None) -> None:
    generator = torch.Generator().manual_seed(acc.process_index)
    loss = (call or model)(torch.randn(3, 4, generator=generator)).square().mean()
    loss.backward() if call else acc.backward(loss)
    optimizer.step()
    optimizer.zero_grad()


# What goes wrong after an update; what is returned is called in place of the model.


def other_method(acc: Accelerator, model: Any, optimizer: Any) -> Any:
    return lambda x: model.head(model.norm(model.body(x)))


def added_behind(acc: Accelerator, model: Any, optimizer: Any) -> None:
    torch.manual_seed(1)
    acc.unwrap_model(model).adapter = nn.Linear(8, 8)
    optimizer.optimizer.param_groups[0]["params"] += model.adapter.parameters()


def other_rate(acc: Accelerator, model: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] *= 1 + acc.process_index


def thawed(acc: Accelerator, model: Any, optimizer: Any) -> Any:
    model.head.requires_grad_(True)
    return model  # whose loss goes past acc.backward, which would say it at once


def by_hand(acc: Accelerator, model: Any, optimizer: Any) -> None:
    if acc.process_index == acc.num_processes - 1:
        weight: Any = model.norm.weight.detach()
        getattr(weight, "_local_tensor", weight)[0] += 1


def swapped(acc: Accelerator, model: Any, optimizer: Any) -> None:
    if acc.process_index:
        model.head.bias.data = model.head.bias.data.flip(0)


def unprepared(acc: Accelerator, model: Any, optimizer: Any) -> None:
    acc.unwrap_model(model).adapter = nn.Linear(8, 8)  # which no prepared optimizer steps


def drifting(fault: Callable[..., Any], strategy: str, options: Any, after: int) -> tuple[int, Any]:
    """How many updates are made before an error, and its text, if `fault` happens after update number `after`."""
    updates = [0]

    def run(acc: Accelerator) -> None:
        model, optimizer = started(acc)
        call = None
        for i in range(8):
            call = fault(acc, model, optimizer) if i == after else call
            update(acc, model, optimizer, call)
            updates[0] += 1

    error_text = in_full(run, strategy, options)
    return updates[0], error_text


CASES = {
    "another method": (other_method, "'body.weight'", "another method than the model's call"),
    "added": (added_behind, "'adapter.weight'", "It was added after prepare(): add it to the model before prepare()"),
    "another rate": (other_rate, "SGD group 0 lr=0.2", "Set the same options on all ranks"),
    "unfrozen": (thawed, "'head.weight'", "a parameter unfrozen after prepare()"),
    "by hand": (by_hand, "'norm.weight'", "weights changed on some ranks only"),
    "elements swapped": (swapped, "'head.bias'", "weights changed on some ranks only"),
    "of no optimizer": (unprepared, "'adapter.weight'", "It was added after prepare()"),
}


@pytest.mark.parametrize("name", CASES)
def test_under_ddp_drift_is_an_error_that_names_the_parameter(ranks, name: str) -> None:
    fault, parameter, cause = CASES[name]
    zero, one = ranks(drifting, fault, "ddp", None, 0)
    assert zero == one and zero[0] == 1  # said while the second one is made
    assert zero[1].startswith("WorldError: after update 1 of SGD")
    assert parameter in zero[1] and cause in zero[1]
    assert "lr=" in parameter or "rank 1 and rank 0 differ" in zero[1]


@pytest.mark.parametrize("strategy", ALL)
def test_under_each_strategy_options_that_drift_apart_are_an_error(ranks, strategy: str) -> None:
    case = ALL[strategy]
    results = ranks(drifting, other_rate, strategy, dict(case.options), 2, processes=case.sizes[0])
    assert results == [results[0]] * case.sizes[0]
    assert "SGD group 0 lr=" in results[0][1]


@pytest.mark.parametrize(
    ("name", "options", "processes", "fault", "pattern"),
    [
        ("zero1", None, 2, swapped, "rank 1 and rank 0 differ in parameter 'head.bias'"),
        ("fsdp", {"ignore": "norm"}, 2, by_hand, "rank 1 and rank 0 differ in parameter 'norm.weight'"),
        ("hsdp", {"shard_size": 2}, 4, by_hand, "rank 3 and rank 1 differ in parameter 'norm.weight'"),
        ("tensor_parallel", {"size": 2}, 4, by_hand, "rank 3 and rank 2 differ in parameter 'norm.weight'"),
        ("local_sgd", {"every": 2}, 2, unprepared, "after update 4 of SGD rank 1 and rank 0 differ"),
    ],
)
def test_copies_are_compared_where_a_strategy_has_some(ranks, name, options, processes, fault, pattern):
    results = ranks(drifting, fault, name, options, 2, processes=processes)
    assert results == [results[0]] * processes
    assert pattern in str(results[0][1])


def apart_for_a_while(acc: Accelerator) -> str:
    model, optimizer = started(acc)

    def updates(number: int) -> None:
        for _ in range(number):
            update(acc, model, optimizer)

    with acc.no_sync(model):
        updates(2 + acc.process_index)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(acc.reduce(parameter, "mean"))
    updates(5)
    with acc.join_uneven_inputs([model]):
        updates(2 + acc.process_index)
    updates(5)
    return "equal"


def apart_and_compared() -> Any:
    return in_full(apart_for_a_while, replica_check=1)


def test_ranks_may_train_apart_where_they_say_so(ranks) -> None:
    assert ranks(apart_and_compared) == ["equal"] * 2


UNLIKE = {
    "lr": ("SGD group 0 lr=0.1", "SGD group 0 lr=0.2"),
    "class": ("SGD", "RMSprop"),
    "groups": ("SGD group 0 with 1 parameters", "SGD group 0 with 6 parameters"),
    "scheduler": ("StepLR gamma=0.1", "StepLR gamma=0.5"),
    "seed": ("Settings seed=5", "Settings seed=6"),
    "replica_check": ("Settings replica_check=5", "Settings replica_check=6"),
    "data_seed": ("DataLoaderConfiguration data_seed=0", "DataLoaderConfiguration data_seed=1"),
}


def unlike() -> list[Any]:
    return [in_full(partial(unlike_in, name), **options_of(name)) for name in UNLIKE]


def options_of(setting: str) -> dict[str, Any]:
    rank = int(os.environ["RANK"])
    values: dict[str, Any] = {"seed": 5 + rank, "replica_check": 5 + rank}
    values["data_seed"] = DataLoaderConfiguration(data_seed=rank)
    name = "dataloader_config" if setting == "data_seed" else setting
    return {"seed": 1, **({name: values[setting]} if setting in values else {})}


def unlike_in(setting: str, acc: Accelerator) -> None:
    model, rank = net(), acc.process_index
    parameters = list(model.parameters())
    optimizer: Any = torch.optim.SGD(parameters, lr=0.1 * (1 + rank * (setting == "lr")), momentum=0.5)
    if setting == "class":
        optimizer = (torch.optim.SGD, torch.optim.RMSprop)[rank](parameters, lr=0.1)
    elif setting == "groups" and not rank:
        optimizer = torch.optim.SGD([{"params": parameters[:1]}, {"params": parameters[1:]}], lr=0.1)
    gamma = 0.5 if setting == "scheduler" and rank else 0.1
    acc.prepare(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma))


def test_what_trains_is_compared_at_prepare(ranks) -> None:
    first, second = ranks(unlike)
    for error_text, (zero, one) in zip(first, UNLIKE.values(), strict=True):
        prefix = f"WorldError: the ranks prepare different things: rank 0 has {zero}, rank 1 has {one}"
        assert error_text.startswith(prefix)
    assert first == second


def unfrozen_after_the_first_updates(acc: Accelerator) -> str:
    torch.manual_seed(0)
    body, head = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 2)
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)
    body, head, optimizer = acc.prepare(body, head, optimizer)
    for step in range(8):
        body.requires_grad_(step > 4)
        update(acc, nn.Sequential(body, head), optimizer)
    return "not seen"


def test_a_model_that_is_unfrozen_after_the_first_updates_is_compared(ranks) -> None:
    for error_text in ranks(in_full, unfrozen_after_the_first_updates):
        assert "after update 6 of SGD rank 1 and rank 0 differ in parameter 'weight' of Linear" in error_text
        assert "unfrozen after prepare()" in error_text


def ends_by_an_error(acc: Accelerator) -> str:
    model, optimizer = started(acc)
    with torch.no_grad():
        model.body.weight.add_(acc.process_index)
    update(acc, model, optimizer)
    sys.last_value = ValueError("as the interpreter does before it calls exit handlers")
    try:
        acc.close()
    finally:
        del sys.last_value
    return "left"


def test_a_rank_that_ends_by_an_error_does_not_wait_for_a_comparison(ranks) -> None:
    assert ranks(in_full, ends_by_an_error) == ["left"] * 2


def adding(strategy: str, options: Any) -> list[str]:
    def run(acc: Accelerator, through: Callable[[Any], Any]) -> None:
        model, optimizer = started(acc)
        acc.unwrap_model(model).adapter = nn.Linear(8, 8)
        through(optimizer).add_param_group({"params": model.adapter.parameters()})

    accesses = (lambda o: o, lambda o: o.optimizer, lambda o: o.given)
    return [in_full(lambda acc, access=access: run(acc, access), strategy, options) for access in accesses]


@pytest.mark.parametrize("strategy", ALL)
def test_a_group_of_parameters_that_were_not_prepared_is_refused(ranks, strategy: str) -> None:
    pattern = "PrepareError: SGD.add_param_group got .* shape .8, 8. that belongs to no prepared model.*add it to"
    for error_texts in ranks(adding, strategy, dict(ALL[strategy].options), processes=ALL[strategy].sizes[0]):
        assert all(re.match(pattern, error_text, re.DOTALL) for error_text in error_texts)


def test_on_one_process_a_model_may_grow(tmp_path: Path) -> None:
    with Accelerator(mixed_precision="no", cpu=True) as acc:
        model, optimizer = started(acc)
        model.adapter = nn.Linear(8, 8)
        group = {"params": model.adapter.parameters()}
        optimizer.add_param_group(group)
        assert optimizer.param_groups[-1] is group  # as in torch: a script may change its options later
        before = model.adapter.weight.detach().clone()
        update(acc, model, optimizer)
        assert not torch.equal(model.adapter.weight, before)
        acc.save_state(tmp_path / "there")
        lone = nn.Parameter(torch.ones(3))
        with pytest.raises(PrepareError, match=r"shape \(3,\) that belongs to no prepared model"):
            optimizer.add_param_group({"params": lone})
        assert len(optimizer.param_groups) == 2
        optimizer.param_groups[0]["params"].append(lone)
        with pytest.raises(StepError, match="that belongs to no prepared model"):
            acc.save_state(tmp_path / "not there")
        model.other = nn.Linear(8, 8)
        with pytest.raises(TypeError, match="set"):
            optimizer.add_param_group({"params": set(model.other.parameters())})
        plain = optimizer.given
    plain.add_param_group({"params": nn.Parameter(torch.ones(2))})  # the run has let go of it
