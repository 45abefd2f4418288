"""Scripts written for Lightning Fabric: their set-up and loop, accumulation by hand, checkpoints, on one process and on two."""

from __future__ import annotations

import importlib
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from easymp.compat.lightning_fabric.loggers import CSVLogger
from easymp.compat.lightning_fabric.strategies import DDPStrategy, FSDPStrategy
from easymp.compat.lightning_fabric.utilities import rank_zero
from torch import nn

import easymp.compat.lightning_fabric as L
from easymp import CheckpointError, NonfiniteError, RefusedError, SettingError
from easymp.compat.lightning_fabric import Fabric

from . import fabric_script
from .fabric_script import Block, pretrained

OURS = "easymp.compat.lightning_fabric"
SHARDED = {"auto_wrap_policy": {Block}, "activation_checkpointing_policy": {Block}, "cpu_offload": False}


@pytest.fixture(autouse=True)
def _closed():
    yield
    L.layer.native.clear()


@pytest.fixture
def theirs(monkeypatch):
    """Lightning Fabric itself, where it is installed."""
    for name in ("PYTORCH_NVML_BASED_CUDA_CHECK", "PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.setenv(name, "1")  # as its import and seed_everything do
    return pytest.importorskip("lightning_fabric")


def one_model():
    """A Fabric, a model of two weights and its optimizer, set up."""
    fabric, net = Fabric(accelerator="cpu"), nn.Linear(2, 1)
    return fabric, *fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))


def halves(folder, strategy):
    """All steps at once; and half of them, then the others from a checkpoint."""
    whole = pretrained(OURS, f"{folder}/whole", strategy)
    first = pretrained(OURS, f"{folder}/halves", strategy, stop=2)
    return whole, first + pretrained(OURS, f"{folder}/halves", strategy)


@pytest.mark.parametrize("strategy", ["auto", "ddp", "fsdp", FSDPStrategy(**SHARDED)])
def test_a_script_trains_and_goes_on_from_its_checkpoint(ranks, tmp_path, strategy):
    for name in ("alone", "whole", "halves"):
        (tmp_path / name).mkdir()
    alone = pretrained(OURS, tmp_path / "alone")
    assert len(alone) == 4
    for whole, again in ranks(halves, str(tmp_path), strategy, processes=1 if strategy == "auto" else 2):
        assert whole == again == [pytest.approx(row, rel=1e-4) for row in alone]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_losses_are_those_of_fabric(theirs, tmp_path, precision):
    found = []
    for package in (OURS, "lightning_fabric"):
        (tmp_path / package).mkdir()
        found.append(pretrained(package, tmp_path / package, devices=1, precision=precision))
    near = 0.05 if "bf16" in precision else 1e-5
    assert found[0] == [pytest.approx(row, rel=near) for row in found[1]]


@pytest.mark.slow
def test_losses_on_two_processes_are_those_of_fabric(theirs, tmp_path):
    found = []
    for package in (OURS, "lightning_fabric"):
        folder = tmp_path / package
        folder.mkdir()
        words = [sys.executable, fabric_script.__file__, package, str(folder), "ddp", "2"]
        subprocess.run(words, check=True, timeout=300, capture_output=True, cwd=folder)
        steps = json.loads((folder / "found.json").read_text())
        found.append(
            [[mean, rate] for mean, _, rate in steps]
        )  # micro-batches hold other samples than Fabric's
    assert found[0] == [pytest.approx(row, rel=1e-5) for row in found[1]]


def test_its_signatures_are_those_of_fabric(theirs):
    public = {n for n in vars(theirs.Fabric) if n[0] != "_"} - {"accelerator"}
    assert public <= {*vars(Fabric), "loggers", "strategy"}
    forwarded = {"autocast", "print"}  # the Accelerator's own
    for name in (n for n in public - forwarded if inspect.isfunction(vars(theirs.Fabric)[n])):
        pair = (inspect.signature(vars(kind)[name]).parameters.values() for kind in (theirs.Fabric, Fabric))
        there, here = ([(p.name, p.kind) for p in parameters] for parameters in pair)
        assert there == here, name


def test_parts_are_one_file_and_filters_choose(tmp_path):
    part, file, raw = tmp_path / "part.safetensors", tmp_path / "model.safetensors", tmp_path / "raw.pth"
    fabric, model, optimizer = one_model()
    fabric.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    before = model.weight.detach().clone()
    with pytest.raises(ValueError, match="filter names"):
        fabric.save(part, {"model": model}, {"net": lambda name, value: False})
    for call in (fabric.save, fabric.load):
        with pytest.raises(SettingError, match="state is a list: pass a dict"):
            call(part, [model])
    fabric.save(file, {"model": model, "epoch": 3})
    fabric.save(part, {"model": model, "optimizer": optimizer}, {"model": lambda name, _: name == "bias"})
    nn.init.zeros_(model.weight)
    rest = fabric.load(part, {"model": model}, strict=False)
    assert model.weight.sum() == 0 and set(rest) == {"optimizer"}
    state = {"model": model, "epoch": 0}
    assert fabric.load(file, state) == {} and state["epoch"] == 3
    assert torch.equal(model.weight, before)
    with pytest.raises(KeyError, match="has no 'steps'"):
        fabric.load(file, {"steps": 0})
    torch.save({"weight": torch.ones(1, 2), "bias": torch.ones(1)}, raw)
    fabric.load_raw(raw, model)
    assert model.bias.item() == 1
    fabric.save(raw, {"model": model, "epoch": 4})  # litgpt's lit_model.pth
    assert torch.equal(torch.load(raw, weights_only=True)["model"]["weight"], model.weight)
    nn.init.zeros_(model.weight)
    assert fabric.load(raw, state) == {} and state["epoch"] == 4 and model.weight.sum() == 2
    with pytest.raises(CheckpointError, match="does not read this dict"):
        fabric.save(raw, {"model": model, "path": part})
    with pytest.raises(CheckpointError, match="was not set up"):
        fabric.save(tmp_path / "x", {"other": nn.Linear(1, 1)})
    fabric.easymp.close()


def test_values_of_a_whole_checkpoint(tmp_path):
    fabric, model, optimizer = one_model()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "best": torch.tensor(1.5)}
    state["step"] = 3
    for name in ("last", "part.safetensors"):
        optimizer.step()
        scheduler.step()
        fabric.save(tmp_path / name, state if name == "last" else {"scheduler": scheduler})
    nn.init.zeros_(model.weight)
    rest = fabric.load(tmp_path / "last")
    assert rest["best"] == 1.5 and rest["step"] == 3 and rest["scheduler"]["last_epoch"] == 1
    fabric.load(tmp_path / "part.safetensors", {"scheduler": scheduler})
    assert scheduler.last_epoch == 2
    assert model.weight.abs().sum() == 0  # without a state nothing is loaded
    state["best"] = torch.tensor(0.0)
    assert fabric.load(tmp_path / "last", state) == {}
    assert state["best"] == 1.5 and model.weight.abs().sum() > 0 and state["scheduler"] is scheduler
    assert scheduler.last_epoch == 1 and scheduler.get_last_lr() == [pytest.approx(0.01)]
    fabric.easymp.close()
    fabric = Fabric(accelerator="cpu")  # which has no optimizer
    state = {"model": fabric.setup(nn.Linear(2, 1)), "step": 0}
    assert set(fabric.load(tmp_path / "last", state)) == {"scheduler", "best"} and state["step"] == 3
    assert torch.equal(state["model"].weight, model.weight)
    fabric.easymp.close()


def test_settings_count_where_the_script_says_nothing(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EASYMP_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("EASYMP_LOG_WITH", "jsonl")
    fabric, other = Fabric(accelerator="cpu"), Fabric(accelerator="cpu", precision="32-true")
    assert fabric.easymp.mixed_precision == "bf16" and [t.name for t in fabric.easymp.trackers] == ["jsonl"]
    fabric.easymp.close()
    assert other.easymp.mixed_precision == "no"
    other.easymp.close()


def test_what_setup_returned_is_wrapped():
    fabric, *wrapped = one_model()
    assert all(L.is_wrapped(part) for part in wrapped) and not L.is_wrapped(nn.Linear(2, 1))
    several = nn.Sequential(nn.Linear(2, 1), nn.Tanh())  # has parts of its own
    schedule = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(several.parameters(), lr=0.1), 1)
    model, same = fabric.setup(several, scheduler=schedule)
    assert same is schedule and model.module is several and isinstance(model, nn.Sequential)
    assert [*model.state_dict()] == [*several.state_dict()]
    fabric.easymp.close()


def collectives(folder):
    fabric, model, _ = one_model()
    rank = fabric.global_rank
    gathered = fabric.all_gather({"a": torch.tensor([rank]), "b": float(rank)})
    assert gathered["a"].tolist() == [[0], [1]] and gathered["b"].tolist() == [0.0, 1.0]
    assert fabric.all_reduce(torch.tensor(float(rank)), reduce_op="sum").item() == 1
    values = {"a": torch.tensor(rank), "b": [torch.tensor([float(rank) + 2])]}
    fabric.all_reduce(values, reduce_op="max")  # tensors in place
    assert values == {"a": 1, "b": [3.0]}
    assert fabric.all_reduce(rank + 2, reduce_op=torch.distributed.ReduceOp.PRODUCT).item() == 6
    with pytest.raises(RefusedError, match=r"reduce_op='bxor' is not run here.*mean, sum, max"):
        fabric.all_reduce(torch.ones(1), reduce_op="bxor")
    assert rank_zero.rank_zero_only(lambda: "ran")() == (None if rank else "ran")
    assert fabric.broadcast({"of": rank}, src=1) == {"of": 1}
    with fabric.rank_zero_first():
        pass
    assert (fabric.world_size, fabric.is_global_zero, fabric.node_rank) == (2, rank == 0, 0)
    with pytest.raises(RefusedError, match="sync_grads"):
        fabric.all_gather(torch.ones(1), sync_grads=True)
    with pytest.raises(CheckpointError, match="does not read this dict"):  # on all ranks
        fabric.save(Path(folder, "part.ckpt"), {"model": model, "path": Path(folder)})
    fabric.barrier()
    fabric.easymp.close()


def test_collectives_and_errors_of_rank_0(ranks, tmp_path):
    ranks(collectives, str(tmp_path))


@pytest.mark.slow
def test_launch_starts_the_processes_and_run_launches(tmp_path):
    (tmp_path / "script.py").write_text(
        "from easymp.compat.lightning_fabric import Fabric\n"
        "class Mine(Fabric):\n"
        "    def run(self, word):\n"
        "        self.barrier()\n"
        "        open(f'{word}{self.global_rank}of{self.world_size}', 'w').close()\n"
        "Mine(accelerator='cpu', devices=2).run('ran')\n"
    )
    subprocess.run([sys.executable, "script.py"], cwd=tmp_path, check=True, timeout=100)
    assert {"ran0of2", "ran1of2"} <= {path.name for path in tmp_path.iterdir()}


def test_callbacks_and_loggers(tmp_path):
    calls, rows = [], []

    class Watch:
        def on_end(self, loss):
            calls.append(loss)

        def log_metrics(self, metrics, step=None):
            rows.append((metrics, step))

    fabric = Fabric(accelerator="cpu", callbacks=[Watch(), object()], loggers=Watch())
    fabric.call("on_end", loss=2.0, other=1)
    fabric.log("loss", torch.tensor(1.5), step=4)
    assert calls == [2.0] and rows == [({"loss": 1.5}, 4)] and fabric.logger is fabric.loggers[0]
    for version in (0, 1):
        log = CSVLogger(tmp_path, name="run", prefix="train")
        log.log_metrics({"loss": torch.tensor(2.5)}, step=4)
        log.log_metrics({"loss": 1.5, "lr": 0.1}, step=8)
        assert log.log_dir == str(tmp_path / "run" / f"version_{version}")
    assert Path(log.log_dir, "metrics.csv").read_text() == "step,train-loss,train-lr\n4,2.5,\n8,1.5,0.1\n"


def test_a_norm_that_is_not_finite_is_an_error():
    fabric, model, optimizer = one_model()
    fabric.backward(model(torch.full((1, 2), float("inf"))).sum())
    with pytest.raises(NonfiniteError, match="norm of the gradients"):
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
    with pytest.raises(ValueError, match="one of clip_val"):
        fabric.clip_gradients(model, optimizer)
    fabric.clip_gradients(model, optimizer, clip_val=0.5)
    fabric.easymp.close()


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"precision": "64-true"}, RefusedError, "64-true"),
        ({"strategy": "deepspeed_stage_3"}, RefusedError, "pass 'fsdp'"),
        ({"strategy": "fspd"}, RefusedError, "fsdp"),
        ({"accelerator": "tpu"}, SettingError, "tpu"),
        ({"devices": [1]}, RefusedError, "CUDA_VISIBLE_DEVICES"),
        ({"devices": 0}, SettingError, "number of processes"),
        ({"num_nodes": 2}, RefusedError, "easymp launch --nodes 2"),
        ({"plugins": object()}, RefusedError, "plugins"),
    ],
)
def test_what_is_not_run_is_refused(arguments, error, words):
    with pytest.raises(error, match=words):
        Fabric(**arguments)


def test_strategies_and_absent_modules():
    assert DDPStrategy(static_graph=True).options == {"static_graph": True}
    assert FSDPStrategy(auto_wrap_policy={nn.Linear}).options.wrap == ("Linear",)
    with pytest.raises(RefusedError, match="pass a set of the modules' classes"):
        FSDPStrategy(auto_wrap_policy=len)
    absent = r"lightning_fabric\.plugins is not part of easymp.compat: pass precision"
    with pytest.raises(ModuleNotFoundError, match=absent):
        importlib.import_module(f"{OURS}.plugins.precision")


# Names of lightning-fabric 2.6.6 that scripts import: here, forwarded or renamed; or refused, with a sentence.
NO_STRATEGIES = """DataParallelStrategy DeepSpeedStrategy ModelParallelStrategy ParallelStrategy SingleDeviceStrategy
    SingleDeviceXLAStrategy XLAFSDPStrategy XLAStrategy"""
UNUSED = """AttributeDict Throughput ThroughputMonitor measure_flops LightningEnum disable_possible_user_warnings is_shared_filesystem
    rank_zero_deprecation suggested_max_num_workers"""
NAMES = {
    "": ("Fabric is_wrapped seed_everything", ""),
    ".loggers": ("CSVLogger", "Logger TensorBoardLogger"),
    ".strategies": ("DDPStrategy FSDPStrategy Strategy", NO_STRATEGIES),
    ".utilities": ("move_data_to_device rank_zero_info rank_zero_only rank_zero_warn", UNUSED),
}


@pytest.mark.parametrize("module", NAMES)
def test_every_name_is_here_or_refused(module):
    here, refused = (words.split() for words in NAMES[module])
    ours = importlib.import_module(OURS + module)
    assert all(hasattr(ours, name) for name in here)
    for name in refused:
        with pytest.raises(ImportError, match=f"{name} is not part of easymp.compat"):
            getattr(ours, name)


@pytest.mark.parametrize("module", NAMES)
def test_fabric_has_no_other_names(module, theirs):
    module, known = importlib.import_module("lightning_fabric" + module), " ".join(NAMES[module]).split()
    public = getattr(module, "__all__", None) or [
        n for n, v in vars(module).items() if isinstance(v, type) and n[0] != "_" and "TPU" not in n
    ]
    assert sorted(public) == sorted(known)


class TwoWays(nn.Linear):
    def twice(self, x):
        self.cast = torch.is_autocast_enabled("cpu")
        return 2 * self(x)


def marked(precision=None):
    fabric = Fabric(accelerator="cpu", precision=precision)
    torch.manual_seed(0)
    model = fabric.setup(TwoWays(2, 1, bias=False))
    model.mark_forward_method("twice")
    model.mark_forward_method(model.twice)
    found = model.twice(torch.ones(1, 2) * (fabric.global_rank + 1))
    fabric.backward(found.sum())
    with pytest.raises(AttributeError, match="has no such method"):
        model.mark_forward_method("thrice")
    with pytest.raises(ValueError, match="forward is marked always"):
        model.mark_forward_method("forward")
    with pytest.raises(TypeError, match="got a int"):
        model.mark_forward_method(3)
    fabric.easymp.close()
    return model.cast, model.weight.grad.tolist()


def test_a_marked_method_computes_as_forward(ranks):
    assert marked("bf16-mixed") == (True, [[2.0, 2.0]])
    assert ranks(marked) == [(False, [[3.0, 3.0]])] * 2
