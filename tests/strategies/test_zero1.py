"""zero1 on real processes: the numbers of one process, a part of the states on each rank, and what is in the way of them."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from easymp import (
    Accelerator,
    DistributedDataParallelKwargs,
    PrepareError,
    RefusedError,
    SettingError,
    StepError,
)

from ..versions import ADDS
from .models import STEPS, make, message, part, under


class Normalised(torch.optim.Optimizer):
    """Looks at whole parameters: a step of the gradient's direction, with momentum and in the parameter's own size (as LARS)."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "count": 0})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.calls += 1
        for group in self.param_groups:
            group["count"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if not state:
                        state["mean"] = torch.zeros_like(p)
                    state["mean"].mul_(0.5).add_(p.grad)
                    step = state["mean"] * (p.norm() + 0.1) / (state["mean"].norm() + 1e-8)
                    p.add_(step, alpha=-group["lr"] / group["count"])

    def look(self) -> int:
        return self.calls


class MyAdamW(torch.optim.AdamW):
    """A subclass may do anything, so its states are DTensors."""


OPTIMIZERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw of two groups": lambda p: torch.optim.AdamW(
        [{"params": [x for x in p if x.ndim > 1]}, {"params": [x for x in p if x.ndim < 2], "lr": 0.003}],
        lr=0.01,
    ),
    "adamw plain": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True, amsgrad=True),
    "a subclass of adamw": lambda p: MyAdamW(p, lr=0.01),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "sgd with momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.05),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.001),
    "normalised": lambda p: Normalised(p, lr=0.1),
    "muon": lambda p: torch.optim.Muon([x for x in p if x.ndim == 2], lr=0.02),
}
WHOLE = ["normalised", "muon"]  # these look at whole parameters
ANY = [name for name in OPTIMIZERS if ADDS or name not in WHOLE]
SOME = [name for name in ("adamw", "a subclass of adamw", "normalised") if name in ANY]


def optimized(strategy: str, which: str, kind: str = "tied", steps: int = STEPS) -> dict[str, Any]:
    with Accelerator(mixed_precision="no", strategy=strategy) as acc, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = make(kind)
        if kind == "mlp":
            model.gain = nn.Parameter(torch.ones(()))
            model.register_forward_hook(lambda module, _, out: out * module.gain)
        model, optimizer = acc.prepare(model, OPTIMIZERS[which](list(model.parameters())))
        generator = torch.Generator().manual_seed(7)
        losses = []
        for _ in range(steps):
            x, y = torch.randn(24, 12, generator=generator), torch.randint(0, 5, (24,), generator=generator)
            x, y = (t.chunk(acc.num_processes)[acc.process_index] for t in (x, y))
            loss = nn.functional.cross_entropy(model(x), y)
            acc.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(acc.reduce(loss.detach(), "mean")))
        states = [v for per in optimizer.state.values() for v in per.values() if isinstance(v, Tensor)]
        return {
            "losses": losses,
            "parameters": [p.detach().clone() for p in model.parameters()],
            "kinds": sorted({type(v).__name__ for v in states if v.ndim}),
            "reason": acc.plan.optimizer.reason,
        }


@pytest.mark.parametrize("which", [*ANY[:-1], pytest.param(ANY[-1], marks=pytest.mark.slow)])
def test_every_optimizer_steps_as_in_one_process(ranks, which: str) -> None:
    # Muon's products are in bf16; Rprop asks for signs of rounding
    rel = {"muon": 2e-3, "rprop": 1e-3}.get(which, 1e-5)
    one = optimized("single", which)
    for got in ranks(optimized, "zero1", which):
        assert got["losses"] == pytest.approx(one["losses"], rel=rel)
        assert got["kinds"] in ([], ["DTensor"])
        assert got["reason"] == one["reason"]


@pytest.mark.parametrize("which", SOME)
def test_shards_without_a_row_and_a_parameter_without_dimensions(ranks, which: str) -> None:
    """The last of 4 ranks has no row of a bias of 5, nor of what lies in only 2 rows."""
    one = optimized("single", which, "mlp")
    for got in ranks(optimized, "zero1", which, "mlp", processes=4):
        assert got["losses"] == pytest.approx(one["losses"], rel=1e-5)
        for a, b in zip(got["parameters"], one["parameters"]):
            assert torch.allclose(a, b, rtol=1e-3, atol=1e-5)


class Odd(nn.Module):
    """Rows that no number of ranks divides, a scalar, a batch-norm, and a layer that one kind of batch does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Linear(8, 7), nn.BatchNorm1d(7)
        self.b, self.rare = nn.Linear(7, 3), nn.Linear(8, 3)
        self.gain = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor, rare: bool = False) -> Tensor:
        out = self.b(self.norm(torch.tanh(self.a(x)))) * self.gain
        return out + self.rare(x) if rare else out


def cut_gradients(options: dict[str, Any], steps: int, precision: str, backwards: int) -> dict[str, Any]:
    """Norms, parameters and gradients of updates; the ranks do not use the same layers, and run several backward passes."""
    torch.manual_seed(0)
    how = {"strategy": "zero1", "strategy_options": options, "gradient_accumulation_steps": steps}
    with Accelerator(mixed_precision=precision, seed=0, **how) as acc:
        model: Any = Odd()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
        model, optimizer = acc.prepare(model, optimizer)
        x = torch.randn(16, 2, 4, 8, generator=torch.Generator().manual_seed(acc.process_index))
        norms, kinds, local = [], set(), 0
        for i in range(2 * steps):
            with acc.accumulate(model):
                for j in range(backwards):
                    out = model(x[i, j], rare=True if backwards == 1 else bool(acc.process_index))
                    acc.backward(out.float().square().mean())
                if acc.sync_gradients:
                    norms.append(float(acc.clip_grad_norm_(model.parameters(), 0.5)))
                    kinds = {type(p.grad).__name__ for p in model.parameters()}
                    local = sum(getattr(p.grad, "_local_tensor", p).numel() for p in model.parameters())
                optimizer.step()
                optimizer.zero_grad()
        parameters = [p.detach().clone() for p in model.parameters()]
        found = {"norms": norms, "parameters": parameters, "kinds": kinds}
        return {**found, "local": local, "mean": model.norm.running_mean}


@pytest.mark.parametrize(("steps", "precision"), [(1, "no"), (2, "bf16-true"), (2, "no")])
def test_gradients_in_shards_are_those_of_ddp(ranks, steps: int, precision: str) -> None:
    whole = ranks(cut_gradients, {}, steps, precision, 1)
    cut = ranks(cut_gradients, {"shard_gradients": True}, steps, precision, 1)
    for a, b in zip(whole, cut):
        assert b["norms"] == pytest.approx(a["norms"], rel=1e-2 if precision != "no" else 1e-5)
        assert precision != "no" or (b["kinds"] == {"DTensor"} and b["local"] < 0.7 * a["local"])
        assert torch.equal(a["mean"], b["mean"])
        for p, q in zip(a["parameters"], b["parameters"]):
            torch.testing.assert_close(p, q, rtol=1e-4, atol=2e-2 if precision != "no" else 1e-6)


def test_ranks_need_not_use_the_same_layers_nor_one_backward(ranks) -> None:
    one, other = ranks(cut_gradients, {"shard_gradients": True}, 2, "no", 2)
    assert one["norms"] == other["norms"]
    assert all(torch.equal(p, q) for p, q in zip(one["parameters"], other["parameters"]))


def hooks() -> tuple[str, list[float]]:
    with Accelerator(mixed_precision="no", strategy="zero1") as acc, warnings.catch_warnings():
        warnings.simplefilter("error")  # a scheduler that thinks the optimizer has not stepped
        model = make("mlp")
        given = torch.optim.AdamW(model.parameters(), lr=0.1)
        seen: list[str] = []
        given.register_step_pre_hook(lambda o, a, k: seen.append("pre"))
        first = lambda o: o.param_groups[0]["params"][0]  # noqa: E731
        given.register_step_post_hook(
            lambda o, a, k: seen.append("whole") if first(o) is model[0].weight else None
        )
        schedule = torch.optim.lr_scheduler.StepLR(given, 1, 0.5)
        view, optimizer = acc.prepare(model, given)
        optimizer.register_step_post_hook(lambda o, a, k: seen.append("post"))
        given.register_state_dict_post_hook(lambda o, s: seen.append("state"))
        optimizer.register_load_state_dict_pre_hook(lambda o, s: seen.append("load"))
        moved = []
        for _ in range(2):
            acc.backward(view(torch.ones(2, 12)).sum())
            before = model[0].bias.detach().clone()
            optimizer.step()
            moved.append(float((model[0].bias.detach() - before).abs().max()))
            schedule.step()
        given.param_groups[0]["lr"] = 0.0
        before = model[0].bias.detach().clone()
        given.param_groups[0]["weight_decay"] = 0.0
        optimizer.step(lambda: seen.append("closure"))
        still = torch.equal(before, model[0].bias)
        optimizer.load_state_dict(optimizer.state_dict())
        alone = message(StepError, given.step)
        copied = message(StepError, copy.deepcopy, optimizer.optimizer)
        assert "step what prepare() returned" in alone and "keep its state_dict()" in copied and still
        return " ".join(seen), moved


def test_hooks_schedulers_and_closures(ranks) -> None:
    steps = "pre whole post pre whole post pre closure whole post state load pre"
    for seen, moved in ranks(hooks):
        assert seen == steps and moved == pytest.approx([0.1, 0.05], rel=0.05)


def own_words() -> tuple[int, int, str]:
    with Accelerator(mixed_precision="no", strategy="zero1") as acc:
        model = make("mlp")
        given = Normalised(model.parameters(), 0.1)
        view, optimizer = acc.prepare(model, given)
        for _ in range(2):
            acc.backward(view(torch.ones(2, 12)).sum())
            optimizer.step()
        said = message(AttributeError, lambda: optimizer.look())
        return given.param_groups[0]["count"], optimizer.calls, said


def test_what_an_optimizer_notes_in_its_groups_and_on_itself(ranks) -> None:
    if not ADDS:
        assert {failure.type for failure in ranks.fails(own_words)} == {"SettingError"}
        return
    for count, calls, said in ranks(own_words):
        assert count == calls == 2 and "Normalised.look() would act on this rank's shards only" in said


def many(strategy: str) -> list[Tensor]:
    """Two models; an optimizer over parts of both, one prepared later; a group added; a parameter whose memory is exchanged."""
    with Accelerator(mixed_precision="no", strategy=strategy, gradient_accumulation_steps=2) as acc:
        first, second = make("tied"), nn.Linear(5, 3)
        bodies = [p for n, p in first.named_parameters() if not n.startswith("blocks.2")]
        late = [p for n, p in first.named_parameters() if n.startswith("blocks.2")]
        one = torch.optim.SGD(bodies, lr=0.1, momentum=0.9)
        two = torch.optim.AdamW([second.weight], lr=0.01)
        a, b, one = acc.prepare(first, second, one)
        two = acc.prepare(two)
        one.add_param_group({"params": late, "lr": 0.05})
        two.param_groups[0]["params"].append(second.bias)  # behind everyone's back
        generator = torch.Generator().manual_seed(1)
        for step in range(8):
            x = part(acc, torch.randn(8, 12, generator=generator))
            with acc.accumulate():
                acc.backward(b(a(x)).square().mean())
                acc.clip_grad_norm_([*first.parameters(), *second.parameters()], 0.5)
                for optimizer in (one, two):
                    optimizer.step()
                    optimizer.zero_grad()
            if step == 3:
                first.embed.weight.data = first.embed.weight.data.clone()
        return [p.detach().clone() for p in [*first.parameters(), *second.parameters()]]


def test_two_models_two_optimizers_and_groups_that_come_later(ranks) -> None:
    one = many("single")
    for got in ranks(many, "zero1"):
        assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(got, one))


def steps_of(acc: Accelerator, model: nn.Module, optimizer: Any, first: int, last: int) -> None:
    for i in range(first, last):
        x = part(acc, torch.randn(8, 12, generator=torch.Generator().manual_seed(i)))
        acc.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def handed_on(strategy: str, which: str, how: str, saved: Any = None) -> tuple[Any, list[Tensor]]:
    """Three steps, then the state goes through `how`, then three more."""
    with Accelerator(mixed_precision="no", strategy=strategy) as acc:
        model = make("mlp")
        given = OPTIMIZERS[which](list(model.parameters()))
        if how == "had state":  # on whole parameters, before prepare
            for i in range(3):
                x = torch.randn(8, 12, generator=torch.Generator().manual_seed(i))
                model(x).square().mean().backward()
                given.step()
                given.zero_grad()
            view, optimizer = acc.prepare(model, given)
        elif how == "loads":
            model.load_state_dict(saved["model"])
            view, optimizer = acc.prepare(model, given)
            optimizer.load_state_dict(saved["optimizer"])
        else:
            view, optimizer = acc.prepare(model, given)
            steps_of(acc, view, optimizer, 0, 3)
        state = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        steps_of(acc, view, optimizer, 3, 6)
        return state, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("which", SOME)
def test_state_moves_between_plain_and_sharded(ranks, which: str) -> None:
    saved, end = handed_on("single", which, "steps")
    sharded = ranks(handed_on, "zero1", which, "steps", processes=4)
    for state, values in sharded:
        assert all(torch.allclose(a, b, rtol=1e-3, atol=1e-5) for a, b in zip(values, end))
        for i, per in saved["optimizer"]["state"].items():
            assert state["optimizer"]["state"][i].keys() == per.keys()
            for key, value in per.items():
                ours = state["optimizer"]["state"][i][key]
                assert type(ours) is type(value)
                tensor = isinstance(value, Tensor)
                assert not tensor or torch.allclose(ours, value, rtol=1e-3, atol=1e-5), (i, key)
        assert state["optimizer"]["param_groups"] == saved["optimizer"]["param_groups"]
    loads = ranks(handed_on, "zero1", which, "loads", saved)
    loads.append(handed_on("single", which, "loads", sharded[0][0]))
    loads += ranks(handed_on, "zero1", which, "had state")
    for _, values in loads:
        assert all(torch.allclose(a, b, rtol=1e-3, atol=1e-5) for a, b in zip(values, end))


def refusals() -> dict[str, str]:
    said = {}
    with under("zero1", kwargs_handlers=[DistributedDataParallelKwargs()]) as acc:
        model = make("mlp")
        model[0].late = nn.Linear(2, 2).requires_grad_(False)
        square = nn.Linear(4, 4, bias=False)
        view, square = acc.prepare(model, square)
        said["sparse"] = message(PrepareError, acc.prepare, nn.Sequential(nn.Embedding(5, 3, sparse=True)))
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        wrapping = torch.optim.SGD(model.parameters(), lr=0.1)
        wrapping.base = inner  # type: ignore[attr-defined]
        for name, optimizer in {
            "lbfgs": torch.optim.LBFGS(model.parameters()),
            "wrapping": wrapping,
            "differentiable": torch.optim.SGD(model.parameters(), lr=0.1, differentiable=True),
        }.items():
            said[name] = message(RefusedError, acc.prepare, optimizer)
        optimizer = acc.prepare(inner)
        model[0].late.requires_grad_(True)
        (view(torch.ones(2, 12)).sum() + model[0].late(torch.ones(2)).sum()).backward()
        cases = {"late": optimizer}
        square(torch.ones(1, 4)).sum().backward()
        if ADDS:
            cases["no rule"] = acc.prepare(torch.optim.Adafactor(square.parameters()))
        for name, one in cases.items():
            said[name] = message(StepError, one.step)
    said["closed"] = message(StepError, optimizer.step)
    hooked = {"shard_gradients": True, "comm_hook": "fp16"}
    said["hooked"] = message(SettingError, Accelerator, strategy="zero1", strategy_options=hooked)
    with Accelerator(mixed_precision="no", strategy="zero1") as acc:
        said["again"] = message(RefusedError, acc.prepare, model, inner)
    return said


def test_refusals_have_sentences(ranks) -> None:
    words = {
        "lbfgs": r"LBFGS holds parameters or another optimizer in \._params",
        "wrapping": r"SGD holds parameters or another optimizer in \.base",
        "differentiable": r"differentiable=True\) keeps a graph",
        "late": r"shape \(2, 2\) has a gradient but had requires_grad=False",
        "sparse": "'0' has sparse gradients, and zero1 cuts dense ones only",
        "no rule": "Adafactor cannot step on sharded parameters",
        "hooked": "leave comm_hook and gradient_predivide_factor out",
        "closed": "shards of a run that has ended",
        "again": "was prepared before, and its state went into shards",
    }
    if not ADDS:
        del words["no rule"]
    for said in ranks(refusals):
        assert said.keys() == words.keys()
        for name, pattern in words.items():
            assert re.search(pattern, said[name]), said[name]
