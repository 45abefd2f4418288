"""zero1 on real processes.

The numbers of one process, a part of the states on each rank, and what is in the way of them.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from easymp import DistributedDataParallelKwargs, PrepareError, RefusedError, SettingError, StepError

from ..versions import ADDS
from .models import Of, make, mean_square, message, mlp, part, refuses, sgd, train, under


class Normalised(torch.optim.Optimizer):
    """Looks at whole parameters.

    A step of the gradient's direction, with momentum and in the parameter's own size (as LARS).
    """

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
    "adamw of two groups": lambda p: torch.optim.AdamW([{"params": p[::2]}, {"params": p[1::2], "lr": 0.003}]),
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


def gained() -> nn.Module:
    """With a parameter of no dimensions."""
    return Of(lambda m, x: m.body(x) * m.gain, body=mlp(), gain=nn.Parameter(torch.ones(())))


def optimized(strategy: str, name: str, kind: Any = "tied") -> dict[str, Any]:
    with under(strategy) as acc, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {**train(acc, kind, None, OPTIMIZERS[name]), "reason": acc.plan.optimizer.reason}


ROWS = [*((name, "tied", 2) for name in ANY[:-1]), *((name, gained, 4) for name in SOME)]


@pytest.mark.parametrize(
    ("name", "kind", "processes"), [*ROWS, pytest.param(ANY[-1], "tied", 2, marks=pytest.mark.slow)]
)
def test_every_optimizer_steps_as_in_one_process(ranks, name: str, kind: Any, processes: int) -> None:
    """The last of 4 ranks has no row of a bias of 5, nor of what lies in only 2 rows."""
    # Muon's products are in bf16; Rprop asks for signs of rounding
    rel = {"muon": 2e-3, "rprop": 1e-3}.get(name, 1e-5)
    one = optimized("single", name, kind)
    for got in ranks(optimized, "zero1", name, kind, processes=processes):
        assert got["losses"] == pytest.approx(one["losses"], rel=rel)
        assert got["states"] in ([], ["DTensor"]) and got["reason"] == one["reason"]
        if processes == 4:
            torch.testing.assert_close(got["parameters"], one["parameters"], rtol=1e-3, atol=1e-5)


def odd() -> nn.Module:
    """Rows that no number of ranks divides, a scalar, a batch-norm, and a layer that one kind of batch does not use."""

    def call(m: nn.Module, x: Tensor, rare: bool = False) -> Tensor:
        output = m.b(m.norm(torch.tanh(m.a(x)))) * m.gain
        return output + m.rare(x) if rare else output

    parts = {"a": nn.Linear(8, 7), "norm": nn.BatchNorm1d(7), "b": nn.Linear(7, 3), "rare": nn.Linear(8, 3)}
    return Of(call, **parts, gain=nn.Parameter(torch.tensor(1.5)))


def cut_gradients(options: dict[str, Any], steps: int, precision: str, backwards: int) -> dict[str, Any]:
    """Norms, parameters and gradients of updates.

    The ranks do not use the same layers, and run several backward passes.
    """
    with under("zero1", options, steps, precision, seed=0) as acc:
        model: Any = make(odd)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
        model, optimizer = acc.prepare(model, optimizer)
        x = torch.randn(16, 2, 4, 8, generator=torch.Generator().manual_seed(acc.process_index))
        norms, grad_types, local = [], set(), 0
        for i in range(2 * steps):
            with acc.accumulate(model):
                for j in range(backwards):
                    output = model(x[i, j], rare=True if backwards == 1 else bool(acc.process_index))
                    acc.backward(output.float().square().mean())
                if acc.sync_gradients:
                    norms.append(float(acc.clip_grad_norm_(model.parameters(), 0.5)))
                    grad_types = {type(p.grad).__name__ for p in model.parameters()}
                    local = sum(getattr(p.grad, "_local_tensor", p).numel() for p in model.parameters())
                optimizer.step()
                optimizer.zero_grad()
        parameters = [p.detach().clone() for p in model.parameters()]
        results = {"norms": norms, "parameters": parameters, "kinds": grad_types}
        return {**results, "local": local, "mean": model.norm.running_mean}


@pytest.mark.parametrize(("steps", "precision"), [(1, "no"), (2, "bf16-true"), (2, "no")])
def test_gradients_in_shards_are_those_of_ddp(ranks, steps: int, precision: str) -> None:
    unsharded = ranks(cut_gradients, {}, steps, precision, 1)
    cut = ranks(cut_gradients, {"shard_gradients": True}, steps, precision, 1)
    for a, b in zip(unsharded, cut):
        assert b["norms"] == pytest.approx(a["norms"], rel=1e-2 if precision != "no" else 1e-5)
        assert precision != "no" or (b["kinds"] == {"DTensor"} and b["local"] < 0.7 * a["local"])
        assert torch.equal(a["mean"], b["mean"])
        atol = 2e-2 if precision != "no" else 1e-6
        torch.testing.assert_close(a["parameters"], b["parameters"], rtol=1e-4, atol=atol)


def test_ranks_need_not_use_the_same_layers_nor_one_backward(ranks) -> None:
    first_rank, second_rank = ranks(cut_gradients, {"shard_gradients": True}, 2, "no", 2)
    assert first_rank["norms"] == second_rank["norms"]
    assert all(torch.equal(p, q) for p, q in zip(first_rank["parameters"], second_rank["parameters"]))


@pytest.mark.on_ranks(2)
def test_hooks_schedulers_and_closures() -> None:
    with under("zero1") as acc, warnings.catch_warnings():
        warnings.simplefilter("error")  # a scheduler that thinks the optimizer has not stepped
        model, events = make("mlp"), []
        plain_optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0)

        def note(event: str) -> Any:
            return lambda *_: events.append(event)

        def after(optimizer: Any, *_: Any) -> None:
            if optimizer.param_groups[0]["params"][0] is model[0].weight:
                events.append("whole")

        plain_optimizer.register_step_pre_hook(note("pre"))
        plain_optimizer.register_step_post_hook(after)
        schedule = torch.optim.lr_scheduler.StepLR(plain_optimizer, 1, 0.5)
        view, optimizer = acc.prepare(model, plain_optimizer)
        optimizer.register_step_post_hook(note("post"))
        plain_optimizer.register_state_dict_post_hook(note("state"))
        optimizer.register_load_state_dict_pre_hook(note("load"))
        for length in (0.1, 0.05, 0.0):
            acc.backward(view(torch.ones(2, 12)).sum())
            before = model[0].bias.detach().clone()
            if length:
                optimizer.step()
                schedule.step()
            else:
                plain_optimizer.param_groups[0]["lr"] = 0.0
                optimizer.step(note("closure"))
            moved = float((model[0].bias.detach() - before).abs().max())
            assert abs(moved - length) <= 0.05 * length
        optimizer.load_state_dict(optimizer.state_dict())
        refuses(StepError, "step what prepare() returned", plain_optimizer.step)
        refuses(StepError, "keep its state_dict()", copy.deepcopy, optimizer.optimizer)
        steps = "pre whole post pre whole post pre closure whole post state load pre"
        assert " ".join(events) == steps


@pytest.mark.skipif(not ADDS, reason="this torch refuses the optimizer for shards")
@pytest.mark.on_ranks(2)
def test_what_an_optimizer_notes_in_its_groups_and_on_itself() -> None:
    with under("zero1") as acc:
        model = make("mlp")
        view, optimizer = acc.prepare(model, plain_optimizer := Normalised(model.parameters(), 0.1))
        for _ in range(2):
            acc.backward(view(torch.ones(2, 12)).sum())
            optimizer.step()
        assert plain_optimizer.param_groups[0]["count"] == optimizer.calls == 2
        error_text = message(AttributeError, lambda: optimizer.look())
        assert "Normalised.look() would act on this rank's shards only" in error_text


def two_models(strategy: str) -> list[Tensor]:
    """Two models.

    An optimizer over parts of both, one prepared later; a group added; a parameter whose memory is exchanged.
    """
    with under(strategy, steps=2) as acc:
        first, second = make("tied"), nn.Linear(5, 3)
        bodies = [p for n, p in first.named_parameters() if not n.startswith("blocks.2")]
        last_block = [p for n, p in first.named_parameters() if n.startswith("blocks.2")]
        sgd_optimizer = torch.optim.SGD(bodies, lr=0.1, momentum=0.9)
        adamw = torch.optim.AdamW([second.weight], lr=0.01)
        a, b, sgd_optimizer = acc.prepare(first, second, sgd_optimizer)
        adamw = acc.prepare(adamw)
        sgd_optimizer.add_param_group({"params": last_block, "lr": 0.05})
        adamw.param_groups[0]["params"].append(second.bias)  # behind everyone's back
        generator = torch.Generator().manual_seed(1)
        for step in range(8):
            x = part(acc, torch.randn(8, 12, generator=generator))
            with acc.accumulate():
                acc.backward(b(a(x)).square().mean())
                acc.clip_grad_norm_([*first.parameters(), *second.parameters()], 0.5)
                for optimizer in (sgd_optimizer, adamw):
                    optimizer.step()
                    optimizer.zero_grad()
            if step == 3:
                first.embed.weight.data = first.embed.weight.data.clone()
        return [p.detach().clone() for p in [*first.parameters(), *second.parameters()]]


def test_two_models_two_optimizers_and_groups_that_come_later(ranks) -> None:
    one = two_models("single")
    for got in ranks(two_models, "zero1"):
        torch.testing.assert_close(got, one, rtol=1e-4, atol=1e-6)


def steps_of(acc: Any, model: nn.Module, optimizer: Any, first: int, last: int) -> None:
    for i in range(first, last):
        x = torch.randn(8, 12, generator=torch.Generator().manual_seed(i))
        loss = mean_square(model(part(acc, x) if acc else x))
        acc.backward(loss) if acc else loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def handed_on(strategy: str, name: str, mode: str, saved: Any = None) -> tuple[Any, list[Tensor]]:
    """Three steps, then the state goes through `how`, then three more."""
    with under(strategy) as acc:
        model = make("mlp")
        plain_optimizer = OPTIMIZERS[name](list(model.parameters()))
        if mode == "had state":  # on whole parameters, before prepare
            steps_of(None, model, plain_optimizer, 0, 3)
        elif mode == "loads":
            model.load_state_dict(saved["model"])
        view, optimizer = acc.prepare(model, plain_optimizer)
        if mode == "loads":
            optimizer.load_state_dict(saved["optimizer"])
        elif mode == "steps":
            steps_of(acc, view, optimizer, 0, 3)
        state = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        steps_of(acc, view, optimizer, 3, 6)
        return state, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("name", SOME)
def test_state_moves_between_plain_and_sharded(ranks, name: str) -> None:
    saved, end = handed_on("single", name, "steps")
    sharded = ranks(handed_on, "zero1", name, "steps", processes=4)
    for state, values in sharded:
        torch.testing.assert_close(values, end, rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(state["optimizer"], saved["optimizer"], rtol=1e-3, atol=1e-5)
    loads = ranks(handed_on, "zero1", name, "loads", saved)
    loads.append(handed_on("single", name, "loads", sharded[0][0]))
    loads += ranks(handed_on, "zero1", name, "had state")
    for _, values in loads:
        torch.testing.assert_close(values, end, rtol=1e-3, atol=1e-5)


@pytest.mark.on_ranks(2)
def test_refusals_have_sentences() -> None:
    hooked = {"shard_gradients": True, "comm_hook": "fp16"}
    refuses(SettingError, "leave comm_hook and gradient_predivide_factor out", under, "zero1", hooked)
    with under("zero1", DistributedDataParallelKwargs()) as acc:
        model = make("mlp")
        model[0].late = nn.Linear(2, 2).requires_grad_(False)
        view, square = acc.prepare(model, nn.Linear(4, 4, bias=False))
        sparse = nn.Sequential(nn.Embedding(5, 3, sparse=True))
        refuses(PrepareError, "'0' has sparse gradients, and zero1 cuts dense ones only", acc.prepare, sparse)
        inner, wrapping = sgd(list(model.parameters())), sgd(list(model.parameters()))
        wrapping.base = inner  # type: ignore[attr-defined]
        holds = "holds parameters or another optimizer in ."
        refuses(RefusedError, f"LBFGS {holds}_params", acc.prepare, torch.optim.LBFGS(model.parameters()))
        refuses(RefusedError, f"SGD {holds}base", acc.prepare, wrapping)
        differentiable = torch.optim.SGD(model.parameters(), lr=0.1, differentiable=True)
        refuses(RefusedError, "differentiable=True) keeps a graph", acc.prepare, differentiable)
        optimizer = acc.prepare(inner)
        model[0].late.requires_grad_(True)
        (view(torch.ones(2, 12)).sum() + model[0].late(torch.ones(2)).sum()).backward()
        refuses(StepError, "shape (2, 2) has a gradient but had requires_grad=False", optimizer.step)
        square(torch.ones(1, 4)).sum().backward()
        if ADDS:
            no_rule = acc.prepare(torch.optim.Adafactor(square.parameters()))
            refuses(StepError, "Adafactor cannot step on sharded parameters", no_rule.step)
    refuses(StepError, "shards of a run that has ended", optimizer.step)
    with under("zero1") as acc:
        released = "was prepared before, and its state went into shards"
        refuses(RefusedError, released, acc.prepare, model, inner)
