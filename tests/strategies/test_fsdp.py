"""fsdp on real processes: the numbers of one process, and what is in the way of them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate

from easymp import (
    DistributedDataParallelKwargs,
    FSDPOptions,
    GradientAccumulationPlugin,
    PrepareError,
    RefusedError,
    SettingError,
    StepError,
)
from easymp.compat.accelerate import Accelerator
from easymp.strategies.blocks import find_blocks

from ..versions import ADDS
from .models import Of, Tied, adamw, agree, alone, make, mean_square, part, refuses, sgd, trained, under, update, whole

ROWS = [
    ({"wrap": 500, "cpu_offload": True}, 2, 0.1),
    ({"wrap": ["Linear", "LayerNorm"], "reduce_every_micro_batch": True}, 2, 0.1),
    (FSDPOptions(wrap=("Block", "Sequential"), reshard_after_forward=False, reduce_every_micro_batch=False), 2, 0.1),
    ({"ignore": ("blocks.1",)}, 1, None),
    ({"ignore": ("*.bias", "embed.weight")}, 2, 0.1),
]


@pytest.mark.parametrize(("options", "steps", "clip"), ROWS)
def test_options_change_no_number(ranks, options: Any, steps: int, clip: float | None) -> None:
    results = ranks(trained, "fsdp", "tied", steps, clip, "no", options)
    ignores = isinstance(options, dict) and "ignore" in options
    for got in results:
        agree(got, alone("tied", steps, clip))
        assert got["kinds"] == ["DTensor", "Parameter"][: 1 + ignores]
    for name, values in results[0]["parameters"].items():
        assert torch.equal(values, results[1]["parameters"][name]), name


@pytest.mark.on_ranks(2)
def test_adam_steps_sharded_and_whole_parameters_of_a_group_at_once() -> None:
    for choice, step in (({}, "fused"), ({"foreach": True}, "as given")):
        with under("fsdp", {"ignore": "*.bias"}) as acc:
            model = make("tied")
            model, optimizer = acc.prepare(model, torch.optim.AdamW(model.parameters(), **choice))
            acc.backward(mean_square(model(torch.ones(8, 12))))
            weight = model.get_parameter("embed.weight")
            weight.grad = weight.grad.redistribute(placements=[Replicate()])  # as a script may set it
            optimizer.step()
            states = optimizer.state_dict()["state"].values()
            assert acc.plan.optimizer.value == step
            assert {type(state["exp_avg"]).__name__ for state in states} == {"DTensor", "Tensor"}


def averaged_each(strategy: str) -> list[torch.Tensor]:
    """Gradients of three micro-batches, each of which is averaged: what is averaged stays averaged."""
    plugin = GradientAccumulationPlugin(3, sync_each_batch=True)
    options = {"ignore": "blocks.0"} if strategy == "fsdp" else None
    with under(strategy, options, gradient_accumulation_plugin=plugin, kind=Accelerator) as acc:
        model = acc.prepare(make("tied"))
        x = part(acc, torch.randn(8, 12, generator=torch.Generator().manual_seed(1)))
        for _ in range(3):
            with acc.accumulate(model):
                acc.backward(mean_square(model(x)))
        return [whole(p.grad) for p in model.parameters()]


def test_gradients_that_are_averaged_at_each_backward(ranks) -> None:
    for gradients in ranks(averaged_each, "fsdp"):
        torch.testing.assert_close(gradients, averaged_each("single"), rtol=1e-5, atol=1e-6)


def first_micro_batch(strategy: str, options: Any) -> tuple[bool, str]:
    """Whether the first of two micro-batches leaves reduced gradients, and what the plan says."""
    with under(strategy, options, steps=2, cpu=True) as acc:
        model = acc.prepare(Words())
        with acc.accumulate(model):
            acc.backward(model(torch.arange(12).view(2, 6)).square().mean())
        return model.head.weight.grad is not None, acc.plan.accumulation.reason


@pytest.mark.parametrize(("strategy", "options", "processes"), [("fsdp", {}, 2), ("hsdp", {"shard_size": 2}, 4)])
def test_memory_decides_when_gradients_are_reduced(ranks, strategy: str, options: Any, processes: int) -> None:
    prefix = "2 micro-batches an update"
    for memory, reduces, fit in (("2MiB", True, "do not fit"), ("1GiB", False, "fit")):
        environment = {"EASYMP_MEMORY": memory}
        for reduced, reason in ranks(first_micro_batch, strategy, options, processes=processes, env=environment):
            assert reduced is reduces
            schedule = "reduced to shards at each" if reduces else "whole and are reduced at the last"
            pattern = rf"{prefix}; gradients .*{schedule}: .* of whole gradients {fit} beside .* a rank of .*"
            assert re.fullmatch(pattern, reason), reason
    options = {**options, "reduce_every_micro_batch": True}
    for reduced, reason in ranks(first_micro_batch, strategy, options, processes=processes):
        assert reduced and reason == f"{prefix}; gradients are reduced to shards at each"


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(400, 64), nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.norm(self.embed(x)), self.embed.weight)


def read_weight(strategy: str) -> list[torch.Tensor]:
    with under(strategy) as acc:
        model = acc.prepare(make(Reads))
        acc.backward(mean_square(model(torch.arange(12).view(2, 6))))
        return [whole(p.grad) for p in model.parameters()]


def test_a_layer_whose_weight_is_read_stays_with_the_model(ranks) -> None:
    torch.testing.assert_close(ranks(read_weight, "fsdp")[0], read_weight("single"), rtol=1e-4, atol=1e-6)


class Words(nn.Module):
    """An embedding, blocks, and a head that is not tied to it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(400, 64), nn.LayerNorm(64)
        blocks = (nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3))
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(64, 400, bias=False)
        self.register_buffer("positions", torch.randn(6, 64, generator=torch.Generator().manual_seed(1)))
        self.dtypes: set[torch.dtype] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x) + self.positions
        self.dtypes.add(self.positions.dtype)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x))


def traffic(call: Any, model: nn.Module) -> tuple[int, int, int]:
    """Bytes gathered in forward, of whole weights that are saved when it has ended, and gathered in backward."""
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    gather, shapes = getattr(dist, name), {p.shape for p in model.parameters() if p.ndim > 1}
    gathered, saved = [0], {}

    def counted(output_tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        gathered[0] += output_tensor.nbytes
        return gather(output_tensor, *args, **kwargs)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape in shapes or tensor.T.shape in shapes:
            saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, name, counted)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = call(torch.arange(12).view(2, 6))
        forward, alive = gathered[0], sum(storage.nbytes() for storage in saved.values())
        output.float().square().mean().backward()
    return forward, alive, gathered[0] - forward


def beside_plain(strategy: str, options: Any, precision: str) -> tuple[Any, ...]:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    with under(strategy, options, precision=precision) as acc:
        plain, prepared = Words(), Words()
        mesh = None
        if strategy == "hsdp":
            mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "no": None}[precision]
        for part in (plain.embed, *plain.blocks, plain.head, plain):
            policy = MixedPrecisionPolicy(dtype, torch.float32)
            fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=True)  # type: ignore[call-overload]
        plain.positions = plain.positions.to(dtype)
        prepared = acc.prepare(prepared)
        parameter: Any = prepared.head.weight
        bytes_moved = traffic(plain, plain), traffic(prepared, prepared)
        dtypes = prepared.dtypes | {prepared(torch.arange(12).view(2, 6)).dtype}
        dtypes |= {p.dtype for p in prepared.parameters()} | {p.grad.dtype for p in prepared.parameters()}
        return *bytes_moved, dtypes, parameter.to_local().numel()


def gains() -> nn.Module:
    """Vectors of norms, and one of its own."""
    parts = {"norm": nn.LayerNorm(32), "batch": nn.BatchNorm1d(32), "linear": nn.Linear(32, 32)}
    call = lambda m, x: x + m.gain * m.batch(m.linear(m.norm(x)))  # noqa: E731
    return Of(call, gain=nn.Parameter(torch.ones(32)), **parts)


def recomputed(strategy: str, checkpointing: Any) -> tuple[float, float]:
    with under(strategy, precision="bf16", activation_checkpointing=checkpointing, cpu=True) as acc:
        torch.manual_seed(0)
        model = acc.prepare(nn.Sequential(*(gains() for _ in range(3))))
        output = model(torch.randn(8, 32, generator=torch.Generator().manual_seed(1)))
        acc.backward(output.square().mean())
        return float(output.detach().sum()), float(whole(model[0].gain.grad).sum())


@pytest.mark.parametrize("checkpointing", [True, "LayerNorm"])
def test_what_is_computed_again_sees_the_same_weights(ranks, checkpointing: Any) -> None:
    assert ranks(recomputed, "fsdp", checkpointing)[0] == pytest.approx(ranks(recomputed, "ddp", False)[0], rel=0.02)


@pytest.mark.parametrize(
    ("strategy", "options", "processes", "precision"),
    [("fsdp", None, 2, "bf16"), ("fsdp", None, 2, "no"), ("hsdp", {"shard_size": 2}, 4, "bf16")],
)
def test_it_gathers_and_keeps_what_plain_fully_shard_does(ranks, strategy, options, processes, precision):
    model = Words()
    size = sum(p.numel() for p in model.parameters()) * (4 if precision == "no" else 2)
    for plain, prepared, dtypes, shard in ranks(beside_plain, strategy, options, precision, processes=processes):
        assert prepared == pytest.approx(plain, rel=0.01)
        assert prepared[:2] == pytest.approx((size, 0), rel=0.01)
        assert dtypes == {torch.float32} and shard == model.head.weight.numel() // 2


def test_blocks_that_share_a_parameter_with_the_outside_are_not_wrapped() -> None:
    model = Tied()
    model.extra = nn.Linear(1, 32)
    model.extra.bias = model.blocks[1].think[0].bias
    assert find_blocks(model, "blocks") == [model.blocks[0], model.blocks[2]]
    assert model.embed not in find_blocks(model, ("Embedding", "Block"))
    # Parts of another dtype are on their own.
    inner = nn.Sequential(nn.BatchNorm2d(8), nn.Linear(8, 8).half())
    mixed = nn.Sequential(nn.Conv2d(1, 8, 3).half(), nn.BatchNorm2d(8), inner)
    for wrap in ("blocks", 10**6, ("BatchNorm2d",)):
        assert find_blocks(mixed, wrap) == [mixed[1], inner[0]]


@pytest.mark.on_ranks(2)
def test_refusals_have_sentences() -> None:
    no_option = "strategy 'fsdp' has no option 'reshard', did you mean 'reshard_after_forward'"
    refuses(SettingError, no_option, under, "fsdp", {"reshard": True})
    no_record = "takes FSDPOptions, or a dict of its fields, not a DistributedDataParallelKwargs"
    refuses(SettingError, no_record, under, "fsdp", DistributedDataParallelKwargs())
    for option, value, pattern in (
        ("wrap", ("Blok",), "no module in this Tied is a 'Blok', did you mean 'Block'?"),
        ("ignore", "blocs", "no parameter or module of this Tied is named 'blocs', did you mean 'blocks'"),
        ("ignore", "*", "leaves no parameter to shard"),
        ("ignore", "blocks", "SGD has foreach=True for sharded and ignored parameters together (param group 0)"),
    ):
        with under("fsdp", {option: value}) as acc:
            model = make("tied")
            lists = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
            refuses(PrepareError, pattern, acc.prepare, model, lists)
    with under("fsdp") as acc:
        model = make("mlp")
        foreign, stepped = sgd(list(model.parameters())), adamw(list(model.parameters()))
        model(torch.ones(1, 12)).sum().backward()
        stepped.step()
        scalar, last = nn.Linear(2, 2), nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last)
        scalar.gain = nn.Parameter(torch.ones(()))
        mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
        refuses(PrepareError, "AdamW has state for parameter '0.weight'", acc.prepare, model, stepped)
        refuses(PrepareError, "parameter 'gain', which fsdp shards along dimension 0, is 0-dim", acc.prepare, scalar)
        refuses(PrepareError, "is not contiguous (strides (18, 1, 6, 2))", acc.prepare, last)
        refuses(PrepareError, "'0.weight' is torch.float32, '1.weight' is torch.float64", acc.prepare, mixed)
        refuses(PrepareError, "a scripted module takes no hooks", acc.prepare, torch.jit.script(nn.Linear(2, 2)))
        refuses(PrepareError, "a ModuleList cannot be called", acc.prepare, nn.ModuleList([nn.Linear(1, 1)]))
        prepared = acc.prepare(model)
        refuses(PrepareError, "that belongs to no prepared model", acc.prepare, foreign)
    refuses(StepError, "shards of a run that has let go of it", prepared, torch.ones(1, 12))
    with under("fsdp") as acc:
        released = acc.unwrap_model(prepared)
        refuses(PrepareError, "parameter '0.weight' is sharded already", acc.prepare, released)


@pytest.mark.on_ranks(2)
def test_ignored_parameters_may_thaw_and_are_let_go() -> None:
    with under("fsdp", {"ignore": "1"}) as acc:
        model = acc.prepare(nn.Sequential(nn.Linear(12, 4), nn.Linear(4, 4).requires_grad_(False)))
        weight = model[1].weight
        assert not weight.requires_grad
        model[1].requires_grad_(True)
        acc.backward(model(torch.full((2, 12), 1.0 + acc.process_index)).sum())
        assert model[1].bias.grad.tolist() == [2.0] * 4
    assert not weight._post_accumulate_grad_hooks


def cleared(strategy: str, options: dict[str, Any], precision: str) -> torch.Tensor:
    """Weights after a backward under `no_sync` whose gradients are cleared, and two updates."""
    with under(strategy, options, precision=precision) as acc:
        model = make("mlp")
        model, optimizer = acc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        batch = part(acc, torch.randn(8, 12, generator=torch.Generator().manual_seed(0)))
        for _ in range(2):
            with acc.no_sync(model):
                acc.backward(100 * mean_square(model(batch)))
            optimizer.zero_grad()
            update(acc, optimizer, mean_square(model(batch)))
        return torch.cat([whole(p).flatten() for p in model.parameters()])


def test_zero_grad_drops_gradients_that_are_not_reduced(ranks) -> None:
    expected = ranks(cleared, "ddp", {}, "no")[0]
    for precision, tolerance in (("no", {}), ("bf16", {"rtol": 0.1, "atol": 0.01})):
        weights = ranks(cleared, "fsdp", {"reduce_every_micro_batch": False}, precision)[0]
        torch.testing.assert_close(weights, expected, **tolerance)


def experts() -> nn.Module:
    """Uses another block in each micro-batch, one in all of them, and one in none."""
    torch.manual_seed(3)
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4))
    call = lambda m, x, index: m.blocks[0](m.blocks[index](m.first(x)))  # noqa: E731
    return Of(call, first=nn.Linear(12, 16), blocks=blocks)


def in_turn(strategy: str, options: Any, precision: str) -> list[Any]:
    """Gradients and parameters after two windows of two micro-batches."""
    with under(strategy, options, 2, precision) as acc:
        model, optimizer = acc.prepare(model := experts(), adamw(list(model.parameters())))
        generator = torch.Generator().manual_seed(1)
        for step in range(4):
            x = part(acc, torch.randn(8, 12, generator=generator))
            with acc.accumulate(model):
                acc.backward(model(x, 1 + step % 2).float().square().mean())
                grads = [None if p.grad is None else whole(p.grad) for p in model.parameters()]
                optimizer.step()
                optimizer.zero_grad()
        return [*grads, *(whole(p) for p in model.parameters())]


@pytest.mark.parametrize(
    ("strategy", "options", "precision", "processes"),
    [
        ("fsdp", None, "no", 2),
        ("fsdp", None, "bf16", 2),
        ("hsdp", {"shard_size": 2, "reduce_every_micro_batch": True}, "no", 4),
        ("hsdp", {"shard_size": 2, "reduce_every_micro_batch": False}, "no", 4),
    ],
)
def test_the_micro_batches_of_an_update_may_use_different_parts(ranks, strategy, options, precision, processes):
    one = in_turn("single", None, "no")
    assert [g is None for g in one[:10]] == [False] * 8 + [True] * 2
    exact = precision == "no"
    for got in ranks(in_turn, strategy, options, precision, processes=processes):
        for index, (a, b) in enumerate(zip(got, one, strict=True)):
            # In bf16 AdamW moves what has a small gradient by another part of its rate.
            atol = 1e-6 if exact else 6e-4 if index < 10 else 4e-3
            assert (a is None) == (b is None)
            assert a is None or torch.allclose(a, b, rtol=1e-4 if exact else 2e-2, atol=atol)


def double(parameter: Any) -> None:
    parameter.grad.mul_(2)


@pytest.mark.on_ranks(2)
@pytest.mark.parametrize("strategy", ["fsdp", "tensor_parallel"])
def test_hooks_of_parameters_are_not_lost(strategy: str) -> None:
    """A shard replaces the parameter, whose hooks backward would not call."""
    for register in (
        lambda p: p.register_hook(lambda gradient: gradient * 2),
        lambda p: p.register_post_accumulate_grad_hook(double),
    ):
        with under(strategy) as acc:
            model = make("mlp")
            register(model[2].weight)
            refuses(PrepareError, "parameter '2.weight' has a hook, which would not run", acc.prepare, model)
    with under(strategy) as acc:
        plain, model = make("mlp"), acc.prepare(make("mlp"))
        for net, backward in ((plain, torch.Tensor.backward), (model, acc.backward)):
            net[2].weight.register_post_accumulate_grad_hook(double)
            backward(net(torch.ones(2, 12)).sum())
        torch.testing.assert_close(whole(model[2].weight.grad), plain[2].weight.grad)
        model[2].weight.register_hook(lambda gradient: gradient)
        if strategy == "fsdp":
            refuses(PrepareError, "parameter '2.weight' has a hook, which would not run", model, torch.ones(2, 12))


@pytest.mark.on_ranks(2)
@pytest.mark.parametrize("strategy", ["fsdp", "tensor_parallel"])
def test_what_shards_cannot_compute_is_explained(strategy: str) -> None:
    for kind in (torch.optim.LBFGS, torch.optim.Rprop) if ADDS else ():
        with under(strategy) as acc:
            model, optimizer = acc.prepare(model := make("mlp"), kind(model.parameters()))

            def closure() -> torch.Tensor:
                loss = mean_square(model(torch.ones(2, 12)))  # noqa: B023
                acc.backward(loss)
                return loss

            closure()
            refuses(StepError, f"{kind.__name__} cannot step on sharded parameters", optimizer.step, closure)
    with under(strategy) as acc:
        model = acc.prepare(make("mlp"))
        loss = mean_square(model(torch.ones(2, 12))) + sum(p.abs().sum() for p in model.parameters())
        refuses(StepError, "such as a penalty on weights, and there they are shards", acc.backward, loss)


@pytest.mark.on_ranks(2)
def test_backward_for_some_inputs_is_refused() -> None:
    """torch leaves the shards without a gradient, in silence."""
    with under("fsdp") as acc:
        model = acc.prepare(make("mlp"))
        loss = mean_square(model(torch.ones(2, 12)))
        keywords = {"inputs": list(model[4].parameters())}
        refuses(RefusedError, "backward(inputs=...) and fsdp do not go together", acc.backward, loss, **keywords)


def evaluated_first(strategy: str) -> list[torch.Tensor]:
    with under(strategy) as acc:
        model, optimizer = acc.prepare(model := make("tied"), adamw(list(model.parameters())))
        x = torch.ones(2, 12)
        with torch.inference_mode():
            before = model(x).clone()
        update(acc, optimizer, mean_square(model(x)))
        with torch.inference_mode():
            return [before, model(x).clone()]


def test_a_model_trains_after_inference_mode(ranks) -> None:
    for result in ranks(evaluated_first, "fsdp"):
        torch.testing.assert_close(result, evaluated_first("single"), rtol=1e-4, atol=1e-5)
