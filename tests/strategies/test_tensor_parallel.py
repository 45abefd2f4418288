"""tensor_parallel on real processes: the numbers of one process, whatever the plan, alone and with fsdp in one mesh."""

from __future__ import annotations

import re
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from easymp import (
    Accelerator,
    BatchError,
    PrepareError,
    RefusedError,
    SettingError,
    StepError,
    TensorParallelOptions,
)
from easymp.strategies.tensor_parallel import TensorParallel, read_plan

from ..versions import ADDS
from .models import Tied, make, message, under, whole

Options = dict[str, Any]


class Attention(nn.Module):
    """Heads of 4 features, whose number it learns from its projections: what "colwise" needs."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))
        self.q_norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, 4)).transpose(1, 2) for p in (self.q, self.k, self.v))
        mixed = nn.functional.scaled_dot_product_attention(self.q_norm(q), k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.attend = Attention()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Language(nn.Module):
    """A transformer with words and positions; the head may be the embedding."""

    def __init__(self, tied: bool = True, positions: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 16)
        self.places = nn.Embedding(8, 16) if positions else None
        self.enter = nn.Identity()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 11, bias=False)
        if tied:
            self.head.weight = self.words.weight
        self.layers[0].norm1.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.words(x)
        if self.places is not None:
            y = y + self.places(torch.arange(x.shape[1]))
        y = self.enter(y)
        for layer in self.layers:
            y = layer(y)
        return self.head(self.norm(y))


INNER = {
    "layers.*.attend.[qkv]": "colwise",
    "layers.*.attend.q_norm": "replicated_with_grad_allreduce",
    "layers.*.attend.out": "rowwise",
    "layers.*.up": "colwise",
    "layers.*.down": "rowwise",
}
PLAN = {"words": "rowwise", "head": "colwise_rep", **INNER}
HUGGING = {"words": "embedding_rowwise", "head": "colwise_gather_output", **INNER}
PIECES = {"*norm*": "sequence"}
ENTERED = {"words": "replicate", "places": "replicate", "enter": "sequence_split"}


class Own(Language):
    _tp_plan: ClassVar[Any] = {**HUGGING, "layers.*.experts": "grouped_gemm"}  # of a part that this one lacks


def language(
    strategy: str, options: Any, how: Options, steps: int = 1, kind: type[Language] = Language
) -> dict[str, Any]:
    torch.manual_seed(5)
    with under(strategy, options, steps=steps) as acc:
        torch.manual_seed(0)
        model: Any = kind(**how)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
        model, optimizer = acc.prepare(model, optimizer)
        spread = acc._prepared.strategy
        generator = torch.Generator().manual_seed(7)
        losses, norms = [], []
        for _ in range(8 * steps):
            x = torch.randint(0, 11, (4, 9), generator=generator).chunk(spread.data_size)[spread.data_rank]
            with acc.accumulate(model):
                loss = nn.functional.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
                acc.backward(loss)
                losses.append(float(acc.reduce(loss.detach(), "mean")))
                norm = acc.clip_grad_norm_(model.parameters(), 0.5)
                norms += [] if norm is None else [float(norm)]
                frozen = model.layers[0].norm1.weight
                assert not frozen.requires_grad
                assert frozen.grad is None
                optimizer.step()
                optimizer.zero_grad()
        tied = model.head.weight is model.words.weight
        here = {n: getattr(p, "_local_tensor", p).detach().clone() for n, p in model.named_parameters()}
        full = {n: whole(p) for n, p in model.named_parameters()}
        return {"losses": losses, "norms": norms, "here": here, "full": full, "tied": tied}


def alike(got: dict[str, Any], one: dict[str, Any]) -> None:
    assert got["losses"] == pytest.approx(one["losses"], rel=1e-5)
    assert got["norms"] == pytest.approx(one["norms"], rel=1e-5)
    assert got["tied"] == one["tied"]
    assert got["full"].keys() == one["full"].keys()
    for name, values in one["full"].items():
        close = torch.allclose(got["full"][name], values, rtol=1e-3, atol=1e-4)
        assert name.endswith("k.bias") or close, name


PLANS: dict[str, tuple[Options, Options, type[Language]]] = {
    "none": ({}, {}, Language),
    "by hand": ({"plan": PLAN}, {}, Language),
    "the model's own": ({}, {}, Own),
    "head followed by its embedding": ({"plan": {"head": "colwise_rep", **INNER}}, {}, Language),
    "untied": ({"plan": {"words": "colwise_rep", "head": "rowwise_rep", **INNER}}, {"tied": False}, Language),
    "pieces": ({"plan": {**INNER, **PIECES, **PLAN}, "sequence_parallel": True}, {}, Language),
    "pieces, entered later": (
        {"plan": {**ENTERED, **INNER, **PIECES, "head": "colwise_rep"}, "sequence_parallel": True},
        {"tied": False, "positions": True},
        Language,
    ),
}


@pytest.mark.parametrize("plan", PLANS)
def test_plans_change_no_number(ranks, plan: str) -> None:
    options, how, kind = PLANS[plan]
    steps = 3 if plan == "pieces" else 1
    one = language("single", None, how, steps)
    first, second = ranks(language, "tensor_parallel", options, how, steps, kind)
    for got in (first, second):
        alike(got, one)
    for name, values in one["full"].items():  # what is whole stays alike to the last bit
        if first["here"][name].shape == values.shape:
            assert torch.equal(first["here"][name], second["here"][name]), name


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["by hand", "pieces"])
def test_plans_with_fsdp_in_one_mesh(ranks, plan: str) -> None:
    options, how, _ = PLANS[plan]
    one = language("single", None, how, 3)
    for got in ranks(language, "tensor_parallel", {**options, "size": 2}, how, 3, processes=4, timeout=110):
        alike(got, one)


def styles() -> float:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel

    plan = {"0": ColwiseParallel(output_layouts=Replicate()), "[24]": "replicate"}
    with under("tensor_parallel", {"plan": plan}) as acc:
        model = acc.prepare(make("mlp"))
        kinds = [type(p).__name__ for p in model.parameters()]
        assert kinds == ["DTensor", "DTensor", *["Parameter"] * 4]
        return float(model(torch.ones(2, 12)).sum().detach())


def test_a_style_of_torchs_own(ranks) -> None:
    expected = float(make("mlp")(torch.ones(2, 12)).sum().detach())
    assert ranks(styles) == pytest.approx([expected] * 2, rel=1e-5)


@pytest.mark.parametrize(
    ("plan", "sequence", "words"),
    [
        ({"layer.*": "colwise"}, False, "' matches no module of this Language, did you mean 'layers"),
        ({"head": "columnwise"}, False, r"'head' has the style 'columnwise', did you mean 'colwise'\?"),
        ({"head": "colwise"}, False, "'head' is 'colwise', and dimension 0 of its weight, 11, does"),
        ({"words": "colwise_rep", "head": "colwise_rep"}, False, "'words' and 'head' share a parameter"),
        ({"norm": "colwise"}, False, "'colwise' for 'norm', a LayerNorm, and torch splits nn.Linear"),
        ({"norm": "sequence"}, False, "'sequence' for 'norm', which needs sequence_parallel=True"),
        ({"layers.0": "replicated_with_grad_allreduce"}, False, "is for single layers, and 'layers.0'"),
        (None, True, "sequence_parallel=True needs a plan"),
        (INNER, True, "nothing in the plan splits the sequence"),
        (PLAN, True, "the plan does not name 'layers.0.norm1.bias'"),
    ],
)
def test_what_a_plan_may_not_say(plan: Any, sequence: bool, words: str) -> None:
    with pytest.raises(PrepareError, match=words):
        read_plan(Language(), plan, 2, sequence)


def test_attention_that_is_not_called_is_left_whole() -> None:
    with pytest.raises(PrepareError, match=r"'blocks\.0\.attend\.out_proj' lies in a MultiheadAttention"):
        read_plan(Tied(), {"blocks.*": "colwise_rep"}, 2, False)
    with pytest.raises(PrepareError, match=r"has no nn\.Linear and no nn\.Embedding of at least 2 features"):
        read_plan(nn.Sequential(nn.Conv1d(3, 3, 3)), None, 2, False)


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.first(x), self.second.weight)


def wrong_calls() -> list[Any]:
    options = {"plan": {**INNER, **PIECES, **PLAN}, "sequence_parallel": True}
    with under("tensor_parallel", options) as acc:
        found: list[Any] = [message(BatchError, acc.prepare(Language()), torch.zeros(2, 7, dtype=torch.long))]
    with under("tensor_parallel") as acc:
        found.append(message(StepError, acc.prepare(Reader()), torch.ones(2, 4)))
    with under("tensor_parallel", {"plan": {"second": "replicate", "*": "colwise_rep"}}) as acc:
        return [*found, acc.prepare(Reader())(torch.ones(2, 4)).shape]


def test_a_sequence_that_does_not_divide_and_a_weight_that_is_read_and_not_called(ranks) -> None:
    for uneven, read, shape in ranks(wrong_calls):
        assert "into 2 pieces of one length, and 'words' has (2, 7, 16)" in uneven
        assert "outside of the layer that holds it" in read and shape == (2, 4)


def forgotten(plan: Any) -> str:
    options = {"plan": plan, "size": 2}
    with Accelerator(mixed_precision="no", strategy="tensor_parallel", strategy_options=options) as acc:
        model: Any = Language()
        model, optimizer = acc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        x = torch.randint(0, 11, (2, 9), generator=torch.Generator().manual_seed(1))
        acc.backward(nn.functional.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten()))
        return message(StepError, optimizer.step)


@pytest.mark.parametrize("processes", [2, 4])
def test_a_layer_on_parts_that_the_plan_forgets_is_named(ranks, processes: int) -> None:
    plan = {name: how for name, how in PLAN.items() if "norm" not in name}
    for said in ranks(forgotten, plan, processes=processes):
        assert re.search(r"different gradients for 'layers\.[01]\.attend\.q_norm\.(weight|bias)'", said)


def muon(strategy: str) -> list[Tensor]:
    with Accelerator(mixed_precision="no", strategy=strategy) as acc:
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(8, 12, bias=False), nn.Tanh(), nn.Linear(12, 6, bias=False))
        model, optimizer = acc.prepare(model, torch.optim.Muon(model.parameters(), lr=0.02))
        generator = torch.Generator().manual_seed(1)
        for _ in range(4):
            acc.backward((model(torch.randn(200, 8, generator=generator)) - 1).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        return [whole(p) for p in model.parameters()]


def test_muon_takes_whole_matrices(ranks) -> None:
    if not ADDS:  # torch 2.8 has no Muon
        refused = "SettingError" if hasattr(torch.optim, "Muon") else "AttributeError"
        assert {failure.type for failure in ranks.fails(muon, "tensor_parallel")} == {refused}
        return
    start = [whole(p) for p in (torch.manual_seed(0), nn.Linear(8, 12, bias=False))[1].parameters()]
    one, there = muon("single"), ranks(muon, "tensor_parallel")[0]
    assert (one[0] - start[0]).abs().max() > 0.02
    for a, b in zip(there, one):
        assert torch.allclose(a, b, atol=4e-3)  # it computes in bf16


def data(size: int) -> dict[str, Any]:
    with under("tensor_parallel", {"size": size}, seed=3) as acc:
        loader = DataLoader(TensorDataset(torch.arange(22.0)[:, None]), batch_size=3, shuffle=True)
        model, loader = acc.prepare(nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.5)), loader)
        seen, metrics = [], []
        for (x,) in loader:
            seen.append(x.flatten().tolist())
            metrics += acc.gather_for_metrics(x).flatten().tolist()
        spread = acc._prepared.strategy
        dropped = model(torch.ones(50, 1)).detach()
        together = torch.distributed.get_process_group_ranks(spread.data_group)
        found = {"seen": seen, "metrics": metrics, "dropped": dropped, "together": together}
        return {**found, "slice": (spread.data_rank, spread.data_size)}


def test_neighbours_share_their_data_and_their_dropout(ranks) -> None:
    results = ranks(data, 2, processes=4)
    assert [r["slice"] for r in results] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert [r["together"] for r in results] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    for a, b in ((0, 1), (2, 3)):
        assert results[a]["seen"] == results[b]["seen"]
        assert torch.equal(results[a]["dropped"], results[b]["dropped"])
    assert results[0]["seen"] != results[2]["seen"]
    assert not torch.equal(results[0]["dropped"], results[2]["dropped"])
    assert all(sorted(r["metrics"]) == list(range(22)) for r in results)


def held(kind: str, size: int) -> tuple[int, int, int]:
    with under("tensor_parallel", {"size": size}) as acc:
        model = acc.prepare(make(kind))
        parts = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
        memory = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in parts}
        one, count = make(kind), acc.num_processes
        layout = TensorParallel.layout(one, TensorParallelOptions(size=size), count, count)
        predicted = sum(layout.weights(name, p) for name, p in one.named_parameters())
        return sum(p.numel() for p in parts), sum(memory.values()), predicted


@pytest.mark.parametrize(("processes", "size"), [(2, 2), (4, 2)])
def test_a_rank_holds_what_its_layout_says_and_no_more(ranks, processes: int, size: int) -> None:
    results = ranks(held, "tied", size, processes=processes)
    most = max(elements for elements, _, _ in results)
    assert most <= results[0][2] <= 1.02 * most
    for elements, in_memory, predicted in results:
        assert in_memory <= 4 * 1.1 * predicted
        assert elements < 0.85 * sum(p.numel() for p in make("tied").parameters()) * 2 / processes


def refusals() -> dict[str, str]:
    overlapped, symmetric = (
        {"sequence_parallel": True, "async_tensor_parallel": True},
        {"symmetric_memory": True},
    )
    said = {
        "size": message(SettingError, under, "tensor_parallel", {"size": 3}),
        "overlap": message(RefusedError, under, "tensor_parallel", overlapped),
        "groups": message(RefusedError, under, "tensor_parallel", {"fsdp": symmetric}),
        "symmetric": message(RefusedError, under, "fsdp", symmetric),
        "alone": message(SettingError, TensorParallelOptions, async_tensor_parallel=True),
    }
    with Accelerator(mixed_precision="no", strategy="tensor_parallel") as acc:
        prepared = acc.prepare(make("mlp"))
    said["closed"] = message(StepError, prepared, torch.ones(1, 12))
    with Accelerator(mixed_precision="no", strategy="tensor_parallel") as acc:
        said["again"] = message(PrepareError, acc.prepare, acc.unwrap_model(prepared))
    return said


def test_refusals_have_sentences(ranks) -> None:
    words = {
        "size": r"size=3 does not divide 2 processes .*: use one of \[2\]",
        "overlap": "async_tensor_parallel=True works between CUDA devices, and this run is on cpu",
        "groups": "symmetric_memory=True works between CUDA devices",
        "symmetric": "symmetric_memory=True works between CUDA devices",
        "alone": "pass sequence_parallel=True, too",
        "closed": "shards of a run that has let go of it",
        "again": "parameter '0.weight' is sharded already",
    }
    for said in ranks(refusals):
        assert all(re.search(pattern, said[name]) for name, pattern in words.items()), said
