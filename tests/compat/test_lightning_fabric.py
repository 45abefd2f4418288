"""Scripts written for Lightning Fabric: their set-up and loop, accumulation by hand, checkpoints, on one process and on two."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from easymp.compat.lightning_fabric.loggers import CSVLogger
from easymp.compat.lightning_fabric.strategies import DDPStrategy, FSDPStrategy
from easymp.compat.lightning_fabric.utilities import rank_zero
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import easymp
import easymp.compat.lightning_fabric as L
from easymp import CheckpointError, NonfiniteError, RefusedError, SettingError
from easymp.compat.lightning_fabric import Fabric

from ..conftest import Ranks


@pytest.fixture(autouse=True)
def _closed() -> Any:
    yield
    easymp.compat.lightning_fabric.layer.native.clear()


def trained(
    folder: str, strategy: Any = "auto", stop: int = 8, accumulate: int = 1, **how: Any
) -> list[float]:
    """The loop of Fabric's examples; goes on from `folder` where a checkpoint is there. Returns the losses."""
    L.seed_everything(3)
    fabric = Fabric(accelerator="cpu", strategy=strategy, devices=how.pop("devices", "auto"), **how)
    fabric.launch()
    with fabric.init_module():
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model, optimizer = fabric.setup(model, optimizer)
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4))
    state = {"model": model, "optimizer": optimizer, "step": 0}
    path = Path(folder, "last.ckpt")
    if path.exists():
        assert fabric.load(path, state) == {}
    losses = []
    while state["step"] < stop:
        for i, (inputs, targets) in enumerate(loader):
            with fabric.no_backward_sync(model, enabled=(i + 1) % accumulate != 0):
                loss = nn.functional.mse_loss(model(inputs), targets)
                fabric.backward(loss / accumulate)
            if (i + 1) % accumulate:
                continue
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(fabric.all_reduce(loss.detach()).item())
            state["step"] += 1
            if state["step"] == stop:
                fabric.save(path, state)
                break
    fabric.easymp.close()
    return losses


@pytest.mark.parametrize(
    ("processes", "strategy"), [(1, "auto"), (2, "ddp"), (2, "fsdp"), (2, FSDPStrategy(cpu_offload=False))]
)
def test_a_script_trains_and_goes_on_from_its_checkpoint(
    ranks: Ranks, tmp_path: Path, processes: int, strategy: Any
) -> None:
    whole = ranks(trained, str(tmp_path / "whole"), strategy, 8, processes=processes)
    first = ranks(trained, str(tmp_path / "halves"), strategy, 4, processes=processes)
    second = ranks(trained, str(tmp_path / "halves"), strategy, 8, processes=processes)
    for one, a, b in zip(whole, first, second):
        assert one == a + b
        assert one[-1] < one[0]


def test_accumulation_by_hand(ranks: Ranks, tmp_path: Path) -> None:
    both = ranks(trained, str(tmp_path), "ddp", 4, 2, processes=2)
    assert len(both[0]) == 4 and both[0][0] == pytest.approx(both[1][0])


def test_its_signatures_are_those_of_fabric(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # which their import sets
    theirs = pytest.importorskip("lightning_fabric").Fabric
    public = {n for n in vars(theirs) if n[0] != "_"} - {"accelerator"}
    assert public <= {*vars(Fabric), "loggers", "strategy"}
    for name in (name for name in public if inspect.isfunction(vars(theirs)[name])):
        pair = (inspect.signature(vars(kind)[name]).parameters.values() for kind in (theirs, Fabric))
        there, here = ([(p.name, p.kind) for p in parameters] for parameters in pair)
        assert there == here, name


def losses(kind: Any, precision: str) -> list[float]:
    torch.manual_seed(0)
    fabric = kind(accelerator="cpu", devices=1, precision=precision)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
    found = []
    for (batch,) in fabric.setup_dataloaders(DataLoader(TensorDataset(x), batch_size=4)):
        loss = model(batch).float().square().mean()
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, clip_val=0.5)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_losses_are_those_of_fabric(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    theirs = losses(pytest.importorskip("lightning_fabric").Fabric, precision)
    assert losses(Fabric, precision) == pytest.approx(theirs, rel=0.05 if "bf16" in precision else 1e-6)


def test_parts_are_one_file_and_filters_choose(tmp_path: Path) -> None:
    fabric = Fabric(accelerator="cpu")
    part, file = tmp_path / "part.safetensors", tmp_path / "model.safetensors"
    net = nn.Linear(2, 1)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
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
    torch.save({"weight": torch.ones(1, 2), "bias": torch.ones(1)}, tmp_path / "raw.pth")
    fabric.load_raw(tmp_path / "raw.pth", model)
    assert model.bias.item() == 1
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        fabric.load(tmp_path / "raw.pth", state)
    with pytest.raises(CheckpointError, match="was not set up"):
        fabric.save(tmp_path / "x", {"other": nn.Linear(1, 1)})
    fabric.easymp.close()


def test_values_of_a_whole_checkpoint(tmp_path: Path) -> None:
    fabric = Fabric(accelerator="cpu")
    model, optimizer = fabric.setup(net := nn.Linear(2, 1), torch.optim.SGD(net.parameters(), lr=0.1))
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


def errors_of_rank_0(folder: str) -> None:
    fabric = Fabric(accelerator="cpu", devices=2)
    model = fabric.setup(nn.Linear(2, 1))
    fabric.setup(net := nn.Linear(2, 1), torch.optim.SGD(net.parameters(), lr=0.1))
    with pytest.raises(CheckpointError, match=r"read by torch\.load"):
        fabric.save(Path(folder, "part.ckpt"), {"model": model})
    fabric.barrier()
    fabric.easymp.close()


def test_all_ranks_hear_why_a_file_is_not_saved(ranks: Ranks, tmp_path: Path) -> None:
    ranks(errors_of_rank_0, str(tmp_path), processes=2)


def test_settings_count_where_the_script_says_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EASYMP_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("EASYMP_LOG_WITH", "jsonl")
    fabric, other = Fabric(accelerator="cpu"), Fabric(accelerator="cpu", precision="32-true")
    assert fabric.easymp.mixed_precision == "bf16" and [t.name for t in fabric.easymp.trackers] == ["jsonl"]
    fabric.easymp.close()
    assert other.easymp.mixed_precision == "no"
    other.easymp.close()


def test_what_setup_returned_is_wrapped() -> None:
    fabric = Fabric(accelerator="cpu")
    net, other = nn.Linear(2, 1), nn.Linear(2, 1)
    wrapped = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    assert all(L.is_wrapped(part) for part in wrapped) and not L.is_wrapped(other)
    several = nn.Sequential(nn.Linear(2, 1), nn.Tanh())  # has parts of its own
    schedule = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(several.parameters(), lr=0.1), 1)
    assert fabric.setup(several, scheduler=schedule) == (several, schedule)
    fabric.easymp.close()


def test_models_of_a_whole_checkpoint_load_alone(tmp_path: Path) -> None:
    trained(str(tmp_path), stop=2)
    fabric = Fabric(accelerator="cpu")
    model = fabric.setup(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
    state = {"model": model, "step": 0}
    assert fabric.load(tmp_path / "last.ckpt", state) == {} and state["step"] == 2
    fabric.easymp.close()


def collectives() -> None:
    fabric = Fabric(accelerator="cpu", devices=2)
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
    fabric.barrier()
    assert (fabric.world_size, fabric.is_global_zero, fabric.node_rank) == (2, rank == 0, 0)
    with pytest.raises(RefusedError, match="sync_grads"):
        fabric.all_gather(torch.ones(1), sync_grads=True)
    fabric.easymp.close()


def test_collectives(ranks: Ranks) -> None:
    ranks(collectives, processes=2)


@pytest.mark.slow
def test_launch_starts_the_processes_and_run_launches(tmp_path: Path) -> None:
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


def test_callbacks_and_loggers() -> None:
    calls, rows = [], []

    class Watch:
        def on_end(self, loss: float) -> None:
            calls.append(loss)

        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            rows.append((metrics, step))

    fabric = Fabric(accelerator="cpu", callbacks=[Watch(), object()], loggers=Watch())
    fabric.call("on_end", loss=2.0, other=1)
    fabric.log("loss", torch.tensor(1.5), step=4)
    assert calls == [2.0] and rows == [({"loss": 1.5}, 4)] and fabric.logger is fabric.loggers[0]


def test_a_norm_that_is_not_finite_is_an_error() -> None:
    fabric = Fabric(accelerator="cpu")
    model, optimizer = fabric.setup(net := nn.Linear(1, 1), torch.optim.SGD(net.parameters(), lr=0.1))
    fabric.backward(model(torch.full((1, 1), float("inf"))).sum())
    with pytest.raises(NonfiniteError, match="norm of the gradients"):
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
    with pytest.raises(ValueError, match="one of clip_val"):
        fabric.clip_gradients(model, optimizer)
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
def test_what_is_not_run_is_refused(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Fabric(**arguments)


def test_metrics_are_rows_of_csv(tmp_path: Path) -> None:
    for version in (0, 1):
        log = CSVLogger(tmp_path, name="run", prefix="train")
        log.log_metrics({"loss": torch.tensor(2.5)}, step=4)
        log.log_metrics({"loss": 1.5, "lr": 0.1}, step=8)
        assert log.log_dir == str(tmp_path / "run" / f"version_{version}")
    assert Path(log.log_dir, "metrics.csv").read_text() == "step,train-loss,train-lr\n4,2.5,\n8,1.5,0.1\n"


SCRIPT = Path(__file__).with_name("fabric_script.py")


def pretrained(folder: Path, package: str, strategy: str, devices: int, *stops: int) -> list[list[float]]:
    """The rows that a script in the style of litgpt logs, in as many processes one after another as there are stops."""
    folder.mkdir()
    for stop in stops:
        words = [sys.executable, str(SCRIPT), package, strategy, str(devices), str(folder), str(stop)]
        subprocess.run(words, check=True, timeout=300, capture_output=True, cwd=folder)
    files = sorted(folder.glob("logs/*/metrics.csv"))
    assert (folder / f"{stops[-1]}.json").read_text() == f"[{stops[-1]}, {stops[-1]}]"
    return [[float(n) for n in line.split(",")[:3]] for f in files for line in f.read_text().splitlines()[1:]]


OURS = "easymp.compat.lightning_fabric"


@pytest.mark.slow
def test_a_script_in_the_style_of_litgpt_runs_alone_by_ddp_and_by_fsdp(tmp_path: Path) -> None:
    alone = pretrained(tmp_path / "alone", OURS, "auto", 1, 3)
    assert len(alone) == 3
    by_ddp = pretrained(tmp_path / "ddp", OURS, "ddp", 2, 3)
    by_fsdp = pretrained(tmp_path / "fsdp", OURS, "fsdp", 2, 2, 3)  # goes on from its checkpoint
    for other in (by_ddp, by_fsdp):
        assert other == [pytest.approx(row, rel=1e-4) for row in alone]


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_its_losses_are_those_of_fabric(tmp_path: Path, devices: int) -> None:
    pytest.importorskip("lightning_fabric")
    strategy = "ddp" if devices > 1 else "auto"
    ours = pretrained(tmp_path / "ours", OURS, strategy, devices, 3)
    theirs = pretrained(tmp_path / "theirs", "lightning_fabric", strategy, devices, 3)
    assert ours == [pytest.approx(row, rel=1e-5) for row in theirs]


def test_names_that_are_absent_say_what_to_use() -> None:
    with pytest.raises(ImportError, match="tensor_parallel"):
        from easymp.compat.lightning_fabric.strategies import ModelParallelStrategy  # noqa: F401
    assert DDPStrategy(static_graph=True).options == {"static_graph": True}
    assert FSDPStrategy(auto_wrap_policy={nn.Linear}).options.wrap == ("Linear",)
    with pytest.raises(RefusedError, match="pass a set of the modules' classes"):
        FSDPStrategy(auto_wrap_policy=len)
    with pytest.raises(
        ModuleNotFoundError, match=r"lightning_fabric\.plugins is not part of easymp.compat: pass precision"
    ):
        importlib.import_module("easymp.compat.lightning_fabric.plugins.precision")


# Names of lightning-fabric 2.6.6 that scripts import: here, forwarded or renamed; or refused, with a sentence.
NO_STRATEGIES = (
    "DataParallelStrategy DeepSpeedStrategy ModelParallelStrategy ParallelStrategy SingleDeviceStrategy SingleDeviceXLAStrategy "
    "XLAFSDPStrategy XLAStrategy"
)
UNUSED = " LightningEnum disable_possible_user_warnings is_shared_filesystem rank_zero_deprecation suggested_max_num_workers"
NAMES = {
    "": ("Fabric is_wrapped seed_everything", ""),
    ".loggers": ("CSVLogger", "Logger TensorBoardLogger"),
    ".strategies": ("DDPStrategy FSDPStrategy Strategy", NO_STRATEGIES),
    ".utilities": (
        "move_data_to_device rank_zero_info rank_zero_only rank_zero_warn",
        "AttributeDict Throughput ThroughputMonitor measure_flops" + UNUSED,
    ),
}


@pytest.mark.parametrize("module", NAMES)
def test_every_name_is_here_or_refused(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    here, refused = (words.split() for words in NAMES[module])
    ours = importlib.import_module(OURS + module)
    assert all(hasattr(ours, name) for name in here)
    for name in refused:
        with pytest.raises(ImportError, match=f"{name} is not part of easymp.compat"):
            getattr(ours, name)
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    pytest.importorskip("lightning_fabric")
    theirs = importlib.import_module("lightning_fabric" + module)
    public = getattr(theirs, "__all__", None) or [
        n for n, v in vars(theirs).items() if isinstance(v, type) and n[0] != "_" and "TPU" not in n
    ]
    assert sorted(public) == sorted([*here, *refused])
