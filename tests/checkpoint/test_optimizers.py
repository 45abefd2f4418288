"""What optimizers remember goes through a checkpoint: by names of parameters, for every class, in the layout of the run that loads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from easymp import Accelerator, CheckpointError

from ..strategies.models import whole
from ..versions import ADDS

Make = Callable[[Any], torch.optim.Optimizer]


def net(seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 3, bias=False))


def steps(acc: Accelerator, model: nn.Module, optimizer: Any, begin: int, end: int) -> None:
    for i in range(begin, end):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(i))

        def closure(x: Tensor = x) -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            acc.backward(loss)
            return loss

        if isinstance(optimizer.given, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


def weights(model: nn.Module) -> list[Tensor]:
    return [whole(p) for p in model.parameters() if not p.is_meta]


def goes_on(make: Make, folder: Path, then: Make | None = None, **settings: Any) -> bool:
    """Whether a training with `make` goes on, with `then`, as it would have."""
    with Accelerator(cpu=True, fused=False, **settings) as acc:
        model = net()
        model, optimizer = acc.prepare(model, make(model.parameters()))
        steps(acc, model, optimizer, 0, 3)
        acc.save_state(folder)
        steps(acc, model, optimizer, 3, 6)
        one = weights(model)
    with Accelerator(cpu=True, fused=False, **settings) as acc:
        other = net(5)
        other, optimizer = acc.prepare(other, (then or make)(other.parameters()))
        acc.load_state(folder)
        steps(acc, other, optimizer, 3, 6)
        return all(torch.equal(a, b) for a, b in zip(one, weights(other), strict=True))


class Rows(torch.optim.SGD):
    """Remembers something of another shape than its parameter, which steps under sharding, too."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state.setdefault("rows", p.grad.new_zeros(p.shape[1])).add_(p.grad.square().sum(0))
                    p.sub_(p.grad / (state["rows"] + 1), alpha=group["lr"])


CLASSES: dict[str, Make] = {
    "AdamW": torch.optim.AdamW,
    "AdamW fused": lambda p: torch.optim.AdamW(p, fused=True),
    "Adam amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True),
    "Adam with a tensor as lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
    "SGD": torch.optim.SGD,
    "rows": lambda p: Rows(p, lr=0.1),
    "SGD momentum": lambda p: torch.optim.SGD(p, momentum=0.9, nesterov=True),
    "SGD fused": lambda p: torch.optim.SGD(p, momentum=0.9, fused=True),
    "Adafactor": torch.optim.Adafactor,
    "Adagrad": torch.optim.Adagrad,
    "ASGD": torch.optim.ASGD,
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=4, line_search_fn="strong_wolfe"),
    "NAdam": torch.optim.NAdam,
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "Rprop": torch.optim.Rprop,
}
if ADDS:
    CLASSES["Muon"] = torch.optim.Muon


@pytest.mark.parametrize("name", CLASSES)
def test_every_class_goes_on_bit_for_bit(tmp_path: Path, name: str) -> None:
    assert goes_on(CLASSES[name], tmp_path / "a")


def test_which_implementation_steps_stays_this_runs(tmp_path: Path) -> None:
    with Accelerator(cpu=True, fused=False) as acc:
        model = net()
        model, optimizer = acc.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.5, foreach=True))
        steps(acc, model, optimizer, 0, 2)
        acc.save_state(tmp_path / "a")
    with Accelerator(cpu=True, fused=False) as acc:
        model, optimizer = acc.prepare(model, torch.optim.AdamW(model.parameters(), fused=True))
        acc.load_state(tmp_path / "a")
        (group,) = optimizer.param_groups
        assert (group["lr"], group["fused"], group["foreach"]) == (0.5, True, None)
        steps(acc, model, optimizer, 2, 3)


class Own(torch.optim.SGD):
    """With a counter that `state_dict` shows, and memory that belongs to no parameter."""

    calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        self.state["seen"] = {"batches": [self.calls], "mean": torch.tensor([float(self.calls)])}
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "calls": self.calls}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state_dict = dict(state_dict)
        self.calls = state_dict.pop("calls")
        super().load_state_dict(state_dict)
        if self.calls == 13:
            raise ValueError("an unlucky number")


def own(strategy: str, folder: Path) -> None:
    for load in (False, True):
        with Accelerator(cpu=True, strategy=strategy, fused=False, timeout=50) as acc:
            model = net()
            model, optimizer = acc.prepare(model, Own(model.parameters(), lr=0.1, momentum=0.5))
            if load:
                acc.load_state(folder)
                inner = getattr(optimizer.optimizer, "_twin", optimizer.given)
                assert inner.calls == 2
                assert optimizer.state["seen"] == {"batches": [2], "mean": torch.tensor([2.0])}
            else:
                steps(acc, model, optimizer, 0, 2)
                acc.save_state(folder)


def test_what_a_class_adds_to_its_state_dict_comes_back(tmp_path: Path) -> None:
    own("single", tmp_path / "a")


def test_a_load_state_dict_that_fails_leaves_all_as_it_was(tmp_path: Path) -> None:
    with Accelerator(cpu=True, fused=False) as acc:
        model = net()
        model, optimizer = acc.prepare(model, Own(model.parameters(), lr=0.1, momentum=0.5))
        steps(acc, model, optimizer, 0, 2)
        optimizer.given.calls = 13
        acc.save_state(tmp_path / "a")
        optimizer.given.calls = 7
        steps(acc, model, optimizer, 2, 3)
        before, momentum = (
            weights(model),
            [optimizer.state[p]["momentum_buffer"].clone() for p in model.parameters()],
        )
        with pytest.raises(
            CheckpointError, match="nothing has changed: optimizer: ValueError: an unlucky number"
        ):
            acc.load_state(tmp_path / "a")
        assert optimizer.given.calls == 8
        assert all(torch.equal(a, b) for a, b in zip(before, weights(model)))
        assert all(
            torch.equal(m, optimizer.state[p]["momentum_buffer"])
            for m, p in zip(momentum, model.parameters())
        )


def heard(strategy: str, folder: Path) -> None:
    """A hook of load_state_dict sees what was loaded."""
    for load in (False, True):
        with Accelerator(cpu=True, strategy=strategy, fused=False, timeout=50) as acc:
            model = net(5 if load else 3)
            model, optimizer = acc.prepare(
                model, torch.optim.AdamW(model.parameters(), lr=0.5 if load else 0.25)
            )
            steps(acc, model, optimizer, 0, 1 if load else 3)
            if not load:
                acc.save_state(folder)
                continue
            seen = []

            def hook(of: Any, seen: list[Any] = seen) -> None:
                seen.append(
                    (
                        of.param_groups[0]["lr"],
                        [float(of.state[p]["step"]) for p in of.param_groups[0]["params"]],
                    )
                )

            optimizer.register_load_state_dict_post_hook(hook)
            acc.load_state(folder)
            assert seen == [(0.25, [3.0, 3.0])]


def groups(model: Any, *which: list[int], **options: Any) -> torch.optim.Optimizer:
    """AdamW with these layers in its groups."""
    return torch.optim.AdamW([{"params": [model[i].weight for i in layers], **options} for layers in which])


def test_groups_and_parameters_may_stand_in_another_order(tmp_path: Path) -> None:
    with Accelerator(cpu=True) as acc:
        model = net()
        model, optimizer = acc.prepare(model, groups(model, [0], [1]))
        optimizer.param_groups[0]["lr"] = 0.5
        steps(acc, model, optimizer, 0, 2)
        acc.save_state(tmp_path / "a")
        moments = [optimizer.state[layer.weight]["exp_avg"] for layer in model]
    with Accelerator(cpu=True) as acc:
        other = net(5)
        other, optimizer = acc.prepare(other, groups(other, [1], [0]))
        acc.load_state(tmp_path / "a")
        assert [group["lr"] for group in optimizer.param_groups] == [0.001, 0.5]
        assert all(
            torch.equal(m, optimizer.state[layer.weight]["exp_avg"]) for m, layer in zip(moments, other)
        )
    with Accelerator(cpu=True) as acc:
        other = net(5)
        acc.prepare(other, groups(other, [1, 0]))
        with pytest.raises(
            CheckpointError,
            match=r"optimizer: param group 0 has other parameters .* group 0: not in the .*'model/1",
        ):
            acc.load_state(tmp_path / "a")


def test_a_group_that_was_added_later_is_there_or_missed(tmp_path: Path) -> None:
    for added in (True, False):
        with Accelerator(cpu=True) as acc:
            model = net()
            model, optimizer = acc.prepare(model, groups(model, [0]))
            if added:
                steps(acc, model, optimizer, 0, 1)
                optimizer.add_param_group({"params": [model[1].weight], "lr": 0.25})
                steps(acc, model, optimizer, 1, 2)
                acc.save_state(tmp_path / "a")
                continue
            with pytest.raises(CheckpointError, match="optimizer had 2 param groups, and has 1 here"):
                acc.load_state(tmp_path / "a")
            optimizer.add_param_group({"params": [model[1].weight]})
            acc.load_state(tmp_path / "a")
            assert [g["lr"] for g in optimizer.param_groups] == [0.001, 0.25]
            assert [float(optimizer.state[layer.weight]["step"]) for layer in model] == [2, 1]


def test_several_models_and_optimizers(tmp_path: Path) -> None:
    found = []
    for load in (False, True):
        with Accelerator(cpu=True) as acc:
            nets = [net(9 if load else i) for i in (1, 2)]
            both = [
                torch.optim.SGD(nets[0].parameters(), 0.1, momentum=0.9),
                torch.optim.AdamW(nets[1].parameters()),
            ]
            *nets, one, two = acc.prepare(*nets, *both)
            if load:
                acc.load_state(tmp_path / "a")
            else:
                steps(acc, nets[0], one, 0, 2)
                steps(acc, nets[1], two, 0, 3)
                acc.save_state(tmp_path / "a")
            steps(acc, nets[0], one, 3, 4)
            steps(acc, nets[1], two, 3, 4)
            found.append([*weights(nets[0]), *weights(nets[1])])
    assert all(torch.equal(a, b) for a, b in zip(*found))
    with Accelerator(cpu=True) as acc:
        acc.prepare(net())
        with pytest.raises(
            CheckpointError, match="nothing here takes model_1; optimizer; optimizer_1 of the checkpoint"
        ):
            acc.load_state(tmp_path / "a")


def test_another_class_remembers_other_things(tmp_path: Path) -> None:
    with Accelerator(cpu=True) as acc:
        model = net()
        model, optimizer = acc.prepare(model, torch.optim.AdamW(model.parameters()))
        steps(acc, model, optimizer, 0, 1)
        acc.save_state(tmp_path / "a")
        saved = weights(model)
    with Accelerator(cpu=True) as acc:
        model = net(5)
        model, optimizer = acc.prepare(model, torch.optim.SGD(model.parameters()))
        with pytest.raises(CheckpointError, match=r"optimizer was a AdamW, and is a SGD here.*strict=False"):
            acc.load_state(tmp_path / "a")
        skipped = acc.load_state(tmp_path / "a", strict=False).skipped
        assert len(skipped) == 1 and "was a AdamW" in skipped[0]
        assert all(torch.equal(a, b) for a, b in zip(saved, weights(model)))


def test_a_schedule_that_has_not_answered_an_update_yet_does_so(tmp_path: Path) -> None:
    rates = []
    for load in (False, True):
        with Accelerator(cpu=True) as acc:
            model = net()
            optimizer: Any = torch.optim.SGD(model.parameters(), 1.0)
            model, optimizer, schedule = acc.prepare(
                model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            )
            if load:
                acc.load_state(tmp_path / "a")
            else:
                steps(acc, model, optimizer, 0, 1)
                schedule.step()
                steps(acc, model, optimizer, 1, 2)
                acc.save_state(tmp_path / "a")
            schedule.step()
            schedule.step()  # no update since
            rates.append(schedule.get_last_lr())
    assert rates == [[0.25], [0.25]]


# -- masters -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("before", "after"), [("O2", "no"), ("no", "O2"), ("O2", "O2")])
def test_masters_serve_as_fp32_weights_and_the_other_way_round(
    tmp_path: Path, before: str, after: str
) -> None:
    found = []
    for precision in (before, after):
        with Accelerator(cpu=True, mixed_precision=precision) as acc:
            model = net(3 if precision is before else 5)
            model, optimizer = acc.prepare(model, torch.optim.AdamW(model.parameters()))
            if len(found):
                acc.load_state(tmp_path / "a")
                for low, master in optimizer.masters:
                    assert torch.equal(low, master.to(low.dtype))
            else:
                steps(acc, model, optimizer, 0, 3)
                acc.save_state(tmp_path / "a")
            held = [p for group in optimizer.param_groups for p in group["params"]]
            found.append([t.detach().clone() for p in held for t in (p, optimizer.state[p]["exp_avg"])])
    assert all(a.dtype == torch.float32 and torch.equal(a, b) for a, b in zip(*found))


# -- on several processes ----------------------------------------------------------------------------------------------


def spread(strategy: str, name: str, folder: Path) -> bool:
    return goes_on(CLASSES[name], folder / name, strategy=strategy, timeout=50)


def many(folder: Path) -> dict[str, bool]:
    found = {}
    for strategy, name in (
        ("zero1", "SGD momentum"),
        ("zero1", "Muon"),
        ("zero1", "Adam amsgrad"),
        ("fsdp", "SGD momentum"),
        ("fsdp", "Muon"),
        ("fsdp", "rows"),
        ("zero1", "rows"),
        ("tensor_parallel", "Muon"),
        ("tensor_parallel", "RMSprop"),
        ("ddp", "LBFGS"),
        ("pipeline", "Adafactor"),
    ):
        if name in CLASSES and (ADDS or name != "rows"):
            found[f"{strategy} {name}"] = spread(strategy, name, folder / strategy)
    own("zero1", folder / "own")
    heard("zero1", folder / "heard")
    return found


def test_every_class_goes_on_in_shards(ranks: Any, tmp_path: Path) -> None:
    found = ranks(many, tmp_path)[0]
    assert all(found.values()), found


def apart(folder: Path, load: bool) -> tuple[Tensor, Tensor]:
    with Accelerator(cpu=True, strategy="local_sgd", strategy_options={"every": 2}, timeout=50) as acc:
        model = net()
        model, optimizer = acc.prepare(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
        if load:
            acc.load_state(folder)
        else:
            steps(
                acc, model, optimizer, acc.process_index, acc.process_index + 3
            )  # the last one is not averaged
            acc.save_state(folder)
        acc._run.world.settle()
        return model[0].weight.detach().clone(), optimizer.state[model[0].weight]["momentum_buffer"].clone()


def test_under_local_sgd_each_rank_remembers_its_own_and_the_model_is_one(ranks: Any, tmp_path: Path) -> None:
    saved = ranks(apart, tmp_path / "a", False)
    assert torch.equal(saved[0][0], saved[1][0]) and not torch.equal(saved[0][1], saved[1][1])
    for size in (2, 4):
        for rank, (weight, momentum) in enumerate(ranks(apart, tmp_path / "a", True, processes=size)):
            assert torch.equal(weight, saved[0][0])
            assert torch.equal(momentum, saved[rank % 2][1])


def before_the_cut(folder: Path) -> dict[str, list[float]]:
    """A pipeline cuts its model at the first call: saved and loaded before it, and after it."""
    found: dict[str, list[float]] = {}
    for save, load in (
        ("never", ""),
        ("before", ""),
        ("after", ""),
        ("", "before before"),
        ("", "after before"),
        ("", "before after"),
    ):
        with Accelerator(cpu=True, strategy="pipeline", timeout=50) as acc:
            model = net(5 if load else 3)
            model, optimizer = acc.prepare(model, torch.optim.AdamW(model.parameters()))
            if save == "before":
                acc.save_state(folder / save)
            if load.startswith("after"):
                steps(acc, model, optimizer, 7, 9)
            if load:
                acc.load_state(folder / load.split()[1])
            if save != "after" and not load.endswith("after"):
                steps(acc, model, optimizer, 0, 2)
            if save == "after":
                steps(acc, model, optimizer, 0, 2)
                acc.save_state(folder / save)
            losses = [float(model(torch.ones(2, 4)).square().mean())]
            steps(acc, model, optimizer, 2, 4)
            losses.append(float(model(torch.ones(2, 4)).square().mean()))
            found[save + load] = losses
    return found


def test_a_pipeline_saves_and_loads_before_and_after_its_model_is_cut(ranks: Any, tmp_path: Path) -> None:
    found = ranks(before_the_cut, tmp_path)[0]
    assert len(found) == 6 and all(losses == found["never"] for losses in found.values()), found
