"""Activation checkpointing in every strategy: the same numbers, less memory, and a model that stays the user's."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from easymp import BatchError, PrepareError, SettingError, Settings, StepError
from easymp.conflicts import words_of
from easymp.strategies.transforms import Recompute, find_recomputed, recompute

from ..words import make_accelerator
from .models import Block, Of, Tied, agree, alone, make, message, trained, under


def saving(strategy: str, kind: Any, checkpointing: Any, options: Any = None, precision: str = "no") -> dict[str, Any]:
    return trained(strategy, kind, 2, 0.1, precision, options, activation_checkpointing=checkpointing)


@pytest.mark.parametrize(
    ("kind", "checkpointing", "precision"),
    [
        ("tied", "attention", "no"),
        ("conv", ("1", "2"), "no"),
        ("tied", "attention", "bf16"),
    ],
)
def test_alone(kind: str, checkpointing: Any, precision: str) -> None:
    recomputed, plain = (saving("single", kind, setting, None, precision) for setting in (checkpointing, False))
    agree(recomputed, plain, 1e-5 if precision == "no" else 1e-3)
    for name, values in plain["buffers"].items():
        assert torch.equal(recomputed["buffers"][name], values), name  # batch-norm's are changed once


@pytest.mark.parametrize(
    ("options", "checkpointing"),
    [
        ({"reshard_after_forward": False}, "attention"),
        ({"wrap": ("LayerNorm", "Linear")}, True),  # shards inside of what is computed again
    ],
)
def test_on_ranks(ranks, options: Any, checkpointing: Any) -> None:
    for got in ranks(saving, "fsdp", "tied", checkpointing, options):
        agree(got, alone("tied", 2, 0.1))


def drop(m: nn.Module, x: Tensor, *, debug: Tensor) -> Tensor:
    x = torch.tanh(m.layer(x))[:, None, None]
    x = nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.1)  # draws before the other dropout
    return m.drop(x.view(-1, 8)) + debug


def drops(m: nn.Module, x: Tensor) -> Tensor:
    for block in m.blocks:
        x = block(x, debug=x)  # a name that torch's checkpoint has, too
    return x


def dropped(checkpointing: Any) -> list[Tensor]:
    torch.manual_seed(0)
    with under(activation_checkpointing=checkpointing) as acc:
        blocks = (Of(drop, layer=nn.Linear(8, 8), drop=nn.Dropout(0.5)) for _ in range(4))
        model = acc.prepare(Of(drops, blocks=nn.ModuleList(blocks)))
        torch.manual_seed(1)
        x = torch.ones(3, 8, requires_grad=True)
        acc.backward(model(x).square().mean())
        return [x.grad, *(p.grad.clone() for p in model.parameters())]


def test_dropout_is_replayed_and_keywords_arrive() -> None:
    for checkpointing in (True, "attention"):
        assert all(torch.equal(a, b) for a, b in zip(dropped(checkpointing), dropped(False), strict=True))


def bytes_kept(checkpointing: Any) -> int:
    """Bytes that forward keeps for backward, parameters not counted."""
    with under(activation_checkpointing=checkpointing) as acc:
        model = acc.prepare(make("tied"))
        parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
        sizes: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in parameters:
                sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(torch.ones(24, 12)).sum()
        del loss
        return sum(sizes.values())


def test_forward_keeps_the_inputs_of_blocks_only() -> None:
    inputs = 3 * 24 * 6 * 16 * 4  # blocks × (batch, length, width) in fp32
    assert bytes_kept(True) < inputs + 30_000
    assert bytes_kept(False) > 6 * bytes_kept(True)


def test_a_size_decides_how_many_blocks_are_recomputed(caplog: pytest.LogCaptureFixture) -> None:
    """The first ones, which backward comes to when the others have been freed; the plan says how many."""
    for below, blocks, models in (("1MB", 0, 1), ("400KB", 1, 2), ("300KB", 2, 1), ("100KB", 3, 1)):
        with under(cpu=True, activation_checkpointing=below) as acc:
            for number in range(models):  # a model that free_memory() has released counts no more
                model = make("tied")
                optimizer: Any = torch.optim.AdamW(model.parameters())
                view, _ = acc.prepare(model, optimizer)
                with torch.no_grad():
                    view(torch.ones(24, 12))
                assert number or "first forward" in str(acc.plan.activations)
                view(torch.ones(24, 12)).sum().backward()
                assert [type(b) is Block for b in model.blocks] == [False] * blocks + [True] * (3 - blocks)
                assert f"{blocks} of 3 blocks are recomputed" in str(acc)
                acc.free_memory()
                assert all(type(b) is Block for b in model.blocks)
    assert "too much, so use a smaller batch" in caplog.text


def test_models_that_cannot_be_counted_or_kept_are_told_what_to_use() -> None:
    with under(cpu=True, activation_checkpointing="1GiB") as acc:
        branching = Of(lambda m, x: m.inner(x if x.sum() > 0 else -x), inner=Tied())
        error_text = message(BatchError, acc.prepare(branching), torch.ones(2, 12))
        assert "so activation_checkpointing cannot count blocks for" in error_text
    with under(cpu=True, activation_checkpointing="attention") as acc:
        blocks = (nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)) for _ in range(2))
        model = acc.prepare(nn.Sequential(*blocks))
        error_text = message(StepError, acc.backward, model(torch.ones(2, 4)).sum())
        assert "a block has changed one in place" in error_text


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        ((), ["blocks.0", "blocks.1", "blocks.2"]),
        (("blocks.*",), ["blocks.0", "blocks.1", "blocks.2"]),  # the outermost of those inside one another
        (("blocks.[02]", "head"), ["blocks.0", "blocks.2", "head"]),
        (("*.think",), ["blocks.0.think", "blocks.1.think", "blocks.2.think"]),
    ],
)
def test_what_is_meant(patterns: Any, names: list[str]) -> None:
    model = Tied()
    by_id = {id(m): name for name, m in model.named_modules()}
    assert [by_id[id(m)] for m in find_recomputed([model], Recompute(patterns))] == names


def test_a_name_that_begins_with_a_digit_is_no_size() -> None:
    settings = Settings(activation_checkpointing="0,1.block")
    assert "activation_checkpointing by size" not in words_of(settings)
    assert "activation_checkpointing by size" in words_of(Settings(activation_checkpointing="1.5 GB"))


def test_what_means_nothing_is_refused() -> None:
    own_forward = Tied()
    own_forward.blocks[0].forward = lambda x: x
    name = "'Blok' is the name or class of no module inside this Tied, did you mean 'Block'"
    for checkpointing, model, pattern in (
        (("Blok",), Tied(), name),
        (True, make("mlp"), "the repeated blocks of a model, and this Sequential has none"),
        (True, own_forward, "a Block has a forward of its own"),
    ):
        with under(activation_checkpointing=checkpointing) as acc:
            assert pattern in message(PrepareError, acc.prepare, model)
    for wrong in (1, ()):
        assert "is neither" in message(SettingError, under, activation_checkpointing=wrong)


def test_the_model_stays_the_users() -> None:
    model = make("tied")
    names = [list(model.state_dict()), [n for n, _ in model.named_modules()], repr(model)]
    with under(activation_checkpointing=True) as acc:
        view = acc.prepare(model)
        assert [list(view.state_dict()), [n for n, _ in view.named_modules()], repr(model)] == names
        assert all(isinstance(b, Block) and type(b) is not Block for b in model.blocks)
        for copied in (copy.deepcopy(view), pickle.loads(pickle.dumps(model))):
            assert all(type(b) is Block for b in copied.blocks)
            copied(torch.ones(2, 12)).sum().backward()
        assert model.embed.weight.grad is None
        with torch.no_grad():
            model(torch.ones(2, 12))
    assert all(type(b) is Block for b in model.blocks)


def momentum(m: nn.Module, x: Tensor) -> Tensor:
    """Changes a buffer, and replaces another, as some normalisations do."""
    m.calls += 1
    m.mean = 0.5 * m.mean + x.detach().mean(0)
    return torch.tanh(m.layer(x))


def test_buffers_are_changed_once() -> None:
    module = Of(momentum, layer=nn.Linear(4, 4))
    module.register_buffer("calls", torch.zeros(()))
    module.register_buffer("mean", torch.zeros(4))
    undo = recompute([module])
    module(torch.ones(2, 4)).sum().backward()
    undo()
    assert float(module.calls) == 1.0 and module.mean.tolist() == [1.0] * 4


def crossed(strategy: str, precision: str, recomputed: bool, splits: tuple[str, ...] = ()) -> list[float]:
    """The losses of two updates of a model whose blocks are containers."""
    options: Any = {"microbatches": 2, "splits": splits or None} if strategy == "pipeline" else None
    settings: Any = {"strategy": strategy, "strategy_options": options, "mixed_precision": precision}
    with make_accelerator(
        cpu=True, seed=0, activation_checkpointing="blocks" if recomputed else None, **settings
    ) as acc:
        model: Any = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)], nn.Linear(4, 2))
        model, optimizer = acc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        losses = []
        for step in range(2):
            x = torch.randn(4, 4, generator=torch.Generator().manual_seed(step))
            losses.append(acc.forward_backward(model, lambda y: y.float().square().mean(), x).item())
            optimizer.step()
            optimizer.zero_grad()
        return losses


def test_blocks_under_o1() -> None:
    assert crossed("single", "O1", True) == crossed("single", "O1", False)


def test_blocks_in_a_pipeline(ranks) -> None:
    assert ranks(crossed, "pipeline", "no", True)[0] == pytest.approx(crossed("single", "no", False))
    failures = ranks.fails(crossed, "pipeline", "no", True, ("1.1",))
    assert all(
        "'1.1' inside of '1', which activation_checkpointing computes again" in failure.message for failure in failures
    )
