"""fsdp on real processes: the numbers of one process, and what is in the way of them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from easymp import (
    Accelerator,
    DistributedDataParallelKwargs,
    FSDPOptions,
    GradientAccumulationPlugin,
    PrepareError,
    SettingError,
    StepError,
)
from easymp.strategies.blocks import find_blocks

from .models import Tied, agree, make, mean_square, message, part, trained, under, whole

# -- the numbers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        FSDPOptions(reshard_after_forward=False),
        {"wrap": 500, "cpu_offload": True},
        pytest.param(
            {"wrap": ["Linear", "LayerNorm"], "reduce_every_micro_batch": True}, marks=pytest.mark.slow
        ),
        {"wrap": ("Block", "Sequential"), "reshard_after_forward": False, "reduce_every_micro_batch": False},
    ],
)
def test_options_change_no_number(ranks, options: Any) -> None:
    agree(ranks(trained, "fsdp", "tied", 3, 0.1, "no", options)[0], trained("single", "tied", 3, 0.1))


# -- the step ----------------------------------------------------------------------------------------------------------


def by_hand(strategy: str, how: str, options: Any = None) -> list[torch.Tensor]:
    with Accelerator(mixed_precision="no", strategy=strategy, strategy_options=options) as acc:
        model = acc.prepare(make("tied"))
        x = part(acc, torch.randn(8, 12, generator=torch.Generator().manual_seed(1)))
        if how == "no_sync":
            with acc.no_sync(model):
                acc.backward(model(x).square().mean())
                with acc.no_sync(model):
                    acc.backward(model(x).square().mean())
                acc.backward(model(x).square().mean())
            acc.backward(model(x).square().mean())
        else:
            with acc.no_sync(model):
                acc.backward(model(x).square().mean())
                loss = model(x).square().mean()
                with acc.trigger_sync_in_backward(model):
                    acc.backward(loss)
        acc.clip_grad_value_(model.parameters(), 0.01)
        return [whole(p.grad) for p in model.parameters()]


@pytest.mark.parametrize("how", ["no_sync", "trigger"])
def test_accumulation_by_hand(ranks, how: str) -> None:
    one = by_hand("single", how)
    assert any(g.abs().max() == 0.01 for g in one)
    for got in ranks(by_hand, "fsdp", how):
        assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(got, one))


def early(options: Any) -> tuple[bool, str]:
    """Whether the first of two micro-batches leaves reduced gradients, and what the plan says."""
    with under("fsdp", options, steps=2, cpu=True) as acc:
        model = acc.prepare(Words())
        with acc.accumulate(model):
            acc.backward(model(torch.arange(12).view(2, 6)).square().mean())
        return model.head.weight.grad is not None, acc.plan.accumulation.reason


def test_memory_decides_when_gradients_are_reduced(ranks) -> None:
    many = "2 micro-batches an update"
    for memory, wanted, words in (("2MiB", True, "do not fit"), ("1GiB", False, "fit")):
        for reduced, reason in ranks(early, None, env={"EASYMP_MEMORY": memory}):
            assert reduced is wanted
            way = "reduced to shards at each" if wanted else "whole and are reduced at the last"
            assert re.fullmatch(
                rf"{many}; gradients .*{way}: .* of whole gradients {words} beside .* a rank of .*", reason
            ), reason
    for reduced, reason in ranks(early, {"reduce_every_micro_batch": True}):
        assert reduced and reason == f"{many}; gradients are reduced to shards at each"


def norms() -> list[float]:
    with Accelerator(mixed_precision="no") as acc:
        model = acc.prepare(make("mlp"))
        x = part(acc, torch.randn(8, 12, generator=torch.Generator().manual_seed(1)))
        acc.backward(model(x).square().mean())
        found = [float(acc.clip_grad_norm_(model.parameters(), 0.5, kind)) for kind in (1.0, 2.0, torch.inf)]
        plain = nn.Parameter(torch.zeros(3))
        plain.grad = torch.full((3,), 2.0)
        found.append(float(acc.clip_grad_norm_([*model.parameters(), plain], 0.1)))
        return [*found, *plain.grad.tolist()]


def test_norms_of_every_kind_and_of_mixed_layouts(ranks) -> None:
    one = norms()
    # some hold no element of a bias of 5
    for got in ranks(norms, processes=4, env={"EASYMP_STRATEGY": "fsdp"}):
        assert got == pytest.approx(one, rel=1e-5)


# -- half precision ----------------------------------------------------------------------------------------------------


class Words(nn.Module):
    """An embedding, blocks, and a head that is not tied to it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(400, 64)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3)
        )
        self.norm = nn.LayerNorm(64)
        self.head = nn.Linear(64, 400, bias=False)
        self.register_buffer("place", torch.randn(6, 64, generator=torch.Generator().manual_seed(1)))
        self.seen: set[torch.dtype] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x) + self.place
        self.seen.add(self.place.dtype)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x))


def traffic(call: Any, model: nn.Module) -> tuple[int, int, int]:
    """Bytes gathered in forward, bytes of whole weights that are saved when it has ended, and bytes gathered in backward."""
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
            out = call(torch.arange(12).view(2, 6))
        forward, alive = gathered[0], sum(storage.nbytes() for storage in saved.values())
        out.float().square().mean().backward()
    return forward, alive, gathered[0] - forward


def beside_plain(strategy: str, options: Any, precision: str) -> dict[str, Any]:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    with Accelerator(strategy=strategy, strategy_options=options, mixed_precision=precision) as acc:
        plain, ours = Words(), Words()
        mesh = None
        if strategy == "hsdp":
            mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "no": None}[precision]
        for part in (plain.embed, *plain.blocks, plain.head, plain):
            policy = MixedPrecisionPolicy(dtype, torch.float32)
            fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=True)  # type: ignore[call-overload]
        plain.place = plain.place.to(dtype)
        ours = acc.prepare(ours)
        parameter: Any = ours.head.weight
        found = {"plain": traffic(plain, plain), "ours": traffic(ours, ours)}
        return {
            **found,
            "stored": {p.dtype for p in ours.parameters()} | {p.grad.dtype for p in ours.parameters()},
            "buffer": ours.seen,
            "output": ours(torch.arange(12).view(2, 6)).dtype,
            "shard": parameter.to_local().numel(),
        }


class Gains(nn.Module):
    """Vectors of norms, and one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.batch, self.linear = nn.LayerNorm(32), nn.BatchNorm1d(32), nn.Linear(32, 32)
        self.gain = nn.Parameter(torch.ones(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gain * self.batch(self.linear(self.norm(x)))


def recomputed(strategy: str, which: Any) -> tuple[float, float]:
    with Accelerator(
        strategy=strategy, mixed_precision="bf16", activation_checkpointing=which, cpu=True
    ) as acc:
        torch.manual_seed(0)
        model = acc.prepare(nn.Sequential(*(Gains() for _ in range(3))))
        out = model(torch.randn(8, 32, generator=torch.Generator().manual_seed(1)))
        acc.backward(out.square().mean())
        return float(out.detach().sum()), float(whole(model[0].gain.grad).sum())


@pytest.mark.parametrize("which", [True, "LayerNorm"])
def test_what_is_computed_again_sees_the_same_weights(ranks, which: Any) -> None:
    assert ranks(recomputed, "fsdp", which)[0] == pytest.approx(ranks(recomputed, "ddp", False)[0], rel=0.02)


@pytest.mark.parametrize(
    ("strategy", "options", "processes", "precision"),
    [("fsdp", None, 2, "bf16"), ("fsdp", None, 2, "no"), ("hsdp", {"shard_size": 2}, 4, "bf16")],
)
def test_it_gathers_and_keeps_what_plain_fully_shard_does(
    ranks, strategy: str, options: Any, processes: int, precision: str
) -> None:
    model = Words()
    size = sum(p.numel() for p in model.parameters()) * (4 if precision == "no" else 2)
    for got in ranks(beside_plain, strategy, options, precision, processes=processes):
        assert got["ours"] == pytest.approx(got["plain"], rel=0.01)
        assert got["ours"][:2] == pytest.approx((size, 0), rel=0.01)
        assert got["stored"] == got["buffer"] == {got["output"]} == {torch.float32}
        assert got["shard"] == model.head.weight.numel() // 2


# -- what is wrapped ---------------------------------------------------------------------------------------------------


class Reads(Words):
    """Its head is the embedding, whose weight is read."""

    def __init__(self) -> None:
        super().__init__()
        del self.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return nn.functional.linear(self.norm(x), self.embed.weight)


def read_weight(strategy: str) -> list[torch.Tensor]:
    with Accelerator(mixed_precision="no", strategy=strategy) as acc:
        torch.manual_seed(0)
        model = acc.prepare(Reads())
        acc.backward(model(torch.arange(12).view(2, 6)).square().mean())
        return [whole(p.grad) for p in model.parameters()]


def test_a_layer_whose_weight_is_read_stays_with_the_model(ranks) -> None:
    for a, b in zip(ranks(read_weight, "fsdp")[0], read_weight("single")):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)


def test_blocks_that_share_a_parameter_with_the_outside_are_not_wrapped() -> None:
    model = Tied()
    model.blocks[1].think[0].bias = nn.Parameter(torch.zeros(32))
    model.extra = nn.Linear(1, 32)
    model.extra.bias = model.blocks[1].think[0].bias
    assert find_blocks(model, "blocks") == [model.blocks[0], model.blocks[2]]
    assert model.embed not in find_blocks(model, ("Embedding", "Block"))


def test_parts_of_another_dtype_are_on_their_own() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3).half(), nn.BatchNorm2d(8), nn.Sequential(nn.BatchNorm2d(8), nn.Linear(8, 8).half())
    )
    for wrap in ("blocks", 10**6, ("BatchNorm2d",)):
        assert find_blocks(model, wrap) == [model[1], model[2][0]]


def test_a_class_that_no_module_has() -> None:
    with pytest.raises(PrepareError, match=r"no module in this Tied is a 'Blok', did you mean 'Block'\?"):
        find_blocks(Tied(), ("Blok",))


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"reshard": True}, "strategy 'fsdp' has no option 'reshard', did you mean 'reshard_after_forward'"),
        (
            DistributedDataParallelKwargs(),
            "takes FSDPOptions, or a dict of its fields, not a DistributedDataParallelKwargs",
        ),
    ],
)
def test_wrong_options(ranks, options: Any, words: str) -> None:
    for said in ranks(refused_options, options):
        assert re.search(words, said), said


def refused_options(options: Any) -> str:
    return message(SettingError, Accelerator, strategy="fsdp", strategy_options=options)


def refusals() -> dict[str, str]:
    said = {}
    with Accelerator(mixed_precision="no", strategy="fsdp") as acc:
        model = make("mlp")
        late = torch.optim.SGD(model.parameters(), lr=0.1)
        stepped = torch.optim.AdamW(model.parameters(), lr=0.1)
        model(torch.ones(1, 12)).sum().backward()
        stepped.step()
        scalar, last = nn.Linear(2, 2), nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last)
        scalar.gain = nn.Parameter(torch.ones(()))
        mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
        for name, objects in {
            "stepped": (model, stepped),
            "scalar": (scalar,),
            "channels": (last,),
            "list": (nn.ModuleList([nn.Linear(1, 1)]),),
            "mixed": (mixed,),
        }.items():
            said[name] = message(PrepareError, acc.prepare, *objects)
        prepared = acc.prepare(model)
        said["late"] = message(PrepareError, acc.prepare, late)
        assert acc._scaler.agree
    said["closed"] = message(StepError, prepared, torch.ones(1, 12))
    with Accelerator(mixed_precision="no", strategy="fsdp") as acc:
        said["again"] = message(PrepareError, acc.prepare, acc.unwrap_model(prepared))
    return said


def test_refusals_have_sentences(ranks) -> None:
    for said in ranks(refusals):
        assert "AdamW has state for parameter '0.weight'" in said["stepped"]
        assert "parameter 'gain' is 0-dim" in said["scalar"]
        assert "parameter 'weight' is not contiguous" in said["channels"]
        assert "a ModuleList cannot be called" in said["list"]
        assert "'0.weight' is torch.float32, '1.weight' is torch.float64" in said["mixed"]
        assert "that belongs to no prepared model" in said["late"]
        assert "shards of a run that has let go of it" in said["closed"]
        assert "parameter '0.weight' is sharded already" in said["again"]


# -- what stays whole --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ignore", "steps", "clip"), [(("blocks.1",), 1, None), (("*.bias", "embed.weight"), 3, 0.1)]
)
def test_ignored_parameters_stay_whole_and_train(ranks, ignore: Any, steps: int, clip: float | None) -> None:
    one = trained("single", "tied", steps, clip)
    results = ranks(trained, "fsdp", "tied", steps, clip, "no", {"ignore": ignore})
    for got in results:
        agree(got, one)
        assert got["kinds"] == ["DTensor", "Parameter"]
    for name, values in results[0]["parameters"].items():
        assert torch.equal(values, results[1]["parameters"][name]), name


def each_micro_step(strategy: str) -> list[torch.Tensor]:
    plugin = GradientAccumulationPlugin(3, sync_each_batch=True)
    options = {"ignore": "blocks.0"} if strategy == "fsdp" else None
    how = {"strategy": strategy, "strategy_options": options, "gradient_accumulation_plugin": plugin}
    with Accelerator(mixed_precision="no", **how) as acc:
        model = acc.prepare(make("tied"))
        x = part(acc, torch.randn(8, 12, generator=torch.Generator().manual_seed(1)))
        for _ in range(3):
            with acc.accumulate(model):
                acc.backward(model(x).square().mean())
        return [whole(p.grad) for p in model.parameters()]


def test_what_is_averaged_stays_averaged(ranks) -> None:
    for a, b in zip(ranks(each_micro_step, "fsdp")[1], each_micro_step("single")):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)


def thaw() -> tuple[torch.Tensor, int]:
    with Accelerator(mixed_precision="no", strategy="fsdp", strategy_options={"ignore": "1"}) as acc:
        model = nn.Sequential(nn.Linear(12, 4), nn.Linear(4, 4).requires_grad_(False))
        model = acc.prepare(model)
        assert not model[1].weight.requires_grad
        model[1].requires_grad_(True)
        acc.backward(model(torch.full((2, 12), 1.0 + acc.process_index)).sum())
        grad = model[1].bias.grad.clone(), model[1].weight
    return grad[0], len(grad[1]._post_accumulate_grad_hooks)


def test_ignored_parameters_may_thaw_and_are_let_go(ranks) -> None:
    for grad, hooks in ranks(thaw):
        assert grad.tolist() == [2.0] * 4
        assert hooks == 0


def ignored_wrongly() -> list[str]:
    said = []
    for ignore in (("blocs",), ("*",)):
        with Accelerator(mixed_precision="no", strategy="fsdp", strategy_options={"ignore": ignore}) as acc:
            said.append(message(PrepareError, acc.prepare, make("tied")))
    with Accelerator(mixed_precision="no", strategy="fsdp", strategy_options={"ignore": "blocks"}) as acc:
        model = make("tied")
        mixed = torch.optim.AdamW(model.parameters(), foreach=True)
        said.append(message(PrepareError, acc.prepare, model, mixed))
    return said


def test_wrong_names_are_refused(ranks) -> None:
    for nothing, everything, mixed in ranks(ignored_wrongly):
        assert "no parameter or module of this Tied is named 'blocs', did you mean 'blocks'" in nothing
        assert "leaves no parameter to shard" in everything
        assert "AdamW has foreach=True for sharded and ignored parameters together (param group 0)" in mixed


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
            acc.backward(mean_square(model(batch)))
            optimizer.step()
            optimizer.zero_grad()
        return torch.cat([whole(p).flatten() for p in model.parameters()])


def test_zero_grad_drops_gradients_that_are_not_reduced(ranks) -> None:
    wanted = ranks(cleared, "ddp", {}, "no")[0]
    for precision, near in (("no", {}), ("bf16", {"rtol": 0.1, "atol": 0.01})):
        found = ranks(cleared, "fsdp", {"reduce_every_micro_batch": False}, precision)[0]
        torch.testing.assert_close(found, wanted, **near)
