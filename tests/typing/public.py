"""The types that a script sees of easymp's public names; `errors.py` has what type checkers refuse.

Nothing runs this file. `make test` checks it with mypy, and `make wheel-test` with mypy and pyright, against the
installed wheel.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, assert_type

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset, TensorDataset

import easymp.optim
from easymp import Accelerator, ProjectConfiguration, Settings


class Net(nn.Module):
    """A model of the script's own."""

    @easymp.forward_method
    def embed(self, x: Tensor) -> Tensor:
        return x


class Notes:
    """A tracker of the script's own."""

    name = "notes"

    def start(self, run: str, config: Any) -> None: ...
    def log(self, values: Any, step: int | None) -> None: ...
    def finish(self) -> None: ...


net, x = Net(), torch.ones(4, 2)
adamw, sgd = AdamW(net.parameters()), SGD(net.parameters())
schedule = StepLR(adamw, 10)
data = TensorDataset(x)
loader: DataLoader[int] = DataLoader(range(8))  # type: ignore[arg-type]

# -- the constructor

acc = Accelerator()
assert_type(acc, Accelerator)
Accelerator(mixed_precision="bf16", strategy="fsdp", strategy_options=easymp.FSDPOptions(cpu_offload=True))
Accelerator(mixed_precision="fp16", strategy="pipeline", strategy_options={"microbatches": 4})
Accelerator(
    nonfinite="skip", compile="blocks", activation_checkpointing=["Block", "head"], settings=Settings(memory="16GiB")
)
Accelerator(compile=easymp.CompileOptions("blocks", mode="max-autotune"), settings=Settings(seed=1))
Accelerator(log_with=["jsonl", easymp.LoggerType.WANDB, Notes(), Notes], project_dir=Path("runs"))
Accelerator(
    dataloader_config=easymp.DataLoaderConfiguration(split_batches=True),
    gradient_accumulation_steps=easymp.GradientAccumulationPlugin(4),
    project_dir=ProjectConfiguration("runs"),
    settings=Settings(autocast_options=easymp.AutocastKwargs(), scaler_options=easymp.GradScalerKwargs()),
)
Accelerator(strategy_options=easymp.DistributedDataParallelKwargs(comm_hook="bf16"))

# -- prepare gives back what was given, in any order

assert_type(acc.prepare(net), Net)
assert_type(acc.prepare(adamw), AdamW)
assert_type(acc.prepare(loader), "DataLoader[int]")
assert_type(acc.prepare(schedule), StepLR)
assert_type(acc.prepare(net).embed(x), Tensor)
assert_type(acc.prepare(net, adamw), tuple[Net, AdamW])
assert_type(acc.prepare(adamw, net), tuple[AdamW, Net])
assert_type(acc.prepare(net, None, adamw), tuple[Net, None, AdamW])
assert_type(acc.prepare(loader, net, schedule, adamw), "tuple[DataLoader[int], Net, StepLR, AdamW]")
assert_type(
    acc.prepare(net, adamw, loader, loader, schedule), "tuple[Net, AdamW, DataLoader[int], DataLoader[int], StepLR]"
)
assert_type(acc.prepare(net, net, adamw, sgd, loader, schedule), "tuple[Net, Net, AdamW, SGD, DataLoader[int], StepLR]")
assert_type(acc.prepare(net, adamw, device_placement=[True, None], forward_methods="embed"), tuple[Net, AdamW])
several: list[nn.Module] = [net, net]
first, *others = acc.prepare(*several)
assert_type(first, nn.Module)
lion = easymp.optim.Lion(net.parameters(), lr=1e-4, fused=False)
assert_type(acc.prepare(net, lion), tuple[Net, easymp.optim.Lion])
assert_type(acc.unwrap_model(net), Net)
assert_type(acc.skip_first_batches(loader, 2), "DataLoader[int]")

# -- the step

with acc.accumulate(net), acc.autocast(), acc.no_sync(net):
    assert_type(acc.forward_backward(net, nn.functional.mse_loss, x, target=x), Tensor)
    acc.backward(x.sum(), num_items=3, retain_graph=True, inputs=[x])
    assert_type(acc.clip_grad_norm_(net.parameters(), 1.0), Tensor | None)
    acc.clip_grad_value_(net.parameters(), 1.0)
    acc.unscale_gradients(adamw)
with acc.join_uneven_inputs([net], even_batches=False), acc.averaged(net), acc.profile() as profile:
    assert_type(profile.summary(), str)
assert_type(acc.sync_gradients, bool)
assert_type(acc.optimizer_step_was_skipped, bool)
assert_type(acc.gradient_accumulation_steps, int)
assert_type(acc.total_updates(loader, epochs=2), int)

# -- facts

assert_type(acc.device, torch.device)
assert_type(acc.plan, easymp.Plan)
assert_type(acc.plan.strategy, easymp.Choice[str])
assert_type(acc.plan.strategy.source, easymp.Source)
assert_type((acc.num_processes, acc.process_index, acc.local_process_index), tuple[int, int, int])
assert_type((acc.is_main_process, acc.is_local_main_process), tuple[bool, bool])
assert_type(acc.updates, int)
assert_type(acc.mixed_precision == "bf16", bool)

# -- collectives

batch = {"x": x}
assert_type(acc.gather(batch), dict[str, Tensor])
assert_type(acc.gather_for_metrics((x, x)), tuple[Tensor, Tensor])
assert_type(acc.gather_for_metrics(["a"], use_gather_object=True), list[str])
assert_type(acc.mean(x.sum(), len(x)), Tensor)
assert_type(acc.reduce(x, "mean"), Tensor)
assert_type(acc.pad_across_processes(x, dim=1), Tensor)
assert_type(easymp.gather(batch), dict[str, Tensor])
assert_type(easymp.gather_object([1]), list[int])
assert_type(easymp.broadcast(x, from_process=1), Tensor)
assert_type(easymp.broadcast_object_list(["a"]), list[str])
assert_type(easymp.reduce(batch, "sum"), dict[str, Tensor])
assert_type(easymp.pad_across_processes(x), Tensor)
assert_type(easymp.concatenate([x, x]), Tensor)
assert_type(easymp.send_to_device(batch, "cpu"), dict[str, Tensor])
assert_type(easymp.find_batch_size(batch), int | None)

# -- processes

with acc.split_between_processes(["a", "b"]) as words, acc.split_between_processes(x, apply_padding=True) as rows:
    assert_type(words, list[str])
    assert_type(rows, Tensor)
with acc.split_between_processes(data) as part:
    assert_type(part, Dataset[tuple[Tensor, ...]])
assert_type(acc.main_process_first(), AbstractContextManager[None])


@acc.on_main_process
def report(loss: float) -> str:
    return f"{loss:.2f}"


assert_type(report(0.5), str | None)

# -- checkpoints and logs

assert_type(acc.save_state(async_=True), str)
assert_type(acc.load_state("runs/one", strict=False).skipped, tuple[str, ...])
assert_type(acc.resume(), str | None)
for epoch in acc.epochs(3):
    assert_type(epoch, int)
for pair in acc.weights(net, dtype=torch.bfloat16, bucket="500MB"):
    assert_type(pair, tuple[str, torch.Tensor])
assert_type(acc.weights(bucket=10**9).each_bucket(print, rank=0), None)
acc.save_model(net, Path("model"), max_shard_size="5GB")
acc.init_trackers("digits", {"lr": 0.1}, init_kwargs={"wandb": {"tags": ["a"]}})
acc.log({"loss": x.sum(), "note": "first"}, step=3)
with acc as same:
    assert_type(same, Accelerator)

# -- functions


@easymp.find_executable_batch_size(starting_batch_size=256)
def train(batch_size: int, epochs: int) -> float:
    return batch_size / epochs


@easymp.find_executable_batch_size(keep_global_batch=True)
def train_whole(batch_size: int, micro_batches: int, name: str) -> float:
    return batch_size / micro_batches


def two(batch_size: int) -> int:
    return batch_size


assert_type(train(3), float)
assert_type(train_whole("digits"), float)
assert_type(easymp.find_executable_batch_size(two)(), int)
assert_type(easymp.convert_sync_batchnorm(net), Net)
assert_type(easymp.notebook_launcher(two, (4,), num_processes=2, mixed_precision="bf16"), list[int | None])
assert_type(easymp.skip_first_batches(loader), "DataLoader[int]")
assert_type(easymp.detect(), easymp.Hardware)
assert_type(easymp.resolve(seed=1), Settings)
assert_type(easymp.memory.estimate(net, strategy="fsdp", precision="bf16", world=8).total, int)
easymp.PipelineOptions(schedule="1f1b")
for given in easymp.tqdm(loader):
    print(given)
with easymp.LocalSGD(acc, net, local_sgd_steps=8) as local:
    local.step()
