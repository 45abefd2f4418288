"""The Fabric: an Accelerator behind the methods and names of Lightning's."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ... import launcher
from ...accelerator import Accelerator
from ...base.pytree import recursively_apply, send_to_device
from ...checkpoint.accelerate_import import read_state_dict
from ...checkpoint.folders import open_checkpoint
from ...checkpoint.huggingface import load as load_tree
from ...checkpoint.load import Reading
from ...checkpoint.snapshot import on_rank_0
from ...checkpoint.weights import load_weights
from ...distributed import read_ranks
from ...errors import CheckpointError, NonfiniteError, RefusedError, SettingError, StepError
from ...settings import resolve
from ..layer import unless_set
from . import choices
from .choices import seed_everything

NATIVE = """
acc = Accelerator(mixed_precision={precision!r}, strategy={strategy!r})  # Fabric(…); easymp.launch(n) for launch()
model, optimizer, loader = acc.prepare(model, optimizer, loader)  # setup, setup_dataloaders
acc.backward(loss)
acc.save_state(path)  # save(path, state); load_state(path)
"""
OF_TORCH_SAVE = (".pt", ".pth", ".bin", ".ckpt")
STATE = "state/object_0"  # of `Fabric.save`, in a checkpoint
ALL_OF_IT = (
    "pass all models and optimizers that were set up in `state`, so that a whole checkpoint is written"
)


class Remembered:
    """The part of a saved `state` that is neither a model nor an optimizer, and the names of those."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state


class Fabric:
    """Fabric's methods on an Accelerator, which is made by `launch`, or at the first use.

    Args:
        accelerator: "auto", "cpu", "gpu", "cuda" or "mps".
        strategy: "auto", "ddp", "fsdp", "dp" and their variants, `FSDPStrategy(…)` or `DDPStrategy(…)`; a single process trains alone.
        devices: processes on this machine: a number, -1 or "auto" for one an accelerator. `launch` starts them, unless a launcher did.
        num_nodes: machines; more than one are started by a launcher.
        precision: "32-true", "16-mixed", "bf16-mixed", "16-true", "bf16-true", "transformer-engine" (fp8).
        plugins: None only.
        callbacks: objects whose methods `call` calls.
        loggers: words of `Accelerator(log_with=…)`, trackers of easymp, or objects with Lightning's ``log_metrics(metrics, step)``.

    Raises:
        SettingError: a value that Fabric does not know.
        RefusedError: a value that easymp does not run.

    Example:
        >>> fabric = Fabric(accelerator="cpu")
        >>> fabric.launch()
        >>> model, optimizer = fabric.setup(nn.Linear(2, 1), torch.optim.SGD(…))
        >>> fabric.backward(model(torch.ones(1, 2)).sum()); optimizer.step()
    """

    def __init__(
        self,
        *,
        accelerator: str = "auto",
        strategy: Any = "auto",
        devices: Sequence[int] | str | int = "auto",
        num_nodes: int = 1,
        precision: str | int | None = None,
        plugins: Any = None,
        callbacks: Any = None,
        loggers: Any = None,
    ) -> None:
        if plugins:
            raise RefusedError(
                f"Fabric(plugins={plugins!r}) is not honoured: pass precision=, and let the launcher say the ranks"
            )
        self._cpu = choices.on_cpu(accelerator)
        self._precision = choices.precision(precision)
        self._strategy = choices.strategy(strategy)
        self._devices = choices.processes(devices, self._cpu)
        ranks = read_ranks()
        if ranks.size > 1 and devices not in ("auto", -1, "-1") and ranks.local_size != self._devices:
            raise SettingError(
                f"devices={devices!r}, and the launcher ({ranks.announced}) started {ranks.local_size} processes on this machine"
            )
        if num_nodes > 1 and ranks.nodes != num_nodes:
            raise RefusedError(
                f"num_nodes={num_nodes}: start the script with `easymp launch --nodes {num_nodes}`, torchrun or srun"
            )
        self.callbacks = _as_list(callbacks)
        given = _as_list(loggers)
        self.loggers = [item for item in given if hasattr(item, "log_metrics")]
        self._log_with = [item for item in given if not hasattr(item, "log_metrics")] or None
        self._made: Accelerator | None = None
        self._remembered = Remembered()
        if type(self).run is not Fabric.run:
            self.run = partial(self.launch, lambda _, *args, run=self.run, **kwargs: run(*args, **kwargs))  # type: ignore[method-assign]

    # -- the run ------------------------------------------------------------------------------------------------------

    def launch(self, function: Callable[..., Any] = lambda fabric: None, *args: Any, **kwargs: Any) -> Any:
        """Start `devices` processes of this script, unless a launcher did, and return ``function(fabric, *args, **kwargs)``."""
        if self._made is None and read_ranks().size == 1 and self._devices > 1:
            launcher.launch(self._devices)
        return function(self, *args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The program of a subclass; calling it launches first."""
        raise NotImplementedError("a subclass of Fabric defines run()")

    seed_everything = staticmethod(seed_everything)

    @property
    def easymp(self) -> Accelerator:
        """The Accelerator that does the work."""
        if self._made is None:
            several = read_ranks().size > 1
            if self._devices > 1 and not several:
                raise StepError(
                    f"devices={self._devices} in one process: call fabric.launch() first, or start it with easymp launch"
                )
            chosen = self._strategy if several else choices.Chosen("auto")
            asked = resolve()
            precision = unless_set(asked, "mixed_precision", self._precision, "no")
            choices.layer.use("Fabric", NATIVE.format(precision=precision, strategy=chosen.strategy))
            self._made = Accelerator(
                mixed_precision=precision,
                strategy=None if chosen.strategy == "auto" else chosen.strategy,
                strategy_options=chosen.options,
                activation_checkpointing=chosen.activation_checkpointing,
                cpu=self._cpu or None,
                log_with=unless_set(asked, "log_with", self._log_with, "none"),
            )
            self._made.register_for_checkpointing(self._remembered)
        return self._made

    @property
    def device(self) -> torch.device:
        return self.easymp.device

    @property
    def global_rank(self) -> int:
        return read_ranks().rank

    @property
    def local_rank(self) -> int:
        return read_ranks().local_rank

    @property
    def node_rank(self) -> int:
        ranks = read_ranks()
        return ranks.rank // max(1, ranks.local_size)

    @property
    def world_size(self) -> int:
        return self.easymp.num_processes

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    @property
    def strategy(self) -> str:
        """The name of easymp's strategy."""
        return self.easymp.plan.strategy.value

    # -- set up -------------------------------------------------------------------------------------------------------

    def setup(
        self,
        module: nn.Module,
        *optimizers: torch.optim.Optimizer,
        scheduler: Any = None,
        move_to_device: bool = True,
        _reapply_compile: bool = True,
    ) -> Any:
        """The model, or a tuple of it, its optimizers and the scheduler, for this run. The scheduler is stepped by the script."""
        done = self.easymp.prepare(
            module, *optimizers, device_placement=[move_to_device, *(None for _ in optimizers)]
        )
        if scheduler is not None:
            return (*done, scheduler)
        return done

    def setup_module(
        self, module: nn.Module, move_to_device: bool = True, _reapply_compile: bool = True
    ) -> nn.Module:
        """The model, for this run."""
        return self.easymp.prepare(module, device_placement=[move_to_device])

    def setup_optimizers(self, *optimizers: torch.optim.Optimizer) -> Any:
        """One or several optimizers of models that were set up."""
        return self.easymp.prepare(*optimizers)

    def setup_dataloaders(
        self, *dataloaders: Any, use_distributed_sampler: bool = True, move_to_device: bool = True
    ) -> Any:
        """One loader, or a list of several, of which each rank reads its share."""
        if not use_distributed_sampler and self.world_size > 1:
            raise RefusedError(
                "setup_dataloaders(use_distributed_sampler=False): the ranks share out what a prepared loader reads. Leave it out and "
                "pass a loader of the whole data, or read the loader as it is"
            )
        placed = [move_to_device] * len(dataloaders)
        done = self.easymp.prepare(*dataloaders, device_placement=placed)
        return list(done) if len(dataloaders) > 1 else done

    # -- the step -----------------------------------------------------------------------------------------------------

    def backward(self, tensor: Tensor, *args: Any, model: nn.Module | None = None, **kwargs: Any) -> None:
        """As ``tensor.backward(*args, **kwargs)``; gradients are averaged over the ranks, and the loss is scaled under fp16."""
        self.easymp.backward(
            tensor, **dict(zip(("gradient", "retain_graph", "create_graph"), args)), **kwargs
        )

    def clip_gradients(
        self,
        module: nn.Module,
        optimizer: Any,
        clip_val: float | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor | None:
        """Clip to ``[-clip_val, clip_val]``, or the total norm to `max_norm`; returns that norm before.

        Raises:
            NonfiniteError: the norm is not finite. Under a loss scale the step is skipped instead.
        """
        if (clip_val is None) == (max_norm is None):
            raise ValueError("clip_gradients takes one of clip_val and max_norm")
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if max_norm is None:
            self.easymp.clip_grad_value_(parameters, clip_val)  # type: ignore[arg-type]
            return None
        norm = self.easymp.clip_grad_norm_(parameters, max_norm, norm_type)
        scaled = self.easymp.scaler.scales
        if error_if_nonfinite and not scaled and norm is not None and not torch.isfinite(norm):
            raise NonfiniteError(
                f"the norm of the gradients is {float(norm)}: lower the learning rate, or look at the loss; "
                "error_if_nonfinite=False clips on"
            )
        return norm

    def no_backward_sync(self, module: nn.Module, enabled: bool = True) -> AbstractContextManager[None]:
        """Inside, gradients stay on this rank: for accumulation by the script."""
        return self.easymp.no_sync(module) if enabled else nullcontext()

    def autocast(self) -> AbstractContextManager[Any]:
        return self.easymp.autocast()

    @contextmanager
    def init_tensor(self) -> Any:
        """Inside, new tensors are on the device of this rank."""
        with self.device:
            yield

    @contextmanager
    def init_module(self, empty_init: bool | None = None) -> Any:
        """Inside, new modules are on the device of this rank; with `empty_init` on the meta device, and setup gives them values."""
        with torch.device("meta") if empty_init else self.device:
            yield

    def sharded_model(self) -> AbstractContextManager[None]:
        """Nothing: `setup` shards."""
        return nullcontext()

    def to_device(self, obj: Any) -> Any:
        return obj.to(self.device) if isinstance(obj, nn.Module) else send_to_device(obj, self.device)

    # -- the ranks together -------------------------------------------------------------------------------------------

    def barrier(self, name: str | None = None) -> None:
        self.easymp.wait_for_everyone()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Rank `src`'s object."""
        held = [obj]
        if self.world_size > 1:
            self.easymp._world.broadcast_objects(held, src)
        return held[0]

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Each tensor or number of `data` from all ranks, in a new first dimension; of one process the tensors as they are."""
        _refuse_groups("all_gather", group, sync_grads)
        one = (lambda leaf: leaf) if self.world_size == 1 else (lambda leaf: self.easymp.gather(leaf[None]))
        return _each_number(one, data, self.device)

    def all_reduce(self, data: Any, group: Any = None, reduce_op: str = "mean") -> Any:
        """The "mean" or "sum" of each tensor or number of `data` over the ranks."""
        _refuse_groups("all_reduce", group, False)
        word = {"avg": "mean"}.get(str(reduce_op).lower(), str(reduce_op).lower())
        return _each_number(lambda leaf: self.easymp.reduce(leaf, word), data, self.device)

    def rank_zero_first(self, local: bool = False) -> AbstractContextManager[None]:
        """Rank 0 runs the block before the others; with `local` that of each node."""
        return self.easymp.local_main_process_first() if local else self.easymp.main_process_first()

    def print(self, *args: Any, **kwargs: Any) -> None:
        """`print`, on the first process of each node."""
        self.easymp.print(*args, **kwargs)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def save(
        self,
        path: str | os.PathLike[str],
        state: Mapping[str, Any],
        filter: Mapping[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Save models, optimizers and values by name; all ranks call it.

        With all models and optimizers that were set up this is a checkpoint of easymp in the folder `path`: sharded, verified, with random
        states and positions of loaders. With some of them, or a `filter`, it is one safetensors file; both without pickles.

        Raises:
            CheckpointError: it could not be written.
            RefusedError: some optimizers, or a filter, where weights are sharded.
        """
        acc = self.easymp
        names, rest = self._named(state)
        prepared = len(acc._prepared.models) + len(acc._prepared.optimizers)
        if len(names) == prepared and prepared and not filter:
            self._remembered.values = {"names": names, "values": rest}
            acc.save_state(path)
            return
        optimizers = [key for key, of in names.items() if of.startswith("optimizer")]
        if acc._sharded and (optimizers or filter):
            raise RefusedError(
                f"save({', '.join(optimizers) or 'filter'}) under {self.strategy}: {ALL_OF_IT}"
            )
        tree: dict[str, Any] = dict(rest)
        for key in names:
            item = state[key]
            tree[key] = acc.get_state_dict(item) if isinstance(item, nn.Module) else item.state_dict()
        for key, keep in (filter or {}).items():
            tree[key] = {name: value for name, value in tree[key].items() if keep(name, value)}
        on_rank_0(acc._world, lambda: acc.save(tree, path))

    def load(
        self,
        path: str | os.PathLike[str],
        state: dict[str, Any] | None = None,
        strict: bool = True,
        *,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load what `save` wrote into the models and optimizers of `state`, and replace its other values; all ranks call it.

        Returns:
            The saved values that `state` does not name. For ``state=None`` nothing is loaded, and these are all of a file, or all
            of a checkpoint apart from its models and optimizers.

        Raises:
            CheckpointError: it is not there, damaged, or does not fit.
            KeyError: with `strict`, a name of `state` that was not saved.
        """
        acc, wanted = self.easymp, {} if state is None else state
        names, rest = self._named(wanted)
        if Path(path).is_file():
            found = load_tree(path)
            for key in names:
                if acc._sharded:
                    raise RefusedError(f"load({key}) of one file under {self.strategy}: {ALL_OF_IT}")
                if key in found:
                    item = wanted[key]
                    how = {"strict": strict} if isinstance(item, nn.Module) else {}
                    item.load_state_dict(found.pop(key), **how)
                elif strict:
                    raise KeyError(f"{path} has no {key!r}: it has {', '.join(found)}")
        else:
            saved = self._saved(path)
            if state is not None and names == saved["names"]:
                acc.load_state(path, strict=strict)
            else:
                models = [key for key in names if isinstance(wanted[key], nn.Module)]
                if len(models) < len(names):
                    raise CheckpointError(
                        f"{path} was saved of {', '.join(saved['names'])}: pass all of these to load, or models alone"
                    )
                for key in models:
                    load_weights(wanted[key], path, strict=strict, which=saved["names"].get(key, "model"))
            found = dict(saved["values"])
        for key in rest:
            if key in found:
                wanted[key] = found.pop(key)
            elif strict:
                raise KeyError(f"{path} has no {key!r}: it has {', '.join(found)}")
        return found

    def load_raw(
        self,
        path: str | os.PathLike[str],
        obj: nn.Module | torch.optim.Optimizer,
        strict: bool = True,
        *,
        weights_only: bool | None = None,
    ) -> None:
        """Load weights of safetensors, a checkpoint, or a plain state dict of torch.save into a model."""
        if not isinstance(obj, nn.Module):
            obj.load_state_dict(load_tree(path))
        elif str(path).endswith(OF_TORCH_SAVE):
            if self.easymp._sharded:
                raise RefusedError(
                    f"{path} under {self.strategy}: make it safetensors by `easymp checkpoint convert`"
                )
            obj.load_state_dict(read_state_dict(path), strict=strict)
        else:
            load_weights(obj, path, strict=strict)

    def _named(self, state: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, Any]]:
        """The prepared objects in `state` by their names in checkpoints, and its other values."""
        prepared = self.easymp._prepared
        numbers = {
            id(item): f"{word}_{i}" if i else word
            for word, things in (
                ("optimizer", [(o, o.optimizer) for o in prepared.optimizers]),
                ("model", [(m.view, m.route.original) for m in prepared.models]),
            )
            for i, same in enumerate(things)
            for item in same
        }
        names = {key: numbers[id(item)] for key, item in state.items() if id(item) in numbers}
        rest = {key: item for key, item in state.items() if key not in names}
        for key, item in rest.items():
            if isinstance(item, (nn.Module, torch.optim.Optimizer)):
                raise CheckpointError(
                    f"{key}, a {type(item).__name__}, was not set up: pass what setup returned"
                )
        return names, rest

    @staticmethod
    def _saved(path: str | os.PathLike[str]) -> dict[str, Any]:
        """The names of models and optimizers in a checkpoint, and its other values."""
        reading = Reading(open_checkpoint(path))
        found = reading.state(STATE) if STATE in reading else {}
        if found.keys() != {"names", "values"}:
            raise CheckpointError(
                f"{path} was not saved by Fabric.save: read it by easymp.Accelerator.load_state"
            )
        reading.run()
        return found

    # -- callbacks and logs -------------------------------------------------------------------------------------------

    def call(self, hook_name: str, *args: Any, **kwargs: Any) -> None:
        """Call the method `hook_name` of each callback that has it, with those of `kwargs` that it takes."""
        for callback in self.callbacks:
            method = getattr(callback, hook_name, None)
            if not callable(method):
                continue
            takes = signature(method).parameters
            every = any(p.kind is Parameter.VAR_KEYWORD for p in takes.values())
            method(*args, **{name: value for name, value in kwargs.items() if every or name in takes})

    @property
    def logger(self) -> Any:
        """The first logger."""
        return next(iter(self.loggers), None)

    def log(self, name: str, value: Any, step: int | None = None) -> None:
        """Log one number."""
        self.log_dict({name: value}, step)

    def log_dict(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log numbers, on rank 0."""
        if self.easymp._tracking.names:
            self.easymp.log(metrics, step)
        if self.is_global_zero and self.loggers:
            plain = {n: v.item() if isinstance(v, Tensor) else v for n, v in metrics.items()}
            for logger in self.loggers:
                logger.log_metrics(metrics=plain, step=step)


def _as_list(given: Any) -> list[Any]:
    return [] if given is None else list(given) if isinstance(given, (list, tuple)) else [given]


def _each_number(function: Callable[[Tensor], Tensor], data: Any, device: torch.device) -> Any:
    def one(leaf: Any) -> Tensor:
        return function(torch.as_tensor(leaf, device=device))

    return recursively_apply(one, data, test_type=lambda leaf: isinstance(leaf, (Tensor, int, float)))


def _refuse_groups(call: str, group: Any, sync_grads: bool) -> None:
    if group is not None or sync_grads:
        raise RefusedError(
            f"{call}(group=…, sync_grads=True): all ranks take part, without gradients; leave it out"
        )
