"""Models and optimizers come back, by the names of the plain module's parameters, in the layout of the loading run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from easymp import Accelerator, CheckpointError, Settings, checkpoint

from ..strategies.models import whole
from ..versions import ADDS
from ..words import make_accelerator


class Odd(nn.Module):
    """Tensors of all kinds."""

    def __init__(self, value: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3, 2), float(value)))
        self.wide = nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last) * value)
        self.turned = nn.Parameter((torch.randn(5, 4) * value).t())
        self.scalar = nn.Parameter(torch.tensor(float(value)))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.complex = nn.Parameter(torch.randn(3, dtype=torch.complex64) * value)
        self.frozen = nn.Parameter(torch.full((4,), value), requires_grad=False)
        self.register_buffer("count", torch.tensor(value))
        self.register_buffer("mask", torch.tensor([bool(value % 2), True]))
        self.register_buffer("one", torch.tensor([float(value)]).expand(6))
        self.register_buffer("exact", torch.tensor([value / 3], dtype=torch.float64))
        self.register_buffer("small", torch.tensor([value], dtype=torch.uint8))
        self.register_buffer("scratch", torch.tensor(value), persistent=False)
        self.memory = {"seen": [value], "mean": torch.tensor([value / 7])}

    def get_extra_state(self) -> Any:
        return self.memory

    def set_extra_state(self, state: Any) -> None:
        self.memory = state


def saved_or_loaded(folder: Path, model: nn.Module, load: bool, **settings: Any) -> Any:
    """The model, prepared, and saved or loaded."""
    with make_accelerator(cpu=True, settings=Settings(timeout=50), **settings) as acc:
        model = acc.prepare(model)
        acc.load_state(folder) if load else acc.save_state(folder)
    return model


def test_tensors_of_all_kinds_come_back(tmp_path):
    before, after = saved_or_loaded(tmp_path / "a", Odd(3), False), saved_or_loaded(tmp_path / "a", Odd(5), True)
    strides = {name: t.stride() for name, t in Odd(5).state_dict().items() if isinstance(t, Tensor)}
    for name, value in before.state_dict().items():
        loaded = after.state_dict()[name]
        if isinstance(value, Tensor):
            assert loaded.dtype == value.dtype and torch.equal(loaded, value), name
            assert loaded.stride() == strides[name], name
    assert after.memory == {"seen": [3], "mean": torch.tensor([3 / 7])}
    assert after.scratch.item() == 5  # not in the state_dict


def layers(value: int, tied: bool = True) -> Any:
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    nn.init.constant_(model[0].weight, value)
    model[2].running_mean.fill_(value)
    if tied:
        model[1].weight = model[0].weight
        model[3].running_mean = model[2].running_mean
    return model


def test_tied_tensors_are_written_once_and_may_be_untied_and_not_the_other_way_round(tmp_path):
    saved_or_loaded(tmp_path / "a", layers(3), False)
    aliases = {"model/1.weight": "model/0.weight", "model/3.running_mean": "model/2.running_mean"}
    assert checkpoint.inspect(tmp_path / "a").aliases == aliases
    for tied in (True, False):
        after = saved_or_loaded(tmp_path / "a", layers(5, tied), True)
        assert (after[1].weight is after[0].weight) == tied
        assert (after[3].running_mean is after[2].running_mean) == tied
        assert all(layer.weight.tolist() == [[3, 3], [3, 3]] for layer in after[:2])
        assert all(norm.running_mean.tolist() == [3, 3] for norm in after[2:])
    saved_or_loaded(tmp_path / "b", layers(3, False), False)
    with pytest.raises(CheckpointError, match=r"1\.weight and 0\.weight are one tensor here"):
        saved_or_loaded(tmp_path / "b", layers(5), True)


def plain() -> Any:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))


def wrapped() -> Any:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = plain()
    model[0] = checkpoint_wrapper(model[0])
    model[1] = torch.compile(model[1], backend="eager")
    return torch.compile(model, backend="eager")


def moments(build: Any, folder: Path, load: bool) -> list[Tensor]:
    with Accelerator(cpu=True) as acc:
        model = build()
        model, optimizer = acc.prepare(model, torch.optim.Adam(model.parameters()))
        if load:
            acc.load_state(folder)
        else:
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
            acc.save_state(folder)
        return [state["exp_avg"] for state in optimizer.state.values()]


def test_names_are_those_of_the_plain_module(tmp_path):
    for first, second in ((wrapped, plain), (plain, wrapped)):
        folder = tmp_path / first.__name__
        before, after = moments(first, folder, False), moments(second, folder, True)
        assert all(map(torch.equal, before, after))
        names = [t.name for t in checkpoint.inspect(folder).tensors if t.name.startswith("model")]
        assert sorted(names) == ["model/0.bias", "model/0.weight", "model/1.bias", "model/1.weight"]


def empty_shards(folder: Path) -> list[tuple[int, ...]]:
    """fsdp with parameters that have no rows, or fewer than ranks."""
    for value in (3, 5):
        model: Any = nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 2))
        model.nothing = nn.Parameter(torch.empty(0, 4))
        nn.init.constant_(model[0].weight, value)
        with Accelerator(strategy="fsdp", cpu=True, settings=Settings(timeout=50)) as acc:
            model = acc.prepare(model)
            acc.save_state(folder) if value == 3 else acc.load_state(folder)
            assert model[0].weight.full_tensor().tolist() == [[3, 3]]
    return [tuple(p.shape) for p in model.parameters()]


def test_empty_shards_and_empty_parameters_stay(ranks, tmp_path):
    assert (0, 4) in ranks(empty_shards, tmp_path / "a")[0]
    shapes = {t.name: t.shape for t in checkpoint.inspect(tmp_path / "a").tensors}
    assert shapes["model/nothing"] == (0, 4)


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


class Run:
    """A model of two layers and its optimizer, prepared."""

    def __init__(self, acc: Accelerator, seed: int, build: Make) -> None:
        model: Any = net(seed)
        self.acc = acc
        self.model, self.optimizer = acc.prepare(model, build(model))

    def steps(self, begin: int, end: int) -> None:
        steps(self.acc, self.model, self.optimizer, begin, end)

    def states_of(self, key: str) -> list[Tensor]:
        """A state of each parameter."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        return [self.optimizer.state[p][key] for p in parameters]


def adamw(**options: Any) -> Make:
    return lambda model: torch.optim.AdamW(model.parameters(), **options)


@contextmanager
def prepared(folder, count, build=adamw(), fused=False, **settings):  # noqa: B008
    """A run after `count` steps, saved in `folder`; after none, loaded from it."""
    with make_accelerator(cpu=True, fused=fused, timeout=50, **settings) as acc:
        run = Run(acc, 3 if count else 5, build)
        run.steps(0, count)
        if folder is not None:
            acc.save_state(folder) if count else acc.load_state(folder)
        yield run


def goes_on(build: Make, folder: Path, **settings: Any) -> bool:
    """Whether a training goes on from a checkpoint as it would have."""
    results = []
    for count in (3, 0):
        with prepared(folder, count, lambda model: build(model.parameters()), **settings) as run:
            run.steps(3, 6)
            results.append(weights(run.model))
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True))


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
    "rows": lambda p: Rows(p, lr=0.1),
    "SGD momentum": lambda p: torch.optim.SGD(p, momentum=0.9, nesterov=True),
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


def test_every_class_goes_on_bit_for_bit(tmp_path):
    assert [name for name, build in CLASSES.items() if not goes_on(build, tmp_path / name)] == []


def test_the_implementation_of_the_step_stays_this_runs(tmp_path):
    with prepared(tmp_path / "a", 2, adamw(lr=0.5, foreach=True)):
        pass
    with prepared(tmp_path / "a", 0, adamw(fused=True)) as run:
        (group,) = run.optimizer.param_groups
        assert (group["lr"], group["fused"], group["foreach"]) == (0.5, True, None)
        run.steps(2, 3)


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


def counting_sgd(model: Any) -> torch.optim.Optimizer:
    return Own(model.parameters(), lr=0.1, momentum=0.5)


def additions(strategy: str, folder: Path) -> None:
    with prepared(folder, 2, counting_sgd, strategy=strategy):
        pass
    with prepared(folder, 0, counting_sgd, strategy=strategy) as run:
        inner = getattr(run.optimizer.optimizer, "_twin", run.optimizer.given)
        assert inner.calls == 2
        assert run.optimizer.state["seen"] == {"batches": [2], "mean": torch.tensor([2.0])}


def test_additions_of_a_class_come_back_and_a_load_that_fails_leaves_all_as_it_was(tmp_path):
    additions("single", tmp_path / "b")
    with prepared(tmp_path / "never", 2, counting_sgd) as run:
        run.optimizer.given.calls = 13
        run.acc.save_state(tmp_path / "a")
        run.optimizer.given.calls = 7
        run.steps(2, 3)
        before = [t.clone() for t in run.states_of("momentum_buffer")]
        with pytest.raises(CheckpointError, match="nothing has changed: optimizer: ValueError: an unlucky"):
            run.acc.load_state(tmp_path / "a")
        assert run.optimizer.given.calls == 8
        assert all(map(torch.equal, before, run.states_of("momentum_buffer")))


def check_load_hook(strategy: str, folder: Path) -> None:
    """A hook of load_state_dict sees the loaded state."""
    with prepared(folder, 3, adamw(lr=0.25), strategy=strategy):
        pass
    with prepared(None, 1, adamw(lr=0.5), strategy=strategy) as run:
        loaded_states = []

        def hook(of: Any) -> None:
            (group,) = of.param_groups
            loaded_states.append((group["lr"], [float(of.state[p]["step"]) for p in group["params"]]))

        run.optimizer.register_load_state_dict_post_hook(hook)
        run.acc.load_state(folder)
        assert loaded_states == [(0.25, [3.0, 3.0])]


def groups(*layer_groups: list[int]) -> Callable[[Any], torch.optim.Optimizer]:
    """AdamW with these layers in its groups."""
    return lambda model: torch.optim.AdamW([{"params": [model[i].weight for i in layers]} for layers in layer_groups])


def test_groups_and_parameters_may_stand_in_another_order(tmp_path):
    with prepared(None, 1, groups([0], [1])) as run:
        run.optimizer.param_groups[0]["lr"] = 0.5
        run.steps(1, 2)
        run.acc.save_state(tmp_path / "a")
        moments = run.states_of("exp_avg")
    with prepared(tmp_path / "a", 0, groups([1], [0])) as run:
        assert [group["lr"] for group in run.optimizer.param_groups] == [0.001, 0.5]
        assert all(torch.equal(m, t) for m, t in zip(moments, reversed(run.states_of("exp_avg"))))
    with prepared(None, 0, groups([1, 0])) as run:
        message = r"optimizer: param group 0 has other parameters .* group 0: not in the .*'model/1"
        with pytest.raises(CheckpointError, match=message):
            run.acc.load_state(tmp_path / "a")


def test_a_group_that_was_added_later_is_there_or_missed(tmp_path):
    with prepared(None, 1, groups([0])) as run:
        run.optimizer.add_param_group({"params": [run.model[1].weight], "lr": 0.25})
        run.steps(1, 2)
        run.acc.save_state(tmp_path / "a")
    with prepared(None, 0, groups([0])) as run:
        with pytest.raises(CheckpointError, match="optimizer had 2 param groups, and has 1 here"):
            run.acc.load_state(tmp_path / "a")
        run.optimizer.add_param_group({"params": [run.model[1].weight]})
        run.acc.load_state(tmp_path / "a")
        assert [g["lr"] for g in run.optimizer.param_groups] == [0.001, 0.25]
        assert [float(step) for step in run.states_of("step")] == [2, 1]


def test_several_models_and_optimizers(tmp_path):
    results = []
    for load in (False, True):
        with Accelerator(cpu=True) as acc:
            nets = [net(9 if load else i) for i in (1, 2)]
            first, second = (model.parameters() for model in nets)
            optimizers = [torch.optim.SGD(first, 0.1, momentum=0.9), torch.optim.AdamW(second)]
            *nets, first, second = acc.prepare(*nets, *optimizers)
            if load:
                acc.load_state(tmp_path / "a")
            else:
                steps(acc, nets[0], first, 0, 2)
                steps(acc, nets[1], second, 0, 3)
                acc.save_state(tmp_path / "a")
            steps(acc, nets[0], first, 3, 4)
            steps(acc, nets[1], second, 3, 4)
            results.append([*weights(nets[0]), *weights(nets[1])])
    assert all(map(torch.equal, *results))


def test_a_folder_of_accelerate_with_other_groups_is_refused(tmp_path):
    """Its optimizers know parameters by their order alone."""
    model = net()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    optimizer = torch.optim.AdamW([{"params": [p]} for p in model.parameters()])
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.bin")
    torch.save({}, tmp_path / "random_states_0.pkl")
    with prepared(None, 1) as run:
        before = weights(run.model)
        with pytest.raises(CheckpointError, match=r"had param groups of \[1, 1\] parameters, and has \[2\]"):
            run.acc.load_state(tmp_path, allow_pickle=True)
        assert all(map(torch.equal, before, weights(run.model)))


def test_another_class_is_refused_or_skipped(tmp_path):
    with prepared(tmp_path / "a", 1) as run:
        saved = weights(run.model)
    with prepared(None, 0, lambda m: torch.optim.SGD(m.parameters())) as run:
        with pytest.raises(CheckpointError, match=r"optimizer was a AdamW, and is a SGD here.*strict=False"):
            run.acc.load_state(tmp_path / "a")
        (skipped,) = run.acc.load_state(tmp_path / "a", strict=False).skipped
        assert "was a AdamW" in skipped and all(map(torch.equal, saved, weights(run.model)))


@pytest.mark.parametrize(("before", "after"), [("O2", "no"), ("no", "O2"), ("O2", "O2")])
def test_masters_serve_as_fp32_weights_and_the_other_way_round(tmp_path, before, after):
    results = []
    for precision, count in ((before, 3), (after, 0)):
        with prepared(tmp_path / "a", count, fused=None, mixed_precision=precision) as run:
            for low, master in run.optimizer.masters:
                assert torch.equal(low, master.to(low.dtype))
            parameters = [p for group in run.optimizer.param_groups for p in group["params"]]
            results.append([t.detach().clone() for t in (*parameters, *run.states_of("exp_avg"))])
    assert all(a.dtype == torch.float32 and torch.equal(a, b) for a, b in zip(*results))


SPREAD = [
    *(("zero1", name) for name in ("SGD momentum", "Muon", "Adam amsgrad", "rows")),
    *(("fsdp", name) for name in ("SGD momentum", "Muon", "rows")),
    *(("tensor_parallel", name) for name in ("Muon", "RMSprop")),
    *(("ddp", "LBFGS"), ("pipeline", "Adafactor")),
]


def train_classes(folder: Path, rows: Any) -> dict[str, bool]:
    by_name = {
        f"{strategy} {name}": goes_on(CLASSES[name], folder / strategy / name, strategy=strategy)
        for strategy, name in rows
        if ADDS or name not in ("rows", "Muon")
    }
    additions("zero1", folder / "own")
    check_load_hook("zero1", folder / "heard")
    return by_name


@pytest.mark.parametrize("rows", [SPREAD[::5], pytest.param(SPREAD, marks=pytest.mark.slow)])
def test_every_class_goes_on_in_shards(ranks, tmp_path, rows):
    by_name = ranks(train_classes, tmp_path, rows)[0]
    assert all(by_name.values()), by_name


def around_the_cut(folder: Path) -> dict[str, list[float]]:
    """A pipeline cuts its model at the first call: saved and loaded before it, and after it."""
    losses_by_case: dict[str, list[float]] = {}
    for case in ("never", "save before", "save after", "load before", "train, load before", "load after"):
        act, _, folder_name = case.rpartition(" ")
        with Accelerator(cpu=True, strategy="pipeline", settings=Settings(timeout=50)) as acc:
            model = net(5 if "load" in case else 3)
            model, optimizer = acc.prepare(model, torch.optim.AdamW(model.parameters()))
            if case == "save before":
                acc.save_state(folder / "before")
            if "train" in case:
                steps(acc, model, optimizer, 7, 9)
            if "load" in act:
                acc.load_state(folder / folder_name)
            if case != "load after":
                steps(acc, model, optimizer, 0, 2)
            if case == "save after":
                acc.save_state(folder / "after")
            losses = [float(model(torch.ones(2, 4)).square().mean())]
            steps(acc, model, optimizer, 2, 4)
            losses_by_case[case] = [*losses, float(model(torch.ones(2, 4)).square().mean())]
    return losses_by_case


def test_a_pipeline_saves_and_loads_before_and_after_its_model_is_cut(ranks, tmp_path):
    losses_by_case = ranks(around_the_cut, tmp_path)[0]
    assert len(losses_by_case) == 6 and all(losses == losses_by_case["never"] for losses in losses_by_case.values()), (
        losses_by_case
    )
