"""The Fabric: an Accelerator behind the methods of Lightning's, and the choices in Fabric's words."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from inspect import Parameter, signature
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ... import launcher
from ...accelerator import Accelerator
from ...base.pytree import recursively_apply, send_to_device
from ...base.rng import set_seed
from ...checkpoint.accelerate import read as read_torch
from ...checkpoint.accelerate import read_state_dict
from ...checkpoint.accelerate import write as write_torch
from ...checkpoint.folders import open_checkpoint
from ...checkpoint.huggingface import load as load_tree
from ...checkpoint.huggingface import save_tree
from ...checkpoint.load import Reading
from ...checkpoint.snapshot import on_rank_0
from ...checkpoint.weights import load_weights
from ...distributed import read_ranks
from ...errors import CheckpointError, NonfiniteError, RefusedError, SettingError, StepError, nearest
from ...settings import resolve
from ...training.wrapper import routed
from ..accelerate.plugins import FullyShardedDataParallelPlugin
from ..layer import Layer, unless_set

layer = Layer("Lightning Fabric")
PRECISIONS = {
    **dict.fromkeys(("32", "32-true"), "no"),
    **dict.fromkeys(("16", "16-mixed"), "fp16"),
    **dict.fromkeys(("bf16", "bf16-mixed"), "bf16"),
    "16-true": "fp16-true",
    "bf16-true": "bf16-true",
    "transformer-engine": "fp8",
}
REDUCTIONS = {word: word for word in ("mean", "sum", "max", "min", "product")} | {
    "avg": "mean",
    "prod": "product",
}
ACCELERATORS = {"gpu": ("cuda", "xpu", "mps"), "cuda": ("cuda",), "mps": ("mps",)}


class Strategy:
    """A strategy of easymp with its options."""

    def __init__(self, strategy: str, options: Any = None, activation_checkpointing: Any = None) -> None:
        self.strategy, self.options = strategy, options
        self.activation_checkpointing = activation_checkpointing


def _classes(option: str, policy: Any) -> list[str] | None:
    if policy is None:
        return None
    kinds = list(policy) if isinstance(policy, (set, frozenset, list, tuple)) else [policy]
    if not all(isinstance(kind, type) for kind in kinds):
        raise RefusedError(f"{option}={policy!r} is not honoured: pass a set of the modules' classes")
    return [kind.__name__ for kind in kinds]


class FSDPStrategy(Strategy):
    """Strategy "fsdp" (or "hsdp", "ddp") in the words of torch's FSDP. Policies are sets of classes."""

    def __init__(
        self, *, auto_wrap_policy: Any = None, activation_checkpointing_policy: Any = None, **options: Any
    ) -> None:
        wrap = _classes("auto_wrap_policy", auto_wrap_policy)
        plugin = FullyShardedDataParallelPlugin(transformer_cls_names_to_wrap=wrap, **options)
        again = _classes("activation_checkpointing_policy", activation_checkpointing_policy)
        super().__init__(plugin.strategy, plugin.options, again)


class DDPStrategy(Strategy):
    """Strategy "ddp"; `options` are fields of `easymp.DistributedDataParallelKwargs`."""

    def __init__(self, **options: Any) -> None:
        super().__init__("ddp", options or None)


STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "auto": partial(Strategy, "auto"),
    "dp": partial(Strategy, "data_parallel"),
    "single_device": partial(Strategy, "single"),
    **dict.fromkeys(("ddp", "ddp_spawn", "ddp_fork", "ddp_notebook"), DDPStrategy),
    "ddp_find_unused_parameters_true": partial(DDPStrategy, find_unused_parameters=True),
    "ddp_find_unused_parameters_false": DDPStrategy,
    "fsdp": FSDPStrategy,
    "fsdp_cpu_offload": partial(FSDPStrategy, cpu_offload=True),
}


def _on_cpu(accelerator: Any) -> bool:
    if accelerator in ("auto", "cpu"):
        return accelerator == "cpu"
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or found.type not in ACCELERATORS.get(str(accelerator), ()):
        raise SettingError(f"accelerator={accelerator!r}: this machine has {found or 'a CPU only'}")
    return False


def _known(name: str, given: str, known: Mapping[str, Any]) -> Any:
    if given not in known:
        near = nearest(given, known) or "."
        raise RefusedError(f"{name}={given!r} is not run here{near} Known: {', '.join(known)}")
    return known[given]


def _strategy(given: Any) -> Strategy:
    if isinstance(given, Strategy):
        return given
    if str(given).startswith("deepspeed"):
        stage = "zero1" if "1" in str(given) else "fsdp"
        raise RefusedError(f"strategy={given!r} is Accelerator(strategy={stage!r}) of easymp: pass 'fsdp'")
    return _known("strategy", str(given), STRATEGIES)()  # type: ignore[no-any-return]


def _processes(devices: Any, cpu: bool) -> int:
    if isinstance(devices, (list, tuple)):
        if list(devices) != list(range(len(devices))):
            raise RefusedError(f"devices={devices!r}: set CUDA_VISIBLE_DEVICES, and pass their number")
        return len(devices)
    if str(devices) in ("auto", "-1"):
        return 1 if cpu else max(1, torch.accelerator.device_count())
    if not str(devices).isdigit() or int(devices) < 1:
        raise SettingError(f"devices={devices!r} is neither a number of processes, nor -1, nor 'auto'")
    return int(devices)


def seed_everything(seed: int | None = None, workers: bool | None = None, verbose: bool = True) -> int:
    """Seed all random streams; returns the seed, 0 by default. Workers of prepared loaders are seeded by it always."""
    set_seed(seed or 0)
    return seed or 0


NATIVE = """
acc = Accelerator(mixed_precision={precision!r}, strategy={strategy!r})  # Fabric(…); easymp.launch(n) for launch()
model, optimizer, loader = acc.prepare(model, optimizer, loader)  # setup, setup_dataloaders
acc.backward(loss)
acc.save_state(path)  # save(path, state); load_state(path)
"""
OF_TORCH_SAVE = (".pt", ".pth", ".bin", ".ckpt")
STATE = "state/object_0"  # of `Fabric.save`, in a checkpoint
ALL_OF_IT = "pass all models and optimizers that were set up, so that a whole checkpoint is written"


class _Accelerator(Accelerator):
    _views_only = True  # what setup returns has `module` and `mark_forward_method`


def mark_forward_method(self: Any, method: MethodType | str) -> None:
    """Let `method` of a model that was set up compute as forward does: under autocast and the strategy."""
    if not isinstance(method, (MethodType, str)):
        raise TypeError(f"mark_forward_method() takes a method or its name, got a {type(method).__name__}")
    name, route = method if isinstance(method, str) else method.__name__, self._easymp_route
    if name == "forward":
        raise ValueError("mark_forward_method('forward'): forward is marked always. Name another method")
    if not isinstance(getattr(route.original, name, None), MethodType):
        raise AttributeError(
            f"mark_forward_method({name!r}): {type(route.original).__name__} has no such method"
        )
    setattr(type(self), name, routed(route, name))


class Fabric:
    """Fabric's methods on an Accelerator, which is made by `launch`, or at the first use.

    Loggers are words of `Accelerator(log_with=…)`, trackers of easymp, or objects with Lightning's ``log_metrics(metrics, step)``. Raises
    SettingError for a value that Fabric does not know, RefusedError for one that easymp does not run.
    """

    def __init__(
        self, *, accelerator: str = "auto", strategy: Any = "auto", devices: Sequence[int] | str | int = "auto",
        num_nodes: int = 1, precision: str | int | None = None, plugins: Any = None, callbacks: Any = None,
        loggers: Any = None,
    ) -> None:  # fmt: skip
        if plugins:
            raise RefusedError(f"plugins={plugins!r} is not honoured: pass precision=, and use a launcher")
        self._cpu, ranks = _on_cpu(accelerator), read_ranks()
        self._precision = None if precision is None else _known("precision", str(precision), PRECISIONS)
        self.strategy, self._devices = _strategy(strategy), _processes(devices, self._cpu)
        if ranks.size > 1 and devices not in ("auto", -1, "-1") and ranks.local_size != self._devices:
            started = f"the launcher ({ranks.announced}) started {ranks.local_size} processes here"
            raise SettingError(f"devices={devices!r}, and {started}")
        if num_nodes > 1 and ranks.nodes != num_nodes:
            raise RefusedError(f"num_nodes={num_nodes}: start it with `easymp launch --nodes {num_nodes}`")
        self.callbacks, given = _as_list(callbacks), _as_list(loggers)
        self.loggers = [item for item in given if hasattr(item, "log_metrics")]
        self._log_with = [item for item in given if not hasattr(item, "log_metrics")] or None
        self._made: Accelerator | None = None
        # What `save` keeps beside models and optimizers, and their names.
        self._remembered: dict[str, Any] = {}
        if type(self).run is not Fabric.run:
            self.run = partial(self.launch, lambda _, *args, run=self.run, **kwargs: run(*args, **kwargs))  # type: ignore[method-assign]

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
                raise StepError(f"devices={self._devices} in one process: call fabric.launch() first")
            chosen = self.strategy if several else Strategy("auto")
            asked = resolve()
            precision = unless_set(asked, "mixed_precision", self._precision, "no")
            layer.use("Fabric", NATIVE.format(precision=precision, strategy=chosen.strategy))
            self._made = _Accelerator(
                mixed_precision=precision,
                strategy=None if chosen.strategy == "auto" else chosen.strategy,
                strategy_options=chosen.options,
                activation_checkpointing=chosen.activation_checkpointing,
                cpu=self._cpu or None,
                log_with=unless_set(asked, "log_with", self._log_with, "none"),
            )
            held = SimpleNamespace(state_dict=lambda: self._remembered, load_state_dict=lambda _: None)
            self._made.register_for_checkpointing(held)
        return self._made

    device = property(lambda self: self.easymp.device)
    autocast = property(lambda self: self.easymp.autocast)
    print = property(lambda self: self.easymp.print)  # on the first process of each node
    global_rank = property(lambda self: read_ranks().rank)
    local_rank = property(lambda self: read_ranks().local_rank)
    node_rank = property(lambda self: read_ranks().rank // max(1, read_ranks().local_size))
    world_size = property(lambda self: self.easymp.num_processes)
    is_global_zero = property(lambda self: read_ranks().rank == 0)

    def setup(
        self, module: nn.Module, *optimizers: torch.optim.Optimizer, scheduler: Any = None, move_to_device: bool = True,
        _reapply_compile: bool = True,
    ) -> Any:  # fmt: skip
        """The model, or a tuple of it, its optimizers and the scheduler, for this run. The scheduler is stepped by the script."""
        placed = [move_to_device, *(None for _ in optimizers)]
        done = self.easymp.prepare(module, *optimizers, device_placement=placed)
        type(
            done[0] if optimizers else done
        ).mark_forward_method = mark_forward_method  # the class is made for this model
        return done if scheduler is None else (*(done if optimizers else [done]), scheduler)

    def setup_module(
        self, module: nn.Module, move_to_device: bool = True, _reapply_compile: bool = True
    ) -> nn.Module:
        """The model, for this run."""
        return self.setup(module, move_to_device=move_to_device)  # type: ignore[no-any-return]

    def setup_optimizers(self, *optimizers: torch.optim.Optimizer) -> Any:
        """One or several optimizers of models that were set up."""
        return self.easymp.prepare(*optimizers)

    def setup_dataloaders(
        self, *dataloaders: Any, use_distributed_sampler: bool = True, move_to_device: bool = True
    ) -> Any:
        """One loader, or a list of several, of which each rank reads its share."""
        if not use_distributed_sampler and self.world_size > 1:
            raise RefusedError("use_distributed_sampler=False: leave it out, or do not set this loader up")
        placed = [move_to_device] * len(dataloaders)
        done = self.easymp.prepare(*dataloaders, device_placement=placed)
        return list(done) if len(dataloaders) > 1 else done

    def backward(self, tensor: Tensor, *args: Any, model: nn.Module | None = None, **kwargs: Any) -> None:
        """As ``tensor.backward(*args, **kwargs)``; gradients are averaged over the ranks, and the loss is scaled under fp16."""
        named = dict(zip(("gradient", "retain_graph", "create_graph"), args))
        self.easymp.backward(tensor, **named, **kwargs)

    def clip_gradients(
        self, module: nn.Module, optimizer: Any, clip_val: float | None = None, max_norm: float | None = None,
        norm_type: float = 2.0, error_if_nonfinite: bool = True,
    ) -> Tensor | None:  # fmt: skip
        """Clip to ``[-clip_val, clip_val]``, or the total norm to `max_norm`; returns that norm before."""
        if (clip_val is None) == (max_norm is None):
            raise ValueError("clip_gradients takes one of clip_val and max_norm")
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if max_norm is None:
            self.easymp.clip_grad_value_(parameters, clip_val)  # type: ignore[arg-type]
            return None
        norm = self.easymp.clip_grad_norm_(parameters, max_norm, norm_type)
        scaled = self.easymp.scaler.scales
        if error_if_nonfinite and not scaled and norm is not None and not torch.isfinite(norm):
            raise NonfiniteError(f"norm of the gradients is {float(norm)}: error_if_nonfinite=False clips on")
        return norm

    def no_backward_sync(self, module: nn.Module, enabled: bool = True) -> AbstractContextManager[None]:
        """Inside, gradients stay on this rank: for accumulation by the script."""
        return self.easymp.no_sync(module) if enabled else nullcontext()

    def init_tensor(self) -> torch.device:
        """Inside, new tensors are on the device of this rank."""
        return self.device

    def init_module(self, empty_init: bool | None = None) -> torch.device:
        """Inside, new modules are on the device of this rank; with `empty_init` on the meta device, and setup gives them values."""
        return torch.device("meta") if empty_init else self.device

    def sharded_model(self) -> AbstractContextManager[None]:
        """Nothing: `setup` shards."""
        return nullcontext()

    def to_device(self, obj: Any) -> Any:
        return obj.to(self.device) if isinstance(obj, nn.Module) else send_to_device(obj, self.device)

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
        _all_ranks("all_gather", group, sync_grads)
        one = (lambda leaf: leaf) if self.world_size == 1 else (lambda leaf: self.easymp.gather(leaf[None]))
        return _each_number(one, data, self.device)

    def all_reduce(self, data: Any, group: Any = None, reduce_op: str = "mean") -> Any:
        """The "mean", "sum", "max", "min" or "product" of each tensor or number of `data` over the ranks; tensors in place."""
        _all_ranks("all_reduce", group)
        word = _known("reduce_op", str(reduce_op).rpartition(".")[2].lower(), REDUCTIONS)
        reduce = self.easymp.reduce if word in ("mean", "sum") else self.easymp._world.reduce
        return _each_number(lambda leaf: leaf.detach().copy_(reduce(leaf, word)), data, self.device)

    def rank_zero_first(self, local: bool = False) -> AbstractContextManager[None]:
        """Rank 0 runs the block before the others; with `local` that of each node."""
        return self.easymp.local_main_process_first() if local else self.easymp.main_process_first()

    def save(
        self, path: str | os.PathLike[str], state: Mapping[str, Any],
        filter: Mapping[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:  # fmt: skip
        """Save models, optimizers, other objects with a state_dict, and values by name; all ranks call it.

        With all models and optimizers that were set up this is a checkpoint of easymp in the folder `path`: sharded, verified, with random
        states and positions of loaders. With some of them, or a `filter`, it is one file: of safetensors, or where the name ends in
        ``.pt``, ``.pth``, ``.bin`` or ``.ckpt`` one that ``torch.load(weights_only=True)`` reads.
        """
        acc, (names, rest) = self.easymp, self._named(state)
        if unknown := set(filter or {}) - set(state):
            raise ValueError(f"filter names {sorted(unknown)}: pass keys of state, {sorted(state)}")
        rest = {key: item.state_dict() if _stateful(item) else item for key, item in rest.items()}
        prepared = len(acc._prepared.models) + len(acc._prepared.optimizers)
        if len(names) == prepared and prepared and not filter:
            self._remembered = {"names": names, "values": rest}
            acc.save_state(path)
            return
        optimizers = [key for key, of in names.items() if of.startswith("optimizer")]
        if acc._sharded and (optimizers or filter):
            raise RefusedError(f"save({', '.join(optimizers) or 'filter'}) of sharded weights: {ALL_OF_IT}")
        for key in names:
            item, keep = state[key], (filter or {}).get(key, lambda name, value: True)
            found = acc.get_state_dict(item) if isinstance(item, nn.Module) else item.state_dict()
            rest[key] = {name: value for name, value in found.items() if keep(name, value)}
        write = write_torch if str(path).endswith(OF_TORCH_SAVE) else save_tree
        on_rank_0(acc._world, lambda: write(rest, path))

    def load(
        self, path: str | os.PathLike[str], state: dict[str, Any] | None = None, strict: bool = True, *,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Load what `save` wrote into the objects of `state`, and replace its other values; all ranks call it.

        Returns the saved values that `state` does not name. For ``state=None`` nothing is loaded, and these are all of a file, or all of a
        checkpoint apart from its models and optimizers.
        """
        acc, wanted = self.easymp, {} if state is None else state
        names, rest = self._named(wanted)
        if Path(path).is_file():
            found = read_torch(os.fspath(path)) if str(path).endswith(OF_TORCH_SAVE) else load_tree(path)
            if acc._sharded and names:
                raise RefusedError(f"load({', '.join(names)}) of one file into sharded weights: {ALL_OF_IT}")
            rest = dict(wanted)
        else:
            saved = self._saved(path)
            if state is not None and names == saved["names"]:
                acc.load_state(path, strict=strict)
            elif not all(isinstance(wanted[key], nn.Module) for key in names):
                whole = ", ".join(saved["names"])
                raise CheckpointError(f"{path} was saved of {whole}: pass all of these, or models alone")
            else:
                for key in names:
                    load_weights(wanted[key], path, strict=strict, which=saved["names"].get(key, "model"))
            found = dict(saved["values"])
        for key, item in rest.items():
            if key not in found:
                if strict:
                    raise KeyError(f"{path} has no {key!r}: it has {', '.join(found)}")
            elif isinstance(item, nn.Module):
                item.load_state_dict(found.pop(key), strict=strict)
            elif _stateful(item):
                item.load_state_dict(found.pop(key))
            else:
                wanted[key] = found.pop(key)
        return found

    def load_raw(
        self, path: str | os.PathLike[str], obj: nn.Module | torch.optim.Optimizer, strict: bool = True, *,
        weights_only: bool | None = None,
    ) -> None:  # fmt: skip
        """Load weights of safetensors, a checkpoint, or a plain state dict of torch.save into a model."""
        if not isinstance(obj, nn.Module):
            obj.load_state_dict(load_tree(path))
        elif str(path).endswith(OF_TORCH_SAVE):
            if self.easymp._sharded:
                raise RefusedError(f"{path} into sharded weights: run `easymp checkpoint convert` on it")
            obj.load_state_dict(read_state_dict(path), strict=strict)
        else:
            load_weights(obj, path, strict=strict)

    def _named(self, state: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, Any]]:
        """The prepared objects in `state` by their names in checkpoints, and its other values."""
        if not isinstance(state, Mapping):
            raise SettingError(f"state is a {type(state).__name__}: pass a dict, as in {{'model': model}}")
        prepared = self.easymp._prepared
        pairs = {
            "optimizer": [(o, o.optimizer) for o in prepared.optimizers],
            "model": [(m.view, m.original) for m in prepared.models],
        }
        numbers = {
            id(item): f"{word}_{i}" if i else word
            for word, things in pairs.items()
            for i, same in enumerate(things)
            for item in same
        }
        names = {key: numbers[id(item)] for key, item in state.items() if id(item) in numbers}
        rest = {key: item for key, item in state.items() if key not in names}
        for key, item in rest.items():
            if isinstance(item, (nn.Module, torch.optim.Optimizer)):
                raise CheckpointError(f"{key} was not set up; pass what setup returned")
        return names, rest

    @staticmethod
    def _saved(path: str | os.PathLike[str]) -> dict[str, Any]:
        """The names of models and optimizers in a checkpoint, and its other values."""
        reading = Reading(open_checkpoint(path))
        found = reading.state(STATE) if STATE in reading else {}
        if found.keys() != {"names", "values"}:
            raise CheckpointError(f"{path} was not saved by Fabric.save: read it by Accelerator.load_state")
        reading.run()
        return found

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
    def accelerator(self) -> Any:
        """An AttributeError: there is no object of a device's kind."""
        raise AttributeError(
            "fabric.accelerator is not part of easymp.compat: fabric.device has type and index"
        )

    @property
    def logger(self) -> Any:
        """The first logger."""
        return next(iter(self.loggers), None)

    def log(self, name: str, value: Any, step: int | None = None) -> None:
        self.log_dict({name: value}, step)

    def log_dict(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log numbers, on rank 0."""
        if self.easymp._logbook.names:
            self.easymp.log(metrics, step)
        if self.is_global_zero and self.loggers:
            plain = {n: v.item() if isinstance(v, Tensor) else v for n, v in metrics.items()}
            for logger in self.loggers:
                logger.log_metrics(metrics=plain, step=step)


def _stateful(item: Any) -> bool:
    """Whether `save` keeps an object by its state dict: a scheduler, a metric, a sampler."""
    return callable(getattr(item, "state_dict", None)) and callable(getattr(item, "load_state_dict", None))


def _as_list(given: Any) -> list[Any]:
    return [] if given is None else list(given) if isinstance(given, (list, tuple)) else [given]


def _each_number(function: Callable[[Tensor], Tensor], data: Any, device: torch.device) -> Any:
    def one(leaf: Any) -> Tensor:
        return function(torch.as_tensor(leaf, device=device))

    return recursively_apply(one, data, test_type=lambda leaf: isinstance(leaf, (Tensor, int, float)))


def _all_ranks(call: str, group: Any, sync_grads: bool = False) -> None:
    if group is not None or sync_grads:
        raise RefusedError(f"{call}: group and sync_grads=True are not honoured: all ranks take part")
