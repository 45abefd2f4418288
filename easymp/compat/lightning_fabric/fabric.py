"""The Fabric: an Accelerator behind the methods of Lightning's, and the choices in Fabric's words."""

from __future__ import annotations

import copy
import os
import random
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, wraps
from inspect import Parameter, signature
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, RandomSampler

from ... import launcher
from ...accelerator import Accelerator
from ...base import env
from ...base.pytree import map_leaves, recursively_apply, send_to_device
from ...base.rng import set_seed
from ...checkpoint.export import get_state_dict, read_object, write_object
from ...checkpoint.ranks import run_on_rank_0
from ...checkpoint.weights import in_memory, load_source, open_source
from ...distributed import read_ranks
from ...errors import LengthError, NonfiniteError, RefusedError, SettingError, StepError
from ...launcher.entrypoints import notebook_launcher
from ...logging import get_logger
from ...optim import PreparedOptimizer
from ...optim.torch_step import parameters_of
from ...precision.levels import cast
from ...settings import resolve
from ...training.prepare import PrepareOptions
from ...training.wrapper import routed
from ..accelerate.accelerator import adopt
from ..layer import plain_steps_on_cpu, unless_set
from . import strategies
from .strategies import Strategy, lookup

UNSPREAD = ("auto", "single", "data_parallel")  # strategies of which one process joins no group
StrPath = str | os.PathLike[str]
Filter = Mapping[str, Callable[[str, Any], bool]]
SEED, SEED_WORKERS = "PL_GLOBAL_SEED", "PL_SEED_WORKERS"  # Lightning's variables
STEP_METHODS = ("training_step", "validation_step", "test_step", "predict_step")  # of a LightningModule
log = get_logger(__name__)


def seed_everything(seed: int | None = None, workers: bool = False, verbose: bool = True) -> int:
    """Seed Python, NumPy and torch; returns the seed. None takes ``PL_GLOBAL_SEED``, or 0."""
    if seed is None:
        text = env.read(SEED)
        if text is None and verbose:
            warnings.warn("No seed found, seed set to 0", UserWarning, stacklevel=2)
        if not str(text or 0).lstrip("-").isdigit():
            raise ValueError(f"Invalid seed specified via {SEED}: {text!r}: set it to a whole number")
        seed = int(text or 0)
    seed = int(seed)
    if not 0 <= seed < 2**32:
        raise ValueError(f"{seed} is not in bounds, numpy accepts from 0 to {2**32 - 1}")
    env.put({SEED: str(seed), SEED_WORKERS: str(int(workers))})
    set_seed(seed)
    if verbose:
        log.info("Seed set to %d", seed)
    return seed


def reset_seed() -> None:
    """Seed again as the last `seed_everything` did, if there was one."""
    if env.read(SEED) is not None:
        seed_everything(workers=env.flag(SEED_WORKERS, False), verbose=False)


def pl_worker_init_function(worker_id: int, rank: int | None = None) -> None:
    """Seed a worker process of a DataLoader by its number, its rank and the loader's seed, to Lightning's values."""
    base = torch.initial_seed() - worker_id
    rank = read_ranks().rank if rank is None else rank
    seed, high, low = _worker_seeds(base << 32 | worker_id << 16 | rank)
    torch.manual_seed(seed)
    random.seed(high << 32 | low)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(numpy.random.SeedSequence([base, worker_id, rank]).generate_state(4))


def _worker_seeds(state: int) -> list[int]:
    """Three numbers of 64 bits: MurmurHash3's finalizer, then Knuth's linear congruential generator."""
    bits = 2**64 - 1
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        state = (state ^ state >> 33) * factor & bits
    state ^= state >> 33
    seeds = []
    for _ in range(3):
        state = state * 6364136223846793005 + 1 & bits
        seeds.append(state)
    return seeds


def is_set_up(obj: object) -> bool:
    """Whether `obj` came from a setup method, also inside torch.compile."""
    obj = getattr(obj, "_orig_mod", obj)
    return hasattr(type(obj), "_easymp_route") or isinstance(obj, (PreparedOptimizer, FabricDataLoader))


def _nothing(fabric: Fabric) -> None:
    """Default of `Fabric.launch`."""


class _Accelerator(Accelerator):
    def _change_preparing(self, options: PrepareOptions) -> PrepareOptions:
        # What setup returns has `module` and `mark_forward_method`. Ranks with equal seeds draw equal numbers.
        return options._replace(always_views=True, diverge=False)


def mark_forward_method(self: Any, method: MethodType | str) -> None:
    """Let `method` of a model that was set up compute as forward does: under autocast and the strategy."""
    if not isinstance(method, (MethodType, str)):
        raise TypeError(f"Expected a method or a string, got a {type(method).__name__}")
    name, route = method if isinstance(method, str) else method.__name__, self._easymp_route
    if name == "forward":
        raise ValueError("You cannot mark the forward method itself: it is marked always")
    if not isinstance(getattr(route.original, name, None), MethodType):
        raise AttributeError(f"`{type(route.original).__name__}.{name}` does not exist or is not a method.")
    setattr(type(self), name, self._in_precision(routed(route, name)))


def _first_parameter(model: Any) -> Tensor:
    return next(iter(model.parameters()), torch.empty(0))


@contextmanager
def default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    """Inside, new floating-point tensors have `dtype`; None changes nothing."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def in_precision(inputs: torch.dtype | None, weights: torch.dtype | None, method: Any) -> Any:
    """A view's method with floating-point arguments as `inputs`, that computes with `weights`; as it is for None."""
    if inputs is None:
        return method

    @wraps(method)
    def computing(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = cast(args, inputs), cast(kwargs, inputs)
        with default_dtype(weights):
            outputs = method(self, *args, **kwargs)
        return cast(outputs, torch.get_default_dtype())

    return computing


class _EmptyInit(TorchFunctionMode):
    """Leaves new parameters without values, for a checkpoint that gives them some."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs.get("tensor", args[0] if args else None)
        return func(*args, **kwargs)


# -- loaders: a DistributedSampler's share, an epoch for each pass, batches on the device -----------------------------


class FabricDataLoader(DataLoader[Any]):
    """The script's DataLoader. It moves its batches to `device`, and tells its sampler the number of earlier passes."""

    device: torch.device | None
    _dataloader: DataLoader[Any]
    _passes: int

    def __init__(self, loader: DataLoader[Any], device: torch.device | None) -> None:
        # An attribute of a DataLoader cannot be set a second time, which its own __init__ would do.
        vars(self).update(vars(loader), device=device, _dataloader=loader, _passes=0)

    def __len__(self) -> int:
        return len(self._dataloader)

    def __iter__(self) -> Any:  # an iterator, for which torch has a type of its own
        loader = self._dataloader
        samplers: dict[int, Any] = {id(s): s for s in (loader.sampler, getattr(loader.batch_sampler, "sampler", None))}
        for sampler in samplers.values():
            if callable(getattr(sampler, "set_epoch", None)):
                sampler.set_epoch(self._passes)
        self._passes += 1
        for batch in loader:
            yield batch if self.device is None else send_to_device(batch, self.device)


class DealtSampler(DistributedSampler[int]):
    """Deals the indices of another sampler to the ranks, one after the other."""

    def __init__(self, sampler: Any, **shares: Any) -> None:
        if not hasattr(sampler, "__len__"):
            remedy = "add __len__, by which it is dealt to the processes, or pass use_distributed_sampler=False"
            raise LengthError(f"You seem to have configured a sampler in your DataLoader without a length: {remedy}")
        self.sampler = sampler
        super().__init__(sampler, shuffle=False, **shares)

    def __iter__(self) -> Iterator[int]:
        indices = list(self.sampler)
        return (indices[i] for i in super().__iter__())


def shard(loader: DataLoader[Any], rank: int, size: int, seed: int) -> DataLoader[Any]:
    """A copy of `loader` whose sampler has this rank's share. RefusedError for a batch sampler without a sampler."""
    batches: Any = loader.batch_sampler
    if not isinstance(batches, BatchSampler | None):
        raise RefusedError(
            f"setup_dataloaders() of a batch_sampler of class {type(batches).__name__}: its batches cannot be shared "
            "among the processes. Pass use_distributed_sampler=False, and let it yield this rank's batches"
        )
    sampler: Any = loader.sampler if batches is None else batches.sampler
    shares: Any = {"num_replicas": size, "rank": rank, "seed": seed}
    shuffles = isinstance(sampler, RandomSampler)
    sampler = DistributedSampler(loader.dataset, **shares) if shuffles else DealtSampler(sampler, **shares)
    if batches is not None:
        batches = copy.copy(batches)
        batches.sampler = sampler
    sharded = copy.copy(loader)
    vars(sharded).update(sampler=sampler, batch_sampler=batches)
    return sharded


# -- the Fabric ------------------------------------------------------------------------------------------------------


class Fabric:
    """Fabric's methods on an Accelerator, which is made by `launch`, or at the first use."""

    def __init__(
        self, *, accelerator: str = "auto", strategy: Any = "auto", devices: Sequence[int] | str | int = "auto",
        num_nodes: int = 1, precision: str | int | None = None, plugins: Any = None, callbacks: Any = None,
        loggers: Any = None,
    ) -> None:  # fmt: skip
        if plugins:
            raise RefusedError(f"plugins={plugins!r} is not honoured: pass precision=, and use a launcher")
        if num_nodes < 1:
            raise SettingError(f"`num_nodes` must be a positive integer, got {num_nodes}")
        self._cpu, ranks = strategies.is_cpu(accelerator), read_ranks()
        self._devices = strategies.count_processes(devices, self._cpu)
        self._precision = None if precision is None else lookup("precision", str(precision), strategies.PRECISIONS)
        on_cpu = self._cpu or torch.accelerator.current_accelerator(check_available=True) is None
        if on_cpu and self._precision in strategies.ON_CPU:
            warnings.warn("precision='16-mixed' on a CPU is 'bf16-mixed'", UserWarning, stacklevel=2)
            self._precision = strategies.ON_CPU[self._precision]
        if strategy == "dp" and on_cpu:
            warnings.warn("'dp' is not supported on CPUs, hence setting `strategy='ddp'`.", UserWarning, stacklevel=2)
            strategy = "ddp"
        if strategy == "auto" and max(self._devices, ranks.size) > 1:
            strategy = "ddp"
        self.strategy = strategies.read_strategy(strategy)
        self.strategy.fabric = weakref.ref(self)
        script = getattr(sys.modules["__main__"], "__file__", None)
        self._forks = strategy in strategies.FORKED or (script is None and self._devices > 1)
        if ranks.size > 1 and devices not in ("auto", -1, "-1") and ranks.local_size != self._devices:
            started = f"the launcher ({ranks.announced}) started {ranks.local_size} processes here"
            raise SettingError(f"devices={devices!r}, and {started}")
        if num_nodes > 1 and ranks.nodes != num_nodes:
            raise RefusedError(f"num_nodes={num_nodes}: start it with `easymp launch --nodes {num_nodes}`")
        self.callbacks, self.loggers = _as_list(callbacks), _as_list(loggers)
        if wrong := [logger for logger in self.loggers if not hasattr(logger, "log_metrics")]:
            raise RefusedError(f"loggers={wrong!r}: pass objects with log_metrics, such as loggers.CSVLogger(folder)")
        self._accelerator: Accelerator | None = None
        if type(self).run is not Fabric.run:
            run = self.run
            launched = partial(self.launch, lambda _, *args, **kwargs: run(*args, **kwargs))
            self.run = launched  # type: ignore[method-assign]

    def launch(self, function: Callable[..., Any] = _nothing, *args: Any, **kwargs: Any) -> Any:
        """Start `devices` processes, unless a launcher did, and return ``function(fabric, *args, **kwargs)``."""
        if not callable(function):
            raise TypeError(f"`Fabric.launch(...)` needs to be a callable, but got {function!r}: pass a function")
        if not signature(function).parameters:
            raise TypeError(f"`Fabric.launch(function={function})` needs to take at least one argument, the Fabric")
        if self._forks and function is _nothing:
            raise TypeError("under this strategy, or without a script, `launch()` needs to be called with a function")
        if self._accelerator is None and read_ranks().size == 1 and self._devices > 1:
            if self._forks:  # processes that run the function only; others run the script
                return notebook_launcher(partial(function, self, *args, **kwargs), (), self._devices)[0]
            launcher.launch(self._devices)
        return function(self, *args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The program of a subclass; calling it launches first."""

    @staticmethod
    def seed_everything(seed: int | None = None, workers: bool | None = None, verbose: bool = True) -> int:
        return seed_everything(seed, workers is None or workers, verbose)

    @property
    def easymp(self) -> Accelerator:
        """The Accelerator that does the work."""
        if self._accelerator is None:
            distributed = read_ranks().size > 1
            if self._devices > 1 and not distributed:
                remedy = "to use Fabric with more than one device, you must call `.launch()` first"
                raise StepError(f"devices={self._devices} in one process: {remedy}")
            strategy = self.strategy if distributed else Strategy("auto")
            settings = plain_steps_on_cpu(resolve(), self._cpu)
            named = "no" if self._precision == strategies.DOUBLE else self._precision
            precision = unless_set(settings, "mixed_precision", named, "no")
            self._accelerator = _Accelerator(
                mixed_precision=precision,
                strategy=None if strategy.strategy == "auto" else strategy.strategy,  # type: ignore[arg-type]
                strategy_options=strategy.options,
                activation_checkpointing=strategy.activation_checkpointing,
                cpu=self._cpu or None,
                log_with="none",
                settings=settings,
            )
            if precision in strategies.TRUE_DTYPES:
                self._accelerator._prepared.round_updates()
        return self._accelerator

    device = property(lambda self: self.easymp.device)
    autocast = property(lambda self: self.easymp.autocast)
    global_rank = property(lambda self: read_ranks().rank)
    local_rank = property(lambda self: read_ranks().local_rank)
    node_rank = property(lambda self: read_ranks().rank // max(1, read_ranks().local_size))
    world_size = property(lambda self: read_ranks().size)
    is_global_zero = property(lambda self: read_ranks().rank == 0)

    @property
    def _is_group(self) -> bool:
        """Whether the processes are a group: of several, or of one under a strategy for several, as in Fabric."""
        return self.world_size > 1 or self.strategy.strategy not in UNSPREAD

    @property
    def _true_dtype(self) -> torch.dtype | None:
        """The dtype of all weights under "bf16-true" and its kind."""
        return strategies.TRUE_DTYPES.get(self._precision or self.easymp._precision.name)

    # -- models, optimizers and loaders

    def setup(
        self, module: nn.Module, *optimizers: Optimizer, scheduler: Any = None, move_to_device: bool = True,
        _reapply_compile: bool = True,
    ) -> Any:  # fmt: skip
        """Set up a model for this run; returns it, or with optimizers or a scheduler a tuple that begins with it."""
        model = self._set_up_module("setup", module, move_to_device)
        prepared = [self._set_up_optimizer("setup", optimizer) for optimizer in optimizers]
        self.call("on_after_setup", fabric=self, module=model)
        if not optimizers:
            return model if scheduler is None else (model, scheduler)
        return (model, *prepared) if scheduler is None else (model, *prepared, scheduler)

    def setup_module(self, module: nn.Module, move_to_device: bool = True, _reapply_compile: bool = True) -> nn.Module:
        """The model, for this run."""
        return self._set_up_module("setup_module", module, move_to_device)

    def setup_optimizers(self, *optimizers: Optimizer) -> Any:
        """Set up one or several optimizers. Under a strategy that shards weights, set up their models before."""
        if not optimizers:
            raise ValueError("`setup_optimizers` requires at least one optimizer as input")
        prepared = tuple(self._set_up_optimizer("setup_optimizers", optimizer) for optimizer in optimizers)
        return prepared[0] if len(prepared) == 1 else prepared

    def _set_up_module(self, method: str, module: nn.Module, move_to_device: bool) -> nn.Module:
        if is_set_up(module):
            raise ValueError(f"A model should be passed only once to the `{method}` method: use what it returned")
        if self._precision == strategies.DOUBLE:
            module.double()
        adopt(self.easymp, [module])
        model: Any = self.easymp.prepare(module, device_placement=[move_to_device])
        view = type(model)  # made for this model
        inputs = self._true_dtype or strategies.MIXED_DTYPES.get(self.easymp._precision.name)
        view._in_precision = staticmethod(partial(in_precision, inputs, self._true_dtype))
        view.__call__ = view._in_precision(view.__call__)
        view.forward = view._in_precision(view.forward)
        view.mark_forward_method = mark_forward_method
        for name in STEP_METHODS if self._is_group else ():
            if isinstance(getattr(module, name, None), MethodType):
                model.mark_forward_method(name)
        if not hasattr(module, "device"):
            view.device = self.device if move_to_device else property(lambda self: _first_parameter(self).device)
        if not hasattr(module, "dtype"):
            view.dtype = property(lambda self: _first_parameter(self).dtype)
        return model  # type: ignore[no-any-return]  # a module

    def _set_up_optimizer(self, method: str, optimizer: Optimizer) -> Any:
        if is_set_up(optimizer):
            raise ValueError(f"An optimizer should be passed only once to the `{method}` method: use what it returned")
        adopt(self.easymp, [optimizer], replaces=True)
        prepared = self.easymp.prepare(optimizer)
        if any(hasattr(callback, "on_after_optimizer_step") for callback in self.callbacks):
            step = partial(self.call, "on_after_optimizer_step", strategy=self.strategy)
            optimizer.register_step_post_hook(lambda optimizer, *_: step(optimizer=optimizer))
        return prepared

    def setup_dataloaders(
        self, *dataloaders: Any, use_distributed_sampler: bool = True, move_to_device: bool = True
    ) -> Any:
        """One loader, or a list of several, of which each rank reads its share, by DistributedSampler."""
        device = self.device if move_to_device else None
        if not dataloaders:
            raise ValueError("`setup_dataloaders` requires at least one dataloader as input")
        prepared = []
        for loader in dataloaders:
            if is_set_up(loader):
                raise ValueError("A dataloader should be passed only once to the `setup_dataloaders` method")
            if not isinstance(loader, DataLoader):
                kind = type(loader).__name__
                raise TypeError(f"Only PyTorch DataLoader are currently supported in `setup_dataloaders`, not {kind}")
            is_shared = isinstance(loader.sampler, DistributedSampler) or isinstance(loader.dataset, IterableDataset)
            if use_distributed_sampler and self._is_group and not is_shared:
                loader = shard(loader, self.global_rank, self.world_size, int(env.read(SEED, "0") or 0))
            if env.flag(SEED_WORKERS, False) and loader.num_workers and loader.worker_init_fn is None:
                loader.worker_init_fn = partial(pl_worker_init_function, rank=self.global_rank)
            prepared.append(FabricDataLoader(loader, device))
        return prepared if len(prepared) > 1 else prepared[0]

    # -- the step

    def backward(self, tensor: Tensor, *args: Any, model: nn.Module | None = None, **kwargs: Any) -> None:
        """As ``tensor.backward(*args, **kwargs)``, with gradients averaged over ranks, and a loss scale under fp16."""
        positional = dict(zip(("gradient", "retain_graph", "create_graph"), args))
        self.easymp.backward(tensor, **positional, **kwargs)

    def clip_gradients(
        self, module: nn.Module, optimizer: Any, clip_val: float | None = None, max_norm: float | None = None,
        norm_type: float = 2.0, error_if_nonfinite: bool = True,
    ) -> Tensor | None:  # fmt: skip
        """Clip to ``[-clip_val, clip_val]``, or the total norm to `max_norm`; returns that norm before."""
        if (clip_val is None) == (max_norm is None):
            raise ValueError("Only one of `clip_val` or `max_norm` can be set: clip_gradients takes one of them")
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if max_norm is None:
            self.easymp.clip_grad_value_(parameters, float(clip_val))  # type: ignore[arg-type]  # checked above
            return None
        norm = self.easymp.clip_grad_norm_(parameters, max_norm, norm_type)
        self.easymp.unscale_gradients(optimizer)  # in memory, not inside the step
        scaled = self.easymp.scaler.scales
        if error_if_nonfinite and not scaled and norm is not None and not torch.isfinite(norm):
            raise NonfiniteError(f"norm of the gradients is {float(norm)}: error_if_nonfinite=False clips on")
        return norm

    def no_backward_sync(self, module: nn.Module, enabled: bool = True) -> AbstractContextManager[None]:
        """Inside, gradients stay on this rank: for accumulation by the script."""
        if not is_set_up(module):
            raise TypeError("You need to set up the model first before you can call no_backward_sync(): fabric.setup")
        return self.easymp.no_sync(module) if enabled else nullcontext()

    @contextmanager
    def init_tensor(self) -> Iterator[None]:
        """Inside, new tensors are on this rank's device; under "bf16-true" and its kind they have its dtype."""
        with self.device, default_dtype(self._true_dtype):
            yield

    @contextmanager
    def init_module(self, empty_init: bool | None = None) -> Iterator[None]:
        """As `init_tensor`; with `empty_init` parameters have no values, or are on the meta device until setup."""
        empty = torch.device("meta") if self.easymp._sharded else _EmptyInit()
        with self.init_tensor(), empty if empty_init else nullcontext():
            yield

    def sharded_model(self) -> AbstractContextManager[None]:
        """Nothing: `setup` shards."""
        warnings.warn("Fabric.sharded_model() is deprecated: use init_module()", DeprecationWarning, stacklevel=2)
        return nullcontext()

    def to_device(self, obj: Any) -> Any:
        return obj.to(self.device) if isinstance(obj, nn.Module) else send_to_device(obj, self.device)

    # -- the other processes

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the first process of each node."""
        if self.local_rank == 0:
            print(*args, **kwargs)  # noqa: T201 (Fabric's interface)

    def barrier(self, name: str | None = None) -> None:
        self.easymp.wait_for_everyone()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Rank `src`'s object."""
        return self.easymp._world.broadcast_objects([obj], src)[0]

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Each tensor or number of `data` from all ranks, in a new first dimension; as it is without a group."""

        def gather(leaf: Tensor) -> Tensor:
            if self.world_size == 1:
                return leaf[None] if self._is_group else leaf
            if not sync_grads:
                return self.easymp.gather(leaf.detach()[None])
            from torch.distributed import _functional_collectives as collectives  # here: it takes 25 ms

            # The second is the name before torch 2.13.
            flows: Any = getattr(collectives, "all_gather_single", None) or collectives.all_gather_tensor_autograd
            gathered: Tensor = flows(leaf.contiguous()[None], 0, torch.distributed.group.WORLD)
            return gathered.clone()

        return self._on_numbers("all_gather", gather, data, group)

    def all_reduce(self, data: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """The "mean", "sum", "max", "min" or "product" of each tensor (in place) or number of `data` over the ranks."""
        operation = lookup("reduce_op", str(reduce_op).rpartition(".")[2].lower(), strategies.REDUCTIONS)
        reduce = self.easymp.reduce if operation in ("mean", "sum") else self.easymp._world.reduce

        def in_place(leaf: Tensor) -> Tensor:
            leaf.detach().copy_(reduce(leaf, operation))
            return leaf

        return self._on_numbers("all_reduce", in_place, data, group)

    def _on_numbers(self, method: str, function: Callable[[Tensor], Tensor], data: Any, group: Any) -> Any:
        """Call `function` with each tensor of `data`, and with its numbers as tensors on the device."""
        if group is not None:
            raise RefusedError(f"{method}: group is not honoured: all ranks take part")

        def on_device(leaf: Any) -> Tensor:
            return function(torch.as_tensor(leaf, device=self.device))

        return recursively_apply(on_device, data, test_type=lambda leaf: isinstance(leaf, (Tensor, int, float)))

    def rank_zero_first(self, local: bool = False) -> AbstractContextManager[None]:
        """Rank 0 runs the block before the others; with `local` that of each node."""
        return self.easymp.local_main_process_first() if local else self.easymp.main_process_first()

    # -- files of torch.save or safetensors, with whole states, also where weights are shards

    def save(self, path: StrPath, state: Mapping[str, Any], filter: Filter | None = None) -> None:
        """Save models, optimizers, other objects with a state_dict, and values by name; all ranks call it."""
        _check_state(state)
        filter = {} if filter is None else filter
        if not isinstance(filter, Mapping):
            raise TypeError(f"Filter should be a dictionary, given {filter!r}")
        if unknown := set(filter) - set(state):
            raise ValueError(f"The filter keys {unknown} are not present in the state keys {sorted(state)}")
        for key, predicate in filter.items():
            if not callable(predicate):
                raise TypeError(f"Expected `filter` of save for key {key!r} to be a callable, given {predicate!r}")
        contents = {key: self._whole_state(item) for key, item in state.items()}
        for key, predicate in filter.items():
            if isinstance(contents[key], dict):  # one of which nothing is left is left out
                chosen = {name: value for name, value in contents.pop(key).items() if predicate(name, value)}
                contents.update({key: chosen} if chosen else {})
        run_on_rank_0(self.easymp._world, lambda: write_object(contents, Path(path)))

    def load(
        self, path: StrPath, state: dict[str, Any] | None = None, strict: bool = True, *,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Load what `save` wrote into `state`; returns the values that it does not name. All ranks call it."""
        state = {} if state is None else state
        _check_state(state)
        contents = _read(path)
        missing = [key for key in state if key not in contents]
        if missing and strict:
            remedy = "pass strict=False to go on without it"
            raise KeyError(f"state contains a key {missing[0]!r} that does not exist in {os.fspath(path)}: {remedy}")
        for key in [key for key in state if key in contents]:
            item, value = state[key], contents.pop(key)
            if self._is_sharded(item):
                load_source(item, in_memory("this checkpoint", value), strict=strict, dtype="live")
            elif isinstance(item, nn.Module):
                item.load_state_dict(value, strict=strict)
            elif _is_stateful(item):
                item.load_state_dict(_as_shards(value, item) if isinstance(item, Optimizer) else value)
            else:
                state[key] = value
        return contents

    def load_raw(
        self, path: StrPath, obj: nn.Module | Optimizer, strict: bool = True, *, weights_only: bool | None = None
    ) -> None:
        """Load weights of safetensors, a checkpoint, or a plain state dict of torch.save into a model."""
        if isinstance(obj, nn.Module):
            load_source(obj, open_source(path, trust=True), strict=strict, dtype="live")
        else:
            obj.load_state_dict(_as_shards(_read(path), obj))

    def _is_sharded(self, item: Any) -> bool:
        return isinstance(item, nn.Module) and self.easymp._sharded and hasattr(type(item), "_easymp_route")

    def _whole_state(self, item: Any) -> Any:
        """The state dict of an object that has one, with whole tensors, else the object."""
        if not _is_stateful(item):
            return item
        if self._is_sharded(item):
            return get_state_dict(self.easymp._world, item)

        def whole(leaf: Any) -> Any:
            full_tensor = getattr(leaf, "full_tensor", None)
            if full_tensor is None:
                return leaf
            tensor = full_tensor()  # a collective
            return tensor.cpu() if self.easymp.is_main_process else None

        return map_leaves(whole, item.state_dict()) if isinstance(item, Optimizer) else item.state_dict()

    # -- callbacks and loggers

    def call(self, hook_name: str, *args: Any, **kwargs: Any) -> None:
        """Call the method `hook_name` of each callback that has it, with those of `kwargs` that it takes."""
        for callback in self.callbacks:
            method = getattr(callback, hook_name, None)
            if method is None:
                continue
            if not callable(method):
                name = f"{type(callback).__name__}.{hook_name}"
                warnings.warn(f"Skipping the callback `{name}` because it is not callable", UserWarning, stacklevel=2)
                continue
            parameters = signature(method).parameters
            takes_all = any(p.kind is Parameter.VAR_KEYWORD for p in parameters.values())
            method(*args, **{name: value for name, value in kwargs.items() if takes_all or name in parameters})

    @property
    def accelerator(self) -> Any:
        """Raise an AttributeError: easymp has no object like Fabric's accelerators."""
        raise AttributeError("fabric.accelerator is not part of easymp.compat: fabric.device has type and index")

    @property
    def logger(self) -> Any:
        """The first logger; an IndexError without one, as in Fabric."""
        return self.loggers[0]

    def log(self, name: str, value: Any, step: int | None = None) -> None:
        self.log_dict({name: value}, step)

    def log_dict(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log numbers. A logger is called on all ranks, and writes on rank 0."""
        for name, value in metrics.items():
            if isinstance(value, Tensor) and value.numel() != 1:
                raise ValueError(f"the metric {name!r}, {tuple(value.shape)}: it cannot be converted to a scalar.")
        numbers = {name: v.item() if isinstance(v, Tensor) else v for name, v in metrics.items()}
        for logger in self.loggers:
            logger.log_metrics(metrics=numbers, step=step)


def _as_list(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]


def _check_state(state: Any) -> None:
    if not isinstance(state, Mapping):
        raise SettingError(f"state is a {type(state).__name__}: pass a dict, as in {{'model': model}}")


def _is_stateful(item: Any) -> bool:
    """Whether `save` keeps an object by its state dict: a scheduler, a metric, a model."""
    return callable(getattr(item, "state_dict", None)) and callable(getattr(item, "load_state_dict", None))


def _as_shards(state: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """An optimizer's `state` with tensors that are sharded as its parameters are."""
    indices = [index for group in state["param_groups"] for index in group["params"]]
    by_index = dict(state["state"])
    for index, parameter in zip(indices, parameters_of(optimizer)):
        if index in by_index and isinstance(parameter, DTensor):
            by_index[index] = {
                name: distribute_tensor(value, parameter.device_mesh, parameter.placements)
                if isinstance(value, Tensor) and value.shape == parameter.shape
                else value
                for name, value in by_index[index].items()
            }
    return {**state, "state": by_index}


def _read(path: StrPath) -> dict[str, Any]:
    if not os.path.isfile(path):
        raise FileNotFoundError(f"there is no file {os.fspath(path)}")
    return dict(read_object(Path(path)))
