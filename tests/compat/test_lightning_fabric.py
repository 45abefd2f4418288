"""Scripts written for Lightning Fabric.

Their set-up and loop, accumulation by hand, checkpoints, on one process and on two.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch
from easymp.compat.lightning_fabric.loggers import CSVLogger, TensorBoardLogger
from easymp.compat.lightning_fabric.utilities import rank_zero, seed
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

import easymp.compat.lightning_fabric as L
from easymp import CheckpointError, NonfiniteError, RefusedError, SettingError, StepError
from easymp.compat.lightning_fabric import Fabric
from easymp.compat.lightning_fabric.strategies import DDPStrategy, FSDPStrategy

from . import fabric_script
from .fabric_script import Block, pretrained

OURS = "easymp.compat.lightning_fabric"
WORKER_DRAWS = [(52, 888, 824), (586, 580, 411), (583, 811, 809)]  # of Fabric 2.6.6: torch, Python, NumPy
SHARDED = {"auto_wrap_policy": {Block}, "activation_checkpointing_policy": {Block}, "cpu_offload": False}


@pytest.fixture(autouse=True)
def _variables(monkeypatch):
    """Lightning's variables, which seed_everything and the import of Fabric set."""
    for name in ("PYTORCH_NVML_BASED_CUDA_CHECK", "PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.setenv(name, "1")
        monkeypatch.delenv(name)


@pytest.fixture
def fabric():
    fabric = Fabric(accelerator="cpu")
    yield fabric
    fabric.easymp.close()


def one_model(fabric, **options):
    """A model of two weights and its optimizer, set up."""
    net = nn.Linear(2, 1)
    return fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), **options)


def halves(folder, strategy):
    """All steps at once; and half of them, then the others from a checkpoint."""
    expected = pretrained(OURS, f"{folder}/whole", strategy)
    first = pretrained(OURS, f"{folder}/halves", strategy, stop=2)
    return expected, first + pretrained(OURS, f"{folder}/halves", strategy)


@pytest.mark.parametrize("strategy", ["auto", "ddp", "fsdp", FSDPStrategy(**SHARDED)])
def test_a_script_trains_and_goes_on_from_its_checkpoint(ranks, tmp_path, strategy):
    for name in ("alone", "whole", "halves"):
        (tmp_path / name).mkdir()
    single_process = pretrained(OURS, tmp_path / "alone")
    assert len(single_process) == 4
    for expected, resumed in ranks(halves, str(tmp_path), strategy, processes=1 if strategy == "auto" else 2):
        assert expected == [pytest.approx(row, rel=1e-5) for row in resumed]
        assert [row[::2] for row in expected] == [pytest.approx(row[::2], rel=1e-4) for row in single_process]
    contents = torch.load(tmp_path / "halves" / "last.ckpt", weights_only=True)  # one file, as Fabric's
    assert contents["hparams"] == {"lr": 0.05} and contents["model"]["3.weight"].shape == (11, 16)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_losses_in_bf16_are_those_of_fabric(tmp_path, processes):
    """test_random_scripts has its other precisions."""
    pytest.importorskip("lightning_fabric")
    losses = []
    for package in (OURS, "lightning_fabric"):
        folder = tmp_path / package
        folder.mkdir()
        arguments = [package, str(folder), "auto" if processes == 1 else "ddp", str(processes), "bf16-true"]
        command = [sys.executable, fabric_script.__file__, *arguments]
        subprocess.run(command, check=True, timeout=300, capture_output=True, cwd=folder)
        losses.append(json.loads((folder / "found.json").read_text()))
    assert losses[0] == [pytest.approx(row, rel=1e-3) for row in losses[1]]  # torch's fused step rounds less often


def test_its_signatures_are_those_of_fabric():
    original = pytest.importorskip("lightning_fabric")
    public = {name for name in vars(original.Fabric) if name[0] != "_"} - {"accelerator"}
    assert public <= {*dir(Fabric), "loggers", "strategy"}
    methods = [name for name in public - {"autocast"} if inspect.isfunction(vars(original.Fabric)[name])]
    for name in methods:
        expected, parameters = (
            [(p.name, p.kind) for p in inspect.signature(getattr(kind, name)).parameters.values()]
            for kind in (original.Fabric, Fabric)
        )
        assert parameters == expected, name


def test_files_hold_what_the_state_names(fabric, tmp_path):
    model, optimizer = one_model(fabric)
    average = nn.Linear(2, 1)  # of the weights, and not set up
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    fabric.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    scheduler.step()
    weight, new_model = model.weight.detach().clone(), average.weight.detach().clone()
    state = {"model": model, "ema": average, "optimizer": optimizer, "scheduler": scheduler, "epoch": 3}
    for path in (tmp_path / "all.ckpt", tmp_path / "all.safetensors"):
        fabric.save(path, state)
        for module in (model, average):
            nn.init.zeros_(module.weight)
        optimizer.state.clear()
        scheduler.last_epoch, state["epoch"] = 0, 0
        assert fabric.load(path)["optimizer"]["param_groups"][0]["momentum"] == 0.9
        assert model.weight.abs().sum() == 0  # without a state nothing is loaded
        assert fabric.load(path, state) == {} and state["epoch"] == 3 and scheduler.last_epoch == 1
        assert torch.equal(model.weight, weight) and torch.equal(average.weight, new_model)
        assert optimizer.state[optimizer.param_groups[0]["params"][0]]["momentum_buffer"].tolist() == [[1.0, 1.0]]
        assert set(fabric.load(path, {"model": model})) == {"ema", "optimizer", "scheduler", "epoch"}
    with pytest.raises(KeyError, match="contains a key 'steps' that does not exist in"):
        fabric.load(path, {"steps": 0})
    assert fabric.load(path, {"steps": 0}, strict=False).keys() == state.keys()
    with pytest.raises(FileNotFoundError, match="there is no file"):
        fabric.load(tmp_path / "none.ckpt")
    with pytest.raises(CheckpointError, match="does not read this dict"):
        fabric.save(tmp_path / "x.ckpt", {"path": tmp_path})


def test_filters_choose_and_raw_files_are_read(fabric, tmp_path):
    model, optimizer = one_model(fabric)
    path = tmp_path / "part.ckpt"
    state = {"model": model, "optimizer": optimizer, "step": 2}
    fabric.save(path, state, {"model": lambda name, _: name == "bias"})
    assert fabric.load(path)["model"].keys() == {"bias"}
    fabric.save(path, state, dict.fromkeys(state, lambda *_: False))
    assert fabric.load(path) == {"step": 2}  # a number has no names to choose from
    for wrong, error, message in (
        ({"net": lambda name, value: False}, ValueError, "The filter keys {'net'} are not present"),
        ({"model": True}, TypeError, "to be a callable, given True"),
        (len, TypeError, "Filter should be a dictionary"),
    ):
        with pytest.raises(error, match=message):
            fabric.save(path, {"model": model}, wrong)
    for call in (fabric.save, fabric.load):
        with pytest.raises(SettingError, match="state is a list: pass a dict"):
            call(path, [model])
    torch.save({"weight": torch.ones(1, 2), "bias": torch.ones(1)}, path)
    fabric.load_raw(path, model)
    assert model.bias.item() == 1
    torch.save(optimizer.state_dict(), path)
    optimizer.param_groups[0]["lr"] = 5.0
    fabric.load_raw(path, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize(("precision", "dtype"), [("bf16-true", torch.bfloat16), ("16-true", torch.float16)])
def test_true_low_precision_takes_six_bytes_a_parameter(precision, dtype):
    fabric = Fabric(accelerator="cpu", precision=precision)
    with fabric.init_module(empty_init=False):
        net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    assert fabric.setup(Dtypes())(torch.ones(1)) == (dtype, dtype)
    assert torch.get_default_dtype() == torch.float32 and net[0].weight.dtype == dtype
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=0.01, eps=1e-4))
    assert (model.dtype, model.device.type) == (dtype, "cpu")
    fabric.backward(model(torch.randn(8, 4)).square().sum() * 8)
    norm = fabric.clip_gradients(model, optimizer, max_norm=0.5)
    clipped = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    assert norm > 1 and clipped.float() == pytest.approx(0.5, rel=0.01)
    optimizer.step()
    moments = [value for values in optimizer.state.values() for name, value in values.items() if name != "step"]
    assert {tensor.dtype for tensor in (*model.parameters(), *moments)} == {dtype}
    assert len(moments) == 2 * len(optimizer.param_groups[0]["params"]) and optimizer.masters == []
    fabric.easymp.close()


class Dtypes(nn.Linear):
    """Gives back the dtypes of its input, and of tensors that it makes."""

    def __init__(self):
        super().__init__(1, 1)

    def forward(self, x):
        return x.dtype, torch.ones(1).dtype


def test_forward_gets_its_inputs_in_the_run_s_precision():
    for precision, inputs in (("32-true", torch.float64), ("bf16-mixed", torch.bfloat16)):
        fabric = Fabric(accelerator="cpu", precision=precision)
        assert fabric.setup(Dtypes())(torch.ones(1, dtype=torch.float64)) == (inputs, torch.float32)
        assert fabric.setup(nn.Identity())(torch.arange(2)).dtype == torch.int64
        fabric.easymp.close()


def test_double_precision_is_of_weights_inputs_and_new_tensors():
    fabric = Fabric(accelerator="cpu", precision="64-true")
    with fabric.init_module():
        assert nn.Linear(1, 1).weight.dtype == torch.float64
    net = nn.Linear(2, 1)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    assert fabric.setup(Dtypes())(torch.ones(1)) == (torch.float64, torch.float64)
    loss = model(torch.ones(1, 2)).sum()
    fabric.backward(loss)
    optimizer.step()
    assert (loss.dtype, model.weight.dtype, model.weight.grad.dtype) == (torch.float32, torch.float64, torch.float64)
    assert torch.get_default_dtype() == torch.float32
    fabric.easymp.close()


def test_new_modules_may_have_no_values(fabric):
    with fabric.init_module(empty_init=True):
        net = nn.Linear(4, 4)
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    with fabric.init_module(empty_init=True):
        nn.Linear(4, 4)  # draws no random numbers
    assert torch.equal(torch.rand(1), expected) and not net.weight.is_meta
    with fabric.init_tensor():
        assert torch.ones(1).device == fabric.device


def summed(fabric, x, scale=1):
    total = fabric.all_reduce(torch.tensor(float(x + fabric.global_rank)), reduce_op="sum").item()
    return total * scale, fabric.global_rank, fabric.world_size


@pytest.mark.parametrize("strategy", ["ddp_fork", "ddp_spawn"])
def test_a_launched_function_runs_on_each_process(strategy):
    assert Fabric(accelerator="cpu", devices=2, strategy=strategy).launch(summed, 1, scale=2) == (6.0, 0, 2)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    for arguments, message in (
        ([(1.0, 0)], "needs to be a callable"),
        ([lambda: None], "needs to take at least one argument"),
        ([], "needs to be called with a function"),
    ):
        with pytest.raises(TypeError, match=message):
            fabric.launch(*arguments)
    for call in (fabric.barrier, fabric.setup_dataloaders):
        with pytest.raises(StepError, match=r"you must call `.launch\(\)` first"):
            call()


def test_seeds_come_from_lightnings_variable_and_go_there(fabric, monkeypatch):
    assert fabric.seed_everything(3) == 3 and os.environ["PL_GLOBAL_SEED"] == "3"
    assert os.environ["PL_SEED_WORKERS"] == "1" and L.seed_everything() == 3
    assert os.environ["PL_SEED_WORKERS"] == "0"
    first = torch.rand(1)
    seed.reset_seed()
    assert torch.equal(first, torch.rand(1)) and os.environ["PL_SEED_WORKERS"] == "0"
    for text, message in ("three", "Invalid seed specified via PL_GLOBAL_SEED"), (str(2**32), "is not in bounds"):
        monkeypatch.setenv("PL_GLOBAL_SEED", text)
        with pytest.raises(ValueError, match=message):
            L.seed_everything()
    with pytest.raises(ValueError, match="-1 is not in bounds"):
        L.seed_everything(-1)
    monkeypatch.delenv("PL_GLOBAL_SEED")
    seed.reset_seed()  # nothing, without the variable
    with pytest.warns(UserWarning, match="No seed found"):
        assert L.seed_everything() == 0


def test_workers_draw_the_numbers_of_lightnings_workers():
    draws = []
    for worker, rank in ((0, 0), (1, 0), (0, 1)):
        torch.manual_seed(100 + worker)  # as a DataLoader seeds its workers
        seed.pl_worker_init_function(worker, rank)
        draws.append((torch.randint(1000, (1,)).item(), random.randrange(1000), numpy.random.randint(1000)))
    assert draws == WORKER_DRAWS


def test_settings_count_where_the_script_says_nothing(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EASYMP_MIXED_PRECISION", "bf16")
    fabric, second_fabric = Fabric(accelerator="cpu"), Fabric(accelerator="cpu", precision="32-true")
    assert fabric.easymp.mixed_precision == "bf16"
    fabric.easymp.close()
    assert second_fabric.easymp.mixed_precision == "no"
    second_fabric.easymp.close()


class Remembers:
    """A callback."""

    def __init__(self):
        self.calls = []

    not_a_method = 1

    def on_after_setup(self, fabric, module):
        self.calls.append(type(module).__name__)

    def on_after_optimizer_step(self, strategy, optimizer):
        self.calls.append(type(optimizer).__name__)

    def on_end(self, loss):
        self.calls.append(loss)

    def log_metrics(self, metrics, step=None):
        self.calls.append((metrics, step))


def test_setup_in_any_order_once_an_object(fabric):
    model, optimizer = one_model(fabric)
    loader = fabric.setup_dataloaders(DataLoader(range(4)))
    for item in (model, optimizer, loader, torch.compile(model)):
        assert L.is_wrapped(item)
    assert not L.is_wrapped(nn.Linear(2, 1)) and not L.is_wrapped(None)
    for call, error, message in (
        (lambda: fabric.setup(model), ValueError, "A model should be passed only once to the `setup`"),
        (lambda: fabric.setup_module(model), ValueError, "passed only once to the `setup_module`"),
        (lambda: fabric.setup_optimizers(optimizer), ValueError, "An optimizer should be passed only once"),
        (lambda: fabric.setup_dataloaders(loader), ValueError, "A dataloader should be passed only once"),
        (lambda: fabric.setup_dataloaders(range(2)), TypeError, "Only PyTorch DataLoader are currently"),
        (fabric.setup_dataloaders, ValueError, "requires at least one dataloader"),
        (fabric.setup_optimizers, ValueError, "requires at least one optimizer"),
        (lambda: fabric.no_backward_sync(nn.Linear(1, 1)), TypeError, "You need to set up the model first"),
        (lambda: fabric.clip_gradients(model, optimizer), ValueError, "Only one of `clip_val` or `max_norm`"),
    ):
        with pytest.raises(error, match=message):
            call()
    net = nn.Sequential(nn.Linear(2, 1), nn.Tanh())  # has parts of its own
    first = fabric.setup_optimizers(torch.optim.SGD(net.parameters(), lr=0.1))  # before its model
    schedule = torch.optim.lr_scheduler.StepLR(first, 1)
    model, second, same = fabric.setup(net, torch.optim.Adam(net.parameters()), scheduler=schedule)
    assert same is schedule and model.module is net and isinstance(model, nn.Sequential)
    assert [*model.state_dict()] == [*net.state_dict()] and (model.device.type, model.dtype) == ("cpu", torch.float32)
    for optimizer in (first, second):  # two of the same parameters
        before = model[0].weight.detach().clone()
        fabric.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
        optimizer.zero_grad()
        assert not torch.equal(model[0].weight, before)


def shares(folder):
    """What a rank reads of each kind of loader, in two passes."""
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.seed_everything(5)
    data, batches = list(range(9)), BatchSampler(SequentialSampler(range(9)), 2, False)
    weighted = torch.utils.data.WeightedRandomSampler([1.0] * 9, 6, generator=torch.Generator().manual_seed(0))
    loaders = {
        "shuffled": DataLoader(data, 2, shuffle=True),
        "batches": DataLoader(data, batch_sampler=batches),
        "weighted": DataLoader(data, 3, sampler=weighted),
        "own": DataLoader(data, 3, sampler=DistributedSampler(data, 2, fabric.global_rank, shuffle=False)),
    }
    read = {}
    for name, loader in loaders.items():
        prepared = fabric.setup_dataloaders(loader)
        assert prepared.dataset is data and isinstance(prepared, DataLoader)
        read[name] = [[batch.tolist() for batch in prepared] for _ in range(2)]
    own_sampler = type("Own", (), {"__iter__": lambda self: iter([[0], [1]])})()
    with pytest.raises(RefusedError, match="batch_sampler of class Own: its batches cannot be shared"):
        fabric.setup_dataloaders(DataLoader(data, batch_sampler=own_sampler))
    endless = type("Endless", (torch.utils.data.Sampler,), {"__iter__": lambda self: iter(range(9))})()
    with pytest.raises(TypeError, match="a sampler in your DataLoader without a length: add __len__"):
        fabric.setup_dataloaders(DataLoader(data, sampler=endless))
    all_rows = fabric.setup_dataloaders(DataLoader(data, batch_sampler=own_sampler), use_distributed_sampler=False)
    assert [batch.tolist() for batch in all_rows] == [[0], [1]]
    workers = fabric.setup_dataloaders(DataLoader(data, num_workers=1))
    read["worker"] = workers.worker_init_fn is not None
    fabric.easymp.close()
    return read


def test_ranks_read_the_shares_of_a_distributed_sampler(ranks, tmp_path):
    first, second = ranks(shares, str(tmp_path))
    for rank, read in enumerate((first, second)):
        sampler = DistributedSampler(range(9), 2, rank, seed=5)
        for epoch in range(2):
            sampler.set_epoch(epoch)
            indices = list(sampler)
            assert read["shuffled"][epoch] == [indices[i : i + 2] for i in range(0, 5, 2)]
        assert read["batches"] == [[[rank, 2 + rank], [4 + rank, 6 + rank], [8 if not rank else 0]]] * 2
        assert read["own"][0] == [[rank, 2 + rank, 4 + rank], [6 + rank, 8 if not rank else 0]]
        assert read["worker"]
    (a,), (b,) = first["weighted"][0], second["weighted"][0]
    drawn = list(torch.utils.data.WeightedRandomSampler([1.0] * 9, 6, generator=torch.Generator().manual_seed(0)))
    assert [a[0], b[0], a[1], b[1], a[2], b[2]] == drawn


def collectives(folder):
    fabric = Fabric(accelerator="cpu", strategy="ddp", devices=2)
    model, _ = one_model(fabric)
    rank = fabric.global_rank
    gathered = fabric.all_gather({"a": torch.tensor([rank]), "b": float(rank)})
    assert gathered["a"].tolist() == [[0], [1]] and gathered["b"].tolist() == [0.0, 1.0]
    x = torch.tensor([rank + 1.0], requires_grad=True)
    (fabric.all_gather(x, sync_grads=True) * torch.tensor([[2.0], [3.0]])).sum().backward()
    assert x.grad.tolist() == [4.0 + 2.0 * rank]  # of the losses of both ranks
    assert fabric.all_reduce(torch.tensor(float(rank)), reduce_op="sum").item() == 1
    values = {"a": torch.tensor(rank), "b": [torch.tensor([float(rank) + 2])]}
    assert fabric.all_reduce(values["a"], reduce_op="max") is values["a"]  # in place
    fabric.all_reduce(values, reduce_op="max")
    assert values == {"a": 1, "b": [3.0]}
    assert fabric.all_reduce(rank + 2, reduce_op=torch.distributed.ReduceOp.PRODUCT).item() == 6
    with pytest.raises(RefusedError, match=r"invalid reduce_op name: reduce_op='bxor'.*mean, avg, sum, max"):
        fabric.all_reduce(torch.ones(1), reduce_op="bxor")
    with pytest.raises(RefusedError, match="group is not honoured"):
        fabric.all_gather(torch.ones(1), group=object())
    assert rank_zero.rank_zero_only(lambda: "ran")() == (None if rank else "ran")
    assert fabric.broadcast({"of": rank}, src=1) == {"of": 1}
    with fabric.rank_zero_first():
        pass
    strategy = fabric.strategy
    assert (fabric.world_size, fabric.is_global_zero, fabric.node_rank) == (2, rank == 0, 0)
    assert (strategy.root_device, strategy.world_size, strategy.num_nodes) == (torch.device("cpu"), 2, 1)
    with pytest.raises(AttributeError, match="no 'root_devise' here, did you mean 'root_device'"):
        strategy.root_devise  # noqa: B018
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
        "fabric = Mine(accelerator='cpu', devices=2)\n"
        "fabric.run('ran')\n"
        "open(f'returned{fabric.launch(lambda fabric, n: fabric.global_rank + n, 3)}', 'w').close()\n"
    )
    subprocess.run([sys.executable, "script.py"], cwd=tmp_path, check=True, timeout=100)
    assert {"ran0of2", "ran1of2", "returned3", "returned4"} <= {path.name for path in tmp_path.iterdir()}


def test_callbacks(capsys):
    callback = Remembers()
    fabric = Fabric(accelerator="cpu", callbacks=[callback, object()], loggers=callback)
    model, optimizer = one_model(fabric)
    fabric.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    fabric.call("on_end", loss=2.0, other=1)
    fabric.log("loss", torch.tensor([1.5]), step=4)
    assert callback.calls == ["PreparedLinear", "SGD", 2.0, ({"loss": 1.5}, 4)] and fabric.logger is callback
    with pytest.warns(UserWarning, match="Skipping the callback `Remembers.not_a_method`"):
        fabric.call("not_a_method")
    with pytest.raises(ValueError, match="it cannot be converted to a scalar"):
        fabric.log("loss", torch.ones(2))
    fabric.print("once")
    assert capsys.readouterr().out == "once\n"
    fabric.easymp.close()


def test_ddp_of_one_process_is_a_group_of_one():
    loader = DataLoader(range(4), shuffle=True)
    for strategy, shape, sampler in (("ddp", (1, 2), DistributedSampler), ("auto", (2,), RandomSampler)):
        fabric = Fabric(accelerator="cpu", strategy=strategy)
        assert fabric.all_gather(torch.ones(2)).shape == shape
        assert type(fabric.setup_dataloaders(loader).sampler) is sampler
        with pytest.raises(IndexError):
            fabric.logger  # noqa: B018
        fabric.easymp.close()


def test_choices_of_fabric_on_a_cpu():
    assert type(Fabric(accelerator="cpu", devices=2).strategy) is DDPStrategy
    with pytest.warns(UserWarning, match="'dp' is not supported on CPUs"):
        assert type(Fabric(accelerator="cpu", strategy="dp").strategy) is DDPStrategy
    with pytest.warns(UserWarning, match="'16-mixed' on a CPU is 'bf16-mixed'"):
        fabric = Fabric(accelerator="cpu", precision="16-mixed")
    assert fabric.easymp.mixed_precision == "bf16"
    fabric.easymp.close()


def test_a_sampler_hears_of_each_pass_once(fabric):
    class Passes(SequentialSampler):
        calls = ()

        def set_epoch(self, epoch):
            self.calls += (epoch,)

    sampler = Passes(range(2))
    for _ in range(2):
        loader = fabric.setup_dataloaders(DataLoader(range(2), sampler=sampler))
        list(loader)
        list(loader)
    assert sampler.calls == (0, 1, 0, 1)


def test_rows_of_metrics(tmp_path):
    for version in (0, 1):
        log = CSVLogger(tmp_path, name="run", prefix="train", flush_logs_every_n_steps=2)
        log.log_metrics({"loss": torch.tensor(2.5)})
        assert log.log_dir == str(tmp_path / "run" / f"version_{version}") and log.experiment.metrics
        log.log_metrics({"loss": 1.5, "lr": 0.1})
        assert not log.experiment.metrics and log.version == version
    log.log_metrics({"loss": 0.5, "acc": 1}, step=8)
    log.finalize("success")
    rows = "step,train-acc,train-loss,train-lr\n0,,2.5,\n1,,1.5,0.1\n8,1,0.5,\n"
    assert Path(log.experiment.metrics_file_path).read_text() == rows
    replaced = CSVLogger(tmp_path, "run", version=1)
    with pytest.warns(UserWarning, match="exists and is not empty"):
        replaced.log_metrics({"loss": 1})
    replaced.save()
    assert Path(log.log_dir, "metrics.csv").read_text() == "loss,step\n1,0\n"
    with pytest.raises(NotImplementedError):
        log.log_hyperparams({})
    board = TensorBoardLogger(tmp_path, "board", prefix="train", sub_dir="rank")
    board.save()
    board.finalize("success")
    assert not Path(tmp_path, "board").exists()  # nothing was logged
    board.log_metrics({"loss": 1.0}, 2)
    board.log_hyperparams({"lr": 0.1, "model": nn.Linear, 3: 4}, {"best": 1.0})
    board.log_graph(nn.Linear(2, 1), torch.ones(1, 2))
    with pytest.warns(UserWarning, match="pass input_array"):
        board.log_graph(nn.Linear(2, 1))
    board.save()
    board.finalize("success")
    assert list(Path(tmp_path, "board/version_0/rank").glob("events*"))
    assert TensorBoardLogger("~/runs", "board", "last").log_dir == os.path.expanduser("~/runs/board/last")


def test_a_norm_that_is_not_finite_is_an_error(fabric):
    model, optimizer = one_model(fabric)
    fabric.backward(model(torch.full((1, 2), float("inf"))).sum())
    with pytest.raises(NonfiniteError, match="norm of the gradients"):
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.zero_grad()
    fabric.backward(model(torch.ones(1, 2)).sum())
    fabric.clip_gradients(model, optimizer, clip_val=0.5)
    assert model.weight.grad.tolist() == [[0.5, 0.5]]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"precision": "8-true"}, RefusedError, "invalid precision name: precision='8-true'"),
        ({"strategy": "deepspeed_stage_3"}, RefusedError, "pass 'fsdp'"),
        ({"strategy": "fspd"}, RefusedError, "fsdp"),
        ({"accelerator": "tpu"}, SettingError, "tpu"),
        ({"devices": [1]}, RefusedError, "CUDA_VISIBLE_DEVICES"),
        ({"devices": 0}, SettingError, "number of processes"),
        ({"devices": []}, SettingError, "number of processes"),
        ({"num_nodes": 0}, SettingError, "must be a positive integer, got 0"),
        ({"num_nodes": 2}, RefusedError, "easymp launch --nodes 2"),
        ({"plugins": object()}, RefusedError, "plugins"),
        ({"loggers": "jsonl"}, RefusedError, "pass objects with log_metrics"),
    ],
)
def test_what_is_not_run_is_refused(arguments, error, message):
    with pytest.raises(error, match=message):
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
UNUSED = """AttributeDict Throughput ThroughputMonitor measure_flops LightningEnum disable_possible_user_warnings
    is_shared_filesystem rank_zero_deprecation suggested_max_num_workers"""
NAMES = {
    "": ("Fabric is_wrapped seed_everything", ""),
    ".loggers": ("CSVLogger TensorBoardLogger", "Logger"),
    ".strategies": ("DDPStrategy FSDPStrategy Strategy", NO_STRATEGIES),
    ".utilities": ("move_data_to_device rank_zero_info rank_zero_only rank_zero_warn", UNUSED),
}


@pytest.mark.parametrize("module", NAMES)
def test_every_name_is_here_or_refused(module):
    public, refused = (names.split() for names in NAMES[module])
    module_here = importlib.import_module(OURS + module)
    assert all(hasattr(module_here, name) for name in public)
    for name in refused:
        with pytest.raises(ImportError, match=f"{name} is not part of easymp.compat"):
            getattr(module_here, name)


@pytest.mark.parametrize("module", NAMES)
def test_fabric_has_no_other_names(module):
    pytest.importorskip("lightning_fabric")
    original, names = importlib.import_module("lightning_fabric" + module), " ".join(NAMES[module]).split()
    public = getattr(original, "__all__", None) or [
        n for n, v in vars(original).items() if isinstance(v, type) and n[0] != "_" and "TPU" not in n
    ]
    assert sorted(public) == sorted(names)


class TwoWays(nn.Linear):
    def training_step(self, x):
        return 3 * self(x)

    def twice(self, x):
        self.cast = torch.is_autocast_enabled("cpu")
        return 2 * self(x)


def marked(precision=None):
    fabric = Fabric(accelerator="cpu", precision=precision)
    torch.manual_seed(0)
    model = fabric.setup(TwoWays(2, 1, bias=False))
    model.mark_forward_method("twice")
    model.mark_forward_method(model.twice)
    fabric.backward(model.twice(torch.ones(1, 2) * (fabric.global_rank + 1)).sum())
    if fabric.world_size > 1:  # a LightningModule's steps are marked there, as in Fabric
        fabric.backward(model.training_step(torch.ones(1, 2)).sum())
    for method, error, message in (
        ("thrice", AttributeError, "`TwoWays.thrice` does not exist or is not a method"),
        ("forward", ValueError, "You cannot mark the forward method itself"),
        (3, TypeError, "Expected a method or a string, got a int"),
    ):
        with pytest.raises(error, match=message):
            model.mark_forward_method(method)
    fabric.easymp.close()
    return model.cast, model.weight.grad.tolist()


def test_a_marked_method_computes_as_forward(ranks):
    assert marked("bf16-mixed") == (True, [[2.0, 2.0]])
    assert ranks(marked) == [(False, [[6.0, 6.0]])] * 2
