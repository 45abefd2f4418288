"""tensor_parallel on real processes: the numbers of one process, whatever the plan, alone and with fsdp in one mesh."""

from __future__ import annotations

import re
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from easymp import PrepareError, SettingError, StepError
from easymp.strategies.tensor_parallel import read_plan

from ..versions import ADDS
from .models import Of, Tied, agree, make, message, refuses, sgd, train, under

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
        self.attend, self.up, self.down = Attention(), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Language(nn.Module):
    """A transformer without positions; the head may be the embedding."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(11, 16), nn.LayerNorm(16)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(16, 11, bias=False)
        if tied:
            self.head.weight = self.words.weight
        self.layers[0].norm1.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(nn.Sequential(self.words, *self.layers)(x))).transpose(1, 2)


INNER = {
    "layers.*.attend.[qkv]": "colwise",
    "layers.*.attend.q_norm": "replicated_with_grad_allreduce",
    "layers.*.attend.out": "rowwise",
    "layers.*.up": "colwise",
    "layers.*.down": "rowwise",
}
PLAN = {"words": "rowwise", "head": "colwise_rep", **INNER}
HUGGING = {"words": "embedding_rowwise", "head": "colwise_gather_output", **INNER}


class Own(Language):
    _tp_plan: ClassVar[Any] = {**HUGGING, "layers.*.experts": "grouped_gemm"}  # of a part that this one lacks


def language_batch(generator: torch.Generator) -> list[Tensor]:
    x = torch.randint(0, 11, (4, 9), generator=generator)
    return [x[:, :-1], x[:, 1:]]


def language(
    strategy: str, options: Any, keywords: Options, steps: int = 1, kind: type[Language] = Language
) -> dict[str, Any]:
    with under(strategy, options, steps) as acc:
        return train(acc, partial(kind, **keywords), 0.5, sgd, language_batch)


def check_equal(got: dict[str, Any], one: dict[str, Any]) -> None:
    agree(got, one)
    for name, values in one["parameters"].items():
        close = torch.allclose(got["parameters"][name], values, rtol=1e-3, atol=1e-4)
        assert name.endswith("k.bias") or close, name


PLANS: dict[str, tuple[Options, Options, type[Language]]] = {
    "none": ({}, {}, Language),
    "by hand": ({"plan": PLAN}, {}, Language),
    "the model's own": ({}, {}, Own),
    "head followed by its embedding": ({"plan": {"head": "colwise_rep", **INNER}}, {}, Language),
    "untied": ({"plan": {"words": "colwise_rep", "head": "rowwise_rep", **INNER}}, {"tied": False}, Language),
}


@pytest.mark.parametrize("plan", PLANS)
def test_plans_change_no_number(ranks, plan: str) -> None:
    options, keywords, kind = PLANS[plan]
    one = language("single", None, keywords, 1)
    first, second = ranks(language, "tensor_parallel", options, keywords, 1, kind)
    for got in (first, second):
        check_equal(got, one)
    for name, values in one["parameters"].items():  # what is whole stays alike to the last bit
        if first["here"][name].shape == values.shape:
            assert torch.equal(first["here"][name], second["here"][name]), name


@pytest.mark.slow
def test_a_plan_with_fsdp_in_one_mesh(ranks) -> None:
    options, keywords, _ = PLANS["by hand"]
    one = language("single", None, keywords, 3)
    for got in ranks(language, "tensor_parallel", {**options, "size": 2}, keywords, 3, processes=4, timeout=110):
        check_equal(got, one)


@pytest.mark.on_ranks(2)
def test_a_style_of_torchs_own() -> None:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel

    expected = make("mlp")(torch.ones(2, 12))
    plan = {"0": ColwiseParallel(output_layouts=Replicate()), "[24]": "replicate"}
    with under("tensor_parallel", {"plan": plan}) as acc:
        model = acc.prepare(make("mlp"))
        assert [type(p).__name__ for p in model.parameters()] == ["DTensor", "DTensor", *["Parameter"] * 4]
        torch.testing.assert_close(model(torch.ones(2, 12)), expected)


@pytest.mark.parametrize(
    ("plan", "pattern", "kind"),
    [
        ({"layer.*": "colwise"}, "' matches no module of this Language, did you mean 'layers", Language),
        ({"head": "columnwise"}, r"'head' has the style 'columnwise', did you mean 'colwise'\?", Language),
        ({"head": "colwise"}, "'head' is 'colwise', and dimension 0 of its weight, 11, does", Language),
        ({"words": "colwise_rep", "head": "colwise_rep"}, "'words' and 'head' share a parameter", Language),
        ({"norm": "colwise"}, "'colwise' for 'norm', a LayerNorm, and torch splits nn.Linear", Language),
        ({"norm": "sequence"}, "style 'sequence', which was removed: put torch's SequenceParallel", Language),
        ({"layers.0": "replicated_with_grad_allreduce"}, "is for single layers: name the layers in it", Language),
        ({"blocks.*": "colwise_rep"}, "'blocks.0.attend.out_proj' lies in a MultiheadAttention", Tied),
        (None, "has no nn.Linear and no nn.Embedding of at least 2 features", partial(nn.Conv1d, 3, 3, 3)),
    ],
)
def test_what_a_plan_may_not_say(plan: Any, pattern: str, kind: Any) -> None:
    with pytest.raises(PrepareError, match=pattern):
        read_plan(kind(), plan, 2)


@pytest.mark.on_ranks(2)
def test_a_weight_that_is_read_and_not_called() -> None:
    reads = lambda m, x: nn.functional.linear(m.first(x), m.second.weight)  # noqa: E731
    reader = lambda: Of(reads, first=nn.Linear(4, 4), second=nn.Linear(4, 4))  # noqa: E731
    with under("tensor_parallel") as acc:
        refuses(StepError, "outside of the layer that holds it", acc.prepare(reader()), torch.ones(2, 4))
    with under("tensor_parallel", {"plan": {"second": "replicate", "*": "colwise_rep"}}) as acc:
        assert acc.prepare(reader())(torch.ones(2, 4)).shape == (2, 4)


def forgotten(plan: Any) -> str:
    with under("tensor_parallel", {"plan": plan, "size": 2}) as acc:
        model: Any = Language()
        model, optimizer = acc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        x = torch.randint(0, 11, (2, 9), generator=torch.Generator().manual_seed(1))
        acc.backward(nn.functional.cross_entropy(model(x[:, :-1]), x[:, 1:]))
        return message(StepError, optimizer.step)


@pytest.mark.parametrize("processes", [2, 4])
def test_a_layer_on_parts_that_the_plan_forgets_is_named(ranks, processes: int) -> None:
    plan = {name: style for name, style in PLAN.items() if "norm" not in name}
    for error_text in ranks(forgotten, plan, processes=processes):
        assert re.search(r"different gradients for 'layers\.[01]\.attend\.q_norm\.(weight|bias)'", error_text)


def muon(strategy: str) -> list[float]:
    def matrices(parameters: list[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.Muon([p for p in parameters if p.ndim == 2], lr=0.02)

    with under(strategy) as acc:
        return train(acc, "mlp", None, matrices)["losses"]


def test_muon_takes_whole_matrices(ranks) -> None:
    if not ADDS:  # torch 2.8 has no Muon
        refused = "SettingError" if hasattr(torch.optim, "Muon") else "AttributeError"
        assert {failure.type for failure in ranks.fails(muon, "tensor_parallel")} == {refused}
        return
    assert ranks(muon, "tensor_parallel")[0] == pytest.approx(muon("single"), rel=2e-3)  # it computes in bf16


def data(size: int) -> dict[str, Any]:
    with under("tensor_parallel", {"size": size}, seed=3) as acc:
        loader = DataLoader(TensorDataset(torch.arange(22.0)[:, None]), batch_size=3, shuffle=True)
        model, loader = acc.prepare(nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.5)), loader)
        samples, metrics = [], []
        for (x,) in loader:
            samples.append(x.flatten().tolist())
            metrics += acc.gather_for_metrics(x).flatten().tolist()
        spread = acc._prepared.strategy
        dropped = model(torch.ones(50, 1)).detach()
        group_ranks = torch.distributed.get_process_group_ranks(spread.data_group)
        results = {"seen": samples, "metrics": metrics, "dropped": dropped, "together": group_ranks}
        return {**results, "slice": (spread.data_rank, spread.data_size)}


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


@pytest.mark.on_ranks(2)
def test_refusals_have_sentences() -> None:
    refuses(SettingError, "size=3 does not divide 2 processes", under, "tensor_parallel", {"size": 3})
    with under("tensor_parallel") as acc:
        prepared = acc.prepare(make("mlp"))
    refuses(StepError, "shards of a run that has let go of it", prepared, torch.ones(1, 12))
    with under("tensor_parallel") as acc:
        released = acc.unwrap_model(prepared)
        refuses(PrepareError, "parameter '0.weight' is sharded already", acc.prepare, released)
