"""Scripts written for DeepSpeed.

The engine beside plain torch on real ranks, the loss scale, schedules, checkpoints.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import re
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from easymp.compat.deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
from easymp.compat.deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint as zero_to_fp32
from torch import nn
from torch.utils.data import TensorDataset

from easymp import CheckpointError, RefusedError, SettingError, StepError
from easymp.compat import deepspeed
from easymp.compat.deepspeed import utils
from easymp.compat.deepspeed.config import layer

BATCH = {"train_batch_size": 4}
SGD = {"type": "SGD", "params": {"lr": 0.1}}
HALF = {"fp16": {"enabled": True, "initial_scale_power": 4}}
FP16, BF16 = {"fp16": {"enabled": True, "loss_scale": 128}}, {"bf16": {"enabled": True}}
cross_entropy = nn.functional.cross_entropy


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))


def data():
    x = torch.randn(48, 8, generator=torch.Generator().manual_seed(0))
    return x, (x.sum(1) > 0).long()


@contextmanager
def started(config, **arguments):
    engine, *_ = deepspeed.initialize(model=arguments.pop("model", None) or model(), config=config, **arguments)
    try:
        yield engine
    finally:
        engine.destroy()


def looked_at(stage, precision):
    """What a script reads of its model and optimizer, and what `safe_set_full_…` leaves there."""
    x, y = data()
    config = {**precision, "train_batch_size": 8, "zero_optimization": {"stage": stage}, "gradient_clipping": 0}
    config["optimizer"] = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}
    with started(config) as engine:
        rows = slice(4 * engine.global_rank, 4 * engine.global_rank + 4)
        engine.backward(cross_entropy(engine(x[rows]).float(), y[rows]))
        parameters = list(engine.module.parameters())
        gradients = [safe_get_full_grad(p).tolist() for p in parameters]
        assert stage > 1 or precision or gradients == [p.grad.tolist() for p in parameters]
        weight = parameters[0]
        double, ones = safe_get_full_grad(weight) * 2, torch.ones(weight.shape)
        utils.safe_set_full_grad(weight, double)
        assert torch.equal(safe_get_full_grad(weight), double)
        engine.step()
        norms = [float(p.norm()) for p in parameters] if stage < 3 else []
        type_names = {type(value).__name__ for value in engine.module.state_dict().values()}
        state = utils.safe_get_full_optimizer_state(weight, "momentum_buffer").tolist()
        utils.safe_set_full_optimizer_state(weight, ones, "momentum_buffer")
        utils.safe_set_full_fp32_param(weight, ones * 0.3)
        assert torch.equal(utils.safe_get_full_optimizer_state(weight, "momentum_buffer"), ones)
        assert torch.equal(safe_get_full_fp32_param(weight), ones * 0.3)
        engine.empty_partition_cache()
        parameters[1].requires_grad_(False)
        assert safe_get_full_fp32_param(parameters[1]) is None
        with pytest.raises(ValueError, match="has \\['momentum_buffer'"):
            utils.safe_get_full_optimizer_state(weight, "nothing")
        return gradients, state, norms, type_names


@pytest.mark.parametrize(("stage", "precision"), [(0, {}), (1, {}), (1, HALF), (2, {}), (3, {})])
def test_up_to_stage_2_scripts_read_whole_parameters_and_averaged_gradients(ranks, stage, precision):
    net, (x, y) = model(), data()
    cross_entropy(net(x[:8]), y[:8]).backward()
    one, second = ranks(looked_at, stage, precision)
    assert one == second
    gradients, state, norms, type_names = one
    tolerance = {"rtol": 1e-2, "atol": 1e-3} if precision else {"rtol": 1e-5, "atol": 1e-6}
    for gradient, parameter in zip(gradients, net.parameters(), strict=True):
        torch.testing.assert_close(torch.tensor(gradient) / (16 if precision else 1), parameter.grad, **tolerance)
    net[0].weight.grad *= 2
    torch.testing.assert_close(torch.tensor(state), net[0].weight.grad, **tolerance)
    if stage < 3:
        expected = [float((p - 0.1 * p.grad).detach().norm()) for p in net.parameters()]
        assert type_names == {"Tensor"} and norms == pytest.approx(expected, rel=1e-2 if precision else 1e-5)


def saved_as_deepspeed_chat_saves(folder):
    """Its `save_zero_three_model`; then weights that rank 1 writes, and a step from there."""
    from easymp.compat.deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    gathered = deepspeed.zero.GatheredParameters
    config = {"train_batch_size": 4, "zero_optimization": {"stage": 3}, "gradient_clipping": 0}
    with started({**config, "optimizer": SGD}) as engine:
        state, rank = {}, engine.global_rank
        for name, p in engine.module.named_parameters():
            assert hasattr(p, "ds_id") and (p.ds_shape, p.ds_numel) == (p.shape, p.numel())
            with gathered([q for q in [p] if q.ds_status == ZeroParamStatus.NOT_AVAILABLE]):
                state[name] = p.data.cpu()
        if rank == 0:
            torch.save(state, os.path.join(folder, "pytorch_model.bin"))
        with gathered(engine.module.parameters()):
            p.data.fill_(7.0)  # nobody writes it back
        with gathered(p, modifier_rank=1), torch.no_grad():
            if rank == 1:
                nn.init.constant_(p, 3.0)
                p[0] = p.mean() - 1
        assert p.ds_status == ZeroParamStatus.NOT_AVAILABLE and safe_get_full_fp32_param(p).tolist() == [2.0, 3.0]
        engine.backward(engine(torch.ones(2, 8)).sum())
        engine.step()
        return safe_get_full_fp32_param(p).tolist()


def test_gathered_parameters_are_whole_and_written_back(ranks, tmp_path):
    for bias in ranks(saved_as_deepspeed_chat_saves, str(tmp_path)):
        assert bias == pytest.approx([1.8, 2.8])
    saved, expected = torch.load(tmp_path / "pytorch_model.bin"), model().state_dict()
    assert list(saved) == list(expected) and all(type(t) is torch.Tensor for t in saved.values())
    assert all(torch.equal(saved[name], expected[name]) for name in expected)


class TwoHeads(nn.Module):
    """One of which another head's loss does not reach; and a layer that nothing reaches."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(8, 16)
        self.a, self.b, self.unused = (nn.Linear(16, 2) for _ in range(3))

    def forward(self, x):
        hidden = torch.tanh(self.trunk(x))
        return self.a(hidden), self.b(hidden)


def several_backwards(stage, precision, steps):
    """Norms of updates of `steps` micro-batches: one backward a head after one forward; and one after two forwards."""
    config = {**precision, "zero_optimization": {"stage": stage}, "gradient_clipping": 0}
    config |= {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": steps}
    config["optimizer"] = {"type": "SGD", "params": {"lr": 0.0}}
    x, _ = data()
    with started(config, model=TwoHeads()) as engine:
        norms = []
        for two_forwards in (False, True):
            for i in range(steps):
                rows = x[8 * i + 4 * engine.global_rank :][:4]
                first = engine(rows)
                second = engine(rows) if two_forwards else first
                engine.backward(first[0].float().sum(), retain_graph=not two_forwards)
                engine.backward(second[1].float().sum())
                engine.step()
            norms.append(engine.get_global_grad_norm())
        return norms


@pytest.mark.parametrize(("stage", "precision", "steps"), [(0, HALF, 2), (1, {}, 2), (2, {}, 1), (3, HALF, 2)])
def test_several_backward_passes_before_a_step(ranks, stage, precision, steps):
    net, (x, _) = TwoHeads(), data()
    for i in range(steps):
        one, second = net(x[8 * i : 8 * i + 8])
        ((one.sum() + second.sum()) / 2 / steps).backward()  # a mean over two ranks
    expected = float(nn.utils.clip_grad_norm_(net.parameters(), math.inf))
    for norms in ranks(several_backwards, stage, precision, steps):
        assert norms == pytest.approx([expected] * 2, rel=1e-2)


def decay_of_unused(stage, precision):
    """By how much an update shrinks the weights that no loss reaches."""
    adamw = {"type": "AdamW", "params": {"lr": 0.1, "weight_decay": 0.5}}
    config = {**BATCH, **precision, "zero_optimization": {"stage": stage}, "optimizer": adamw}
    with started(config, model=TwoHeads()) as engine:
        before = safe_get_full_fp32_param(engine.module.unused.weight).clone()
        engine.backward(engine(data()[0][:2])[0].float().sum())
        engine.step()
        return (safe_get_full_fp32_param(engine.module.unused.weight) / before).flatten().tolist()


@pytest.mark.parametrize(("stage", "precision"), [(0, {}), (2, {}), (3, {}), (1, FP16), (3, FP16)])
def test_parameters_without_a_gradient_decay_as_in_deepspeed(ranks, stage, precision):
    for ratios in [*ranks(decay_of_unused, stage, precision), decay_of_unused(stage, precision)]:
        assert ratios == [pytest.approx(0.95)] * 32


class Language(nn.Module):
    """A small language model whose head is the embedding."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(20, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids, labels):
        return cross_entropy(self.head(self.block(self.embed(ids))).flatten(0, 1), labels.flatten())


def groups_of(net):
    matrices = [p for p in net.parameters() if p.ndim > 1]
    return [
        {"params": matrices, "weight_decay": 0.1},
        {"params": [p for p in net.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]


def tokens():
    ids = torch.randint(0, 20, (32, 6), generator=torch.Generator().manual_seed(0))
    return ids, ids.roll(-1, 1)


def trained_language_model(stage, precision):
    """Weights and norms of four updates as scripts for BERT and GPT make them: groups, accumulation, clip, warm-up."""
    config = {**precision, "train_batch_size": 16, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5}
    config["optimizer"] = {"type": "Adam", "adam_w_mode": True, "params": {"lr": 0.01, "eps": 1e-3}}
    config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 3, "warmup_max_lr": 0.01}}
    net, (ids, labels), norms = Language(), tokens(), []
    config["zero_optimization"] = {"stage": stage}
    with started(config, model=net, model_parameters=groups_of(net)) as engine:
        samples = engine.train_micro_batch_size_per_gpu()
        for step, i in enumerate([0, 8, 16, 24] * 2):
            rows = slice(begin := i + engine.global_rank * samples, begin + samples)
            loss = engine(ids[rows], labels[rows])
            assert engine.backward(loss).item() == pytest.approx(loss.item() / 2)
            assert engine.is_gradient_accumulation_boundary() == bool(step % 2)
            engine.step()
            if step % 2:
                norms.append(engine.get_global_grad_norm())
        facts = engine.global_steps, engine.micro_steps, engine.global_samples, engine.skipped_steps
        assert facts == (4, 8, 64, 0)
        state = {}
        for name, p in engine.module.named_parameters():
            with deepspeed.zero.GatheredParameters(p):
                state[name] = p.detach().tolist()
        return state, norms, engine.accelerator.plan.strategy.value


@pytest.mark.parametrize(
    ("processes", "stage", "precision"),
    [(1, 0, {}), (1, 0, FP16), (1, 0, BF16), *((2, stage, {}) for stage in range(4)), (2, 1, FP16), (2, 1, BF16)],
)
def test_a_language_model_trains_as_plain_torch(ranks, processes, stage, precision):
    net, (ids, labels), norms = Language(), tokens(), []
    optimizer = torch.optim.AdamW(groups_of(net), eps=1e-3)
    for update, rows in enumerate([slice(0, 16), slice(16, 32)] * 2):
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * [0.0, 0.0, math.log(2) / math.log(3), 1.0][update]
        net(ids[rows], labels[rows]).backward()
        norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    case = stage, precision
    expected_strategy = "single" if processes == 1 else ["ddp", "zero1", "zero1", "fsdp"][stage]
    for state, engine_norms, strategy in (
        [trained_language_model(*case)] if processes == 1 else ranks(trained_language_model, *case)
    ):
        assert engine_norms == pytest.approx(norms, rel=0.1 if precision else 1e-4)
        assert strategy == expected_strategy
        for name, parameter in net.named_parameters():
            weight = torch.tensor(state[name])
            torch.testing.assert_close(weight, parameter.detach(), rtol=0, atol=4e-3 if precision else 2e-6)


def test_checkpoints_are_saved_between_micro_batches(tmp_path):
    with started({"train_batch_size": 4, "gradient_accumulation_steps": 2, "optimizer": SGD}) as engine:

        def boundaries(n):
            for _ in range(n):
                engine.backward(engine(torch.ones(2, 8)).sum())
                yield engine.is_gradient_accumulation_boundary()
                engine.step()

        assert list(boundaries(3)) == [False, True, False]
        engine.save_checkpoint(tmp_path, client_state={"epoch": 1})
        assert list(boundaries(1)) == [True] and engine.global_steps == 2
        after = [p.clone() for p in engine.module.parameters()]
        assert engine.load_checkpoint(tmp_path)[1] == {"epoch": 1} and engine.global_steps == 1
        assert list(boundaries(2)) == [False, True]
        assert all(torch.equal(a, b) for a, b in zip(after, engine.module.parameters(), strict=True))


GOLDEN = {
    2: "256 128 128 128 128 256 256 256 256 256 512 512 256 128 128 128 128 256 256 256 512 512 256",
    1: "128 64 64 64 64 128 64 64 64 64 128 64 32 16 16 16 16 32 32 32 64 32 16",
}


@pytest.mark.parametrize(("stage", "hysteresis"), [(1, 1), (1, 2), (0, 2)])
def test_the_golden_loss_scales(stage, hysteresis):
    fp16 = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 3, "hysteresis": hysteresis}
    config = {"train_batch_size": 1, "fp16": fp16, "zero_optimization": {"stage": stage}}
    net = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    with started(config, model=net, optimizer=optimizer) as engine:
        scales = []
        for step in "ooggggoggggooogggggggoo":
            loss = engine(torch.full((1, 1), 1e-3)).float().sum()
            engine.backward(loss * (math.inf if step == "o" else 1.0))
            engine.step()
            scales.append(engine.optimizer.cur_scale)
            assert engine.optimizer.overflow == (step == "o")
        scaler = engine.optimizer.loss_scaler
        assert (scaler.cur_scale, scaler.scale_window, scaler.cur_iter) == (scales[-1], 3, 23)
        assert engine.optimizer.dynamic_loss_scale and engine.optimizer.loss_scale_config.min_loss_scale == 1
        assert scales == [float(scale) for scale in GOLDEN[hysteresis if stage else 1].split()]
        assert (engine.skipped_steps, engine.global_steps) == (8, 23)


@pytest.mark.parametrize("stage", [0, 1])
def test_with_zero_an_overflow_at_the_smallest_scale_ends_the_run(stage):
    fp16 = {"enabled": True, "initial_scale_power": 1, "hysteresis": 1, "min_loss_scale": 1}
    config = {"train_batch_size": 1, "fp16": fp16, "optimizer": SGD, "zero_optimization": {"stage": stage}}
    with started(config) as engine:

        def overflow():
            engine.backward(engine(torch.ones(1, 8)).float().sum() * math.inf)
            engine.step()
            return engine.optimizer.loss_scale

        assert overflow() == 1.0
        with pytest.raises(StepError, match="cannot be decreased anymore") if stage else nullcontext():
            assert overflow() == 1.0


def test_inputs_are_cast_and_steps_that_are_not_finite_are_skipped():
    for precision, dtype, weights in (FP16, torch.float16, torch.float16), (BF16, torch.bfloat16, torch.float32):
        with started({**BATCH, **precision, "optimizer": SGD}) as engine:
            assert (engine.fp16_enabled(), engine.bfloat16_enabled()) == (precision is FP16, precision is BF16)
            output, before = engine(data()[0][:4]), engine.module[0].weight.clone()
            assert (output.dtype, before.dtype) == (dtype, weights)
            engine.backward(output.float().sum() * math.nan)
            engine.step()
            assert (engine.skipped_steps, engine.was_step_applied()) == (1, False)
            assert torch.equal(engine.module[0].weight, before)


def test_calls_in_a_wrong_order():
    with started({**BATCH, "optimizer": SGD}) as engine:
        engine(torch.ones(4, 8)).sum().backward()
        with pytest.raises(StepError, match=r"step\(\) before a backward: call engine\.backward"):
            engine.step()
        for name, words in layer.members.items():
            with pytest.raises(AttributeError, match=re.escape(words)):
                getattr(engine, name)
        assert engine.train().training
        assert not engine.eval().training
        with torch.no_grad():
            engine(torch.ones(4, 8))  # an evaluation between two micro-batches opens nothing
    with started(BATCH) as engine:
        assert engine.optimizer is None
        with pytest.raises(StepError, match="without an optimizer"):
            engine.backward(engine(torch.ones(4, 8)).sum())


def test_what_the_engine_says_of_itself():
    adam = {"type": "AdamW", "params": {"lr": 0.5}}
    config = {**BATCH, "zero_optimization": {"stage": 2}, "gradient_clipping": 0.1, "optimizer": adam}
    with started(config) as engine:
        assert (engine.train_batch_size(), engine.gradient_accumulation_steps()) == (4, 1)
        assert (engine.zero_optimization_stage(), engine.gradient_clipping()) == (2, 0.1)
        assert (engine.get_lr(), engine.get_mom()) == ([0.5], [(0.9, 0.999)])
        assert (engine.get_global_grad_norm(), engine.optimizer.loss_scale) == (None, 1.0)
        assert (engine.local_rank, engine.world_size) == (0, 1)
        assert engine.steps_per_print() == 0 and engine.device == engine.accelerator.device
        assert list(engine.module_state_dict()) == list(engine.module.state_dict())
        assert (engine.optimizer_name(), engine.optimizer_params()) == ("AdamW", {"lr": 0.5})
        with pytest.raises(AttributeError, match="nothing"):
            engine.nothing  # noqa: B018


@pytest.mark.parametrize(
    ("name", "params", "kind", "options"),
    [
        ("Adam", {"betas": [0.8, 0.9], "bias_correction": True}, "AdamW", {"betas": (0.8, 0.9), "weight_decay": 0.0}),
        ("Adam", {"adam_w_mode": False, "weight_decay": 0.1}, "Adam", {"weight_decay": 0.1}),
        ("AdamW", {"max_grad_norm": 0.0, "adam_w_mode": True}, "AdamW", {"weight_decay": 0.0}),
        ("AdamW", {"lr": 0.1, "torch_adam": True}, "AdamW", {"weight_decay": 0.01}),
        ("Lamb", {"lr": 0.1}, "LAMB", {"lr": 0.1}),
        ("Lion", {"lr": 0.1}, "Lion", {"lr": 0.1}),
        ("Adagrad", {}, "Adagrad", {}),
        ("SGD", {"lr": 0.1, "momentum": 0.9}, "SGD", {"momentum": 0.9}),
        ("rmsprop", {"lr": 0.1}, "RMSprop", {"lr": 0.1}),
    ],
)
def test_optimizers_by_name(name, params, kind, options):
    with started({**BATCH, "optimizer": {"type": name, "params": params}}) as engine:
        optimizer = engine.optimizer.given
        assert type(optimizer).__name__ == kind
        assert {option: optimizer.param_groups[0][option] for option in options} == options


def rates(kind, steps, lr=1.0, **options):
    """Before the first step, and after each."""
    optimizer = torch.optim.Adam([nn.Parameter(torch.ones(1))], lr=lr)
    schedule = getattr(deepspeed, kind)(optimizer, **options)
    values = [optimizer.param_groups[0]["lr"]]
    for _ in range(steps):
        optimizer.step()
        schedule.step()
        values.append(optimizer.param_groups[0]["lr"])
    return values, optimizer, schedule


LINEAR = {"warmup_num_steps": 2, "warmup_type": "linear", "total_num_steps": 6}
COSINE = [2.0 * (0.1 + 0.9 * (1 + math.cos(math.pi * min(1.0, k / 4))) / 2) for k in range(1, 7)]
CYCLE = {"cycle_min_lr": 1.0, "cycle_max_lr": 3.0, "cycle_second_step_size": 4}
STAIRS = {"cycle_first_step_size": 4, "cycle_first_stair_count": 2, "cycle_momentum": False}


@pytest.mark.parametrize(
    ("kind", "lr", "options", "expected"),
    [
        ("WarmupLR", 1.0, {"warmup_min_lr": 0.1, "warmup_max_lr": 1.1, "warmup_num_steps": 4},
         [0.1, *(0.1 + math.log(i + 1) / math.log(4) for i in range(4)), 1.1, 1.1]),
        ("WarmupLR", 0.5, {"warmup_num_steps": 4, "warmup_type": "linear"}, [0, 0, 0.125, 0.25, 0.375, 0.5, 0.5]),
        ("WarmupDecayLR", 1.0, {**LINEAR, "warmup_max_lr": 1.0}, [0, 0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]),
        ("WarmupCosineLR", 2.0, {**LINEAR, "cos_min_ratio": 0.1, "warmup_min_ratio": 0.5}, [0.0, 1.0, 1.5, *COSINE]),
        ("OneCycle", 1.0, {**CYCLE, **STAIRS}, [1, 1, 2, 2, 3]),
    ],
)  # fmt: skip
def test_schedules(kind, lr, options, expected):
    assert rates(kind, len(expected) - 1, lr, **options)[0] == pytest.approx(expected)


def test_schedules_that_decay_after_a_cycle_and_values_that_are_wrong():
    decay = {"decay_step_size": 2, "decay_lr_rate": 0.5, "decay_mom_rate": 0.1}
    values, optimizer, schedule = rates("OneCycle", 8, **CYCLE, cycle_first_step_size=2, **decay)
    # Up two steps, down four; i counts from -1 and DeepSpeed looks one ahead: the cycle begins again at i = 5, and
    # decays from i = 6 on.
    assert values == pytest.approx([1, 2, 3, 2.5, 2, 1.5, 1, 1 / 1.25, 1 / 1.5])
    assert optimizer.param_groups[0]["betas"] == (pytest.approx(0.9 * 1.1), 0.99)
    assert schedule.last_batch_iteration == 7
    for name, value in [("num_steps", 0), ("num_steps", 2.5), ("type", "square"), ("max_lr", [1, 2])]:
        with pytest.raises(ValueError, match=f"warmup_{name}"):
            rates("WarmupLR", 1, **{f"warmup_{name}": value})


def test_a_schedule_starts_at_and_jumps_to_an_iteration():
    values, optimizer, schedule = rates(
        "WarmupLR", 1, lr=7.0, warmup_max_lr=2.0, warmup_num_steps=4, warmup_type="linear", last_batch_iteration=1
    )
    assert values == [7.0, 1.0] and schedule.get_last_lr() == [1.0]  # the first step sets a rate, as in DeepSpeed
    schedule.step(last_batch_iteration=3)
    assert (optimizer.param_groups[0]["lr"], schedule.last_batch_iteration) == (1.5, 3)
    schedule.step(0)
    assert (optimizer.param_groups[0]["lr"], schedule.last_batch_iteration) == (0.0, 0)
    _, optimizer, schedule = rates("OneCycle", 1, **CYCLE, cycle_first_step_size=2)
    schedule.step(batch_iteration=0)
    assert schedule.get_mom() == [optimizer.param_groups[0]["betas"]] == [(pytest.approx(0.85), 0.99)]
    assert rates("OneCycle", 1, **CYCLE, **STAIRS)[2].get_mom() is None


def saved_and_loaded(folder, stage):
    config = {
        "train_batch_size": 8, "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_max_lr": 0.01}},
    }  # fmt: skip
    x, y = data()

    def train(engine, steps):
        micro, losses = engine.train_micro_batch_size_per_gpu(), []
        for i in steps:
            rows = slice(begin := 8 * i + engine.global_rank * micro, begin + micro)
            loss = cross_entropy(engine(x[rows]), y[rows])
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses

    with started(config) as engine:
        train(engine, range(3))
        assert engine.save_checkpoint(folder, client_state={"epoch": 3, "note": ["a", 1.5]})
        later_losses, rate = train(engine, range(3, 6)), engine.get_lr()
        engine.save_checkpoint(folder, tag="other", save_latest=False)
        assert engine.save_checkpoint(folder, tag=0, save_latest=False)
        engine.save_checkpoint(folder, tag=f"of rank {engine.global_rank}", save_latest=False)
    with started(config) as engine:
        path, client = engine.load_checkpoint(folder)
        facts = os.path.basename(path), client, engine.global_steps
        assert (train(engine, range(3, 6)), engine.get_lr()) == (later_losses, rate)
    with started(config) as engine:
        path, client = engine.load_checkpoint(folder, tag="other", load_module_only=True)
        assert (os.path.basename(path), client, engine.global_steps) == ("other", {}, 0)
        with pytest.warns(UserWarning, match="Unable to find latest file"):
            assert engine.load_checkpoint(os.path.join(folder, "nowhere")) == (None, None)
        with pytest.raises(CheckpointError):
            engine.load_checkpoint(folder, tag="nothing")
        _, client = engine.load_checkpoint(folder, load_optimizer_states=False)
        assert (client["epoch"], engine.global_steps, engine.lr_scheduler.last_batch_iteration) == (3, 3, 2)
        assert engine.optimizer.state_dict()["state"] == {}
        engine.load_checkpoint(folder, tag="other", load_lr_scheduler_states=False)
        assert (engine.global_steps, engine.lr_scheduler.last_batch_iteration) == (6, 2)
        weights = [safe_get_full_fp32_param(p) for p in engine.module.parameters()]
        engine.save_16bit_model(folder, "model.safetensors")
        assert engine.save_16bit_model(folder)
    if not int(os.environ.get("RANK", 0)):
        fp32 = zero_to_fp32(folder, "other", lazy_mode=True)
        for state in (torch.load(os.path.join(folder, "pytorch_model.bin")), fp32):
            assert list(state) == list(model().state_dict())
            assert all(torch.equal(a, b) for a, b in zip(state.values(), weights))
    return facts


@pytest.mark.parametrize(("processes", "stage"), [(1, 0), (2, 1), (2, 3)])
def test_checkpoints_with_tags_and_latest(ranks, tmp_path, processes, stage):
    arguments = str(tmp_path), stage
    results = ranks(saved_and_loaded, *arguments) if processes > 1 else [saved_and_loaded(*arguments)]
    assert results == [("global_step3", {"epoch": 3, "note": ["a", 1.5]}, 3)] * processes
    assert (tmp_path / "latest").read_text() == "global_step3"
    assert (tmp_path / "0").is_dir() and (tmp_path / "of rank 0").is_dir() and (tmp_path / "model.safetensors").exists()


def test_checkpoints_behind_a_url():
    url = "memory://deepspeed-url"
    with started({**BATCH, "optimizer": SGD}) as engine:
        engine.save_checkpoint(url, tag="one", save_latest=False, client_state={"epoch": 3})
        assert engine.load_checkpoint(url, tag="one") == (f"{url}/one", {"epoch": 3})


def from_a_data_set():
    deepspeed.init_distributed()
    comm, rows = deepspeed.comm, []
    x = torch.ones(1) * (comm.get_rank() + 1)
    comm.all_reduce(x)
    facts = comm.is_initialized(), comm.get_rank(), comm.get_world_size(), comm.get_local_rank(), x.item()
    args = SimpleNamespace(deepspeed_config={"train_batch_size": 12, "optimizer": SGD}, local_rank=-1)
    scheduler = partial(torch.optim.lr_scheduler.ConstantLR, factor=0.5, total_iters=2)
    results = deepspeed.initialize(args, model(), training_data=TensorDataset(*data()), lr_scheduler=scheduler)
    engine, optimizer, loader, schedule = results
    assert type(schedule) is torch.optim.lr_scheduler.ConstantLR and schedule is engine.lr_scheduler
    assert optimizer is engine.optimizer
    for inputs, labels in loader:
        rows += [tuple(row[:2]) for row in inputs.tolist()]
        engine.backward(cross_entropy(engine(inputs), labels))
        engine.step()
    assert (engine.global_steps, args.local_rank) == (4, comm.get_local_rank())
    engine.destroy()
    comm.destroy_process_group()
    return facts, rows


def test_a_data_set_is_shared_out_among_processes_that_joined(ranks):
    for results in [from_a_data_set()], ranks(from_a_data_set):
        n = len(results)
        assert [facts for facts, _ in results] == [(True, r, n, r, n * (n + 1) / 2) for r in range(n)]
        assert len({row for _, rows in results for row in rows}) == 48
    with pytest.raises(RefusedError, match="the launcher says them"):
        deepspeed.init_distributed(rank=0, world_size=2)


def test_steps_are_printed_when_asked_for(caplog):
    caplog.set_level(logging.INFO, "easymp.compat.deepspeed")
    with started({**BATCH, "steps_per_print": 2, "optimizer": SGD}) as engine:
        for _ in range(4):
            engine.backward(engine(torch.ones(4, 8)).sum())
            engine.step()
    messages = [record.getMessage() for record in caplog.records]
    assert {f"step={n}, skipped=0, lr=[0.1], mom=[0]" for n in (2, 4)} <= set(messages)


def test_activations_are_computed_again(tmp_path):
    checkpointing, calls, path = deepspeed.checkpointing, [], tmp_path / "ds.json"
    path.write_text('{"activation_checkpointing": {"cpu_checkpointing": true, "profile": true}}')
    with pytest.warns(UserWarning, match="without effect here: activation_checkpointing.profile"):
        checkpointing.configure(None, deepspeed_config=path)
    assert checkpointing.is_configured()
    with pytest.raises(SettingError, match="no key 'cpu_checkpoint', did you mean 'cpu_checkpointing'"):
        checkpointing.configure(None, deepspeed_config={"activation_checkpointing": {"cpu_checkpoint": True}})
    with pytest.raises(SettingError, match="no DeepSpeed configuration at 'nowhere"):
        checkpointing.configure(None, deepspeed_config="nowhere.json")
    x = torch.ones(3, requires_grad=True)
    checkpointing.checkpoint(lambda x: calls.append(1) or (x * x).sum(), x).backward()
    assert (x.grad.tolist(), len(calls)) == ([2.0] * 3, 2)
    checkpointing.reset()


def test_its_own_optimizers_and_small_modules():
    p, ops = nn.Parameter(torch.ones(2)), deepspeed.ops
    optimizer = ops.adam.FusedAdam([p], lr=0.1)
    assert isinstance(optimizer, torch.optim.AdamW)
    assert type(ops.adam.DeepSpeedCPUAdam([p], adamw_mode=False)) is torch.optim.Adam
    in_order = ops.adam.DeepSpeedCPUAdam([p], 0.1, True, (0.8, 0.9), 1e-6, 0.2, False, False)
    assert (in_order.defaults["betas"], in_order.defaults["weight_decay"], type(in_order)) == (
        (0.8, 0.9), 0.2, torch.optim.Adam,
    )  # fmt: skip
    assert isinstance(optimizer, ops.adam.FusedAdam) and isinstance(in_order, ops.adam.DeepSpeedCPUAdam)
    assert not isinstance(torch.optim.SGD([p]), ops.adam.FusedAdam)
    assert ops.lamb.FusedLamb([p], lr=0.1).param_groups[0]["lr"] == 0.1
    assert deepspeed.runtime.lr_schedules.WarmupLR is deepspeed.WarmupLR
    with pytest.raises(RefusedError, match="bias_correction"):
        ops.adam.FusedAdam([p], bias_correction=False)
    with deepspeed.zero.GatheredParameters([p]):
        assert p.tolist() == [1.0, 1.0]
    batches = utils.RepeatingLoader([1, 2])
    assert [next(batches) for _ in range(5)] == [1, 2, 1, 2, 1]
    assert deepspeed.add_config_arguments(argparse.ArgumentParser()).parse_args(["--deepspeed"]).deepspeed
    utils.log_dist("words", ranks=[0])
    deepspeed.runtime.utils.see_memory_usage("here", force=True)
    assert utils.logger.name.startswith("easymp")


def test_the_accelerator_of_deepspeed():
    device = deepspeed.get_accelerator()
    tensor = torch.empty(0, device=device.device_name())
    assert tensor.device.type == device.device_name()
    assert device.device_count() >= 1 and device.current_device_name() and device.memory_allocated() >= 0
    device.empty_cache()
    device.manual_seed(3)
    state, first = device.get_rng_state(), torch.rand(1)
    device.set_rng_state(state)
    assert torch.equal(torch.rand(1), first) and device.initial_seed() == 3 and device.is_available()
    with pytest.raises(AttributeError):
        device.no_such_name  # noqa: B018
