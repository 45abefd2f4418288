"""The face: an Accelerator decides once, prepares what it is given, and runs the step.

What it decides stands in `plan`; how the model is spread is the strategy's, dtypes are the precision's, ranks are the world's.
"""

from __future__ import annotations

import atexit
import hashlib
import math
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from . import env, launcher, operations
from .checks import by_kind, check_batch, describe, loss_trouble, refuse_unknown
from .clock import StepClock
from .data import PreparedLoader, prepare_loader, skip_first_batches
from .errors import BatchError, EasympWarning, PrepareError, RefusedError, SettingError, StepError, WorldError
from .hardware import Hardware, detect
from .log import get_logger
from .memory_retry import release_memory
from .microstep import ForeignSteps, MicroStep
from .optim import ItemWindow, PreparedOptimizer, PreparedScheduler, fuse
from .plan import Plan, make_plan
from .precision import PRECISIONS, LossScale, Measured, Scaler
from .prepared import Route, make_view, unwrap
from .processes import Processes
from .protocols import Choice
from .records import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
)
from .rng import diverge, set_seed
from .settings import Settings, resolve
from .state import AcceleratorState, GradientState, Run, register, unregister
from .strategies import STRATEGIES
from .tree import leaves, recursively_apply
from .world import World, odd_one_out, read_ranks

logger = get_logger(__name__)


@dataclass(slots=True)
class Prepared:
    """A prepared model: what the user holds, and how it is called."""

    view: nn.Module
    route: Route


class Accelerator(Processes):
    """Trains one script on whatever is here.

    Settings come from these arguments, else from ``EASYMP_`` variables, else from ``easymp.toml``, else they are detected;
    ``print(accelerator)`` shows each decision with its reason.

    Args:
        mixed_precision: "auto", "no" or "fp32", "tf32", "bf16", "fp16".
        strategy: "auto", "single", "ddp".
        gradient_accumulation_steps: micro-batches an update; use `accumulate`.
        cpu: train on the CPU although there is an accelerator.
        device_placement: move models and batches to the device.
        dataloader_config: how prepared loaders read.
        gradient_accumulation_plugin: accumulation in detail, instead of `gradient_accumulation_steps`.
        step_scheduler_with_optimizer: prepared schedulers step once an optimizer update; False: at every call.
        scheduler_steps_per_process: they step as many times as there are processes (as Accelerate does).
        kwargs_handlers: records of `easymp` with options of autocast, the loss scale, DDP, the process group.
        seed: seed of all random streams; see `set_seed`.
        deterministic: deterministic algorithms only.
        fused: let plain torch optimizers run their fused step.
        settings: a whole `Settings`; the arguments above win over it.

    Raises:
        SettingError: a wrong name or value.
        RefusedError: something that was asked for cannot run here.
        WorldError: announced processes did not arrive.
    """

    def __init__(
        self,
        *,
        mixed_precision: str | None = None,
        strategy: str | None = None,
        gradient_accumulation_steps: int | None = None,
        cpu: bool | None = None,
        device_placement: bool = True,
        dataloader_config: DataLoaderConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        scheduler_steps_per_process: bool = False,
        kwargs_handlers: Sequence[Any] = (),
        seed: int | None = None,
        deterministic: bool | None = None,
        fused: bool | None = None,
        settings: Settings | None = None,
        **others: Any,
    ) -> None:
        refuse_unknown(others)
        handlers = by_kind(kwargs_handlers)
        if gradient_accumulation_plugin is not None:
            if gradient_accumulation_steps not in (None, 1, gradient_accumulation_plugin.num_steps):
                raise SettingError(
                    f"gradient_accumulation_steps={gradient_accumulation_steps} contradicts the plugin's num_steps="
                    f"{gradient_accumulation_plugin.num_steps}: pass one of them"
                )
            gradient_accumulation_steps = gradient_accumulation_plugin.num_steps
        group = handlers.get(InitProcessGroupKwargs)
        asked = resolve(
            settings,
            mixed_precision=mixed_precision,
            strategy=strategy,
            gradient_accumulation_steps=gradient_accumulation_steps,
            cpu=cpu,
            seed=seed,
            deterministic=deterministic,
            fused=fused,
            timeout=group.seconds if group else None,
        )
        plan = make_plan(asked, detect(), read_ranks())
        plugin = gradient_accumulation_plugin or GradientAccumulationPlugin(plan.accumulation.value)
        self._sync_each_batch = plugin.sync_each_batch
        self._clock = StepClock(plan.accumulation.value, plugin.sync_with_dataloader)
        device = torch.device(plan.device.value)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self._undo = ExitStack()
        self._world = World(plan.ranks, device, asked.timeout, asked.debug)
        self._world.close_at_exit()
        self._run = Run(self._world, plan, self._clock)
        register(self._run)
        self._place = device_placement
        self._autocast: AutocastKwargs = handlers.get(AutocastKwargs, AutocastKwargs())
        self._precision = self._make_precision(asked)
        self._scaler = self._make_scaler(handlers.get(GradScalerKwargs, GradScalerKwargs()))
        ddp = handlers.get(DistributedDataParallelKwargs, DistributedDataParallelKwargs())
        self._strategy = STRATEGIES[self.plan.strategy.value](self._world, ddp)
        self._loading = dataloader_config or DataLoaderConfiguration()
        self._with_optimizer = step_scheduler_with_optimizer
        self._scheduler_steps = self._world.size if scheduler_steps_per_process else 1
        self._items = ItemWindow(self._world, self._strategy.data_size)
        self._models: list[Prepared] = []
        self._optimizers: list[PreparedOptimizer] = []
        self._schedulers: list[PreparedScheduler] = []
        self._dataloaders: list[PreparedLoader] = []
        self._owner: dict[int, str] = {}  # id of a prepared parameter → its name
        self._stepped_by: dict[int, PreparedOptimizer] = {}  # id of a parameter → its optimizer
        self._seed = asked.seed
        self._alike = asked.seed is not None  # whether all ranks still draw from one random stream
        self._batch = ""
        self._trigger = False
        self._foreign: ForeignSteps | None = None
        self._closed = False
        self._set_flags(asked)
        if asked.seed is not None:
            set_seed(asked.seed)
        me = weakref.ref(self)
        leave = atexit.register(lambda: (it := me()) and it.close())
        self._undo.callback(atexit.unregister, leave)

    # -- the decision -------------------------------------------------------------------------------------------------

    def _make_precision(self, asked: Settings) -> Any:
        kind = PRECISIONS.get(self.plan.precision.value)
        if kind is not None:
            return kind(self._autocast)  # type: ignore[call-arg]
        return Measured(self._autocast, self._world, asked.probe and not asked.deterministic, self._decided)

    def _decided(self, choice: Choice[str]) -> None:
        self._run.plan = self.plan.replace(precision=choice)
        logger.info("precision %s: %s", choice.value, choice.reason)

    def _make_scaler(self, options: GradScalerKwargs) -> Scaler:
        rule = LossScale(
            initial=options.init_scale,
            growth_factor=options.growth_factor,
            backoff_factor=options.backoff_factor,
            growth_interval=options.growth_interval,
            hysteresis=options.hysteresis,
            minimum=options.min_scale,
            maximum=options.max_scale,
            dynamic=options.dynamic,
        )
        return Scaler(rule, self._world, enabled=self._precision.scaled and options.enabled)

    def _set_flags(self, asked: Settings) -> None:
        """torch's process-wide switches, put back by `close`."""
        if self._precision.tf32 and self.device.type == "cuda":
            matmul, conv = torch.backends.cuda.matmul, torch.backends.cudnn
            for module in (matmul, conv):
                self._undo.callback(setattr, module, "allow_tf32", module.allow_tf32)
                module.allow_tf32 = True
        if asked.deterministic:
            warn = torch.is_deterministic_algorithms_warn_only_enabled()
            self._undo.callback(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled(), warn_only=warn)
            self._undo.callback(setattr, torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
            self._undo.callback(env.put, env.put({"CUBLAS_WORKSPACE_CONFIG": env.read("CUBLAS_WORKSPACE_CONFIG", ":4096:8")}))
            torch.use_deterministic_algorithms(True)
            torch.backends.cudnn.benchmark = False

    def __str__(self) -> str:
        return self.plan.explain() + (f"\nbatch         {self._batch}" if self._batch else "")

    # -- what it is ---------------------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """What was decided, and why; refined as models and optimizers are prepared."""
        return self._run.plan

    @property
    def hardware(self) -> Hardware:
        return self.plan.hardware

    @property
    def mixed_precision(self) -> str:
        """ "no", "tf32", "bf16" or "fp16"; "auto" until the first training step has been timed."""
        return "no" if self._precision.name == "fp32" else self._precision.name

    @property
    def scaler(self) -> Scaler:
        """The loss scaler, up to date; one that scales by one unless the run is fp16."""
        self._scaler.settle()
        return self._scaler

    @property
    def gradient_accumulation_steps(self) -> int:
        return self._clock.accumulation

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        self._clock.accumulation = GradientAccumulationPlugin(steps).num_steps

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-step ends its accumulation window."""
        return self._clock.sync

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last step of any prepared optimizer was skipped for an overflow. Waits for the device under fp16."""
        return any(optimizer.step_was_skipped for optimizer in self._optimizers)

    @property
    def gradient_state(self) -> GradientState:
        return GradientState(self._clock)

    @property
    def state(self) -> AcceleratorState:
        return AcceleratorState()

    @property
    def split_batches(self) -> bool:
        return self._loading.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        return self._loading.dispatch_batches

    @property
    def even_batches(self) -> bool:
        return self._loading.even_batches

    @property
    def use_seedable_sampler(self) -> bool:
        return self._loading.use_seedable_sampler

    launch = staticmethod(launcher.launch)

    # -- prepare ------------------------------------------------------------------------------------------------------

    def prepare(self, *objects: Any, device_placement: Sequence[bool | None] | None = None) -> Any:
        """Models, optimizers, schedulers and loaders, in any order, ready for this run, in the same order.

        Args:
            objects: each a Module, Optimizer, scheduler, DataLoader, something prepared before, or None.
            device_placement: one value an object, over the constructor's.

        Raises:
            PrepareError: objects that do not fit together, or cannot be prepared.
            WorldError: the ranks passed different objects.
        """
        if device_placement is not None and len(device_placement) != len(objects):
            raise PrepareError(
                f"device_placement has {len(device_placement)} values for {len(objects)} objects: pass one for each"
            )
        self._agree(objects)
        place = [self._place if p is None else p for p in device_placement or [None] * len(objects)]
        done: dict[int, Any] = {}
        models = [(i, o) for i, o in enumerate(objects) if isinstance(o, nn.Module)]
        optimizers = [o for o in objects if isinstance(o, torch.optim.Optimizer)]
        for i, model in models:
            done[i] = self._prepare_model(model, optimizers, place[i])
        for kind in (torch.optim.Optimizer, DataLoader, object):  # what follows the models; schedulers follow the optimizers
            for i, item in enumerate(objects):
                if i not in done and isinstance(item, kind):
                    done[i] = self._prepare_other(item, place[i])
        if models and self._alike:
            diverge(self._world.rank)
            self._alike = False
        self._say_batch()
        return done[0] if len(objects) == 1 else tuple(done[i] for i in range(len(objects)))

    def prepare_model(self, model: nn.Module, device_placement: bool | None = None) -> nn.Module:
        return self.prepare(model, device_placement=[device_placement])

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> PreparedOptimizer:
        return self.prepare(optimizer, device_placement=[device_placement])

    def prepare_scheduler(self, scheduler: Any) -> PreparedScheduler:
        return self.prepare(scheduler)

    def prepare_data_loader(self, data_loader: DataLoader[Any], device_placement: bool | None = None) -> PreparedLoader:
        return self.prepare(data_loader, device_placement=[device_placement])

    def _prepare_other(self, item: Any, place: bool) -> Any:
        if item is None or isinstance(item, (PreparedOptimizer, PreparedScheduler, PreparedLoader)):
            return item
        if isinstance(item, torch.optim.Optimizer):
            return self._prepare_optimizer(item)
        if isinstance(item, DataLoader):
            return self._prepare_loader(item, place)
        if callable(getattr(item, "step", None)) and hasattr(item, "state_dict"):
            return self._prepare_scheduler(item)
        raise PrepareError(
            f"prepare() got a {type(item).__name__}, which is no Module, Optimizer, scheduler or DataLoader: leave it out "
            "(a data set goes into a DataLoader first)"
        )

    def _prepare_model(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], place: bool) -> nn.Module:
        for prepared in self._models:
            if model is prepared.view or model is prepared.route.original:
                return prepared.view
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            raise PrepareError(
                f"the model is already in a {type(model).__name__}: pass its .module, the strategy does the wrapping"
            )
        for name, parameter in model.named_parameters():
            if id(parameter) in self._owner:
                raise PrepareError(
                    f"parameter {name!r} of this {type(model).__name__} was prepared before, as {self._owner[id(parameter)]!r}: prepare "
                    "one module that holds both parts, once"
                )
            if parameter.is_meta:
                raise PrepareError(
                    f"parameter {name!r} is on the meta device, without values: use to_empty() and initialise it first"
                )
        wrapped = self._strategy.wrap(model, optimizers, self._precision, place)
        view, route = make_view(model, wrapped.model)
        self._models.append(Prepared(view, route))
        self._owner.update((id(p), name) for name, p in model.named_parameters())
        return view

    def _prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> PreparedOptimizer:
        for prepared in self._optimizers:
            if prepared.optimizer is optimizer:
                return prepared
        kind = type(optimizer).__name__
        for g, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if id(parameter) not in self._owner:
                    raise PrepareError(
                        f"{kind} holds a parameter of shape {tuple(parameter.shape)} (param group {g}) that belongs to no prepared "
                        "model: prepare the model in the same call or before, and build the optimizer from that model's parameters"
                    )
                if id(parameter) in self._stepped_by:
                    raise PrepareError(
                        f"{kind} holds parameter {self._owner[id(parameter)]!r}, which another prepared optimizer steps already: give "
                        "each parameter to one optimizer (free_memory() lets go of the old ones)"
                    )
        prepared = PreparedOptimizer(optimizer, self._clock, self._scaler)
        self._stepped_by.update((id(p), prepared) for group in optimizer.param_groups for p in group["params"])
        self._optimizers.append(prepared)
        if self.plan.settings.fused:
            why_not = fuse(optimizer)
            value = "as given" if why_not else "fused"
            self._run.plan = self.plan.replace(
                optimizer=Choice(value, why_not or f"torch's fused {kind}", self.plan.optimizer.source)
            )
        return prepared

    def _prepare_scheduler(self, scheduler: Any) -> PreparedScheduler:
        for prepared in self._schedulers:
            if prepared.scheduler is scheduler:
                return prepared
        drives = getattr(scheduler, "optimizer", None)
        mine = [o for o in self._optimizers if drives is None or drives is o or drives is o.optimizer]
        if not mine:
            raise PrepareError(
                f"{type(scheduler).__name__} drives an optimizer that is not prepared: prepare that optimizer in the same call or before"
            )
        prepared = PreparedScheduler(scheduler, mine, self._clock, self._with_optimizer, self._scheduler_steps)
        self._schedulers.append(prepared)
        return prepared

    def _prepare_loader(self, loader: DataLoader[Any], place: bool) -> PreparedLoader:
        for prepared in self._dataloaders:
            if prepared._given is loader:
                return prepared
        seed = self._loading.data_seed
        prepared = prepare_loader(
            loader,
            clock=self._clock,
            world=self._world,
            data_rank=self._strategy.data_rank,
            data_size=self._strategy.data_size,
            device=self.device,
            config=self._loading,
            seed=self._seed if seed is None else seed,
            device_placement=place,
        )
        self._dataloaders.append(prepared)
        return prepared

    def _agree(self, objects: Sequence[Any]) -> None:
        """All ranks brought the same things, or an error says who did not; and one data seed for all."""
        mine = [line for o in objects for line in describe(o)]
        digest = hashlib.sha256("\n".join(mine).encode()).hexdigest()
        seen = self._world.gather_objects((digest, torch.initial_seed()))
        if self._seed is None:
            self._seed = seen[0][1]
            self._alike = len({s[1] for s in seen}) == 1
        if any(s[0] != seen[0][0] for s in seen):
            lists = self._world.gather_objects(mine)
            first = next(
                i for i in range(max(map(len, lists))) if len({line[i] if i < len(line) else None for line in lists}) > 1
            )
            there = [line[first] if first < len(line) else "nothing more" for line in lists]
            raise WorldError(
                f"the ranks prepare different things: {odd_one_out(there)}. All ranks must build and prepare the same objects"
            )

    def _say_batch(self) -> None:
        for loader in self._dataloaders[:1]:
            steps = f" × {self._clock.accumulation} accumulation" if self._clock.accumulation > 1 else ""
            if loader.total_batch_size is not None:
                self._batch = f"{loader.size_line()}{steps} = {loader.total_batch_size * self._clock.accumulation}"
                logger.info("batch: %s", self._batch)

    # -- the step -----------------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, *, num_items: int | Tensor | None = None, **kwargs: Any) -> None:
        """Gradients of `loss`, averaged over the ranks on the last micro-step of a window.

        Args:
            loss: a mean over this rank's micro-batch (divided by the accumulation steps here), 0-dim; or with `num_items` a sum.
            num_items: how many items (tokens) `loss` sums over on this rank. The gradients become those of the sum over the whole
                window and all ranks, divided by their common count: equal to one big batch.
            kwargs: for `Tensor.backward`.

        Raises:
            StepError: a loss that is no scalar, or has no graph.
            WorldError: another rank is missing or elsewhere.
        """
        clock = self._clock
        if (
            not isinstance(loss, Tensor)
            or not loss.requires_grad
            or (loss.ndim and loss.numel() != 1 and "gradient" not in kwargs)
        ):
            raise StepError(loss_trouble(loss))
        if num_items is not None:
            loss = self._items.divide(loss, num_items, clock)
        elif clock.accumulation != 1:
            if self._items.open:
                raise StepError(
                    "backward() without num_items in a window that began with it: pass it for every micro-batch, or for none"
                )
            loss = loss / clock.accumulation
        clock.backwards += 1
        scaler = self._scaler
        if scaler.enabled:
            scaler.settle()
            loss = scaler.scale(loss)
        if self._world.size == 1:
            loss.backward(**kwargs)
        else:
            self._backward_among_ranks(loss, kwargs)
        if self._items.open and clock.sync:
            self._items.finish(p for model in self._models for p in model.route.original.parameters())

    def _backward_among_ranks(self, loss: Tensor, kwargs: dict[str, Any]) -> None:
        routes = [model.route for model in self._models]
        if self._clock.sync:
            if routes and not any(route.called for route in routes):
                warnings.warn(
                    "backward() on gradients that no rank will average: no prepared model was called since the last one. Call the "
                    "model itself (model(x), not model.method(x)), and once for each backward()",
                    EasympWarning,
                    stacklevel=3,
                )
            for route in routes:
                route.called = False
        with self._world.explained("backward"):
            loss.backward(**kwargs)

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """One micro-step: ``with accelerator.accumulate(model):`` around forward, backward, step and zero_grad.

        Gradients are reduced and optimizers step on every `gradient_accumulation_steps`-th micro-step, and on the last batch of the
        loader being read, which restarts the count. Without arguments it means all prepared models.
        """
        if self._foreign is None and self._clock.accumulation != 1:
            self._foreign = self._undo.enter_context(ForeignSteps(self._clock, self._owner, self._stepped_by))
        modules = () if self._sync_each_batch or self._world.size == 1 else [r.module for r in self._routes(models)]
        return MicroStep(self._clock, self._strategy, modules)

    @contextmanager
    def no_sync(self, model: nn.Module | None = None) -> Iterator[None]:
        """Inside, backward keeps gradients to this rank: for accumulation by hand."""
        with ExitStack() as stack:
            for route in self._routes((model,) if model is not None else ()):
                stack.enter_context(self._strategy.no_sync(route.module))
            yield

    @contextmanager
    def trigger_sync_in_backward(self, model: nn.Module) -> Iterator[None]:
        """Inside, backward reduces gradients, although `model` was called under `no_sync`."""
        (route,) = self._routes((model,))
        route.called = True
        with self._strategy.force_sync(route.module):
            yield

    def _routes(self, models: Sequence[nn.Module]) -> list[Route]:
        if not models:
            return [model.route for model in self._models]
        routes = []
        for model in models:
            found = [m.route for m in self._models if model is m.view or model is m.route.original]
            if not found:
                raise StepError(f"this {type(model).__name__} is not prepared: pass what prepare() returned")
            routes += found
        return routes

    @contextmanager
    def join_uneven_inputs(self, joinables: Sequence[nn.Module], even_batches: bool | None = None) -> Iterator[None]:
        """Inside, ranks may run out of batches at different times; those that are done go along with the others' reductions.

        Args:
            joinables: prepared models.
            even_batches: over the loaders' setting, while inside.
        """
        before = [(loader, loader.even_batches) for loader in self._dataloaders] if even_batches is not None else []
        for loader, _ in before:
            loader.even_batches = even_batches
        self._scaler.agree = False  # ranks that are done do not take part; gradients are the same on those that are not
        try:
            with self._strategy.join([route.module for route in self._routes(joinables)]):
                yield
        finally:
            self._scaler.agree = True
            for loader, even in before:
                loader.even_batches = even

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """The run's autocast, for what is computed outside of a prepared model."""
        options = autocast_handler or self._autocast
        compute = self._precision.compute
        if not options.enabled or compute == self._precision.param:
            return nullcontext()
        return torch.autocast(self.device.type, compute, True, options.cache_enabled)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Divide gradients by the loss scale, to look at them or change them before the step; once an update."""
        chosen = self._optimizers if optimizer is None else optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
        for item in chosen:
            self._scaler.unscale_(item.optimizer if isinstance(item, PreparedOptimizer) else item)

    def clip_grad_norm_(self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2.0) -> Tensor | None:
        """Scale gradients so that their total norm is at most `max_norm`; returns the norm before (0-dim).

        Acts once a window, as the optimizer does: None on other micro-steps.
        """
        chosen = self._to_clip(parameters)
        return None if chosen is None else self._strategy.clip(chosen, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
        """Clamp every gradient element to [-clip_value, clip_value]; acts once a window, as the optimizer does."""
        chosen = self._to_clip(parameters)
        if chosen is not None:
            nn.utils.clip_grad_value_(chosen, clip_value)

    def _to_clip(self, parameters: Iterable[Tensor] | Tensor) -> list[Tensor] | None:
        if self._clock.accumulation != 1 and not self._clock.sync:
            return None
        chosen = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if self._scaler.enabled:
            for optimizer in {id(o): o for p in chosen if (o := self._stepped_by.get(id(p)))}.values():
                self._scaler.unscale_(optimizer.optimizer)
        return chosen

    # -- over the ranks -----------------------------------------------------------------------------------------------

    def gather(self, tensor: Any) -> Any:
        """Every tensor of the tree joined over the ranks along dimension 0, on all ranks."""
        return operations.gather(tensor, world=self._world)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As `gather`, for results of the current batch: samples that only complete the last round are dropped.

        Call it inside the loop over a prepared loader. Objects that are no tensors (``use_gather_object=True``, or no tensor
        in the tree) are gathered as lists with one item a sample.

        Raises:
            BatchError: outside a loop, or dimension 0 is not the batch.
        """
        loader = self._clock.reading
        if loader is None:
            raise BatchError(
                "gather_for_metrics() outside a loop over a prepared loader cannot know which samples are repeated: call it for "
                "each batch inside the loop, or use gather() for anything else"
            )
        objects = use_gather_object or not any(isinstance(leaf, Tensor) for leaf in leaves(input_data))
        for leaf in [input_data] if objects else leaves(input_data):
            check_batch(leaf, loader.local_size)
        if objects:
            whole = operations.gather_object(list(input_data), world=self._world)
        else:
            collect = self._world.gather_uneven if loader.uneven else self._world.gather
            whole = recursively_apply(collect, input_data, error_on_other_type=True)
        extra = loader.surplus
        if not extra:
            return whole
        return whole[:-extra] if objects else recursively_apply(lambda t: t[: t.shape[0] - extra], whole)

    def mean(self, value: Any, weight: Any = 1.0) -> Tensor:
        """Mean of a number over the ranks, weighted: sum(value × weight) / sum(weight), 0-dim, on all ranks.

        ``accelerator.mean(loss, len(batch))`` is the mean over samples, whatever each rank's share.
        """
        values = torch.as_tensor(value, dtype=torch.float32, device=self.device).detach()
        weights = torch.as_tensor(weight, dtype=torch.float32, device=self.device).detach()
        if values.ndim or weights.ndim:
            raise BatchError(
                f"mean() takes one number and its weight a rank, not shapes {tuple(values.shape)} and {tuple(weights.shape)}: "
                "reduce them first, e.g. values.mean() with weight values.numel()"
            )
        total, count = self._world.reduce(torch.stack([values * weights, weights])).unbind()
        return total / count

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Every tensor of the tree summed ("sum") or averaged ("mean") over the ranks, times `scale`."""
        return operations.reduce(tensor, reduction, scale, world=self._world)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Every tensor of the tree as long along `dim` as the longest rank's."""
        return operations.pad_across_processes(tensor, dim, pad_index, pad_first, world=self._world)

    def set_trigger(self) -> None:
        """Raise a flag that `check_trigger` sees on every rank."""
        self._trigger = True

    def check_trigger(self) -> bool:
        """Whether any rank has raised the flag since the last check; lowers it. All ranks must call it together."""
        raised, self._trigger = self._world.any(self._trigger), False
        return raised

    # -- loaders and models -------------------------------------------------------------------------------------------

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """The loader without its first `num_batches` batches, for one pass."""
        return skip_first_batches(dataloader, num_batches)

    def total_updates(self, loader: Any, epochs: int = 1) -> int:
        """Optimizer updates in `epochs` passes over a prepared loader: the horizon of a learning-rate schedule."""
        each = len(loader)
        steps = self._clock.accumulation
        return epochs * math.ceil(each / steps) if self._clock.end_with_loader else epochs * each // steps

    def unwrap_model(self, model: nn.Module, keep_fp32_wrapper: bool = False, keep_torch_compile: bool = True) -> nn.Module:
        """The user's own module. It never carries a wrapper for fp32 outputs, so there is none to keep."""
        if keep_fp32_wrapper:
            raise RefusedError(
                "keep_fp32_wrapper=True: the fp32 conversion lives outside the module, there is none to keep. Leave it out"
            )
        return unwrap(model, keep_torch_compile)

    # -- the end ------------------------------------------------------------------------------------------------------

    def free_memory(self, *objects: Any) -> Any:
        """Let go of all that was prepared, and of `objects` (assign the Nones returned), and empty the device's cache."""
        for model in self._models:
            model.route.module = self._precision.forward(model.route.original, self.device)
        for held in (self._models, self._optimizers, self._schedulers, self._dataloaders, self._owner, self._stepped_by):
            held.clear()
        self._clock.__init__(self._clock.accumulation, self._clock.end_with_loader)  # type: ignore[misc]
        nothing = (None,) * len(objects)
        del objects
        release_memory(device=self.device)
        return None if len(nothing) <= 1 else nothing

    clear = free_memory

    def end_training(self) -> None:
        """The run is over: leave the world. Models stay callable, each rank for itself."""
        self.close()

    def close(self) -> None:
        """As `end_training`; another Accelerator can be made afterwards. Calling it again does nothing."""
        if self._closed:
            return
        self._closed = True
        self.free_memory()
        self._undo.close()
        unregister(self._run)
        self._world.close()

    def __enter__(self) -> Accelerator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
