"""Scripts written for DeepSpeed: configurations, the engine beside plain torch on real ranks, the loss scale, schedules, checkpoints."""

from __future__ import annotations

import argparse
import logging
import math
import os
import re
import tomllib
import warnings
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from easymp.compat.deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
from easymp.compat.deepspeed.utils.zero_to_fp32 import (
    get_fp32_state_dict_from_zero_checkpoint as zero_to_fp32,
)
from torch import nn
from torch.utils.data import TensorDataset

from easymp import CheckpointError, RefusedError, SettingError, StepError
from easymp.cli.config.importers import DEEPSPEED
from easymp.cli.config.rules import Document, Importer
from easymp.compat import deepspeed, explain
from easymp.compat.deepspeed import utils

BATCH = {"train_batch_size": 4}
SGD = {"type": "SGD", "params": {"lr": 0.1}}
SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
K6 = """{ "train_batch_size": 64, "gradient_accumulation_steps": 4,
  "fp16": { "enabled": true, "loss_scale": 0, // automatic
            "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1 }, # and a comma too many
}"""


def test_a_file_with_comments(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(K6)
    with started(file) as engine:
        assert engine.get_batch_info() == (64, 16, 4)
        assert engine.fp16_enabled() and engine.dynamic_loss_scale() and engine.gradient_clipping() == 1.0
        assert (engine.loss_scale(), engine.initial_dynamic_scale()) == (0, 65536)
        assert engine.config["train_batch_size"] == 64
    file.write_text('{"train_batch_size": 8,\n"train_batch_size": 16}')
    with pytest.raises(SettingError, match="line 2"):
        deepspeed.initialize(model=model(), config=file)
    with pytest.raises(SettingError, match=r"no DeepSpeed configuration at 'nowhere.json'"):
        deepspeed.initialize(model=model(), config="nowhere.json")


@pytest.mark.parametrize(
    ("given", "solved"),
    [
        ((64, 4, 16), (64, 4, 16)),
        ((64, None, 4), (64, 16, 4)),
        ((64, 8, None), (64, 8, 8)),
        ((None, 8, 4), (32, 8, 4)),
        ((64, None, None), (64, 64, 1)),
        (("auto", 8, "auto"), (8, 8, 1)),
    ],
)
def test_the_batch_triangle(given, solved):
    with started({name: value for name, value in zip(SIZES, given) if value is not None}) as engine:
        assert engine.get_batch_info() == solved


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"gradient_accumulation_steps": 2}, "neither train_batch_size nor train_micro_batch_size_per_gpu"),
        (dict(zip(SIZES, (64, 4, 4))), r"gradient_accumulation_steps=4, 1 ranks \(64 != 4 \* 4 \* 1\)"),
        ({SIZES[0]: 7, SIZES[2]: 2}, r"\(7 != 3 \* 2 \* 1\)"),
        ({SIZES[0]: 7, SIZES[1]: 2}, r"\(7 != 2 \* 3 \* 1\)"),
        ({**BATCH, "fp16": {"enabled": True}, "bf16": {"enabled": True}}, "enabled at once"),
        ({**BATCH, "fp16": {"enabled": True, "loss_scale_window": -1}}, "fp16.loss_scale_window=-1 is below 1"),
        ({**BATCH, "fp16": {"enabled": True, "hysteresis": True}}, "fp16.hysteresis=True is not a finite number"),
        ({**BATCH, "fp16": {"enabled": True, "min_loss_scale": math.nan}}, "fp16.min_loss_scale=nan is not a finite"),
        ({**BATCH, "fp16": {"enabled": "yes"}}, "fp16.enabled='yes' is neither true nor false"),
        ({**BATCH, "fp16": 1}, "fp16=1 must be a dict"),
        ({**BATCH, "gradient_cliping": 1.0}, "has no key 'gradient_cliping', did you mean 'gradient_clipping'"),
        ({**BATCH, "fp16": {"enabled": True, "hysterisis": 2}}, "fp16 has no key 'hysterisis', did you mean 'hyster"),
        ({**BATCH, "zero_optimization": {"stage": 4}}, "zero_optimization.stage=4 must lie in 0 … 3"),
        ({**BATCH, "optimizer": {"type": "Adam", "lr": 1}}, "optimizer has no key 'lr'"),
        ({**BATCH, "fp16": {"enabled": "auto"}}, "fp16.enabled='auto' is for tools that fill it in"),
        ({**BATCH, "optimizer": {"type": "Adam", "params": {"lr": "auto"}}}, "optimizer.params.lr='auto' is for tools"),
        ({**BATCH, "optimizer": {"type": "Adam", "params": {"lr": "1e-3"}}}, "optimizer.params.lr='1e-3' is a string"),
        ([], "is a list; it must be a dict"),
        ({**BATCH, "optimizer": {"type": "Adan"}}, "there is no optimizer 'Adan', did you mean 'Adam'"),
        ({**BATCH, "optimizer": {"type": "OneBitAdam"}}, "'OneBitAdam' is not part of easymp.compat: use 'AdamW'"),
        ({**BATCH, "optimizer": {"type": "SGD", "params": {"moment": 0.9}}}, "no parameter 'moment', did you mean 'momentum'"),
        ({**BATCH, "scheduler": {"type": "WarmUpLR"}}, "no scheduler 'WarmUpLR', did you mean"),
        ({**BATCH, "scheduler": {"type": "WarmupLR", "params": {"warmup": 3}}}, "WarmupLR has no parameter 'warmup'"),
        ({**BATCH, "scheduler": {"type": "WarmupLR"}}, "a scheduler without an optimizer"),
    ],
)  # fmt: skip
def test_wrong_configurations(config, words):
    with pytest.raises(SettingError, match=words):
        deepspeed.initialize(model=model(), config=config)


def test_old_spellings_and_nulls():
    old = {"zero_optimization": True, "steps_per_print": math.inf}
    old |= dict.fromkeys(("wall_clock_breakdown", "fp16", "gradient_clipping"))
    with started({**BATCH, **old}) as engine:
        assert (engine.zero_optimization_stage(), engine.steps_per_print()) == (1, 0)
        assert not engine.wall_clock_breakdown()
        assert (engine.fp16_enabled(), engine.gradient_clipping()) == (False, 1.0)


NAMES = tomllib.loads(Path(deepspeed.__file__).with_name("names.toml").read_text(encoding="utf-8"))


def keys_of(table, kind="honoured", why=""):
    """Section by section: key, DeepSpeed's default, "honoured", "ignored" or "refused", and the reason."""
    for name, value in table.items():
        if name in ("ignored", "refused"):
            for reason, inner in value.items():
                yield from keys_of(inner, name, reason)
        elif name == "null":
            yield from ((key, None, kind, why) for key in value.split())
        else:
            yield name, value, kind, why


KEYS = [(at, *key) for at, table in NAMES["keys"].items() for key in keys_of(table)]


def placed(section, key, value):
    """A configuration in which one key of a section has this value."""
    inside = {key: value}
    for name in reversed(section.split(".") if section else []):
        inside = {name: inside}
    return {**BATCH, **inside}


def nested(keys, value):
    """A configuration with these keys, of values by default."""
    content = {}
    for section, key, default, *_ in keys:
        inside = content
        for name in section.split(".") if section else ():
            inside[name] = inside[name] if isinstance(inside.get(name), dict) else {}
            inside = inside[name]
        inside.setdefault(key, value(default))
    return content


def test_defaults_of_deepspeed_stop_no_script():
    config = nested(KEYS, lambda default: default[0] if isinstance(default, list) else default)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with started({**config, **BATCH}) as engine:
            assert engine.get_batch_info() == (4, 4, 1) and engine.zero_reduce_bucket_size() == 500_000_000


def test_easymp_config_knows_the_same_keys():
    known = [key for key in KEYS if key[0] not in ("optimizer", "scheduler", "flops_profiler", "checkpoint")]
    content = nested(known, lambda default: "auto")
    found = Importer(Document("ds.json", content, ""), "DeepSpeed", None)
    found.walk(content, DEEPSPEED)
    assert len(found.lines) >= len(known) - 20
    assert not [line for line in found.lines if line[1].startswith("unknown")]


def test_every_other_key_is_ignored_or_refused_by_name():
    for section, key, default, kind, why in KEYS:
        if kind == "honoured":
            continue
        other = {"enabled": True} if default is None else not default if isinstance(default, bool) else 7
        where = f"{section}.{key}" if section else key
        if kind == "refused":
            with pytest.raises(RefusedError, match=re.escape(f"{where}={other!r} is not honoured: {why}")):
                deepspeed.initialize(model=model(), config=placed(section, key, other))
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                started(placed(section, key, other)).__enter__().destroy()
            assert f"# without effect: {where} ({why})" in explain()
    off = {"wandb": {"enabled": False}, "hybrid_engine": {"enabled": False}, "amp": {"enabled": "auto"}}
    with started({**BATCH, **off, "zero_optimization": {"reduce_bucket_size": "auto"}}) as engine:
        assert engine.zero_optimization_stage() == 0
    nvme = placed("zero_optimization.offload_param", "device", "nvme")
    with pytest.raises(RefusedError, match="nothing is moved to disks"):
        deepspeed.initialize(model=model(), config=nvme)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))


def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(48, 8, generator=generator)
    return x, (x.sum(1) > 0).long()


@contextmanager
def started(config, **more):
    engine, *_ = deepspeed.initialize(model=more.pop("model", None) or model(), config=config, **more)
    try:
        yield engine
    finally:
        engine.destroy()


def by_hand(clip=1.0, epochs=2):
    """Plain torch on one process: updates of 16 samples, and the mean of each epoch's last losses."""
    net, (x, y) = model(), data()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.0)
    norms = []
    for _ in range(epochs):
        for i in range(0, 48, 16):
            nn.functional.cross_entropy(net(x[i : i + 16]), y[i : i + 16]).backward()
            norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), clip)))
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach() for p in net.parameters()], norms


def trained(config, epochs=2):
    """The program of the examples; parameters, norms, and what the engine says of itself."""
    config = {"train_batch_size": 16, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5, **config}
    config.setdefault("optimizer", {"type": "Adam", "params": {"lr": 0.01}})
    x, y = data()
    with started(config) as engine:
        rank, size, micro = engine.global_rank, engine.world_size, engine.train_micro_batch_size_per_gpu()
        norms, boundaries = [], []
        for _ in range(epochs):
            for i in range(0, 48, micro * size):
                rows = slice(i + rank * micro, i + (rank + 1) * micro)
                loss = nn.functional.cross_entropy(engine(x[rows]).float(), y[rows])
                returned = engine.backward(loss)
                assert returned.item() == pytest.approx(loss.item() / 2)
                boundaries.append(engine.is_gradient_accumulation_boundary())
                engine.step()
                if boundaries[-1]:
                    norms.append(engine.get_global_grad_norm())
        state = engine.accelerator.get_state_dict(engine._called)
        parameters = [p.float().tolist() for p in state.values()] if state else None
        facts = engine.global_steps, engine.micro_steps, engine.global_samples, engine.skipped_steps
        assert boundaries == [False, True] * (len(boundaries) // 2)
        return parameters, norms, facts, engine.accelerator.plan.strategy.value


RARE = [pytest.param(*row, marks=pytest.mark.slow) for row in ((1, 3), (2, 0), (2, 2))]


@pytest.mark.parametrize(("processes", "stage"), [(1, 0), (2, 1), (2, 3), *RARE])
def test_it_trains_as_plain_torch(ranks, processes, stage):
    wanted, norms = by_hand(clip=0.5)
    config = {"zero_optimization": {"stage": stage}}
    said = [trained(config)] if processes == 1 else ranks(trained, config)
    for parameters, found, facts, strategy in said:
        assert found == pytest.approx(norms, rel=1e-4)
        assert facts == (6, 12, 96, 0)
        assert strategy == ("single" if processes == 1 else ["ddp", "zero1", "zero1", "fsdp"][stage])
        for a, b in zip(parameters or [], wanted):
            torch.testing.assert_close(torch.tensor(a), b, rtol=1e-4, atol=1e-5)
    assert said[0][0]


def looked_at(stage):
    """What a script reads of its own model: a weight's norm, the shapes it would save, and gradients before the step."""
    x, y = data()
    config = {"train_batch_size": 8, "zero_optimization": {"stage": stage}, "optimizer": SGD}
    with started(config) as engine, warnings.catch_warnings(record=True) as said:
        rows = slice(4 * engine.global_rank, 4 * engine.global_rank + 4)
        engine.backward(nn.functional.cross_entropy(engine(x[rows]), y[rows]))
        gradients = [safe_get_full_grad(p).tolist() for p in engine.module.parameters()]
        assert stage == 2 or gradients == [p.grad.tolist() for p in engine.module.parameters()]
        engine.step()
        state = engine.module.state_dict()
        norms = [float(p.norm()) for p in engine.module.parameters()]
        return gradients, norms, {type(t).__name__ for t in state.values()}, len(said)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_up_to_stage_2_scripts_read_whole_parameters_and_averaged_gradients(ranks, stage):
    net, (x, y) = model(), data()
    nn.functional.cross_entropy(net(x[:8]), y[:8]).backward()
    one, other = ranks(looked_at, stage)
    assert one == other and one[2] == {"Tensor"}
    for found, parameter in zip(one[0], net.parameters()):
        torch.testing.assert_close(torch.tensor(found), parameter.grad, rtol=1e-5, atol=1e-6)
    norms = [float((p - 0.1 * p.grad).detach().norm()) for p in net.parameters()]
    assert one[1] == pytest.approx(norms, rel=1e-5)


@pytest.mark.parametrize(
    "half", [{"fp16": {"enabled": True, "loss_scale": 128}}, {"bf16": {"enabled": True}}]
)
def test_half_precision_trains_too(ranks, half):
    wanted, _ = by_hand(clip=0.5)
    sharded = {**half, "zero_optimization": {"stage": 1}}
    for parameters, _, facts, _ in [trained(half), *ranks(trained, sharded)]:
        assert facts == (6, 12, 96, 0)
        for a, b in zip(parameters or [], wanted):
            torch.testing.assert_close(torch.tensor(a), b, rtol=0.1, atol=0.02)


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


def several_backwards(stage, half, steps):
    """Norms of updates of `steps` micro-batches: one backward a head after one forward; and one after two forwards."""
    config = {**half, "zero_optimization": {"stage": stage}, "gradient_clipping": 0}
    config |= {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": steps}
    config["optimizer"] = {"type": "SGD", "params": {"lr": 0.0}}
    x, _ = data()
    with started(config, model=TwoHeads()) as engine:
        rank, norms = engine.global_rank, []
        for together in (False, True):
            for i in range(steps):
                rows = x[8 * i + 4 * rank :][:4]
                if together:
                    first, second = engine(rows), engine(rows)
                    engine.backward(first[0].float().sum())
                    engine.backward(second[1].float().sum())
                else:
                    one, other = engine(rows)
                    engine.backward(one.float().sum(), retain_graph=True)
                    engine.backward(other.float().sum())
                engine.step()
            norms.append(engine.get_global_grad_norm())
        return norms


HALF = {"fp16": {"enabled": True, "initial_scale_power": 4}}


@pytest.mark.parametrize(("stage", "half", "steps"), [(0, HALF, 2), (1, {}, 2), (2, {}, 1), (3, HALF, 2)])
def test_several_backward_passes_before_a_step(ranks, stage, half, steps):
    net, (x, _) = TwoHeads(), data()
    for i in range(steps):
        one, other = net(x[8 * i : 8 * i + 8])
        ((one.sum() + other.sum()) / 2 / steps).backward()  # a mean over two ranks
    wanted = float(nn.utils.clip_grad_norm_(net.parameters(), math.inf))
    for norms in ranks(several_backwards, stage, half, steps):
        assert norms == pytest.approx([wanted] * 2, rel=1e-2)


def own_backward(stage, half):
    """Weights after updates of two micro-batches by ``loss.backward()``, and by ``engine.backward(loss)``."""
    (x, y), found = data(), []
    config = {**half, "zero_optimization": {"stage": stage}, "optimizer": SGD}
    for own in (True, False):
        with started({**config, "train_batch_size": 16, "gradient_accumulation_steps": 2}) as engine:
            micro, rank = engine.train_micro_batch_size_per_gpu(), engine.global_rank
            for i in range(4):
                rows = slice(i * 8 + rank * micro, i * 8 + (rank + 1) * micro)
                loss = nn.functional.cross_entropy(engine(x[rows]).float(), y[rows])
                engine.scale(loss).backward() if own else engine.backward(loss)
                engine.step()
            assert engine.global_steps == 2
            found.append([safe_get_full_fp32_param(p).tolist() for p in engine.module.parameters()])
    return found


@pytest.mark.parametrize(("stage", "half"), [(1, HALF), (3, {})])
def test_a_backward_of_the_scripts_own(ranks, stage, half):
    own, engines = ranks(own_backward, stage, half)[0]
    for a, b in zip(own, engines):
        torch.testing.assert_close(torch.tensor(a), torch.tensor(b), rtol=1e-3, atol=1e-4)


class Parts(nn.Module):
    """Outputs that come from one operation."""

    def __init__(self):
        super().__init__()
        self.weights = nn.Parameter(torch.ones(4))

    def forward(self):
        return self.weights.chunk(2)


def test_outputs_without_use_and_a_scale_that_is_left_out_in_a_backward_of_the_scripts_own():
    config = {"train_batch_size": 2, "gradient_accumulation_steps": 2, "gradient_clipping": 0}
    with started({**config, "optimizer": SGD}, model=Parts()) as engine:
        for _ in range(2):
            engine()[0].sum().backward()
            engine.step()
        assert engine.module.weights.tolist() == pytest.approx([0.9, 0.9, 1.0, 1.0])
    with started({**BATCH, **HALF, "optimizer": SGD}) as engine:
        engine(torch.ones(4, 8)).float().sum().backward()
        with pytest.raises(StepError, match=r"engine\.scale"):
            engine.step()


def whole_values(stage, half):
    """What `safe_get_full_…` reads, and what `safe_set_full_…` leaves there."""
    x, y = data()
    config = {**half, "train_batch_size": 8, "zero_optimization": {"stage": stage}, "gradient_clipping": 0}
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.1, "weight_decay": 0.0}}
    with started(config) as engine:
        micro, rank = engine.train_micro_batch_size_per_gpu(), engine.global_rank
        rows = slice(rank * micro, rank * micro + micro)
        engine.backward(nn.functional.cross_entropy(engine(x[rows]).float(), y[rows]))
        weight = next(iter(engine.module.parameters()))
        grad = safe_get_full_grad(weight).clone()
        utils.safe_set_full_grad(weight, grad * 2)
        assert torch.equal(safe_get_full_grad(weight), grad * 2)
        engine.step()
        state = utils.safe_get_full_optimizer_state(weight, "exp_avg").clone()
        ones = torch.ones(weight.shape)
        utils.safe_set_full_optimizer_state(weight, ones, "exp_avg")
        utils.safe_set_full_fp32_param(weight, ones * 0.3)
        assert torch.equal(utils.safe_get_full_optimizer_state(weight, "exp_avg"), ones)
        assert torch.equal(safe_get_full_fp32_param(weight), ones * 0.3)
        with pytest.raises(ValueError, match="has \\['step'"):
            utils.safe_get_full_optimizer_state(weight, "nothing")
        return grad.float().tolist(), state.tolist()


@pytest.mark.parametrize(("stage", "half"), [(1, HALF), (2, {}), (3, {})])
def test_whole_parameters_gradients_and_states(ranks, stage, half):
    scale = 2.0 ** half["fp16"]["initial_scale_power"] if half else 1.0
    net, (x, y) = model(), data()
    nn.functional.cross_entropy(net(x[:8]), y[:8]).backward()
    wanted = net[0].weight.grad
    for grad, state in ranks(whole_values, stage, half):
        torch.testing.assert_close(torch.tensor(grad) / scale, wanted, rtol=1e-2, atol=1e-3)
        torch.testing.assert_close(torch.tensor(state), 0.1 * 2 * wanted, rtol=1e-2, atol=1e-3)


def test_batch_sizes_change_while_training():
    with started({"train_batch_size": 4, "gradient_accumulation_steps": 2, "optimizer": SGD}) as engine:

        def boundaries(n):
            for _ in range(n):
                engine.backward(engine(torch.ones(2, 8)).sum())
                yield engine.is_gradient_accumulation_boundary()
                engine.step()

        assert list(boundaries(4)) == [False, True] * 2
        engine.set_train_batch_size(6)
        assert engine.get_batch_info() == (6, 2, 3)
        assert list(boundaries(3)) == [False, False, True]
        engine.set_train_micro_batch_size(4)
        assert (engine.get_batch_info(), engine.global_steps, engine.global_samples) == ((12, 4, 3), 3, 14)
        with pytest.raises(ValueError, match="train_batch_size=5 is not 4 × 1 × n"):
            engine.set_train_batch_size(5)


def test_a_checkpoint_between_two_micro_batches(tmp_path):
    config = {"train_batch_size": 4, "gradient_accumulation_steps": 2, "optimizer": SGD}
    with started(config) as engine:

        def half():
            engine.backward(engine(torch.ones(2, 8)).sum())
            engine.step()

        for _ in range(3):
            half()
        engine.save_checkpoint(tmp_path, client_state={"epoch": 1})
        half()
        assert engine.global_steps == 2
        after = [p.clone() for p in engine.module.parameters()]
        assert engine.load_checkpoint(tmp_path)[1] == {"epoch": 1}
        assert (engine.global_steps, engine.is_gradient_accumulation_boundary()) == (1, False)
        half(), half()
        assert all(torch.equal(a, b) for a, b in zip(after, engine.module.parameters()))


def test_inputs_are_cast_and_outputs_keep_the_models_type():
    kinds = ("fp16", torch.float16, torch.float16), ("bf16", torch.bfloat16, torch.float32)
    for half, dtype, weights in kinds:
        with started({**BATCH, half: {"enabled": True}}) as engine:
            assert engine(data()[0][:4]).dtype == dtype and engine.module[0].weight.dtype == weights
            assert (engine.fp16_enabled(), engine.bfloat16_enabled()) == (half == "fp16", half == "bf16")


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
            engine.backward(loss * (float("inf") if step == "o" else 1.0))
            engine.step()
            scales.append(engine.optimizer.cur_scale)
            assert engine.optimizer.overflow == (step == "o")
        assert scales == [float(word) for word in GOLDEN[hysteresis if stage else 1].split()]
        assert (engine.skipped_steps, engine.global_steps) == (8, 23)


def test_an_overflow_at_the_smallest_scale_ends_the_run():
    fp16 = {"enabled": True, "initial_scale_power": 1, "hysteresis": 1, "min_loss_scale": 1}
    config = {"train_batch_size": 1, "fp16": fp16, "optimizer": SGD}
    for stage in (0, 1):
        with started({**config, "zero_optimization": {"stage": stage}}) as engine:

            def overflow():
                engine.backward(engine(torch.ones(1, 8)).float().sum() * float("inf"))
                engine.step()
                return engine.optimizer.loss_scale

            assert overflow() == 1.0
            if stage:
                with pytest.raises(StepError, match="cannot be decreased anymore"):
                    overflow()
            else:
                assert overflow() == 1.0


def test_bf16_skips_steps_that_are_not_finite():
    with started({**BATCH, "bf16": {"enabled": True}, "optimizer": SGD}) as engine:
        before = engine.module[0].weight.clone()
        engine.backward(engine(torch.ones(4, 8)).float().sum() * float("nan"))
        engine.step()
        assert (engine.skipped_steps, engine.was_step_applied()) == (1, False)
        assert torch.equal(engine.module[0].weight, before)


def test_calls_in_a_wrong_order():
    with started({**BATCH, "optimizer": SGD}) as engine:
        with pytest.raises(StepError, match=r"step\(\) before a backward"):
            engine.step()
        with pytest.raises(StepError, match=r"inside engine.no_sync\(\)"), engine.no_sync():
            engine.step()
        with pytest.raises(RefusedError, match="call step"):
            engine.set_gradient_accumulation_boundary(True)
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
        assert engine.get_batch_info() == (4, 4, 1)
        assert (engine.zero_optimization_stage(), engine.gradient_clipping()) == (2, 0.1)
        assert (engine.get_lr(), engine.get_mom()) == ([0.5], [(0.9, 0.999)])
        assert engine.get_global_grad_norm() is None
        assert (engine.local_rank, engine.world_size, engine.dp_world_size) == (0, 1, 1)
        assert engine.steps_per_print() == 0 and engine.device == engine.accelerator.device
        assert list(engine.module_state_dict()) == list(engine.module.state_dict())
        assert not (engine.zero_overlap_comm() or engine.autotuning_enabled() or engine.fp16_auto_cast())
        assert (engine.optimizer_name(), engine.optimizer_params()) == ("AdamW", {"lr": 0.5})
        with pytest.raises(AttributeError, match="nothing"):
            engine.nothing  # noqa: B018


@pytest.mark.parametrize(
    ("word", "params", "kind", "options"),
    [
        ("Adam", {"betas": [0.8, 0.9]}, "AdamW", {"betas": (0.8, 0.9), "weight_decay": 0.0}),
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
def test_optimizers_by_name(word, params, kind, options):
    with started({**BATCH, "optimizer": {"type": word, "params": params}}) as engine:
        made = engine.optimizer.given
        assert type(made).__name__ == kind
        assert {name: made.param_groups[0][name] for name in options} == options


def rates(kind, steps, lr=1.0, **options):
    """Before the first step, and after each."""
    optimizer = torch.optim.Adam([nn.Parameter(torch.ones(1))], lr=lr)
    schedule = getattr(deepspeed, kind)(optimizer, **options)
    found = [optimizer.param_groups[0]["lr"]]
    for _ in range(steps):
        optimizer.step()
        schedule.step()
        found.append(optimizer.param_groups[0]["lr"])
    return found, optimizer, schedule


LINEAR = {"warmup_num_steps": 2, "warmup_type": "linear", "total_num_steps": 6}
RANGE = {"lr_range_test_min_lr": 0.1, "lr_range_test_step_size": 2}
COSINE = [2.0 * (0.1 + 0.9 * (1 + math.cos(math.pi * min(1.0, k / 4))) / 2) for k in range(1, 7)]


@pytest.mark.parametrize(
    ("kind", "lr", "options", "wanted"),
    [
        ("WarmupLR", 1.0, {"warmup_min_lr": 0.1, "warmup_max_lr": 1.1, "warmup_num_steps": 4},
         [0.1, *(0.1 + math.log(i + 1) / math.log(4) for i in range(4)), 1.1, 1.1]),
        ("WarmupLR", 0.5, {"warmup_num_steps": 4, "warmup_type": "linear"}, [0, 0, 0.125, 0.25, 0.375, 0.5, 0.5]),
        ("WarmupDecayLR", 1.0, {**LINEAR, "warmup_max_lr": 1.0}, [0, 0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]),
        ("WarmupCosineLR", 2.0, {**LINEAR, "cos_min_ratio": 0.1, "warmup_min_ratio": 0.5}, [0.0, 1.0, 1.5, *COSINE]),
        ("LRRangeTest", 1.0, RANGE, [0.1, 0.15, 0.2, 0.25, 0.3]),
        ("LRRangeTest", 1.0, {**RANGE, "lr_range_test_staircase": True}, [0.1, 0.1, 0.2, 0.2, 0.3]),
    ],
)  # fmt: skip
def test_schedules(kind, lr, options, wanted):
    assert rates(kind, len(wanted) - 1, lr, **options)[0] == pytest.approx(wanted)


def test_wrong_warm_ups():
    wrong = {"warmup_num_steps": (0, 2.5), "warmup_type": ("square",), "warmup_max_lr": ([1, 2],)}
    for name, value in [(name, value) for name, values in wrong.items() for value in values]:
        with pytest.raises(ValueError, match=name):
            rates("WarmupLR", 1, **{name: value})


def test_one_cycle():
    options = {"cycle_min_lr": 1.0, "cycle_max_lr": 3.0, "cycle_second_step_size": 4}
    decay = {"decay_step_size": 2, "decay_lr_rate": 0.5, "decay_mom_rate": 0.1}
    found, optimizer, schedule = rates("OneCycle", 8, **options, cycle_first_step_size=2, **decay)
    # Up two steps, down four; i counts from -1 and DeepSpeed looks one ahead: the cycle begins again at i = 5, and decays from i = 6 on.
    assert found == pytest.approx([1, 2, 3, 2.5, 2, 1.5, 1, 1 / 1.25, 1 / 1.5])
    assert optimizer.param_groups[0]["betas"] == (pytest.approx(0.9 * 1.1), 0.99)
    assert schedule.last_batch_iteration == 7
    stairs = {"cycle_first_step_size": 4, "cycle_first_stair_count": 2, "cycle_momentum": False}
    assert rates("OneCycle", 4, **options, **stairs)[0] == pytest.approx([1, 1, 2, 2, 3])


def saved_and_loaded(folder, stage):
    config = {
        "train_batch_size": 8, "zero_optimization": {"stage": stage}, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_max_lr": 0.01}},
    }  # fmt: skip
    x, y = data()

    def train(engine, steps):
        rank, micro, losses = engine.global_rank, engine.train_micro_batch_size_per_gpu(), []
        for i in steps:
            rows = slice(8 * i + rank * micro, 8 * i + (rank + 1) * micro)
            loss = nn.functional.cross_entropy(engine(x[rows]), y[rows])
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses

    with started(config) as engine:
        train(engine, range(3))
        assert engine.save_checkpoint(folder, client_state={"epoch": 3, "note": ["a", 1.5]})
        once, rate = train(engine, range(3, 6)), engine.get_lr()
        engine.save_checkpoint(folder, tag="other", save_latest=False)
        assert engine.save_checkpoint(folder, tag=0, save_latest=False)
    with started(config) as engine:
        path, client = engine.load_checkpoint(folder)
        facts = os.path.basename(path), client, engine.global_steps
        again = train(engine, range(3, 6))
        assert (again, engine.get_lr()) == (once, rate)
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
        whole = engine.accelerator.get_state_dict(engine._called)
        engine.save_16bit_model(folder, "model.safetensors")
        assert engine.save_16bit_model(folder)
    if not int(os.environ.get("RANK", 0)):
        for state in (torch.load(os.path.join(folder, "pytorch_model.bin")), zero_to_fp32(folder, "other")):
            assert state.keys() == whole.keys() and all(torch.equal(state[n], t) for n, t in whole.items())
    return facts


@pytest.mark.parametrize(("processes", "stage"), [(1, 0), (2, 1), (2, 3)])
def test_checkpoints_with_tags_and_latest(ranks, tmp_path, processes, stage):
    run = ranks if processes > 1 else lambda function, *args: [function(*args)]
    said = run(saved_and_loaded, str(tmp_path), stage)
    assert said == [("global_step3", {"epoch": 3, "note": ["a", 1.5]}, 3)] * processes
    assert (tmp_path / "latest").read_text() == "global_step3"
    assert (tmp_path / "0").is_dir() and (tmp_path / "model.safetensors").exists()


def from_a_data_set():
    x, y = data()
    seen = []
    args = SimpleNamespace(deepspeed_config={"train_batch_size": 12, "optimizer": SGD})
    scheduler = partial(torch.optim.lr_scheduler.ConstantLR, factor=0.5, total_iters=2)
    made = deepspeed.initialize(args, model(), training_data=TensorDataset(x, y), lr_scheduler=scheduler)
    engine, optimizer, loader, schedule = made
    assert schedule is engine.lr_scheduler and optimizer is engine.optimizer
    for inputs, labels in loader:
        seen += [tuple(row[:2]) for row in inputs.tolist()]
        engine.backward(nn.functional.cross_entropy(engine(inputs), labels))
        engine.step()
    steps = engine.global_steps
    engine.destroy()
    return steps, seen


def test_a_data_set_is_shared_out(ranks):
    said = ranks(from_a_data_set)
    assert [steps for steps, _ in said] == [4, 4]
    assert len({row for _, seen in said for row in seen}) == 48


def test_initialize_says_what_is_missing():
    for given, words in [
        ({"config": BATCH}, "requires a model"),
        ({"model": model()}, "requires --deepspeed_config"),
        ({"model": model(), "config": BATCH, "config_params": BATCH}, "given twice"),
        ({"model": "bert", "config": BATCH}, "pass a torch"),
        ({"model": model(), "optimizer": "adam", "config": BATCH}, "optimizer='adam' is neither one nor a"),
    ]:
        with pytest.raises(SettingError, match=words):
            deepspeed.initialize(**given)
    with pytest.raises(ImportError, match=r"deepspeed.PipelineModule is not part of easymp.compat: use"):
        deepspeed.PipelineModule  # noqa: B018


def test_arguments_of_a_script(tmp_path):
    (tmp_path / "ds.json").write_text('{"train_batch_size": 4}')
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    parser.add_argument("--local_rank", type=int, default=-1)
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(tmp_path / "ds.json")])
    assert args.deepspeed
    deepspeed.initialize(args, model())[0].destroy()
    assert args.local_rank == 0


def joined():
    deepspeed.init_distributed()
    comm = deepspeed.comm
    try:
        x = torch.ones(1) * (comm.get_rank() + 1)
        comm.all_reduce(x)
        return comm.is_initialized(), comm.get_rank(), comm.get_world_size(), comm.get_local_rank(), x.item()
    finally:
        comm.destroy_process_group()


def test_init_distributed_and_comm(ranks):
    assert ranks(joined) == [(True, r, 2, r, 3.0) for r in range(2)]
    assert joined() == (True, 0, 1, 0, 1.0)  # without a launcher
    with pytest.raises(RefusedError, match="the launcher says them"):
        deepspeed.init_distributed(rank=0, world_size=2)


def test_time_and_operations_are_told_when_asked_for(caplog, tmp_path):
    caplog.set_level(logging.INFO, "easymp.compat.deepspeed")
    file = tmp_path / "flops.txt"
    config = {
        **BATCH, "steps_per_print": 2, "wall_clock_breakdown": True, "optimizer": SGD,
        "flops_profiler": {"enabled": True, "profile_step": 1, "output_file": str(file)},
    }  # fmt: skip
    with started(config) as engine:
        for _ in range(4):
            engine.backward(engine(torch.ones(4, 8)).sum())
            engine.step()
    said = [record.getMessage() for record in caplog.records]
    assert {f"step={n}, skipped=0, lr=[0.1], mom=[0]" for n in (2, 4)} <= set(said)
    assert any(re.match(r"time \(ms\) \| forward: .* \| backward: .* \| step: ", line) for line in said)
    # Two products, of (4, 8) by (8, 16) and of (4, 16) by (16, 2), at two operations an element.
    counted = f"{2 * 4 * 8 * 16 + 2 * 4 * 16 * 2:,} floating-point operations, 178 parameters"
    assert file.read_text().startswith(f"flops profiler, one forward: {counted}")


def test_activations_are_computed_again():
    room = deepspeed.checkpointing
    room.configure(None, deepspeed_config={"activation_checkpointing": {"cpu_checkpointing": True}})
    assert room.is_configured()
    calls = []

    def part(x):
        calls.append(1)
        return (x * x).sum()

    x = torch.ones(3, requires_grad=True)
    room.checkpoint(part, x).backward()
    assert (x.grad.tolist(), len(calls)) == ([2.0] * 3, 2)
    room.reset()


def test_its_own_optimizers_and_contexts():
    p, ops = nn.Parameter(torch.ones(2)), deepspeed.ops
    assert isinstance(ops.adam.FusedAdam([p], lr=0.1), torch.optim.AdamW)
    assert type(ops.adam.DeepSpeedCPUAdam([p], adamw_mode=False)) is torch.optim.Adam
    assert ops.lamb.FusedLamb([p], lr=0.1).param_groups[0]["lr"] == 0.1
    assert deepspeed.runtime.lr_schedules.WarmupLR is deepspeed.WarmupLR
    with pytest.raises(RefusedError, match="bias_correction"):
        ops.adam.FusedAdam([p], bias_correction=False)
    with deepspeed.zero.GatheredParameters([p]):
        assert p.tolist() == [1.0, 1.0]


def test_checkpoints_behind_a_url():
    place = "memory://deepspeed-url"
    with started({**BATCH, "optimizer": SGD}) as engine:
        engine.save_checkpoint(place, tag="one", save_latest=False, client_state={"epoch": 3})
        assert engine.load_checkpoint(place, tag="one") == (f"{place}/one", {"epoch": 3})


def test_small_modules():
    batches = utils.RepeatingLoader([1, 2])
    assert [next(batches) for _ in range(5)] == [1, 2, 1, 2, 1]
    utils.log_dist("words", ranks=[0])
    deepspeed.runtime.utils.see_memory_usage("here", force=True)
    assert utils.logger.name.startswith("easymp")
    device = deepspeed.get_accelerator()
    assert torch.empty(0, device=device.device_name()).device.type == device.device_name()
    assert device.device_count() >= 1 and device.current_device_name() and device.memory_allocated() >= 0
    device.empty_cache()
    device.manual_seed(3)
    state, first = device.get_rng_state(), torch.rand(1)
    device.set_rng_state(state)
    assert torch.equal(torch.rand(1), first) and device.initial_seed() == 3
    assert device.on_accelerator(torch.ones(1, device=device.device_name())) and device.is_available()
    with pytest.raises(AttributeError):
        device.no_such_name  # noqa: B018


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("from easymp.compat.deepspeed import DeepSpeedConfig", r"initialize\(config=…\)"),
        ("from easymp.compat.deepspeed.utils import set_z3_leaf_modules", "FSDPOptions"),
        ("from easymp.compat.deepspeed.pipe import PipelineModule", 'strategy="pipeline"'),
        ("from easymp.compat.deepspeed.zero import register_external_parameter", "leave it out"),
        ("from easymp.compat.deepspeed.runtime.config import DeepSpeedConfig", r"initialize\(config=…\)"),
        ("from easymp.compat.deepspeed.moe.layer import MoE", "experts are not spread"),
    ],
)
def test_names_that_are_not_here_say_what_is(line, words):
    with pytest.raises(ImportError, match=words):
        exec(line, {})
