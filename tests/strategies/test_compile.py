"""torch.compile under every strategy: the same numbers, in as few graphs as it should be, and undone at the end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from easymp import Accelerator, CompileOptions, PrepareError, SettingError

from .models import Block, Tied, agree, make, message, train, under

GRAPHS: list[Any] = []


def counting(graph: Any, inputs: Any) -> Any:
    GRAPHS.append(graph)
    return graph.forward


def trained(compile: Any, precision: str = "no", checkpointing: Any = False) -> dict[str, Any]:
    GRAPHS.clear()
    torch._dynamo.reset()
    with under(None, None, 2, precision, compile=compile, activation_checkpointing=checkpointing) as acc:
        return {**train(acc, "tied", 0.1), "graphs": len(GRAPHS)}


EAGER = {what: CompileOptions(what=what, backend=counting) for what in ("model", "blocks")}
AOT = {what: CompileOptions(what=what, backend="aot_eager") for what in ("model", "blocks")}


@pytest.mark.parametrize(("target", "checkpointing"), [("model", False), ("blocks", True)])
def test_alone(target: str, checkpointing: bool) -> None:
    agree(trained(AOT[target], checkpointing=checkpointing), trained(False))


def test_one_graph_for_the_model_and_one_for_all_blocks() -> None:
    for precision in ("no", "bf16"):
        for target, limit in (("model", 1), ("blocks", 2)):  # inputs with and without a gradient
            assert 1 <= trained(EAGER[target], precision)["graphs"] <= limit


def test_the_model_stays_the_users() -> None:
    model = make("tied")
    names = list(model.state_dict()), [n for n, _ in model.named_modules()]
    for options in EAGER.values():
        with under(compile=options) as acc:
            view = acc.prepare(model)
            assert isinstance(view, Tied)
            assert (list(view.state_dict()), [n for n, _ in view.named_modules()]) == names
            view(torch.ones(2, 12))
        assert all(m._compiled_call_impl is None for m in model.modules())
        assert all(type(b) is Block for b in model.blocks)


def test_a_model_that_the_user_compiled() -> None:
    torch._dynamo.reset()
    GRAPHS.clear()
    with under() as acc:
        model = acc.prepare(torch.compile(make("tied"), backend=counting))
        acc.backward(model(torch.ones(2, 12)).sum())
        assert GRAPHS
    partly_compiled = make("tied")
    partly_compiled.blocks[0].compile(backend="eager")
    refusal = "is compiled already, and compile= asks for it again"
    for target, model, pattern in (
        ("model", torch.compile(make("tied"), backend="eager"), refusal),
        ("model", partly_compiled, refusal),
        ("blocks", make("mlp"), "compile='blocks' means the repeated blocks of a model,"),
    ):
        with under(compile=target) as acc:
            assert pattern in message(PrepareError, acc.prepare, model)


@pytest.mark.parametrize(
    ("setting", "pattern"),
    [
        ("block", r"compile='block' is not one of no, model, blocks, did you mean 'blocks'\?"),
        (1.5, "compile=1.5 is neither one of no, model, blocks nor a table"),
        ({"backend": "inducter"}, r"no backend 'inducter' here, did you mean 'inductor'\?"),
    ],
)
def test_wrong_ways_to_ask(setting: Any, pattern: str) -> None:
    with pytest.raises(SettingError, match=pattern):
        Accelerator(compile=setting)


def graphs_of_a_chain(strategy: str) -> int:
    GRAPHS.clear()
    torch._dynamo.reset()
    with under(strategy, compile=CompileOptions(backend=counting)) as acc:
        model = acc.prepare(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)))
        for _ in range(2):
            acc.backward(model(torch.ones(2, 4)).sum())
    return len(GRAPHS)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "local_sgd", "tensor_parallel"])
def test_a_module_of_torchs_own_is_compiled_too(ranks, strategy: str) -> None:
    """torch.compile passes over torch's own code where nothing of the user's calls it."""
    assert min(ranks(graphs_of_a_chain, strategy)) >= 1
    assert graphs_of_a_chain("single") == 1


def test_behind_the_hooks_of_fsdp_nothing_of_it_would_be(ranks) -> None:
    for failure in ranks.fails(graphs_of_a_chain, "fsdp"):
        assert failure.type == "PrepareError"
        assert "torch.compile passes over behind the hooks" in failure.message


def test_the_mode_reaches_the_backend() -> None:
    modes: list[Any] = []

    def backend(graph: Any, inputs: Any, mode: Any = None) -> Any:
        modes.append(mode)
        return graph.forward

    mode = CompileOptions("blocks", mode="reduce-overhead", backend=backend)
    agree(trained(mode), trained(False))
    assert set(modes) == {"reduce-overhead"}
