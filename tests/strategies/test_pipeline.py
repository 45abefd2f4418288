"""pipeline on real processes: the numbers of one process, wherever the model is cut, and what is in the way of them."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from easymp import (
    BatchError,
    CompileOptions,
    PrepareError,
    RefusedError,
    SettingError,
    StepError,
)
from easymp.strategies.pipeline_cuts import candidates, choose, form, survey
from easymp.strategies.pipeline_run import Pipelined

from .models import WIDTH, Of, Tied, make, message, train_step, trained, under

SCHEDULES = ["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"]


def agree(ours: list[dict[str, Any]], one: dict[str, Any]) -> None:
    """Losses and norms on every rank, and parameters on those that hold them."""
    seen = set()
    for got in ours:
        for name in ("losses", "norms"):
            assert got[name] == pytest.approx(one[name], rel=1e-5)
        assert got["lr"] == one["lr"] and list(got["parameters"]) == list(one["parameters"])
        for name, values in got["parameters"].items():
            if not values.is_meta:
                seen.add(name)
                # A key's bias has no gradient but rounding, which Adam makes a step of.
                close = torch.allclose(values, one["parameters"][name], rtol=1e-3, atol=1e-4)
                assert name.endswith("in_proj_bias") or close, name
    assert seen == set(one["parameters"])


ROWS = [  # gpipe and 1f1b are in the matrix, too
    pytest.param("tied", {"schedule": "1f1b"}, 3, 0.1, 4, marks=pytest.mark.slow),
    ("tied", {"schedule": "interleaved_1f1b"}, 3, 0.1, 2),
    ("mlp", {"schedule": "interleaved_1f1b", "microbatches": 6}, 1, None, 2),
    ("idle", {"schedule": "zero_bubble"}, 1, None, 2),
    ("tied", {"schedule": "zero_bubble", "stages_per_rank": 2}, 1, 0.1, 2),
    pytest.param("tied", {"schedule": "zero_bubble", "microbatches": 8}, 3, 0.1, 4, marks=pytest.mark.slow),
    ("mlp", {"schedule": "zero_bubble"}, 1, None, 4),  # a stage that only takes the model's input
    ("tied", {"splits": ("blocks.0",), "microbatches": 1}, 1, 0.1, 2),
    ("tied", {"splits": ["head"], "microbatches": 5, "schedule": "1f1b"}, 1, 0.1, 2),  # of 5, 5, 5, 5 and 4
]


@pytest.mark.parametrize(("kind", "options", "steps", "clip", "size"), ROWS)
def test_it_trains_as_one_process(ranks, kind: str, options: Any, steps: int, clip: Any, size: int) -> None:
    ours = ranks(trained, "pipeline", kind, steps, clip, "no", options, processes=size)
    agree(ours, trained("single", kind, steps, clip))


def fp16_norm(strategy: str, options: Any) -> float:
    with under(strategy, options, precision="O3") as acc:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, 5), nn.ReLU())
        model, _ = acc.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        acc.backward(model(torch.ones(4, WIDTH)).square().mean())
        return acc.clip_grad_norm_(model.parameters(), 0.1).item()


def test_a_stage_without_parameters_takes_part_in_a_norm_of_fp16_gradients(ranks) -> None:
    one = fp16_norm("single", None)
    assert ranks(fp16_norm, "pipeline", {"splits": ["1"]}) == pytest.approx([one] * 2, rel=1e-2)


def batch_norm(strategy: str, schedule: str) -> tuple[list[float], dict[str, Tensor]]:
    parts = 2 if strategy == "single" else 1
    losses, generator = [], torch.Generator().manual_seed(7)
    with under(strategy, {"schedule": schedule} if parts == 1 else None, steps=parts) as acc:
        model = make("conv")
        model, optimizer = acc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
        for _ in range(6):
            x, y = torch.randn(24, 12, generator=generator), torch.randint(0, 5, (24,), generator=generator)
            for xs, ys in zip(x.chunk(parts), y.chunk(parts)):
                with acc.accumulate(model):
                    losses.append(train_step(acc, model, nn.functional.cross_entropy, xs, ys).item())
                    optimizer.step()
                    optimizer.zero_grad()
        losses = [sum(losses[i : i + parts]) / parts for i in range(0, len(losses), parts)]
        model.eval()
        with torch.no_grad():
            losses.append(float(model(x).square().mean()))
        return losses, {name: b.clone() for name, b in model.named_buffers() if not b.is_meta}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_batch_norm_sees_a_microbatch_at_a_time_and_once(ranks, schedule: str) -> None:
    losses, one = batch_norm("single", schedule)
    found: dict[str, Tensor] = {}
    for got, buffers in ranks(batch_norm, "pipeline", schedule):
        assert got == pytest.approx(losses, rel=1e-5)
        found |= buffers
    assert found.keys() == one.keys()
    assert all(torch.allclose(values, one[name], rtol=1e-4, atol=1e-5) for name, values in found.items())


class Tower(nn.Module):
    """Takes and gives dictionaries; a value that only the first stage computes is passed to every block."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.linspace(-1, 1, 12))
        self.bias, self.enter = nn.Linear(12, WIDTH), nn.Linear(12, WIDTH)
        self.blocks = nn.ModuleList(nn.Bilinear(WIDTH, WIDTH, WIDTH) for _ in range(3))
        self.last = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, 5))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, batch: dict[str, Tensor], scale: float = 1.0, mask: Any = None) -> dict[str, Any]:
        x = batch["x"] + self.shift
        extra, x = self.bias(x), self.enter(x)
        for block in self.blocks:
            x = block(x, extra).tanh() * scale + x
            if mask is not None:
                x = x * mask[:, None]  # from the inputs alone: there on every rank
        self.calls += 1
        return {"logits": self.last(x), "mask": mask, "top": x.argmax(1)}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    got = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return got


def loops(strategy: str) -> list[Any]:
    """Ways to call a model that are no plain loop; what comes out of each."""
    found: list[Any] = []
    draw = torch.Generator().manual_seed(1)
    batch = lambda rows: torch.randn(rows, 12, generator=draw)  # noqa: E731
    with under(strategy, {"splits": ("blocks.1",)} if strategy == "pipeline" else None) as acc:
        torch.manual_seed(0)
        model = acc.prepare(Tower())
        out = model({"x": batch(6)}, mask=torch.arange(6) % 2)  # a dictionary, a keyword
        found.append((out["logits"].detach(), out["mask"], out["top"]))
        acc.backward(out["logits"].square().mean())
        found.append(gradients(model))
        # two forwards, odd sizes
        acc.backward(sum(model({"x": batch(n)}, 0.5)["logits"].square().mean() for n in (5, 1)))
        found.append(gradients(model))
        with acc.no_sync(model):
            acc.backward(model({"x": batch(4)})["logits"].square().mean())
            model({"x": batch(4)})  # its output is not used
            with torch.no_grad():
                model.eval()
                found.append(model({"x": batch(3)})["logits"])
                model.train()
        acc.backward(model({"x": batch(4)})["logits"][1:].square().mean())
        found.append(gradients(model))
        model.shift.requires_grad_(False)
        acc.backward(model({"x": batch(4)})["logits"].relu_().square().sum(), num_items=4)
        found.append(gradients(model))
        loss = model({"x": batch(2)})["logits"].sum()
        acc.backward(loss, retain_graph=True)
        if strategy == "pipeline":
            with pytest.raises(StepError, match="a second backward through one forward"):
                acc.backward(loss)
        norms = [acc.clip_grad_norm_(model.parameters(), 0.5, kind) for kind in (1.0, 2.0, torch.inf)]
        found.append([float(norm) for norm in norms])
        acc.clip_grad_value_(model.parameters(), 1e-3)
        return [*found, gradients(model)]


def same(a: Any, b: Any) -> bool:
    """Whether `a` is `b`, as far as it is here."""
    if isinstance(a, dict):
        return all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return (
        torch.allclose(a, b, rtol=1e-4, atol=1e-6)
        if isinstance(a, Tensor)
        else a == pytest.approx(b, rel=1e-5)
    )


def test_loops_of_other_shapes(ranks) -> None:
    one, ours = loops("single"), ranks(loops, "pipeline")
    assert [[same(a, b) for a, b in zip(got, one, strict=True)] for got in ours] == [[True] * len(one)] * 2
    for first, second, whole in zip(*ours, one):
        assert not isinstance(whole, dict) or first.keys() | second.keys() == whole.keys()


def dropout(schedule: str) -> tuple[Any, int, int]:
    with under("pipeline", {"schedule": schedule}, seed=3) as acc:
        layers = [nn.Linear(12, 12), nn.Dropout(0.5), nn.Linear(12, 12), nn.Linear(12, 12), nn.Dropout(0.5)]
        model = acc.prepare(nn.Sequential(*layers))
        loss = acc.forward_backward(model, lambda out: out.square().mean(), torch.ones(8, 12))
        grads = gradients(model)
        with torch.no_grad():
            out = model(torch.ones(8, 12))
        return (loss, out, grads), int(torch.randint(1 << 40, ())), torch.initial_seed()


def test_schedules_draw_the_same_random_numbers(ranks) -> None:
    all_first, turns = ranks(dropout, "gpipe"), ranks(dropout, "1f1b")
    assert all(same(a[0], b[0]) for a, b in zip(all_first, turns))
    assert len({a[1:] for a in [*all_first, *turns]}) == 1  # streams outside stay alike
    assert all_first[0][0][1].unique(dim=0).shape[0] > 2  # no two micro-batches have the same mask


def scheduled(strategy: str, schedule: str) -> list[Any]:
    """`forward_backward` with keywords, nested targets, num_items, batches smaller than micro-batches, and evaluation between."""
    options = {"schedule": schedule, "microbatches": 4} if strategy == "pipeline" else None
    found: list[Any] = []
    draw = torch.Generator().manual_seed(1)

    def squares(out: Any, target: Any) -> Tensor:
        return (out["logits"] - target["y"]).square().sum(1).mean()

    with under(strategy, options, steps=2) as acc:
        torch.manual_seed(0)
        model = acc.prepare(Tower())
        for rows in (8, 7, 3, 1):
            for summed in (False, True):
                for _ in range(2):
                    x, y = torch.randn(rows, 12, generator=draw), torch.randn(rows, 5, generator=draw)
                    loss_fn = (lambda *a: squares(*a) * a[1]["y"].shape[0]) if summed else squares
                    how = {"target": {"y": y}, "num_items": rows if summed else None, "scale": 0.5}
                    with acc.accumulate(model):
                        found.append(acc.forward_backward(model, loss_fn, {"x": x}, **how))
                found.append(gradients(model))
            with torch.no_grad():
                found.append(model({"x": torch.randn(5, 12, generator=draw)})["logits"])
        if strategy == "pipeline" and schedule != "gpipe":
            with pytest.raises(RefusedError, match="forward_backward"):
                model({"x": torch.ones(4, 12)})
    return found


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_forward_backward_of_other_shapes(ranks, schedule: str) -> None:
    one = scheduled("single", schedule)
    for got in ranks(scheduled, "pipeline", schedule):
        assert [same(a, b) for a, b in zip(got, one, strict=True)] == [True] * len(one)


def runs_and_fails(schedule: str) -> tuple[int, str]:
    """How often blocks ran with values, and what a loss that fails becomes here."""
    calls = []

    def count(module: nn.Module, inputs: Any, out: Any) -> None:
        if type(out) is Tensor and not out.is_meta:
            calls.append(1)

    def no_loss(outputs: Tensor) -> Tensor:
        raise ValueError("no loss today")

    with under("pipeline", {"schedule": schedule, "microbatches": 4}) as acc:
        layers = [nn.Linear(12, 12) for _ in range(4)]
        model = acc.prepare(nn.Sequential(*(nn.Sequential(layer, nn.Tanh()) for layer in layers)))
        for layer in layers:
            layer.register_forward_hook(count)
        train_step(acc, model, nn.functional.mse_loss, torch.ones(8, 12), torch.ones(8, 12))
        runs = len(calls)
        with pytest.raises(Exception) as caught:
            acc.forward_backward(model, no_loss, torch.ones(8, 12))
        return runs, f"{caught.type.__name__}: {caught.value}"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_forward_runs_twice_and_a_loss_that_fails_ends_the_batch_on_all_ranks(ranks, schedule):
    (first, other), (second, last) = ranks(runs_and_fails, schedule)
    assert first + second == 4 * 4  # blocks, micro-batches
    assert last == "ValueError: no loss today"
    assert other.startswith("WorldError: ") and "failed on another rank" in other


def held() -> tuple[list[str], dict[str, Any]]:
    with under("pipeline") as acc:
        model = make("tied")
        whole = {name: t.clone() for name, t in make("tied").state_dict().items()}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        objects = list(model.parameters())
        prepared, optimizer = acc.prepare(model, optimizer)
        acc.backward(prepared(torch.randn(4, 12)).sum())
        optimizer.step()
        state, named = prepared.state_dict(), dict(model.named_parameters())
        here = sorted(n for n, p in named.items() if not p.is_meta)
        with pytest.warns(UserWarning, match="no-op") if len(here) < len(objects) else pytest.warns():
            prepared.load_state_dict(whole)
        return here, {
            "names": list(state) == list(whole),
            "objects": all(a is b for a, b in zip(objects, model.parameters())),
            "tied": model.head.weight is model.embed.weight,
            "meta": all(state[n].is_meta == (n not in here) for n in named),
            "states": sorted(n for n, p in named.items() if p in optimizer.state) == here,
            "loaded": all(torch.equal(named[n], whole[n]) for n in here),
            "grads": sorted(n for n, p in named.items() if p.grad is not None) == here,
            "instance": isinstance(prepared, Tied),
        }


def test_each_rank_keeps_its_stage_under_the_names_of_the_model(ranks) -> None:
    (first, facts), (second, others) = ranks(held)
    assert {*first, *second} == {n for n, _ in make("tied").named_parameters()}
    assert {*first} & {*second} == {"embed.weight"}
    assert all(facts.values()) and all(others.values()), (facts, others)


def checkpointed(schedule: str, again: bool, outside: bool = False) -> Any:
    """Gradients of a model that recomputes its activations in backward, inside of its blocks or around them."""
    again_ = partial(checkpoint, use_reentrant=False)

    def layer(m: nn.Module, x: Tensor) -> Tensor:
        return again_(m.inner, x) if again else m.inner(x)

    def layers(m: nn.Module, x: Tensor) -> Tensor:
        for block in m.blocks:
            x = (again_(block, x) if outside else block(x)) + x
        return x

    with under("pipeline", {"splits": ("blocks.2",), "schedule": schedule}, seed=3) as acc:
        torch.manual_seed(0)
        inner = (nn.Sequential(nn.Linear(12, 12), nn.Dropout(0.5), nn.Tanh()) for _ in range(4))
        model = acc.prepare(Of(layers, blocks=nn.ModuleList(Of(layer, inner=part) for part in inner)))
        acc.forward_backward(model, lambda out: out.square().mean(), torch.ones(8, 12))
        return gradients(model)


def test_a_models_own_checkpoints_change_nothing_inside_of_blocks(ranks) -> None:
    plain = ranks(checkpointed, "gpipe", False)
    assert len(plain[0]) == len(plain[1]) == 4
    for schedule in ("gpipe", "1f1b"):
        assert all(same(a, b) for a, b in zip(ranks(checkpointed, schedule, True), plain))
    other, failure = ranks.fails(checkpointed, "gpipe", False, True)
    assert (other.type, failure.type) == ("WorldError", "StepError")
    assert "stage 1 of 2 (begins at 'blocks.2') cannot have the values that it begins with" in failure.message


def compiled() -> tuple[list[str], str]:
    with under("pipeline", compile=CompileOptions(backend="eager")) as acc:
        model = make("tied")
        acc.prepare(model)(torch.ones(4, 12))
        names = [name for name, m in model.named_modules() if m._compiled_call_impl is not None]
    with under("pipeline") as acc:
        whole = make("mlp")
        whole.compile()
        return names, message(PrepareError, acc.prepare, whole)


@pytest.mark.slow
def test_what_is_compiled_are_the_parts_of_a_stage(ranks) -> None:
    (first, said), (second, _) = ranks(compiled)
    assert first == ["embed", "blocks.0", "head"]  # the head's weight is the embedding's
    assert second == ["embed", "blocks.1", "blocks.2", "head"]
    assert "the model is compiled, as one function" in said


def cut(model: nn.Module, x: Any, stages: int, splits: tuple[str, ...] | None = None) -> Any:
    places = candidates(model, splits or ())
    with torch.no_grad():
        return choose(model, survey(model, model, places, (x,), {}, torch.device("cpu")), splits, stages)


class Skip(nn.Module):
    """What `a` computes is passed to `b`, used after it, and not passed to `c`."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(12, 12) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return self.c(self.b(x)) + x


class Looking(Skip):
    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return self.c(x) if x.sum() > 0 else self.b(x)


class Writing(Skip):
    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros(x.shape[0], 12)
        total += self.a(x)
        return self.c(self.b(total))


def test_cuts_balance_parameters_and_leave_the_model_alone() -> None:
    model = make("conv").train()
    before, drawn = {k: t.clone() for k, t in model.state_dict().items()}, torch.get_rng_state()
    found = cut(model, torch.randn(2, 12, generator=torch.Generator()), 2)
    assert all(torch.equal(t, before[k]) for k, t in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), drawn)
    assert not any("_compiled_call_impl" in vars(m) for m in model.modules())
    assert found.begins == ("2.1",) and found.users["2.1.running_mean"] == (1,)
    tied = cut(make("tied"), torch.randn(2, 12), 2)
    assert tied.begins == ("blocks.1",) and tied.users["embed.weight"] == (0, 1)
    idle = cut(make("idle"), torch.randn(2, 12), 3)
    assert set(idle.users) == {n for n, _ in make("idle").named_parameters()}
    assert all(len(stages) == 1 for stages in idle.users.values())
    for model, splits in ((Skip(), ("b",)), (nn.Sequential(Skip(), nn.Linear(12, 2)), ("0.b", "1"))):
        assert cut(model, torch.ones(2, 12), len(splits) + 1, splits).begins == splits


@pytest.mark.parametrize(
    ("model", "stages", "splits", "words"),
    [
        (Skip(), 3, ("b", "c"), "at 'c': something computed before is used at or after 'c' without being"),
        (Skip(), 4, None, "would need 4 stages, but there are 2 modules at which one can begin: a, b"),
        (Skip(), 2, ("d",), "splits holds 'd', and no module of this Skip has that name"),
        (Tied(), 2, ("block.1",), "splits holds 'block.1', and no module of this Tied has that name, did"),
        (Tied(), 3, ("blocks.2", "blocks.1"), "not in the order in which forward calls them: blocks.1"),
        (make("idle"), 2, ("blocks.2",), "the forward of this Idle does not call that module"),
        (nn.Linear(12, 2), 2, None, "would need 2 stages, but there are 0 modules at which one can begin"),
        (Looking(), 2, None, "could not be followed without values"),
        (Writing(), 2, None, "writes in place"),
    ],
)
def test_where_stages_cannot_begin(model: nn.Module, stages: int, splits: Any, words: str) -> None:
    with pytest.raises((PrepareError, StepError), match=words):
        cut(model, torch.ones(2, 12), stages, splits)


def refusals() -> dict[str, str]:
    odd, x, y = {"schedule": "zero_bubble", "microbatches": 5}, torch.ones(4, 12), torch.ones(3)
    said = {
        "make 4 stages, and there are 2 processes": message(
            SettingError, under, "pipeline", {"splits": ("a", "b", "c")}
        ),
        "use a multiple of 2": message(SettingError, under, "pipeline", odd),
    }
    with under("pipeline") as acc:
        modules = nn.ModuleList([nn.Linear(1, 1)])
        said["a ModuleList cannot be called"] = message(PrepareError, acc.prepare, modules)
        model = acc.prepare(make("mlp"))
        free = torch.ones(4, 12, requires_grad=True)
        said["an input of a pipelined model requires a gradient"] = message(StepError, model, free)
        scalar = acc.prepare(
            Of(lambda m, x: m.last(m.first(x)).mean(), first=nn.Linear(12, 3), last=nn.Linear(3, 1))
        )
        said["returns a tensor of shape () for 2 samples"] = message(BatchError, scalar, x)
        said["along dimension 0"] = message(BatchError, acc.forward_backward, scalar, len, x, target=y)
        model(x)
        untouched = acc.prepare(make("mlp"))
    said["one stage of a run that has let go of it"] = message(StepError, model, x)
    assert untouched(x).shape == (4, 5)
    with under("pipeline") as acc:
        again = message(PrepareError, acc.prepare, acc.unwrap_model(model))
        said["an earlier run left parts of this Sequential to other ranks"] = again
    return said


def test_refusals_have_sentences(ranks) -> None:
    for said in ranks(refusals):
        assert all(words in sentence for words, sentence in said.items()), said


def test_an_output_that_is_none_without_values_and_a_tensor_with_them_is_refused() -> None:
    x = torch.ones(2, 3)
    batch: Any = SimpleNamespace(surveys=[SimpleNamespace(outputs=(form(x), None))], outputs={0: (x, x)})
    with pytest.raises(StepError, match="output has another form than in a forward without values"):
        Pipelined._share(SimpleNamespace(), batch)  # type: ignore[arg-type]
