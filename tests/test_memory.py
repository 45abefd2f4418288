"""The arithmetic of memory, beside what real training holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from benchmarks.memory_words import Live
from easymp import PrepareError, SettingError, memory
from easymp.precision import PRECISIONS
from easymp.strategies import STRATEGIES
from easymp.training.activations import follow_step

from .strategies import models
from .strategies.ways import WAYS, Way
from .words import make_accelerator

F32 = 4
estimate = memory.estimate


def held(tensors: list[Tensor]) -> int:
    """Bytes of the distinct storages behind `tensors`."""
    parts = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    return sum({s._cdata: s.nbytes() for s in (part.untyped_storage() for part in parts)}.values())


# -- beside real training ----------------------------------------------------------------------------------------------


def train(case: Way, kind: str, precision: str) -> dict[str, int]:
    """One update; bytes of what this rank holds before gradients are cleared."""
    with models.under(case.strategy, dict(case.options), precision=precision, cpu=True) as acc:
        model = models.make(kind)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
        model, optimizer = acc.prepare(model, optimizer)
        acc.backward(model(torch.randn(8, 12)).square().mean())
        optimizer.step()
        return {
            "weights": held(list(model.parameters())),
            "buffers": held(list(model.buffers())),
            "gradients": held([p.grad for p in model.parameters() if p.grad is not None]),
            "states": held([t for state in optimizer.state.values() for t in state.values() if t.ndim]),
        }


CASES = [(kind, precision) for kind in ("conv", "tied") for precision in ("fp32", "bf16")]


def train_all(case: Way) -> list[dict[str, int]]:
    return [train(case, kind, precision) for kind, precision in CASES]


@pytest.mark.parametrize("label", ["single", "ddp", "zero1", "fsdp", "tensor_parallel", "tensor_parallel in fsdp"])
def test_what_a_rank_holds_is_what_was_predicted(ranks, label):
    case = WAYS[label]
    each = zip(*ranks(train_all, case, processes=case.sizes[0]))
    way = {"strategy": case.strategy, "options": dict(case.options), "world": case.sizes[0]}
    for (kind, precision), seen in zip(CASES, each, strict=True):
        predicted = estimate(models.make(kind), precision=precision, **way)
        for name in seen[0]:
            # The fullest rank decides. Torch rounds a bucket or a shard up here and there.
            assert max(one[name] for one in seen) == pytest.approx(getattr(predicted, name), rel=0.01), name


# -- exact sums --------------------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Dimension 0 that no even number of ranks divides, a frozen layer, tied weights, and a buffer of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(4, 7).requires_grad_(False)  # 35
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(7, 7), nn.ReLU()) for _ in range(3))  # 56 each
        self.head = nn.Linear(7, 3, bias=False)  # 21
        self.tied = nn.Linear(7, 3, bias=False)
        self.tied.weight = self.head.weight
        self.register_buffer("count", torch.zeros(5, dtype=torch.int64))  # 40 bytes

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks[0](self.frozen(x)))


ALL, TRAINED = 35 + 3 * 56 + 21, 3 * 56 + 21


def test_whole_on_each_rank():
    it = estimate(Odd(), strategy="ddp", world=4)
    assert (it.weights, it.gradients) == (ALL * F32, TRAINED * F32)
    assert (it.states, it.buffers) == (2 * TRAINED * F32, 40)
    assert (it.masters, it.copies, it.gathered, it.reducing, it.activations) == (0, 0, 0, 0, None)
    assert it.total == it.lasting == (ALL + 3 * TRAINED) * F32 + 40


def test_shards_along_dimension_0_the_largest_rank_counts():
    it = estimate(Odd(), strategy="fsdp", world=4)
    block = 2 * 7 + 2  # 7 rows in 4 pieces: 2 rows
    frozen, head = 2 * 4 + 2, 1 * 7
    assert it.weights == (frozen + 3 * block + head) * F32
    assert it.gradients == (3 * block + head) * F32
    assert it.states == 2 * it.gradients
    # the tied layers, one block, and the next; the frozen layer comes after them
    assert it.gathered == it.reducing == (21 + 2 * 56) * F32
    half = estimate(Odd(), strategy="fsdp", world=4, precision="bf16")
    assert (half.weights, half.gathered, half.copies) == (it.weights, it.gathered // 2, 0)
    # gradients come in bf16, and are copied to fp32 to be reduced
    assert half.reducing == (21 + 56) * 2 + 56 * F32


def test_autocast_copies_the_weights_of_matrix_layers():
    it = estimate(nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 8), nn.LayerNorm(8)), precision="bf16")
    assert (it.copies, it.weights) == ((64 + 8) * 2, (72 + 72 + 16) * F32)
    # the embedding is the last layer, too
    assert estimate(models.make("tied"), precision="bf16").copies > 19 * 16 * 2


PLAIN = "Adadelta Adagrad Adam Adamax AdamW ASGD NAdam RAdam RMSprop Rprop SGD Muon".split()
OPTIMIZERS = [
    *((name, {}) for name in PLAIN if hasattr(torch.optim, name)),
    ("Adam", {"amsgrad": True}),
    ("RMSprop", {"momentum": 0.9, "centered": True}),
    ("SGD", {"momentum": 0.9}),
]


def test_states_are_those_that_the_optimizer_makes():
    for name, options in OPTIMIZERS:
        kind, layer = getattr(torch.optim, name), nn.Linear(32, 32, bias=False)
        optimizer = kind(layer.parameters(), lr=0.01, **options)
        predicted = estimate(layer, optimizer=optimizer).states
        layer(torch.randn(2, 32)).sum().backward()
        optimizer.step()
        kept = [t for state in optimizer.state.values() for t in state.values()]
        assert held([t for t in kept if isinstance(t, Tensor) and t.ndim]) == predicted, (name, options)
        if not options:
            assert estimate(layer, optimizer=kind).states == predicted, name


# -- activations -------------------------------------------------------------------------------------------------------


def saved_by_running(model: nn.Module, x: Tensor) -> int:
    """Bytes that are kept from a real forward for backward, of storages that are no parameters or buffers."""
    own = {t.untyped_storage()._cdata for t in [*model.parameters(), *model.buffers()]}
    seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        seen[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        graph = model(x.clone()).grad_fn
    assert graph is not None
    return sum(size for place, (storage, size) in seen.items() if place not in own and not storage.expired())


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 5))


FORWARDS = {
    "mlp": (perceptron, (7, 12)),
    "conv": (lambda: models.make("conv"), (4, 12)),
    "transformer": (lambda: models.make("tied"), (3, 12)),
    "encoder": (lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), (3, 5, 16)),
}


@pytest.mark.parametrize("kind", FORWARDS)
def test_activations_are_what_a_real_forward_saves(kind):
    make, shape = FORWARDS[kind]
    model, x = make(), torch.randn(*shape, requires_grad=True)
    state, stream = {k: v.clone() for k, v in model.state_dict().items()}, torch.random.get_rng_state()
    predicted = follow_step(model, (x,), {}, None, None).kept
    assert torch.equal(stream, torch.random.get_rng_state())
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert predicted == saved_by_running(model, x)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_the_peak_is_that_of_a_real_step(precision):
    x = torch.randn(256, 16)
    for asked in (None, "blocks", "attention", "Wide"):
        words: Any = {"activation_checkpointing": asked} if asked else {}
        with make_accelerator(cpu=True, mixed_precision=precision, **words) as acc:
            model = nn.Sequential(nn.Linear(16, 16), *(Wide() for _ in range(4)))
            prepared = acc.prepare(model)
            with Live(model, x) as live:
                acc.backward(prepared(x).sum())
        need = estimate(model, precision=precision, sample=x, **words)
        assert need.activations is not None
        # The input was there before. `Live` counts the gradient of a weight until it is finished, and outputs that
        # prepare turns to fp32.
        assert live.most == pytest.approx(need.activations + need.copies - x.nbytes, rel=0.15), asked
        assert asked is None or need.copies < 20_000
    assert type(model[1]) is Wide
    with pytest.raises(PrepareError, match="has none"):
        estimate(perceptron(), sample=torch.randn(7, 12), activation_checkpointing=True)


def test_nothing_is_allocated():
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(1 << 17, 1 << 17) for _ in range(4)))  # 256 GiB
    it = estimate(model, precision="bf16", sample={"input": torch.empty(1 << 20, 1 << 17, device="meta")})
    assert it.weights == 4 * ((1 << 34) + (1 << 17)) * F32
    assert it.activations == 7 * (1 << 37) * 2  # the inputs of layers, one output, and two gradients
    assert next(model.parameters()).is_meta


# -- asked and shown ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"strategy": "fdsp"}, "did you mean 'fsdp'"),
        ({"strategy": "auto"}, "strategy='auto' is not one of"),
        ({"precision": "bf61"}, "did you mean 'bf16'"),
        ({"optimizer": "adamv"}, "did you mean 'adam"),
        ({"optimizer": object()}, "is not a name, class, number of states or torch optimizer"),
        ({"optimizer": torch.optim.SGD([nn.Parameter(torch.ones(1))])}, "none of the optimizers holds"),
        ({"world": 0}, "world=0 is not a whole number of at least 1"),
        ({"per_node": 1.5}, "per_node=1.5 is not a whole number"),
        ({"sample": 3}, "sample is a int"),
        ({"options": {"reshard": 1}}, "has no option 'reshard'"),
        ({"model": "gpt"}, "neither a module nor a number of parameters"),
    ],
)
def test_what_is_wrong_is_said(asked, words):
    with pytest.raises(SettingError, match=words):
        estimate(**{"model": nn.Linear(2, 2), **asked})


def test_needs_of_two_models_add_up_activations_included():
    how = {"strategy": "single", "optimizer": "sgd"}
    one, two = (estimate(nn.Linear(4, n), sample=torch.ones(8, 4), **how) for n in (2, 3))
    assert None not in (one.activations, two.activations)
    assert (one + two).activations == one.activations + two.activations
    assert (one + estimate(nn.Linear(4, 2), strategy="single")).activations is None


def test_it_prints_an_aligned_table():
    it = estimate(nn.Linear(1024, 1024, bias=False), strategy="ddp", world=2, optimizer="sgd momentum")
    assert str(it).splitlines() == [
        "ddp, fp32, 2 ranks; a rank needs",
        "weights     4.00 MiB",
        "gradients   4.00 MiB",
        "states      4.00 MiB",
        "total      12.00 MiB",
        "activations are not counted: pass a sample batch",
    ]


def test_every_strategy_and_precision_has_its_arithmetic():
    whole = estimate(models.make("tied"), precision="fp32").weights
    for strategy in STRATEGIES:
        for precision in PRECISIONS:
            it = estimate(models.make("tied"), strategy=strategy, precision=precision, world=4, per_node=2)
            assert 0 < it.lasting <= it.total
            assert it.weights <= whole
