"""Scripts written for Accelerate.

Their imports, its defaults, and skeletons of its examples, on one process and on real ranks.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import math
import multiprocessing
import os
import pickle
import random
import re
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

import easymp
from easymp import EasympWarning, FSDPOptions, RefusedError, SettingError, StepError, WorldError
from easymp.compat import accelerate
from easymp.compat.accelerate import Accelerator, PartialState

utils = accelerate.utils
InitProcessGroupKwargs = utils.InitProcessGroupKwargs
TorchDynamoPlugin, FSDPPlugin = utils.TorchDynamoPlugin, utils.FullyShardedDataParallelPlugin
X = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(X, (X.sum(1) > 0).long())

# Modules whose names `accelerate_names.toml` does not list.
SCRIPTS = """
from accelerate.memory_utils import find_executable_batch_size
from accelerate.utils.dataclasses import DistributedType
from accelerate.utils.imports import is_bf16_available
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from accelerate.utils.operations import broadcast_object_list, recursively_apply
from accelerate.utils.other import extract_model_from_parallel, is_compiled_module
from accelerate.utils.random import set_seed
from accelerate.utils.tqdm import tqdm
"""


class Net(nn.Sequential):
    def __init__(self):
        torch.manual_seed(1)
        super().__init__(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def test_what_scripts_import():
    exec(SCRIPTS.replace("from accelerate", "from easymp.compat.accelerate"), {})
    for module in (accelerate, accelerate.utils, accelerate.utils.imports):
        assert [name for name in module.__all__ if getattr(module, name, None) is None] == []
    assert list(accelerate.utils.tqdm([1, 2], disable=True)) == [1, 2]
    assert accelerate.__version__ == "1.15.0" and not isinstance(DATA, utils.DeepSpeedPlugin)
    assert not utils.is_deepspeed_available() and not utils.is_npu_available() and utils.is_pytest_available()
    assert utils.is_torch_version(">=", "2.8") and not utils.is_torch_version("<", "2.8")
    with pytest.raises(ValueError, match="operation='=>' must be one of <, <=, ==, !=, >=, >"):
        utils.is_torch_version("=>", "2.8")
    assert utils.slice_tensors(torch.arange(4), slice(1, 3), process_index=0, num_processes=1).tolist() == [1, 2]
    for line, words in (
        ("from easymp.compat.accelerate import Acelerator", "did you mean 'Accelerator'"),
        ("from easymp.compat.accelerate.utils import infer_auto_device_map", r"strategy='fsdp'"),
        ("from easymp.compat.accelerate.state import SCALER_NAME", r"easymp checkpoint inspect"),
        ("from easymp import FullyShardedDataParallelPlugin", r"no 'FullySharded.*easymp.compat.accelerate"),
    ):
        with pytest.raises(ImportError, match=words):
            exec(line)


def test_defaults_are_accelerates_unless_a_setting_says_otherwise(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with Accelerator(True, None, None, 2, True) as acc:
        assert (acc.mixed_precision, acc.gradient_accumulation_steps, acc.scaler) == ("no", 2, None)
        assert (acc.device.type, acc.distributed_type) == ("cpu", utils.DistributedType.NO)
        assert (str(acc.distributed_type), str(utils.PrecisionType.FP16)) == ("DistributedType.NO", "fp16")
        number = torch.tensor(1.5)  # on one process it stays a number
        assert acc.gather(number).shape == utils.gather(number).shape == ()
        assert acc.state.deepspeed_plugin is acc.deepspeed_plugin is None
        acc.init_trackers("run", {"lr": 0.1}, init_kwargs={"wandb": {"name": "x"}})
        acc.log({"loss": 1.0}, step=1)
        assert acc.trackers == [] and accelerate.state.is_initialized()
        acc.get_tracker("wandb", unwrap=True).define_metric("loss")  # nothing, as there
        with pytest.raises(SettingError, match="'wand' is not a tracker"):
            acc.log({"loss": 1.0}, log_kwargs={"wand": {}})
        model = nn.Linear(2, 2)
        assert acc.unwrap_model(acc.prepare(model), keep_fp32_wrapper=True) is model
    assert list(tmp_path.iterdir()) == []
    with Accelerator(cpu=True, mixed_precision="bf16"), Accelerator(cpu=True) as second:
        assert second.mixed_precision == "bf16"  # the first one's
    monkeypatch.setenv("EASYMP_MIXED_PRECISION", "bf16")
    with Accelerator(split_batches=True) as acc:
        assert acc.mixed_precision == "bf16" and acc.split_batches and not acc.is_fsdp2
    with pytest.raises(RefusedError, match=r"megatron_lm_plugin=1.*: pass strategy='tensor_parallel'"):
        Accelerator(megatron_lm_plugin=1)
    with pytest.raises(TypeError, match="no argument 'mixed_precison'"):
        Accelerator(mixed_precison="no")
    windows = utils.GradientAccumulationPlugin(num_steps=2)
    with pytest.raises(ValueError, match="gradient_accumulation_steps=3 beside a gradient_accumulation_plugin"):
        Accelerator(gradient_accumulation_steps=3, gradient_accumulation_plugin=windows)
    config = utils.ProjectConfiguration(project_dir="mine")
    with Accelerator(project_dir="other", project_config=config, gradient_accumulation_plugin=windows) as acc:
        assert (acc.project_dir, acc.gradient_accumulation_steps) == ("mine", 2)  # as Accelerate


def test_plugins():
    no_shard, wrapped = SimpleNamespace(name="NO_SHARD"), {"transformer_cls_names_to_wrap": ["A"]}
    for strategy, options, given in (
        ("fsdp", FSDPOptions(), {}),
        ("fsdp", FSDPOptions(False, wrap=100), {"sharding_strategy": "SHARD_GRAD_OP", "min_num_params": 100}),
        ("fsdp", FSDPOptions(False, cpu_offload=True), {"reshard_after_forward": False, "cpu_offload": True}),
        ("hsdp", easymp.HSDPOptions(wrap=("A",)), {"sharding_strategy": "4", **wrapped}),
        ("ddp", None, {"sharding_strategy": no_shard}),
    ):
        plugin = FSDPPlugin(**given)
        assert (plugin.strategy, plugin.options) == (strategy, options)
        with Accelerator(cpu=True, fsdp_plugin=plugin) as acc:  # one process trains alone, as in Accelerate
            assert acc.plan.strategy.value == "single"
    for given, error, words in (
        ({"auto_wrap_policy": len}, RefusedError, "min_num_params"),
        ({"ignored_modules": [nn.Linear(1, 1)]}, RefusedError, "FSDPOptions"),
        ({"sharding_strategy": "FULL"}, SettingError, "did you mean 'FULL_SHARD'"),
        ({"shard_strategy": "FULL"}, SettingError, "did you mean 'sharding_strategy'"),
    ):
        with pytest.raises(error, match=words):
            FSDPPlugin(**given)
    with pytest.warns(EasympWarning, match="backward_prefetch"):
        FSDPPlugin(backward_prefetch="BACKWARD_PRE")
    for off in (TorchDynamoPlugin(), TorchDynamoPlugin("inductor", disable=True)):
        assert not off.compile_options()
    how = {"mode": "default", "dynamic": True, "use_regional_compilation": True}
    compiling = TorchDynamoPlugin("AOT_EAGER", **how).compile_options()
    assert compiling == easymp.CompileOptions("blocks", "aot_eager", dynamic=True)


def test_a_state_without_an_accelerator():
    with pytest.raises(RefusedError, match="backend='nccl' on cpu: collectives there are 'gloo'"):
        PartialState(cpu=True, backend="nccl")
    state = PartialState(cpu=True, timeout=60)
    assert (state.num_processes, state.device.type, state.is_main_process) == (1, "cpu", True)
    for how, words in ({"timeout": 30}, "in a run that is open"), ({"backend": "nccl"}, "'nccl' on cpu"):
        with pytest.raises(RefusedError, match=words):
            PartialState(**how)
    assert PartialState(backend="gloo", timeout=60).num_processes == 1
    state.destroy_process_group()
    assert not accelerate.state.is_initialized()


def counted_by_hand(steps, batch):
    """Accelerate's example of token-weighted losses.

    Batches fetched ahead, `no_sync` of the model, steps outside of `accumulate`.
    """
    with Accelerator(cpu=True, gradient_accumulation_steps=steps) as acc:
        model, losses = Net(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        schedule.total_steps = 7  # as OneCycleLR has, which refuses the eighth
        loader = DataLoader(DATA, batch_size=batch)
        model, optimizer, schedule, loader = acc.prepare(model, optimizer, schedule, loader)
        for _ in range(2):
            batches = iter(loader)
            for _ in range(-(-len(loader) // steps)):
                ahead = [batch for _, batch in zip(range(steps), batches)]
                count = acc.gather(torch.tensor([sum(len(x) for x, _ in ahead)])).sum().item()
                for i, (x, y) in enumerate(ahead):
                    last = i == len(ahead) - 1 or acc.num_processes == 1
                    with contextlib.nullcontext() if last else model.no_sync():
                        loss = nn.functional.cross_entropy(model(x), y, reduction="sum") / count
                        acc.backward(loss * steps * acc.num_processes)
                acc.clip_grad_norm_(model.parameters(), 10.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                losses.append(acc.gather(loss.detach()).sum().item())
        module = model.module if hasattr(model, "module") else model
        assert type(module) is Net
        next(iter(loader))
        acc.backward(model(X[:8]).sum())
        with pytest.raises(StepError, match="1 of gradient_accumulation_steps=4 backward passes"):
            optimizer.step()
        # one step a process and update, and not beyond the schedule's end
        assert (len(losses), schedule.last_epoch) == ((4, 7) if acc.num_processes > 1 else (4, 4))
        return [p.sum().item() for p in module.parameters()]


def test_windows_that_a_script_counts_itself(ranks):
    two, other = ranks(counted_by_hand, 4, 4)
    assert two == other == pytest.approx(counted_by_hand(4, 8), abs=1e-5)  # as many samples an update


def scheduled(calls, updates, before=0, **options):
    """Rate and count of a schedule after `before` steps, and after each of `updates` backwards with `calls` steps."""
    handlers = [utils.GradScalerKwargs(init_scale=16.0)] if "mixed_precision" in options else []
    with Accelerator(cpu=True, kwargs_handlers=handlers, **options) as acc:
        model, seen = Net(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 - n / 20)
        model, optimizer, schedule = acc.prepare(model, optimizer, schedule)
        for update in range(-1, updates):
            if update >= 0:
                with acc.accumulate(model):
                    loss = model(X[:4]).mean() * 1e-4
                    acc.backward(loss * math.inf if "mixed_precision" in options and update == 1 else loss)
                    optimizer.step()
                    optimizer.zero_grad()
            for _ in range(calls if update >= 0 else before):
                schedule.step()
            seen.append((round(schedule.get_last_lr()[0], 4), schedule.state_dict()["_step_count"]))
        return seen


FOUR = {"updates": 4, "gradient_accumulation_steps": 4}
BY_CALLS = {"updates": 2, "gradient_accumulation_steps": 2, "step_scheduler_with_optimizer": False}
SCHEDULES = [  # what to run, and what Accelerate 1.15 gives with one process and with two
    ({"calls": 2, "updates": 2}, [(1.0, 1), (0.9, 3), (0.8, 5)], [(1.0, 1), (0.8, 5), (0.6, 9)]),
    ({"calls": 1, **FOUR}, [*[(1.0, 1)] * 4, (0.95, 2)], [*[(1.0, 1)] * 4, (0.9, 3)]),
    ({"calls": 1, "updates": 1, "split_batches": True}, [(1.0, 1), (0.95, 2)], [(1.0, 1), (0.95, 2)]),
    ({"calls": 1, **BY_CALLS}, [(1.0, 1), (0.95, 2), (0.9, 3)], [(1.0, 1), (0.95, 2), (0.9, 3)]),
    ({"calls": 1, "updates": 1, "before": 3}, [(0.85, 4), (0.8, 5)], [(0.7, 7), (0.6, 9)]),
    (
        {"calls": 1, "updates": 3, "mixed_precision": "fp16"},
        [(1.0, 1), (0.95, 2), (0.95, 2), (0.9, 3)],
        [(1.0, 1), (0.9, 3), (0.9, 3), (0.8, 5)],
    ),
]


def all_scheduled():
    return [scheduled(**case) for case, _, _ in SCHEDULES]


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_schedules_count_calls_as_in_accelerate(ranks):
    assert all_scheduled() == [one for _, one, _ in SCHEDULES]
    assert ranks(all_scheduled) == [[two for _, _, two in SCHEDULES]] * 2


def saved_alone(strategy, folder):
    """What diffusers' examples do: the others go on to their next collective."""
    acc = Accelerator(cpu=True, strategy=strategy, kwargs_handlers=[InitProcessGroupKwargs(timeout=30)])
    model = Net()
    model, optimizer = acc.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))

    def trained():
        for _ in range(2):
            acc.backward(model(X[4 * acc.process_index :][:4]).sum())
            optimizer.step()
            optimizer.zero_grad()
        return [p.sum().item() for p in model.parameters()]

    try:
        trained()
        if acc.is_main_process:
            acc.save_state(f"{folder}/alone")
            acc.save_model(model, f"{folder}/model", safe_serialization=False)
        after = trained()
        acc.load_state(f"{folder}/alone")
        once_more = trained()
        acc.wait_for_everyone()
        acc.save_state(f"{folder}/all")
        if acc.is_main_process:
            acc.save_state(f"{folder}/last")  # the other one ends meanwhile
        return after == once_more
    except (RefusedError, WorldError) as error:
        return str(error)
    finally:
        acc.end_training()


SLOW = [pytest.param(strategy, marks=pytest.mark.slow) for strategy in ("zero1", "fsdp")]


@pytest.mark.parametrize("strategy", ["ddp", *SLOW])
def test_the_main_process_saves_alone(ranks, tmp_path, monkeypatch, strategy):
    monkeypatch.chdir(tmp_path)
    first, second = ranks(saved_alone, strategy, str(tmp_path))
    if strategy != "ddp":
        assert "every rank has a part" in first and isinstance(second, str)  # which hears of an error
        return
    assert first is second is True and os.listdir("model") == ["pytorch_model.bin"]
    alone, saved = Net(), torch.load("model/pytorch_model.bin", weights_only=True)
    easymp.load_weights(alone, "alone")
    assert all(torch.equal(value, saved[name]) for name, value in alone.state_dict().items())


def test_automatic_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    project = utils.ProjectConfiguration(project_dir="named", automatic_checkpoint_naming=True, total_limit=2)
    with Accelerator(cpu=True, project_config=project) as acc:
        model = acc.prepare(nn.Linear(2, 1))
        places = [Path(acc.save_state()).name for _ in range(3)]
        nn.init.zeros_(model.weight)
        acc.load_state()
        assert model.weight.abs().sum() > 0 and acc.save_iteration == 3
    with Accelerator(cpu=True, project_config=dataclasses.replace(project, iteration=2)) as acc:
        acc.prepare(nn.Linear(2, 1))
        with pytest.raises(ValueError, match="checkpoint_2 exists already"):
            acc.save_state()
    assert places == [f"checkpoint_{i}" for i in range(3)]
    kept = sorted(path.name for path in Path("named/checkpoints").glob("checkpoint*"))
    assert kept == ["checkpoint_1", "checkpoint_2"]


class Own:
    pass


def test_files_of_torch_save(tmp_path):
    with Accelerator(cpu=True) as acc:
        acc.save({"a": torch.ones(2), "n": [1, "x", None]}, tmp_path / "x.bin")
        assert torch.load(tmp_path / "x.bin", weights_only=True)["n"] == [1, "x", None]
        for value in (Own(), SimpleNamespace(a=1)):
            with pytest.raises(RefusedError, match="weights_only=True"):
                acc.save(value, tmp_path / "x.bin")
        assert [path.name for path in tmp_path.iterdir()] == ["x.bin"]
        model = acc.prepare(Net())
        acc.save_model(model, tmp_path / "model", max_shard_size=100, safe_serialization=False)
        assert len(list((tmp_path / "model").glob("pytorch_model-*.bin"))) > 1
        weight_map = json.loads((tmp_path / "model" / "pytorch_model.bin.index.json").read_text())["weight_map"]
        for name, value in acc.unwrap_model(model).state_dict().items():
            assert torch.equal(torch.load(tmp_path / "model" / weight_map[name], weights_only=True)[name], value)
        acc.save_model(model, tmp_path / "model", safe_serialization=False)
        index = "pytorch_model.bin.index.json"
        assert sorted(path.name for path in (tmp_path / "model").iterdir()) == ["pytorch_model.bin", index]


def lengths_of_uneven_loaders() -> tuple[int, int]:
    with Accelerator(cpu=True) as acc:
        acc.even_batches = False  # as sentence_transformers does
        uneven = acc.prepare(DataLoader(list(range(3)), batch_size=1))
        acc.even_batches = True
        return sum(1 for _ in uneven), sum(1 for _ in acc.prepare(DataLoader(list(range(3)), batch_size=1)))


def test_an_epoch_ends_with_a_whole_pass_over_the_loader_itself():
    accelerate.utils.set_seed(3)
    acc = Accelerator(cpu=True, dataloader_config=accelerate.DataLoaderConfiguration(use_seedable_sampler=True))
    loader = acc.prepare(DataLoader(TensorDataset(torch.arange(16)), batch_size=3, shuffle=True))

    def order(batches):
        return [batch.tolist() for (batch,) in batches]

    orders = [order(loader)]
    rest = order(acc.skip_first_batches(loader, 2))
    first = next(iter(loader))[0].tolist()
    orders.append(order(loader))
    assert rest == orders[1][2:] and first == orders[1][0]
    loader.set_epoch(0)
    assert order(loader) == orders[0] != orders[1]
    # Accelerate 1.15 on one process and torch 2.13
    assert [epoch[:2] for epoch in orders] == [[[10, 9, 5], [6, 8, 11]], [[10, 0, 7], [4, 13, 8]]]


def test_even_batches_may_be_set_between_loaders(ranks):
    assert ranks(lengths_of_uneven_loaders) == [(2, 2), (1, 2)]


@pytest.mark.filterwarnings("ignore:Accelerate")
def test_second_arguments_of_checkpoints_are_accelerates(tmp_path):
    with Accelerator(cpu=True) as acc:
        model = acc.prepare(nn.Linear(2, 1))
        assert Path(acc.save_state(tmp_path / "one", True), "COMMIT").exists()  # and not in the background
        nn.init.zeros_(model.weight)
        acc.load_state(tmp_path / "one", None, map_location="cpu")
        assert model.weight.abs().sum() > 0
        with pytest.raises(RefusedError, match="safe_serialization"):
            acc.save_state(tmp_path / "two", False)
        with pytest.raises(ValueError, match="no checkpoint there"):
            acc.load_state(tmp_path / "three")
        with pytest.raises(RefusedError, match="load_kwargs"):
            acc.load_state(tmp_path / "one", {"weights_only": True})


def test_a_bare_parameter_and_an_unfinished_window_are_saved(tmp_path):
    with Accelerator(cpu=True, gradient_accumulation_steps=2) as acc:
        bare, model = nn.Parameter(torch.ones(2)), nn.Linear(2, 1)
        model, optimizer = acc.prepare(model, torch.optim.SGD([bare, *model.parameters()], lr=1.0))
        for update in range(2):
            for micro in range(2):
                with acc.accumulate(model):
                    acc.backward(model(bare).sum())
                    if (update, micro) == (1, 0):
                        trained = bare.detach().clone()
                        acc.save_state(tmp_path / "inside")
                    optimizer.step()
                    optimizer.zero_grad()
        assert not torch.equal(bare, trained) and not torch.equal(trained, torch.ones(2))
        acc.load_state(tmp_path / "inside")
        assert torch.equal(bare, trained)


def test_what_prepare_takes():
    other = SimpleNamespace(step=dict, state_dict=dict)  # no LRScheduler
    with Accelerator(cpu=True) as acc:
        model = nn.Linear(2, 1)
        optimizer = acc.prepare_optimizer(optimizer=torch.optim.SGD(model.parameters(), lr=1.0))
        same, none = acc.prepare(other, None)
        assert acc.prepare_scheduler(scheduler=other) is other
        loader = acc.prepare_data_loader(data_loader=DataLoader(range(5), batch_size=2))
        with pytest.raises(RefusedError, match="split along dimension 0"):
            acc.prepare_data_loader(loader, slice_fn_for_dispatch=print)
        assert same is other and none is None and isinstance(loader, DataLoader)
        assert len(pickle.loads(pickle.dumps(loader))) == 3
        assert [(loader.end_of_dataloader, loader.remainder) for _ in loader][1:] == [(False, 1), (True, 1)]
        acc.backward(acc.prepare(model)(torch.ones(1, 2)).sum())
        optimizer.step()
        assert acc._optimizers == [optimizer] and model.bias.grad == 1
        with pytest.raises(ValueError, match="a Tensor cannot be kept: no state_dict"):
            acc.register_for_checkpointing(optimizer, torch.ones(1))
        with pytest.raises(ValueError, match="device_placement has 1 values for 2"):
            acc.prepare(1, 2, device_placement=[True])


def test_functions_of_one_decorator_lose_batch_size_apart():
    tried = {"first": [], "second": []}

    def training(name, batch_size):
        tried[name].append(batch_size)
        if len(tried[name]) < 3:
            raise MemoryError
        return batch_size

    decorate = accelerate.find_executable_batch_size(starting_batch_size=100)
    runs = [decorate(lambda batch_size, name=name: training(name, batch_size)) for name in tried]
    assert [run() for run in runs] == [81, 81] and tried["first"] == tried["second"] == [100, 90, 81]


class Kept(accelerate.tracking.GeneralTracker):
    name, requires_logging_directory = "kept", True

    def __init__(self, run_name, folder, **options):
        super().__init__()
        self.made, self.calls = (run_name, folder, options), []

    @property
    def tracker(self):
        return self.calls

    def store_init_configuration(self, values):
        self.calls.append(values)

    @accelerate.tracking.on_main_process
    def log(self, values, step=None, **options):
        self.calls.append((values, step, options))


def test_trackers_of_the_script_get_what_was_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    logged, nested = {"loss": 0.5, "note": "x"}, {"val": {"accuracy": [0.9]}}
    with Accelerator(cpu=True, log_with=Kept("digits", "runs"), project_dir="runs") as acc:
        acc.init_trackers("digits", {"lr": 0.1})
        acc.log(logged, step=3, log_kwargs={"kept": {"commit": True}})
        acc.log(nested)
        tracker = acc.get_tracker("kept")
        assert isinstance(tracker, Kept) and tracker.made == ("digits", "runs", {})
        assert isinstance(tracker, easymp.GeneralTracker) and acc.get_tracker("kept", unwrap=True) is tracker.calls
    assert tracker.calls == [{"lr": 0.1}, (logged, 3, {"commit": True}), (nested, None, {})]
    with pytest.raises(NotImplementedError, match="no name and no requires_logging_directory"):
        type("Bare", (accelerate.tracking.GeneralTracker,), {"tracker": None})()


def evaluated():
    """fsdp_with_peak_mem_tracking's plugin; run_clm_no_trainer's evaluation, and what its end may look like."""
    acc = Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs("gloo", timeout=60)], fsdp_plugin=FSDPPlugin())
    model = Net()
    model, optimizer = acc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    acc.backward(model(X[:4]).sum())
    optimizer.step()
    assert len(acc.get_state_dict(model)) == (4 if acc.is_main_process else 0)
    (loader,) = (acc.prepare(DataLoader(TensorDataset(torch.arange(21.0)), batch_size=4)),)
    losses = torch.cat([acc.gather_for_metrics(x.mean().repeat(4)) for (x,) in loader])
    logger = accelerate.logging.get_logger("easymp.tests.accelerate")
    logger.info("%s", acc.state, main_process_only=False, in_order=True)
    facts = len(losses), losses.mean().item(), acc.distributed_type.value, acc.plan.strategy.value
    acc.end_training()
    if acc.num_processes > 1:
        with pytest.raises(WorldError, match=r"wait_for_everyone after end_training\(\)"):
            acc.wait_for_everyone()
    return facts


def test_a_plugin_for_fsdp_and_a_repeated_loss_that_weighs_as_much_as_its_samples(ranks):
    assert evaluated() == (21, 10.0, "NO", "single")
    assert {(n, *rest) for n, _, *rest in ranks(evaluated)} == {(21, "FSDP", "fsdp")}


@pytest.mark.filterwarnings("ignore:Accelerate")
def test_objects_outside_of_loops_and_copies_of_states():
    with Accelerator(cpu=True, gradient_accumulation_steps=2) as acc:
        assert acc.gather_for_metrics(["a", 1]) == ["a", 1]
        for again in (copy.copy, copy.deepcopy, lambda state: pickle.loads(pickle.dumps(state))):
            process, whole, window = (again(s) for s in (PartialState(), acc.state, acc.gradient_state))
            for absent in (process, "_window"), (window, "_world"), (window, "none"):
                assert not hasattr(*absent)
            assert (process.num_processes, whole.mixed_precision, window.num_steps) == (1, "no", 2)


def clipped(precision):
    """Gradients and norms where a script clips on each micro-step."""
    with Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision=precision) as acc:
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        model, optimizer = acc.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        norms = []
        for x in (2.0, 4.0):
            with acc.accumulate(model):
                acc.backward(model(torch.full((1, 1), x * (acc.process_index + 1))).sum())
                norms.append(float(acc.clip_grad_norm_(model.parameters(), 0.5)))
                if not acc.sync_gradients:
                    acc.clip_grad_value_(model.parameters(), 0.25)
                optimizer.step()
        return norms, model.weight.item()


def test_a_clip_on_each_micro_step_clips_what_its_rank_has_so_far(ranks):
    assert clipped("no") == ([1.0, 2.25], pytest.approx(-0.5))
    first, second = ranks(clipped, "no")
    assert first[0] == [1.0, 3.25] and second[0] == [2.0, 3.25] and first[1] == second[1] == pytest.approx(-0.5)
    with pytest.raises(StepError, match=r"if accelerator\.sync_gradients"):
        clipped("fp16")


def drawn_after_prepare():
    """Random numbers before and after `prepare`, a broadcast, and a model that is only evaluated."""
    accelerate.utils.set_seed(3)
    with Accelerator(cpu=True) as acc:
        model = acc.prepare(nn.Linear(2, 1))
        numbers = [random.random(), numpy.random.rand(), torch.rand(1).item()]
        tensors = {"x": torch.full((2,), acc.process_index + 1.0)}
        assert utils.broadcast(tensors)["x"] is tensors["x"]
        other = nn.Linear(2, 1)
        teacher = acc.prepare_model(other, evaluation_mode=True)
        assert teacher is other and teacher in acc._models and all(p.requires_grad for p in teacher.parameters())
        teacher(torch.full((1, 2), acc.process_index + 1.0)).sum().backward()
        assert model.weight.grad is None
        utils.set_seed(3, device_specific=True)
        return numbers, tensors["x"].tolist(), other.weight.grad[0, 0].item(), torch.initial_seed()


def test_a_model_that_was_evaluated_is_trained():
    with Accelerator(cpu=True, mixed_precision="bf16") as acc:
        model = nn.Linear(2, 1)
        assert acc.prepare_model(model, evaluation_mode=True) is model
        x = torch.full((1, 2), 1.001)
        assert model(x).dtype == torch.float32 and model(x) != nn.functional.linear(x, model.weight, model.bias)
        acc.free_memory()
        assert "forward" not in vars(model) or model.forward.__func__ is nn.Linear.forward
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        trained, optimizer = acc.prepare(model, optimizer)
        acc.backward(trained(x).sum())
        optimizer.step()
        assert model.weight.grad is not None and acc._models == [trained]


def test_ranks_draw_the_same_numbers_after_prepare(ranks):
    first, second = ranks(drawn_after_prepare)
    assert first[:2] == second[:2] == drawn_after_prepare()[:2] and first[1] == [1.0, 1.0]
    assert (first[2:], second[2:]) == ((1.0, 3), (2.0, 4))


class Noisy(TensorDataset):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + random.random() + torch.rand(4), y


def losses_of(accelerator, utils, configuration):
    """Losses of scripts that shuffle, draw in the data set and drop out, by `accelerator`, or a plain loop for None."""
    losses = {}
    for name, config, data, options in (
        ("shuffled", {}, DATA, {"shuffle": True}),
        ("its own generator", {}, DATA, {"shuffle": True, "generator": torch.Generator().manual_seed(9)}),
        ("weighted", {}, DATA, {"sampler": WeightedRandomSampler(torch.arange(48) + 1.0, 48)}),
        ("workers", {}, Noisy(*DATA.tensors), {"shuffle": True, "num_workers": 1}),
        ("random data", {}, Noisy(*DATA.tensors), {"shuffle": True}),
        ("seedable", {"use_seedable_sampler": True}, DATA, {"shuffle": True}),
    ):
        if name == "workers" and multiprocessing.current_process().daemon:
            continue  # the pool's ranks start no processes
        utils.set_seed(3)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
        objects = model, torch.optim.SGD(model.parameters(), lr=0.5), DataLoader(data, 8, **options)
        acc = accelerator and accelerator(cpu=True, dataloader_config=configuration(**config))
        model, optimizer, loader = acc.prepare(*objects) if acc else objects
        seen = []
        for _ in range(2):
            for x, y in loader:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(x), y)
                (acc.backward if acc else torch.Tensor.backward)(loss)
                optimizer.step()
                seen.append(loss.item())
        losses[name] = [round(loss, 5) for loss in (seen[0], seen[-1])]
        if acc:
            acc.free_memory() if not hasattr(acc, "close") else acc.close()
    return losses


# Of Accelerate 1.15, on one process; and on two the first process's.
LOSSES = {
    "shuffled": [0.84368, 0.40388],
    "its own generator": [0.88345, 0.15649],
    "weighted": [0.87716, 0.30525],
    "workers": [1.01811, 0.62687],
    "random data": [0.83948, 0.79159],
    "seedable": [0.76796, 0.10396],
}
LOSSES_OF_TWO = {
    "shuffled": [1.19771, 0.21342],
    "its own generator": [0.88345, 0.68894],
    "weighted": [0.66576, 0.32017],
    "random data": [0.95363, 1.03893],
    "seedable": [0.76796, 0.37947],
}


def own_losses():
    return losses_of(Accelerator, utils, accelerate.DataLoaderConfiguration)


def test_losses_are_accelerates_to_the_last_printed_digit(ranks):
    assert own_losses() == LOSSES
    assert ranks(own_losses)[0] == LOSSES_OF_TWO
    plain = losses_of(None, utils, None)
    assert {name for name in plain if plain[name] != LOSSES[name]} == {"random data", "seedable"}  # read ahead there


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(13))


def tails():
    """Batches of the last round, and what `gather_for_metrics` gives of it."""
    found = []
    for data, config in (
        (Stream(), {}),
        (Stream(), {"even_batches": False}),
        (Stream(), {"dispatch_batches": False, "even_batches": False}),
        (range(13), {"dispatch_batches": True, "even_batches": False}),
        (range(13), {"even_batches": False}),
        (range(13), {}),
    ):
        with Accelerator(cpu=True, dataloader_config=accelerate.DataLoaderConfiguration(**config)) as acc:
            batches = [batch.tolist() for batch in acc.prepare(DataLoader(data, 4))]
            even = config != {"even_batches": False} or data != range(13)
            loader = acc.prepare(DataLoader(data, 4)) if even else ()
            assert sum(len(acc.gather_for_metrics(batch)) for batch in loader) == 13 * even
            found.append(batches[1:])
    return found


def test_the_last_batches_are_split_as_accelerate_splits_them(ranks):
    split, filled = ([[8, 9, 10]], [[11, 12, 0]]), ([[8, 9, 10, 11]], [[12, 0, 1, 2]])
    short = [[8, 9, 10, 11]], [[12]]
    assert list(zip(*ranks(tails))) == [split, split, filled, split, short, filled]


def backward_after_no_sync():
    """A backward of a loss from under `no_sync`, and one past the prepared model."""
    with Accelerator(cpu=True) as acc:
        model, messages = acc.prepare(nn.Linear(1, 1, bias=False)), []
        with acc.no_sync(model):
            loss = model(torch.ones(1, 1)).sum()
        for apart in loss, acc.unwrap_model(model)(torch.ones(1, 1)).sum():
            with pytest.raises(StepError) as raised:
                acc.backward(apart)
            messages.append(str(raised.value))
        return messages


def test_a_loss_that_no_rank_averages_is_refused(ranks):
    for messages in ranks(backward_after_no_sync):
        assert all("no rank averages" in message for message in messages), messages


def test_what_libraries_ask():
    with pytest.raises(ValueError, match="requires a logging_dir"):
        Accelerator(cpu=True, log_with="tensorboard")
    with Accelerator(cpu=True) as acc:
        one = acc.prepare(DataLoader(range(4)))
        again = pickle.loads(pickle.dumps(acc))
        assert again is acc and again._dataloaders == [one] and one._is_accelerate_prepared
        written = pickle.dumps(acc)
    with pytest.raises(StepError, match="none is"):
        pickle.loads(written)
    assert one.gradient_state.active_dataloader is None and one.batch_sampler.batch_size == 1
    acc = Accelerator(cpu=True)
    assert PartialState._shared_state
    gone, acc = weakref.ref(acc), None
    assert gone() is None  # at once, without garbage collection
    PartialState._reset_state()
    assert PartialState._shared_state == {}
    with Accelerator(cpu=True, dynamo_backend="EAGER") as acc:
        assert acc.plan.settings.compile.backend == "eager"


def test_weights_on_one_device():
    other = Net()
    utils.set_module_tensor_to_device(other, "0.weight", "meta")
    for value, words in (torch.ones(2, 2), "has shape (8, 4)"), (None, "has no values: pass value="):
        with pytest.raises(ValueError, match=re.escape(words)):
            utils.set_module_tensor_to_device(other, "0.weight", "cpu", value=value)
    utils.set_module_tensor_to_device(other, "0.weight", "cpu", value=torch.ones(8, 4))
    assert other[0].weight.sum() == 32 and other[0].weight.requires_grad
    assert utils.convert_file_size_to_int("0MB") == 0 and utils.convert_file_size_to_int("1MiB") == 2**20
    with pytest.raises(TypeError, match="joins nested tensors only"):
        utils.concatenate([{"name": "a"}, {"name": "b"}])


def test_what_would_be_read_as_another_thing_is_a_type_error():
    with pytest.raises(TypeError, match="positional"):  # the fifth is Accelerate's check_reduction
        accelerate.DistributedDataParallelKwargs(0, True, 25, False, True)
    with Accelerator(cpu=True) as acc, pytest.raises(TypeError, match="the leaf at \\['name'\\] is a str"):
        acc.gather({"name": "a"})
