"""pipeline on real processes: the numbers of one process, wherever the model is cut, and what is in the way of them."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import easymp
from easymp import BatchError, CompileOptions, PrepareError, RefusedError, SettingError, StepError, WorldError
from easymp.strategies.pipeline_cuts import candidates, choose, form, survey
from easymp.strategies.pipeline_run import Pipelined

from .models import WIDTH, Of, Tied, agree, alone, classes, make, mean_square, refuses, sgd, train_step, trained, under

SCHEDULES = ["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"]


def agree_in_parts(results: list[dict[str, Any]], one: dict[str, Any]) -> None:
    """Losses and norms on every rank, and parameters on those that hold them."""
    names = set()
    for got in results:
        agree(got, one)
        for name, values in got["parameters"].items():
            if not values.is_meta:
                names.add(name)
                # A key's bias has no gradient but rounding, which Adam makes a step of.
                close = torch.allclose(values, one["parameters"][name], rtol=1e-3, atol=1e-4)
                assert name.endswith("in_proj_bias") or close, name
    assert names == set(one["parameters"])


def slow(*row: Any) -> Any:
    return pytest.param(*row, marks=pytest.mark.slow)


ROWS = [  # gpipe and 1f1b are in the matrix, too
    slow("tied", {"schedule": "1f1b"}, 1, 0.1, 4),
    ("tied", {"schedule": "interleaved_1f1b"}, 2, 0.1, 2),
    ("mlp", {"schedule": "interleaved_1f1b", "microbatches": 6}, 1, None, 2),
    ("idle", {"schedule": "zero_bubble"}, 1, None, 2),
    ("tied", {"schedule": "zero_bubble", "stages_per_rank": 2}, 1, 0.1, 2),
    slow("tied", {"schedule": "zero_bubble", "microbatches": 8}, 1, 0.1, 4),
    ("mlp", {"schedule": "zero_bubble"}, 1, None, 4),  # a stage that only takes the model's input
    ("tied", {"splits": ("blocks.0",), "microbatches": 1}, 1, 0.1, 2),
    ("tied", {"splits": ["head"], "microbatches": 5, "schedule": "1f1b"}, 1, 0.1, 2),  # of 5, 5, 5, 5 and 4
]


@pytest.mark.parametrize(("kind", "options", "steps", "clip", "size"), ROWS)
def test_it_trains_as_one_process(ranks, kind: str, options: Any, steps: int, clip: Any, size: int) -> None:
    results = ranks(trained, "pipeline", kind, steps, clip, "no", options, processes=size)
    agree_in_parts(results, alone(kind, steps, clip))


def fp16_norm(strategy: str, options: Any) -> float:
    with under(strategy, options, precision="O3") as acc:
        plain_model = make(lambda: nn.Sequential(nn.Linear(WIDTH, 5), nn.ReLU()))
        model, _ = acc.prepare(plain_model, sgd(list(plain_model.parameters())))
        acc.backward(mean_square(model(torch.ones(4, WIDTH))))
        return acc.clip_grad_norm_(model.parameters(), 0.1).item()


def test_a_stage_without_parameters_takes_part_in_a_norm_of_fp16_gradients(ranks) -> None:
    one = fp16_norm("single", None)
    assert ranks(fp16_norm, "pipeline", {"splits": ["1"]}) == pytest.approx([one] * 2, rel=1e-2)


def batch_norm(strategy: str, schedule: str) -> dict[str, Tensor]:
    """Buffers after four batches, which one process takes in halves."""
    options = {"schedule": schedule} if strategy == "pipeline" else None
    generator = torch.Generator().manual_seed(7)
    with under(strategy, options, steps=1 if options else 2) as acc:
        model, optimizer = acc.prepare(plain_model := make("conv"), sgd(list(plain_model.parameters())))
        for _ in range(4):
            for x, y in zip(*(t.chunk(acc.gradient_accumulation_steps) for t in classes(generator))):
                with acc.accumulate(model):
                    train_step(acc, model, nn.functional.cross_entropy, x, y)
                    optimizer.step()
                    optimizer.zero_grad()
        return {name: b.clone() for name, b in model.named_buffers() if not b.is_meta}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_batch_norm_sees_a_microbatch_at_a_time_and_once(ranks, schedule: str) -> None:
    first, second = ranks(batch_norm, "pipeline", schedule)
    torch.testing.assert_close(first | second, batch_norm("single", schedule), rtol=1e-4, atol=1e-5)


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
    results: list[Any] = []
    draw = torch.Generator().manual_seed(1)
    batch = lambda rows: torch.randn(rows, 12, generator=draw)  # noqa: E731
    with under(strategy, {"splits": ("blocks.1",)} if strategy == "pipeline" else None) as acc:
        torch.manual_seed(0)
        model = acc.prepare(Tower())
        output = model({"x": batch(6)}, mask=torch.arange(6) % 2)  # a dictionary, a keyword
        results.append((output["logits"].detach(), output["mask"], output["top"]))
        acc.backward(output["logits"].square().mean())
        results.append(gradients(model))
        # two forwards, odd sizes
        acc.backward(sum(model({"x": batch(n)}, 0.5)["logits"].square().mean() for n in (5, 1)))
        results.append(gradients(model))
        with acc.no_sync(model):
            acc.backward(model({"x": batch(4)})["logits"].square().mean())
            model({"x": batch(4)})  # its output is not used
            with torch.no_grad():
                model.eval()
                results.append(model({"x": batch(3)})["logits"])
                model.train()
        acc.backward(model({"x": batch(4)})["logits"][1:].square().mean())
        results.append(gradients(model))
        model.shift.requires_grad_(False)
        acc.backward(model({"x": batch(4)})["logits"].relu_().square().sum(), num_items=4)
        results.append(gradients(model))
        loss = model({"x": batch(2)})["logits"].sum()
        acc.backward(loss, retain_graph=True)
        if strategy == "pipeline":
            with pytest.raises(StepError, match="a second backward through one forward"):
                acc.backward(loss)
        norms = [acc.clip_grad_norm_(model.parameters(), 0.5, kind) for kind in (1.0, 2.0, torch.inf)]
        results.append([float(norm) for norm in norms])
        acc.clip_grad_value_(model.parameters(), 1e-3)
        return [*results, gradients(model)]


def same(a: Any, b: Any) -> bool:
    """Whether `a` is `b`, as far as it is here."""
    if isinstance(a, dict):
        return all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.allclose(a, b, rtol=1e-4, atol=1e-6) if isinstance(a, Tensor) else a == pytest.approx(b, rel=1e-5)


def test_loops_of_other_shapes(ranks) -> None:
    one, results = loops("single"), ranks(loops, "pipeline")
    assert [[same(a, b) for a, b in zip(got, one, strict=True)] for got in results] == [[True] * len(one)] * 2
    for first, second, expected in zip(*results, one):
        assert not isinstance(expected, dict) or first.keys() | second.keys() == expected.keys()


def dropout(schedule: str) -> tuple[Any, int, int]:
    with under("pipeline", {"schedule": schedule}, seed=3) as acc:
        layers = [nn.Linear(12, 12), nn.Dropout(0.5), nn.Linear(12, 12), nn.Linear(12, 12), nn.Dropout(0.5)]
        model = acc.prepare(nn.Sequential(*layers))
        loss = acc.forward_backward(model, mean_square, torch.ones(8, 12))
        grads = gradients(model)
        with torch.no_grad():
            output = model(torch.ones(8, 12))
        return (loss, output, grads), int(torch.randint(1 << 40, ())), torch.initial_seed()


def test_schedules_draw_the_same_random_numbers(ranks) -> None:
    all_first, turns = ranks(dropout, "gpipe"), ranks(dropout, "1f1b")
    assert all(same(a[0], b[0]) for a, b in zip(all_first, turns))
    assert len({a[1:] for a in [*all_first, *turns]}) == 1  # streams outside stay alike
    assert all_first[0][0][1].unique(dim=0).shape[0] > 2  # no two micro-batches have the same mask


def scheduled(strategy: str, schedule: str) -> list[Any]:
    """`forward_backward` with keywords, nested targets, num_items, few samples, and evaluation between."""
    options = {"schedule": schedule, "microbatches": 4} if strategy == "pipeline" else None
    results: list[Any] = []
    draw = torch.Generator().manual_seed(1)

    def squares(outputs: Any, target: Any) -> Tensor:
        return (outputs["logits"] - target["y"]).square().sum(1).mean()

    with under(strategy, options, steps=2) as acc:
        torch.manual_seed(0)
        model = acc.prepare(Tower())
        for rows in (8, 7, 3, 1):
            for summed in (False, True):
                for _ in range(2):
                    x, y = torch.randn(rows, 12, generator=draw), torch.randn(rows, 5, generator=draw)
                    loss_fn = (lambda *a: squares(*a) * a[1]["y"].shape[0]) if summed else squares
                    keywords = {"target": {"y": y}, "num_items": rows if summed else None, "scale": 0.5}
                    with acc.accumulate(model):
                        results.append(acc.forward_backward(model, loss_fn, {"x": x}, **keywords))
                results.append(gradients(model))
            with torch.no_grad():
                results.append(model({"x": torch.randn(5, 12, generator=draw)})["logits"])
        if strategy == "pipeline" and schedule != "gpipe":
            with pytest.raises(RefusedError, match="forward_backward"):
                model({"x": torch.ones(4, 12)})
    return results


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_forward_backward_of_other_shapes(ranks, schedule: str) -> None:
    one = scheduled("single", schedule)
    for got in ranks(scheduled, "pipeline", schedule):
        assert [same(a, b) for a, b in zip(got, one, strict=True)] == [True] * len(one)


def runs_and_fails(schedule: str) -> tuple[int, str]:
    """How often blocks ran with values, and what a loss that fails becomes here."""
    calls = []

    def count(module: nn.Module, inputs: Any, output: Any) -> None:
        if type(output) is Tensor and not output.is_meta:
            calls.append(1)

    with under("pipeline", {"schedule": schedule, "microbatches": 4}) as acc:
        layers = [nn.Linear(12, 12) for _ in range(4)]
        model = acc.prepare(nn.Sequential(*(nn.Sequential(layer, nn.Tanh()) for layer in layers)))
        for layer in layers:
            layer.register_forward_hook(count)
        train_step(acc, model, nn.functional.mse_loss, torch.ones(8, 12), torch.ones(8, 12))
        runs = len(calls)
        with pytest.raises((ZeroDivisionError, WorldError)) as caught:
            acc.forward_backward(model, lambda outputs: 1 / 0, torch.ones(8, 12))
        return runs, str(caught.value)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_forward_runs_twice_and_a_loss_that_fails_ends_the_batch_on_all_ranks(ranks, schedule):
    (first, first_error), (second, last) = ranks(runs_and_fails, schedule)
    assert first + second == 4 * 4  # blocks, micro-batches
    assert last == "division by zero" and "failed on another rank" in first_error


@pytest.mark.on_ranks(2)
def test_each_rank_keeps_its_stage_under_the_names_of_the_model() -> None:
    with under("pipeline") as acc:
        model = make("tied")
        weights = copy.deepcopy(model.state_dict())
        objects, names = list(model.parameters()), [n for n, _ in model.named_parameters()]
        prepared, optimizer = acc.prepare(model, sgd(objects))
        acc.backward(prepared(torch.randn(4, 12)).sum())
        optimizer.step()
        state, parameters = prepared.state_dict(), dict(model.named_parameters())
        on_this_rank = [n for n, p in parameters.items() if not p.is_meta]
        stages = [{*stage_names} for stage_names in easymp.gather_object([on_this_rank])]
        assert (stages[0] | stages[1], stages[0] & stages[1]) == ({*names}, {"embed.weight"})
        assert isinstance(prepared, Tied) and model.head.weight is model.embed.weight
        assert list(state) == list(weights) and all(state[n].is_meta == (n not in on_this_rank) for n in parameters)
        assert all(a is b for a, b in zip(objects, model.parameters(), strict=True))
        assert [n for n, p in parameters.items() if p in optimizer.state] == on_this_rank
        assert [n for n, p in parameters.items() if p.grad is not None] == on_this_rank
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, of values for a parameter on the meta device
            prepared.load_state_dict(weights)
        assert all(torch.equal(parameters[n], weights[n]) for n in on_this_rank)


def checkpointed(schedule: str, inside_blocks: bool, around_blocks: bool = False) -> Any:
    """Gradients of a model that recomputes its activations in backward, inside of its blocks or around them."""
    recompute = partial(checkpoint, use_reentrant=False)

    def layer(m: nn.Module, x: Tensor) -> Tensor:
        return recompute(m.inner, x) if inside_blocks else m.inner(x)

    def layers(m: nn.Module, x: Tensor) -> Tensor:
        for block in m.blocks:
            x = (recompute(block, x) if around_blocks else block(x)) + x
        return x

    with under("pipeline", {"splits": ("blocks.2",), "schedule": schedule}, seed=3) as acc:
        torch.manual_seed(0)
        inner = (nn.Sequential(nn.Linear(12, 12), nn.Dropout(0.5), nn.Tanh()) for _ in range(4))
        model = acc.prepare(Of(layers, blocks=nn.ModuleList(Of(layer, inner=part) for part in inner)))
        acc.forward_backward(model, mean_square, torch.ones(8, 12))
        return gradients(model)


def test_a_models_own_checkpoints_change_nothing_inside_of_blocks(ranks) -> None:
    plain = ranks(checkpointed, "gpipe", False)
    assert len(plain[0]) == len(plain[1]) == 4
    for schedule in ("gpipe", "1f1b"):
        assert all(same(a, b) for a, b in zip(ranks(checkpointed, schedule, True), plain))
    first_failure, failure = ranks.fails(checkpointed, "gpipe", False, True)
    assert (first_failure.type, failure.type) == ("WorldError", "StepError")
    assert "stage 1 of 2 (begins at 'blocks.2') cannot have the values that it begins with" in failure.message


@pytest.mark.slow
@pytest.mark.on_ranks(2)
def test_what_is_compiled_are_the_parts_of_a_stage() -> None:
    with under("pipeline", compile=CompileOptions(backend="eager")) as acc:
        model = make("tied")
        acc.prepare(model)(torch.ones(4, 12))
        names = [name for name, m in model.named_modules() if m._compiled_call_impl is not None]
        blocks = ["blocks.1", "blocks.2"] if acc.process_index else ["blocks.0"]
        assert names == ["embed", *blocks, "head"]  # the head's weight is the embedding's
    with under("pipeline") as acc:
        (compiled := make("mlp")).compile()
        refuses(PrepareError, "the model is compiled, as one function", acc.prepare, compiled)


def cut(model: nn.Module, x: Any, stages: int, splits: tuple[str, ...] | None = None) -> Any:
    modules = candidates(model, splits or ())
    with torch.no_grad():
        return choose(model, survey(model, model, modules, (x,), {}, torch.device("cpu")), splits, stages)


def three_layers(call: Any) -> nn.Module:
    return Of(call, a=nn.Linear(12, 12), b=nn.Linear(12, 12), c=nn.Linear(12, 12))


def skip(m: nn.Module, x: Tensor) -> Tensor:
    """What `a` computes is passed to `b`, used after it, and not passed to `c`."""
    x = m.a(x)
    return m.c(m.b(x)) + x


def branch(m: nn.Module, x: Tensor) -> Tensor:
    x = m.a(x)
    return m.c(x) if x.sum() > 0 else m.b(x)


def write(m: nn.Module, x: Tensor) -> Tensor:
    total = torch.zeros(x.shape[0], 12)
    total += m.a(x)
    return m.c(m.b(total))


def test_cuts_balance_parameters_and_leave_the_model_alone() -> None:
    model = make("conv").train()
    before, drawn = {k: t.clone() for k, t in model.state_dict().items()}, torch.get_rng_state()
    cuts = cut(model, torch.randn(2, 12, generator=torch.Generator()), 2)
    assert all(torch.equal(t, before[k]) for k, t in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), drawn)
    assert not any("_compiled_call_impl" in vars(m) for m in model.modules())
    assert cuts.begins == ("2.1",) and cuts.users["2.1.running_mean"] == (1,)
    tied = cut(make("tied"), torch.randn(2, 12), 2)
    assert tied.begins == ("blocks.1",) and tied.users["embed.weight"] == (0, 1)
    idle = cut(make("idle"), torch.randn(2, 12), 3)
    assert set(idle.users) == {n for n, _ in make("idle").named_parameters()}
    assert all(len(stages) == 1 for stages in idle.users.values())
    for model, splits in (
        (three_layers(skip), ("b",)),
        (nn.Sequential(three_layers(skip), nn.Linear(12, 2)), ("0.b", "1")),
    ):
        assert cut(model, torch.ones(2, 12), len(splits) + 1, splits).begins == splits


@pytest.mark.parametrize(
    ("model", "stages", "splits", "pattern"),
    [
        (three_layers(skip), 3, ("b", "c"), "at 'c': something computed before is used at or after 'c' without being"),
        (three_layers(skip), 4, None, "would need 4 stages, but there are 2 modules at which one can begin: a, b"),
        (three_layers(skip), 2, ("d",), "splits holds 'd', and no module of this Of has that name"),
        (Tied(), 2, ("block.1",), "splits holds 'block.1', and no module of this Tied has that name, did"),
        (Tied(), 3, ("blocks.2", "blocks.1"), "not in the order in which forward calls them: blocks.1"),
        (make("idle"), 2, ("blocks.2",), "the forward of this Idle does not call that module"),
        (nn.Linear(12, 2), 2, None, "would need 2 stages, but there are 0 modules at which one can begin"),
        (three_layers(branch), 2, None, "could not be followed without values"),
        (three_layers(write), 2, None, "writes in place"),
    ],
)
def test_where_stages_cannot_begin(model: nn.Module, stages: int, splits: Any, pattern: str) -> None:
    with pytest.raises((PrepareError, StepError), match=pattern):
        cut(model, torch.ones(2, 12), stages, splits)


@pytest.mark.on_ranks(2)
def test_refusals_have_sentences() -> None:
    odd, x = {"schedule": "zero_bubble", "microbatches": 5}, torch.ones(4, 12)
    four = "make 4 stages, and there are 2 processes"
    refuses(SettingError, four, under, "pipeline", {"splits": ("a", "b", "c")})
    refuses(SettingError, "use a multiple of 2", under, "pipeline", odd)
    with under("pipeline") as acc:
        refuses(PrepareError, "a ModuleList cannot be called", acc.prepare, nn.ModuleList([nn.Linear(1, 1)]))
        model, untouched = acc.prepare(make("mlp")), acc.prepare(make("mlp"))
        free = torch.ones(4, 12, requires_grad=True)
        refuses(StepError, "an input of a pipelined model requires a gradient", model, free)
        mean = Of(lambda m, x: m.last(m.first(x)).mean(), first=nn.Linear(12, 3), last=nn.Linear(3, 1))
        scalar = acc.prepare(mean)
        refuses(BatchError, "returns a tensor of shape () for 2 samples", scalar, x)
        refuses(BatchError, "along dimension 0", acc.forward_backward, scalar, len, x, target=torch.ones(3))
        model(x)
    refuses(StepError, "one stage of a run that has let go of it", model, x)
    assert untouched(x).shape == (4, 5)
    with under("pipeline") as acc:
        divided = "an earlier run left parts of this Sequential to other ranks"
        refuses(PrepareError, divided, acc.prepare, acc.unwrap_model(model))


def test_an_output_that_is_none_without_values_and_a_tensor_with_them_is_refused() -> None:
    x = torch.ones(2, 3)
    batch: Any = SimpleNamespace(surveys=[SimpleNamespace(outputs=(form(x), None))], outputs={0: (x, x)})
    with pytest.raises(StepError, match="output has another form than in a forward without values"):
        Pipelined._broadcast_outputs(SimpleNamespace(), batch)  # type: ignore[arg-type]
