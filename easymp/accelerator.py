"""The Accelerator: it makes the plan, prepares models, optimizers and loaders, and runs the step.

The plan holds its decisions and their reasons. The strategy distributes models, the precision holds dtypes, the world ranks.
"""

from __future__ import annotations

import atexit
import math
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial, wraps
from inspect import signature
from typing import TYPE_CHECKING, Any, Self, TypeAlias, TypeVar, TypeVarTuple, overload

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from . import distributed, launcher, optim, profiling, trackers
from .base import env
from .base.accumulation import MicroStep, Phase, UpdateWindow
from .base.lazy import modules_at_first_use
from .base.rng import set_seed, switch
from .checkpoint.api import Checkpoints
from .errors import PrepareError, RefusedError, StepError, failing
from .registry import reported
from .training import wrapper
from .training.collectives import Collectives

if TYPE_CHECKING:
    from . import data, precision
    from . import options as records
    from . import settings as setting
    from .distributed.processes import PrecisionType
    from .hardware import Hardware
    from .optim.optimizer import PreparedOptimizer, PreparedScheduler
    from .options import (
        AutocastKwargs,
        DataLoaderConfiguration,
        DistributedDataParallelKwargs,
        GradientAccumulationPlugin,
        GradScalerKwargs,
        InitProcessGroupKwargs,
        LoggerType,
        ProfileKwargs,
        ProjectConfiguration,
    )
    from .plan import Plan
    from .protocols import Tracker
    from .registry import PrecisionName, StrategyName
    from .settings import Compiled, NonfiniteAnswer, Settings
    from .strategies.fsdp import FSDPOptions
    from .strategies.local_sgd import LocalSGDOptions
    from .strategies.pipeline import PipelineOptions
    from .strategies.single import DataParallelOptions
    from .strategies.tensor_parallel import TensorParallelOptions
    from .strategies.transforms import CompileOptions
    from .trackers import TrackerName
    from .trackers.logbook import GeneralTracker
    from .training import nonfinite as guards
    from .training import oom, prepare, spikes, state
    from .training.spikes import GuardPolicy
    from .training.state import AcceleratorState, GradientState

    OneTracker: TypeAlias = (
        TrackerName | LoggerType | Tracker | GeneralTracker | type[Tracker] | type[GeneralTracker]
    )
    StrategyOptions: TypeAlias = (
        DistributedDataParallelKwargs
        | DataParallelOptions
        | FSDPOptions
        | LocalSGDOptions
        | PipelineOptions
        | TensorParallelOptions
    )
    Handler: TypeAlias = (
        AutocastKwargs
        | DistributedDataParallelKwargs
        | GradScalerKwargs
        | InitProcessGroupKwargs
        | ProfileKwargs
    )

# What an Accelerator needs when it is made or runs, and the import of this class does not.
modules_at_first_use(
    globals(),
    *("data", "precision"),
    oom="training.oom",
    prepare="training.prepare",
    records="options",
    state="training.state",
    guards="training.nonfinite",
    spikes="training.spikes",
    setting="settings",
)
Init = TypeVar("Init", bound=Callable[..., None])
Model = TypeVar("Model", bound=nn.Module)
Loader = TypeVar("Loader", bound=Iterable[Any])
T = TypeVar("T")
First = TypeVar("First")
Second = TypeVar("Second")
Others = TypeVarTuple("Others")


def _explaining(init: Init) -> Init:
    """Explain keywords that Accelerator() does not take. A decorator, so that signatures show only those that it takes."""
    known = signature(init).parameters

    @wraps(init)
    def checked(self: Accelerator, *arguments: Any, **named: Any) -> None:
        for name in [name for name in named if name not in known]:
            state.refuse_argument(name, named.pop(name), known)
        init(self, *arguments, **named)

    return checked  # type: ignore[return-value]


class Accelerator(Collectives, Checkpoints):
    """Trains a script on the hardware that is here, from a laptop to several nodes.

    Settings come from these arguments, else from ``EASYMP_`` variables, else from ``easymp.toml``, else they are detected;
    ``print(accelerator)`` shows each decision with its reason.

    Args:
        mixed_precision: dtypes of the computation: "auto", or a precision of `easymp.registry.PRECISIONS`. "no" and "fp32" are the same.
            "bf16", "fp16", "fp8", "O1" and "auto" on a CPU with bf16 instructions raise trainable parameters that arrive in bf16 or fp16
            to fp32; frozen ones keep their dtype. "bf16-true" and "fp16-true" cast the model and keep low-precision weights; "no", "fp32",
            "tf32" and "O0" cast nothing. Low-precision weights are stepped by fp32 masters, or with stochastic rounding where the optimizer
            is of `easymp.optim` ("O3" only rounds). The plan says which.
        strategy: how models are distributed: "auto", or a strategy of `easymp.registry.STRATEGIES`.
        strategy_options: options of the strategy: its record (`FSDPOptions`, `DistributedDataParallelKwargs` …), or a dict of the fields.
        gradient_accumulation_steps: micro-batches in an update; see `accumulate`.
        cpu: train on the CPU although there is an accelerator.
        device_placement: move models and batches to the device.
        dataloader_config: how prepared loaders read.
        gradient_accumulation_plugin: accumulation in detail, instead of `gradient_accumulation_steps`.
        step_scheduler_with_optimizer: prepared schedulers step once an optimizer update; False: at every call.
        scheduler_steps_per_process: prepared schedulers step as many times as there are processes, as with Accelerate.
        kwargs_handlers: records with options of autocast, the loss scale, DDP, the process group and profiles, at most one of each.
        initialize: gives values to modules on the meta device that have no `reset_parameters`; called with each such module.
        activation_checkpointing: modules that keep only their inputs and are computed again in backward: True for the repeated blocks,
            or a pattern of names or classes, or several. "attention": the blocks, which also keep their matrix products and
            attention. "16GiB": as many blocks as a rank needs to stay below this size, counted in the first forward.
        activation_offload: keep activations in pinned host memory from forward to backward; a side stream copies. CUDA only.
        optimizer_in_backward: step each parameter as its gradient is done, and free the gradient; `step` then counts the update.
            Refused with what needs all gradients: accumulation, clipping, a loss scale, ``nonfinite="skip"`` or ``"raise"``. Leave out
            ``torch.nn.utils.clip_grad_norm_``, too: it finds no gradients, and clips nothing without an error.
        gc: False leaves Python's garbage collection alone. Else what is there after the first update is frozen, and it runs at every
            500th update only; as before at the end.
        compile: torch.compile of the whole model (True or "model"), of each repeated block ("blocks"), or as `CompileOptions` say.
        dynamo_backend: the same as ``compile=CompileOptions(backend=...)``; "no" for none.
        seed: seed of all random streams; see `set_seed`.
        deterministic: use deterministic algorithms only.
        fused: let plain torch optimizers run a fused step: our kernels where CuPy runs and they gain, else torch's. It also clips and
            unscales (see `clip_grad_norm_`). False: torch's step as given, and gradients are changed in memory.
        ema_decay: decay of a moving average of the weights, for example 0.999; see `averaged`.
        convert_sync_batchnorm: batch-norm in training by the samples of all ranks that see other data; see `SyncBatchNorm`.
        nonfinite: the answer to a loss or gradient norm that is infinite or not a number. "warn": say it once, with step, rank and loss
            scale, without waiting for the device. "skip": no rank steps where a gradient of any rank is not finite (see
            `optimizer_step_was_skipped`). "raise": all ranks raise a NonfiniteError before that step, or where a loss is not finite.
            "skip" and "raise" check all gradients before each step, may wait for the device, and refuse closures. None: "skip" under a
            loss scale, else "warn". While a loss scale is being found, overflows are not reported, and "warn" means "skip". The first
            module with such numbers is named where it can be found: by a second forward for a loss (under "raise", and on a CPU), by hooks
            in the next update where steps are skipped.
        probe: let "auto" time fp32 and bf16 in the first training step where no rule is certain.
        timeout: seconds that a rank waits for the others in a collective.
        hang_after: seconds after which a collective that still waits is reported, with the call at which the ranks differ. None: 30;
            0: never.
        memory: memory of a rank by which "auto" decides, in bytes or as "16GiB". Default: the device's.
        replica_check: updates between comparisons of the ranks' parameters (by checksums) and options of param groups, where they must be
            equal. The first updates are compared, too; a difference is a WorldError. None: 1000; 0: never.
        replay: last updates whose losses, norms, positions and random streams are kept for `easymp replay`, in the folder ``replay`` of
            the project. Default: 0, none.
        debug: compare the ranks' calls before each collective of the script (`gather`, `reduce` …), with structure, dtypes and shapes.
            None: yes; False: no; True: zero1 also compares the number of gradients in each step.
        project_dir: a folder, or a URL of fsspec, for checkpoints (in ``checkpoints/``). Default: the working directory.
        project_config: more about the folder.
        log_with: where `log` writes: "jsonl" (a file of JSON lines; the default), "console" (a line that shows how far the training is),
            another tracker by name, several, "all" that are installed and keep rows, "none", or a tracker of your own (`Tracker`).
        save_on_signal: answer to SIGTERM and SIGUSR1: end the run at the next batch of a prepared loader, or the next of `epochs`, with a
            checkpoint in the project's folder and exit code 75, all ranks together. One more signal, 5 seconds later or more, ends it at
            once. None: from `resume` on; True: from the beginning; False: never.
        settings: a whole `Settings`; the arguments above win over it.

    Raises:
        SettingError: a wrong name or value.
        RefusedError: something that was asked for cannot run here.
        WorldError: announced processes did not arrive.

    Example:
        >>> acc = Accelerator(cpu=True, mixed_precision="no", gradient_accumulation_steps=2, seed=0)
        >>> model = nn.Linear(2, 1)
        >>> loader = torch.utils.data.DataLoader(torch.ones(8, 2), batch_size=2)
        >>> model, optimizer, loader = acc.prepare(model, torch.optim.AdamW(model.parameters()), loader)
        >>> for x in loader:
        ...     with acc.accumulate(model):
        ...         acc.backward(model(x).square().mean())
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        >>> optimizer.updates, acc.gradient_accumulation_steps, acc.sync_gradients, acc.optimizer_step_was_skipped
        (2, 2, True, False)
        >>> acc.plan.strategy.value, acc.mixed_precision, acc.scaler.enabled, acc.hardware.cpu.threads > 0
        ('single', 'no', False, True)
        >>> acc.state.num_processes, acc.gradient_state.num_steps
        (1, 2)
        >>> acc.even_batches, acc.split_batches, acc.dispatch_batches  # of dataloader_config
        (True, False, None)
        >>> acc.use_seedable_sampler, acc.non_blocking, acc.use_stateful_dataloader
        (True, True, True)
        >>> acc.project_dir, acc.logging_dir, acc.save_iteration, acc.project_configuration.total_limit
        (None, None, 0, None)
        >>> acc.end_training()
    """

    @_explaining
    def __init__(
        self,
        *,
        mixed_precision: PrecisionName | PrecisionType | None = None,
        strategy: StrategyName | None = None,
        strategy_options: StrategyOptions | Mapping[str, Any] | None = None,
        gradient_accumulation_steps: int | None = None,
        cpu: bool | None = None,
        device_placement: bool = True,
        dataloader_config: DataLoaderConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        scheduler_steps_per_process: bool = False,
        kwargs_handlers: Sequence[Handler] = (),
        initialize: Callable[[nn.Module], None] | None = None,
        activation_checkpointing: bool | str | Sequence[str] | None = None,
        activation_offload: bool | None = None,
        optimizer_in_backward: bool | None = None,
        gc: bool | None = None,
        compile: bool | Compiled | CompileOptions | None = None,
        dynamo_backend: str | None = None,
        seed: int | None = None,
        deterministic: bool | None = None,
        fused: bool | None = None,
        ema_decay: float | None = None,
        convert_sync_batchnorm: bool | None = None,
        nonfinite: NonfiniteAnswer | None = None,
        probe: bool | None = None,
        timeout: float | None = None,
        hang_after: float | None = None,
        memory: int | str | None = None,
        replica_check: int | None = None,
        replay: int | None = None,
        debug: bool | None = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        log_with: OneTracker | Sequence[OneTracker] | None = None,
        save_on_signal: bool | None = None,
        settings: Settings | None = None,
    ) -> None:
        asked = state.read_arguments(locals())
        settings, plan, me = asked.settings, asked.plan, weakref.ref(self)
        self._window = UpdateWindow(plan.accumulation.value, asked.accumulation.sync_with_dataloader)
        self._sync_each_batch, self._loading = asked.accumulation.sync_each_batch, asked.loading
        self._autocast, self._profiling = asked.autocast, asked.profiling
        self._in_backward = settings.optimizer_in_backward
        device = torch.device(plan.device.value)
        self._undo = ExitStack()
        self._world = distributed.World(plan.ranks, device, settings.timeout, settings.debug, asked.backend)
        with ExitStack() as begun:  # which ends again where something is refused
            begun.callback(self._world.close)
            begun.callback(self._undo.close)
            run = self._run = state.Run(self._world, plan, self._window, me)
            state.register(run)
            begun.callback(state.unregister, run)
            self._world.name_hangs(settings.hang_after, settings.project_dir)
            dtypes = self._precision = state.make_precision(run, asked.autocast)
            guard = not asked.scaled and settings.nonfinite in ("skip", "raise")
            self._scaler = precision.Scaler(asked.scaling, self._world, asked.scaled, guard, self._window)
            steps = self._world.size if scheduler_steps_per_process else 1
            how = {"with_optimizer": step_scheduler_with_optimizer, "steps": steps}
            wishes = prepare.PrepareOptions(
                *(device_placement, asked.loading, partial(self._make_scheduler, **how)),
                strategy_options=settings.strategy_options is not None,
                initialize=initialize,
                recompute=asked.recompute,
                compile=asked.compile,
                records=(asked.options, asked.accumulation, asked.autocast, asked.scaling, asked.loading),
                keep=guards.keeps(settings.nonfinite, device),
                views=self._views_only,
            )
            spread = asked.strategy(self._world, asked.options)
            prepared = self._prepared = prepare.Preparation(
                *(run, spread, dtypes, self._scaler, wishes), no_sync=lambda model: me().no_sync(model)
            )
            self._nonfinite = guards.Nonfinite(settings.nonfinite, run, self._scaler, prepared, dtypes)
            self._norms: list[Tensor] = []  # of the clips since the last backward
            # id of a parameter → the first norm that has its gradient in it
            self._normed: dict[int, Tensor] = {}
            self._clipped = 0  # updates before the last clip
            self._collection = oom.Collection()
            if settings.gc:
                self._window.stepped.append(self._collection.stepped)
                weakref.finalize(self, self._collection.end).atexit = False
            self._refusing = False  # steps of optimizers that were not prepared
            self._alone = False  # inside no_sync
            self._closed = self._trigger = False
            self._begin_checkpoints(asked.project)
            self._logbook = trackers.Logbook(run, self._project, settings, asked.trackers, prepared)
            log_table = self._logbook.log_table
            self._guard = spikes.Guard(
                *(run, self._scaler), lambda row, step: log_table("spikes", spikes.COLUMNS, [row], step)
            )
            self._listen(settings.save_on_signal)
            self._undo.callback(self._preemption.close)
            switch(dtypes.tf32 and device.type != "cpu", settings.deterministic, self._undo.callback)
            if settings.seed is not None:
                set_seed(settings.seed)
            if folder := env.read(setting.RECORD):
                recorder = trackers.Recorder(folder, run)
                self._logbook.attached[recorder.name] = recorder
                self._undo.callback(recorder.finish)
            leave = atexit.register(lambda: (it := me()) and it.close())
            self._undo.callback(atexit.unregister, leave)
            begun.pop_all()

    # -- the decision

    def __repr__(self) -> str:
        place = f"process {self.process_index} of {self.num_processes}, precision {self._precision.name}"
        return f"{type(self).__name__}({place}, strategy {self.plan.strategy.value}, device {self.device})"

    def __str__(self) -> str:
        batch = f"\nbatch         {self._prepared.batch}" if self._prepared.batch else ""
        return self.plan.explain() + batch

    def _refuse_in_backward(self, what: str) -> None:
        """Raises RefusedError where parameters are stepped in backward, which `what` would have to come before."""
        if self._in_backward:
            words = "which steps each parameter as soon as its gradient is done: leave one of them out"
            raise RefusedError(f"{what} under optimizer_in_backward=True, {words}")

    # -- properties

    @property
    def plan(self) -> Plan:
        """The decisions and their reasons; refined as models and optimizers are prepared."""
        return self._run.plan

    @property
    def _sharded(self) -> bool:
        return self._prepared.strategy.sharded

    @property
    def hardware(self) -> Hardware:
        """The machine: its accelerators, CPU and versions; see `Hardware`."""
        return self.plan.hardware

    @property
    def mixed_precision(self) -> PrecisionName:
        """The precision's name: "no" for fp32, else as `mixed_precision` of the constructor; "auto" until the first step has been timed."""
        return reported(self._precision.name)

    @property
    def scaler(self) -> precision.Scaler:
        """The loss scaler, up to date; it scales by one unless the precision scales the loss."""
        return self._scaler

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches in an update; may be set between updates."""
        return self._window.accumulation

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        number = records.GradientAccumulationPlugin(steps).num_steps
        if number > 1:
            self._refuse_in_backward(f"gradient_accumulation_steps = {number}")
        window = self._window
        if number != window.accumulation and not window.sync:
            raise StepError(
                f"gradient_accumulation_steps = {number} after micro-step {window.micro} of {window.accumulation}, whose loss was "
                f"divided by {window.accumulation}: set it where sync_gradients is true"
            )
        window.accumulation = number

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-step ends its accumulation window."""
        return self._window.sync

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last step of any prepared optimizer was skipped for an overflow. Waits for the device under fp16."""
        return any(optimizer.step_was_skipped for optimizer in self._prepared.optimizers)

    @property
    def gradient_state(self) -> GradientState:
        """The place in the accumulation window and in the loop over the data."""
        return state.GradientState(self._window)

    @property
    def state(self) -> AcceleratorState:
        """The process and the plan, for scripts that pass a state around."""
        return state.AcceleratorState()

    @property
    def split_batches(self) -> bool:
        """Whether a loader's batch size is the global one, which the ranks divide; of `DataLoaderConfiguration`."""
        return self._loading.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """Whether rank 0 reads batches and sends them; of `DataLoaderConfiguration`."""
        return self._loading.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """Whether the last round is completed, so that ranks have as many batches; of `DataLoaderConfiguration`."""
        return self._loading.even_batches

    @property
    def use_seedable_sampler(self) -> bool:
        """Whether loaders shuffle by seed and epoch alone; of `DataLoaderConfiguration`."""
        return self._loading.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        """Whether copies of batches to the device do not wait; of `DataLoaderConfiguration`."""
        return self._loading.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        """As in `DataLoaderConfiguration`; every prepared loader can be resumed."""
        return self._loading.use_stateful_dataloader

    @staticmethod
    def launch(processes: int | None = None) -> None:
        """Run this script again on several processes; see `easymp.launch`. Call it first thing in the script.

        Args:
            processes: number of processes on this machine; None takes one an accelerator, or 1 without any.

        Raises:
            SettingError: there is no script to run again (a notebook, ``python -c``, an interactive session).

        Example:
            >>> Accelerator.launch(1)  # one process: this one goes on
        """
        launcher.launch(processes)

    # -- prepare

    @overload
    def prepare(
        self,
        given: T,
        /,
        *,
        device_placement: Sequence[bool | None] | None = None,
        forward_methods: str | Sequence[str] = (),
    ) -> T: ...

    @overload
    def prepare(
        self,
        first: First,
        second: Second,
        /,
        *others: *Others,
        device_placement: Sequence[bool | None] | None = None,
        forward_methods: str | Sequence[str] = (),
    ) -> tuple[First, Second, *Others]: ...

    def prepare(
        self,
        *objects: Any,
        device_placement: Sequence[bool | None] | None = None,
        forward_methods: str | Sequence[str] = (),
    ) -> Any:
        """Make models, optimizers, schedulers and loaders ready for this run.

        Args:
            objects: each a Module, Optimizer, scheduler, DataLoader, something prepared before, or None; in any order.
            device_placement: whether to move each object to the device, one value an object; None takes the constructor's.
            forward_methods: names of methods that compute as forward does ("embed", "generate"): of the prepared model they are called
                under autocast and the strategy, so that they train, too. Each model takes the names that it has; methods that
                `easymp.forward_method` decorates need not be named.

        Returns:
            The prepared objects in the same order; of one object, itself. Models have the class, parameters and names of the given ones;
            optimizers, loaders and schedulers (`PreparedOptimizer`, `PreparedLoader`, `PreparedScheduler`) their attributes.

        Raises:
            PrepareError: objects that do not fit together, or cannot be prepared; a name in `forward_methods` that no model has.
            RefusedError: `forward_methods` under a strategy that runs forward alone.
            WorldError: the ranks passed different objects.
            CheckpointError: an optimizer, while another live process trains in the folder that `project_dir` names.

        Example:
            >>> acc = Accelerator(cpu=True)
            >>> model = nn.Linear(2, 1)
            >>> optimizer, model = acc.prepare(torch.optim.SGD(model.parameters(), lr=0.1), model)
            >>> isinstance(model, nn.Linear), optimizer.param_groups[0]["lr"]
            (True, 0.1)
        """
        done = self._prepared.prepare(objects, device_placement, forward_methods)
        if self._prepared.optimizers:
            self._claim_early()
        return done[0] if len(done) == 1 else tuple(done)

    def prepare_model(
        self,
        model: Model,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
        forward_methods: str | Sequence[str] = (),
    ) -> Model:
        """Prepare one model; see `prepare`.

        Args:
            model: any module.
            device_placement: whether to move it to the device; None takes the constructor's.
            evaluation_mode: check that the model has no trainable parameters. Such a model is not wrapped for gradients.
            forward_methods: as in `prepare`.

        Returns:
            The prepared model.

        Raises:
            RefusedError: `evaluation_mode` with trainable parameters.

        Example:
            >>> acc = Accelerator(cpu=True)
            >>> teacher = acc.prepare_model(nn.Linear(2, 1).requires_grad_(False), evaluation_mode=True)
        """
        if evaluation_mode and any(p.requires_grad for p in model.parameters()):
            words = "call requires_grad_(False) on it first, or leave evaluation_mode out"
            raise RefusedError(
                f"evaluation_mode=True, but this {type(model).__name__} has trainable parameters: {words}"
            )
        return self.prepare(model, device_placement=[device_placement], forward_methods=forward_methods)

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> PreparedOptimizer:
        """Prepare one optimizer, after its models; see `prepare`.

        Args:
            optimizer: any torch.optim.Optimizer.
            device_placement: accepted, and without effect: states follow the parameters.

        Returns:
            The prepared optimizer.

        Example:
            >>> acc = Accelerator(cpu=True)
            >>> model = acc.prepare_model(nn.Linear(2, 1))
            >>> optimizer = acc.prepare_optimizer(torch.optim.SGD(model.parameters()))
        """
        prepared: Any = self.prepare(optimizer, device_placement=[device_placement])
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> PreparedScheduler:
        """Prepare one scheduler, after its optimizer; see `prepare`.

        Args:
            scheduler: an object with `step` and `state_dict`, as those of torch.optim.lr_scheduler.

        Returns:
            The prepared scheduler.

        Example:
            >>> acc = Accelerator(cpu=True)
            >>> model = nn.Linear(2, 1)
            >>> model, optimizer = acc.prepare(model, torch.optim.SGD(model.parameters()))
            >>> scheduler = acc.prepare_scheduler(torch.optim.lr_scheduler.StepLR(optimizer, 10))
        """
        prepared: Any = self.prepare(scheduler)
        return prepared

    _views_only = False  # whether prepare() never hands a model itself back

    @staticmethod
    def _make_scheduler(
        scheduler: Any, optimizers: Sequence[PreparedOptimizer], **how: Any
    ) -> PreparedScheduler:
        return optim.PreparedScheduler(scheduler, optimizers, **how)

    def prepare_data_loader(
        self, data_loader: DataLoader[Any], device_placement: bool | None = None
    ) -> data.PreparedLoader:
        """Prepare one loader; see `prepare`.

        Args:
            data_loader: any DataLoader.
            device_placement: whether to move batches to the device; None takes the constructor's.

        Returns:
            The prepared loader.

        Example:
            >>> acc = Accelerator(cpu=True)
            >>> loader = acc.prepare_data_loader(torch.utils.data.DataLoader(range(6), batch_size=4))
            >>> [batch.tolist() for batch in loader]
            [[0, 1, 2, 3], [4, 5]]
        """
        prepared: Any = self.prepare(data_loader, device_placement=[device_placement])
        return prepared

    # -- the step

    def backward(
        self,
        loss: Tensor,
        *,
        num_items: int | Tensor | None = None,
        gradient: Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Sequence[Tensor] | None = None,
    ) -> None:
        """Compute the gradients of a loss. On the last micro-step of a window they are averaged over the ranks.

        Args:
            loss: a mean over this rank's micro-batch (divided by the accumulation steps here), 0-dim; or with `num_items` a sum.
            num_items: how many items (tokens) `loss` sums over on this rank. The gradients become those of the sum over the whole
                window and all ranks, divided by their common count: equal to one big batch.
            gradient: as in `torch.Tensor.backward`.
            retain_graph: as there.
            create_graph: as there.
            inputs: as there.

        Raises:
            StepError: a loss that is not a scalar, or has no graph; one that holds the gradient of a gradient, where that is refused;
                gradients that no rank averages, since their model was not called.
            NonfiniteError: a loss that is not finite, under ``nonfinite="raise"``.
            WorldError: another rank is missing or elsewhere.

        Example:
            >>> acc = Accelerator(cpu=True)
            >>> model = acc.prepare(nn.Linear(2, 1))
            >>> outputs, targets = model(torch.ones(4, 2)), torch.tensor([[0.0], [1.0], [2.0], [-100.0]])
            >>> losses = (outputs - targets).abs()[targets != -100]
            >>> acc.backward(losses.sum(), num_items=len(losses))
        """
        window, prepared = self._window, self._prepared
        if prepared.unprepared is not None:
            prepared.look_at_data(prepared.unprepared)
        scalar = isinstance(loss, Tensor) and (not loss.ndim or loss.numel() == 1 or gradient is not None)
        if not scalar or not loss.requires_grad:
            raise StepError(wrapper.loss_trouble(loss))
        self._nonfinite.loss(loss)
        if self._logbook.waiting:
            self._logbook.poll(loss, num_items)
        if num_items is not None:
            if not self._scaler.agree and self._world.size > 1:
                raise StepError(
                    "backward(num_items=...) inside join_uneven_inputs: items are counted over all ranks, and ranks that are done take no "
                    "part. Pass the mean of the loss without num_items, or keep even_batches=True and do not join"
                )
            loss = window.divide(loss, num_items, self._world)
        elif window.accumulation != 1:
            if window.counts_items:
                raise StepError(
                    "backward() without num_items in a window that began with it: pass it for every micro-batch, or for none"
                )
            loss = loss / window.accumulation
        if self._in_backward and (retain_graph or create_graph or any(o.ahead for o in prepared.optimizers)):
            words = "a second backward() before optimizer.step(), or one that keeps its graph,"
            self._refuse_in_backward(words)
        for optimizer in prepared.optimizers:
            if optimizer.turn.phase is not Phase.ACCUMULATING:
                optimizer.follow_backward()
        window.backwards += 1
        self._norms.clear()
        self._normed.clear()
        scaler, sums = self._scaler, prepared.sums
        if scaler.enabled:
            scaler.settle()
            loss = scaler.scale(loss)
        summed = sums.on and window.accumulation != 1
        if summed:
            sums.begin()
        check = None
        if self._world.size > 1:
            self._world.trains_here()
            if window.sync and not self._alone and not summed:
                modules = [route.module for route in prepared.models]
                check = prepared.strategy.after_backward(modules, create_graph)
        try:
            loss.backward(gradient, retain_graph, create_graph, inputs)
        except RuntimeError as error:
            self._world.blame(error, "backward")
            wrapper.explain_backward(error)
            raise
        if check is not None:
            check()
        if summed:
            sums.add()
            if window.sync and self._world.size > 1 and not self._sync_each_batch and not self._alone:
                modules = [route.module for route in prepared.models]
                sums.average(partial(prepared.strategy.average, modules))
        if window.counts_items and window.sync:
            window.finish_items(prepared.gradients(), self._world)
        if summed and window.sync:
            sums.hand_over()

    def forward_backward(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Tensor],
        *inputs: Any,
        target: Any = None,
        num_items: int | Tensor | None = None,
        **keywords: Any,
    ) -> Tensor:
        """Run forward, loss and backward of one micro-step, under every strategy; schedules of a pipeline need this call.

        Instead of ``backward(loss_fn(model(*inputs), target))``, and with the same gradients; accumulation, `num_items` and the loss scale
        work as in `backward`. Under strategy "pipeline" `loss_fn` is called with the output of a micro-batch and its part of `target`, and
        the loss is the mean over the samples (with `num_items` the sum).

        Args:
            model: a prepared model.
            loss_fn: called as ``loss_fn(outputs, target)``, or ``loss_fn(outputs)`` without a target; returns one number.
            inputs: arguments of the model.
            keywords: keyword arguments of the model.
            target: the second argument of `loss_fn`, a tensor or a nested batch of tensors.
            num_items: as in `backward`.

        Returns:
            The loss of this rank's batch without a graph, 0-dim, as `loss_fn` gives it: neither scaled nor divided.

        Raises:
            StepError: as `backward`, and where `loss_fn` returns no number.

        Example:
            >>> acc = Accelerator(cpu=True)
            >>> model = acc.prepare(nn.Linear(2, 3))
            >>> loss = acc.forward_backward(model, nn.functional.cross_entropy, torch.ones(4, 2), target=torch.tensor([0, 1, 2, 0]))
            >>> loss.requires_grad, model.weight.grad.shape
            (False, torch.Size([3, 2]))
        """
        (route,) = self._prepared.routes((model,))
        strategy = self._prepared.strategy
        summed = num_items is not None
        loss = strategy.loss(route.module, route.call, loss_fn, inputs, keywords, target, summed)
        self.backward(loss, num_items=num_items)
        if strategy.late_loss:
            self._nonfinite.loss(loss)
        return loss.detach()

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """Wrap one micro-step: forward, backward, step and zero_grad.

        Gradients are reduced and optimizers step on every `gradient_accumulation_steps`-th micro-step, and on the last batch of the
        loader being read, which restarts the count.

        Args:
            models: prepared models whose gradients are accumulated; none means all.

        Returns:
            A context manager, for ``with``.

        Raises:
            StepError: a model that is not prepared.

        Example:
            >>> acc = Accelerator(cpu=True, gradient_accumulation_steps=2)
            >>> model = acc.prepare(nn.Linear(2, 1))
            >>> for _ in range(2):
            ...     with acc.accumulate(model):
            ...         acc.backward(model(torch.ones(4, 2)).mean())
            ...         print(acc.sync_gradients)
            False
            True
        """
        prepared, window = self._prepared, self._window
        if not self._refusing and window.accumulation != 1:
            self._refusing = True
            held = (prepared.owner, prepared.stepped_by, prepared.optimizers)
            self._undo.callback(window.refuse_unprepared(*held))
        reduces = self._world.size > 1 and not self._sync_each_batch
        modules = [route.module for route in prepared.routes(models)] if reduces else ()
        alone = prepared.sums.on and window.accumulation != 1
        return MicroStep(window, prepared.strategy.no_sync, modules, alone)

    @contextmanager
    def no_sync(self, model: nn.Module | None = None) -> Iterator[None]:
        """Keep gradients to this rank inside the block: for accumulation by hand.

        Args:
            model: a prepared model; None means all.

        Raises:
            StepError: a model that is not prepared.

        Example:
            >>> acc = Accelerator(cpu=True)
            >>> model = acc.prepare(nn.Linear(2, 1))
            >>> with acc.no_sync(model):
            ...     acc.backward(model(torch.ones(4, 2)).mean())
        """
        self._refuse_in_backward("no_sync()")
        with ExitStack() as stack:
            for route in self._prepared.routes((model,) if model is not None else ()):
                stack.enter_context(self._prepared.strategy.no_sync(route.module))
            stack.callback(setattr, self, "_alone", self._alone)
            self._alone = True
            stack.enter_context(self._prepared.not_compared())
            yield

    @contextmanager
    def trigger_sync_in_backward(self, model: nn.Module) -> Iterator[None]:
        """Reduce gradients in backward inside the block, although `model` was called under `no_sync`.

        Args:
            model: a prepared model.

        Raises:
            StepError: a model that is not prepared.

        Example:
            >>> acc = Accelerator(cpu=True)
            >>> model = acc.prepare(nn.Linear(2, 1))
            >>> with acc.no_sync(model):
            ...     loss = model(torch.ones(4, 2)).mean()
            >>> with acc.trigger_sync_in_backward(model):
            ...     acc.backward(loss)
        """
        (route,) = self._prepared.routes((model,))
        alone, self._alone = self._alone, False
        try:
            with self._prepared.strategy.force_sync(route.module):
                yield
        finally:
            self._alone = alone

    def join_uneven_inputs(
        self, joinables: Sequence[nn.Module], even_batches: bool | None = None
    ) -> AbstractContextManager[None]:
        """Let ranks run out of batches at different times inside the block; those that are done join the others' reductions.

        A gradient is the mean over the ranks that still have a batch, each rank's batch with the same weight: with batches of one size
        the training equals that of one process which is given the same samples together. At the end all ranks take the parameters,
        optimizer states, schedules and loss scale of a rank that had the most batches.

        Args:
            joinables: prepared models.
            even_batches: over the loaders' setting, while inside.

        Returns:
            A context manager, for ``with``.

        Raises:
            RefusedError: the strategy, a synchronised batch-norm, gradient accumulation, or a `comm_hook` needs every rank.

        Example:
            >>> acc = Accelerator(cpu=True)
            >>> model, loader = acc.prepare(nn.Linear(2, 1), torch.utils.data.DataLoader(torch.ones(3, 2)))
            >>> with acc.join_uneven_inputs([model], even_batches=False):
            ...     for x in loader:
            ...         acc.backward(model(x).mean())
        """
        self._refuse_in_backward("join_uneven_inputs()")
        return self._prepared.join(joinables, even_batches)

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Compute under the run's autocast, outside of a prepared model.

        Args:
            autocast_handler: options, over the constructor's.

        Returns:
            A context manager, for ``with``.

        Example:
            >>> acc = Accelerator(cpu=True, mixed_precision="bf16")
            >>> with acc.autocast():
            ...     nn.Linear(2, 1)(torch.ones(4, 2)).dtype
            torch.bfloat16
        """
        return self._precision.casting(self.device, autocast_handler or self._autocast)

    def unscale_gradients(
        self, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None
    ) -> None:
        """Divide gradients by the loss scale, to look at them or change them before the step.

        Acts once a window, and does nothing without a loss scale.

        Args:
            optimizer: one or several, prepared or not; None means all prepared ones.

        Example:
            >>> acc = Accelerator(cpu=True)
            >>> model = nn.Linear(2, 1)
            >>> model, optimizer = acc.prepare(model, torch.optim.SGD(model.parameters()))
            >>> acc.backward(model(torch.ones(4, 2)).mean())
            >>> acc.unscale_gradients(optimizer)
            >>> model.bias.grad
            tensor([1.])
        """
        if self._window.accumulation != 1 and not self._window.sync:
            return
        chosen = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
        self._prepared.unscale(self._prepared.optimizers if optimizer is None else chosen)

    def clip_grad_norm_(
        self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2.0
    ) -> Tensor | None:
        """Scale gradients so that their total norm is at most `max_norm`. Acts once a window, as the optimizer does.

        Where `parameters` are all that one or several prepared optimizers step, and torch's fused step or ours runs (see the plan),
        gradients are only read: the step multiplies by the factor, and by 1 / the loss scale, as it reads them again. Until then `.grad`
        is what backward left there, and afterwards it may be either; a change in between is an error. To read or change clipped gradients
        before the step, use ``Accelerator(fused=False)``. Under a loss scale an overflow skips the steps of all of them.

        Args:
            parameters: those of prepared models.
            max_norm: the largest norm.
            norm_type: p of the p-norm.

        Returns:
            The norm before, 0-dim, on the device; None on micro-steps that do not end a window.

        Raises:
            StepError: gradients changed since the last clip, which no step has followed; under a loss scale: there are none.

        Example:
            >>> acc = Accelerator(cpu=True)
            >>> model = acc.prepare(nn.Linear(2, 1))
            >>> acc.backward(model(torch.ones(4, 2)).mean())
            >>> acc.clip_grad_norm_(model.parameters(), max_norm=1.0)  # of three ones
            tensor(1.7321)
        """
        self._refuse_in_backward("clip_grad_norm_()")
        if self._window.accumulation != 1 and not self._window.sync:
            return None
        prepared = self._prepared
        chosen = prepared.stepped(parameters)
        optimizers = prepared.steppers(chosen) if norm_type == 2 else None
        if optimizers and optim.may_leave(optimizers):
            norm = optim.leave_to_step(optimizers, max_norm, self._scaler)
        else:
            norm = prepared.strategy.clip(prepared.unscaled(chosen), max_norm, norm_type)
        self._nonfinite.norm(norm)
        updates = sum(optimizer.updates for optimizer in prepared.optimizers)
        if updates != self._clipped:  # after a plain loss.backward(), which clears nothing
            self._norms.clear()
            self._normed.clear()
            self._clipped = updates
        self._norms.append(norm)
        self._normed = dict.fromkeys(map(id, chosen), norm) | self._normed
        return norm

    def clip_grad_value_(self, parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
        """Clamp every element of the gradients to [-clip_value, clip_value]. Acts once a window, as the optimizer does.

        Args:
            parameters: those of prepared models.
            clip_value: the largest magnitude.

        Example:
            >>> acc = Accelerator(cpu=True)
            >>> model = acc.prepare(nn.Linear(2, 1))
            >>> acc.backward(model(torch.ones(4, 2)).mean())
            >>> acc.clip_grad_value_(model.parameters(), 0.5)
            >>> model.bias.grad
            tensor([0.5000])
        """
        self._refuse_in_backward("clip_grad_value_()")
        if self._window.accumulation == 1 or self._window.sync:
            self._prepared.clamp(self._prepared.stepped(parameters), float(clip_value))

    def guard(
        self,
        loss: Tensor,
        *,
        policy: GuardPolicy = "skip",
        window: int = 128,
        factor: float = 10.0,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        """Leave out an update whose gradient norm or loss is a spike; call it after backward and the clip, before the step.

        The norm is that of `clip_grad_norm_` before the clip; gradients without a clip are measured here. The loss is the mean over the
        window's micro-batches. Both are averaged over the ranks, so that all ranks decide alike. With m the median of the last `window`
        values and d = 1.4826 · median(|x - m|), a value x is a spike if x > m + factor · d, or if it is not finite (without a loss scale,
        which sees to these). Until there are ``window // 2`` values, only the latter counts. Spikes are among the values: a lasting rise
        is accepted after half a window.

        Each spike is a warning and a row of the table "spikes" (see `log_table`): update, norm, loss, limits, and the samples' epoch,
        positions and, of prepared loaders with a known order, indices.

        Args:
            loss: the mean over this rank's micro-batch, as for `backward`.
            policy: "skip": the next `step` changes nothing on any rank, schedulers do not step, and `optimizer_step_was_skipped` is true;
                optimizers that run fused do not wait for the device. "rollback": load the checkpoint that this run saved or loaded
                last, and go on with the next batch, bit for bit as a run that was never given the batches since then. Work of once
                an epoch since then is undone, too, and the step that follows is left out. It waits for the device in each update.
                Without a checkpoint the update is skipped.
            window: former updates; the same at each call. Checkpoints keep their values.
            factor: how far above the median a spike begins.
            optimizer: judge its updates alone (a GAN has two); None: those of all prepared optimizers together.

        Raises:
            StepError: after the step, without optimizers, inside `join_uneven_inputs`, or a fourth return to one checkpoint.
            RefusedError: `optimizer_in_backward`, or a `comm_hook` that would keep what is skipped.
            SettingError: a wrong policy, window or factor.
            CheckpointError: the checkpoint cannot be loaded.

        Example:
            >>> acc = Accelerator(cpu=True, log_with="none", seed=0)
            >>> model = nn.Linear(2, 1)
            >>> model, optimizer = acc.prepare(model, torch.optim.SGD(model.parameters()))
            >>> for i in range(20):
            ...     loss = model(torch.rand(4, 2) * (1000 if i == 15 else 1)).square().mean()
            ...     acc.backward(loss)
            ...     norm = acc.clip_grad_norm_(model.parameters(), 1.0)
            ...     acc.guard(loss, window=16)
            ...     optimizer.step()
            ...     optimizer.zero_grad()
            ...     if acc.optimizer_step_was_skipped:
            ...         print(i)
            15
        """
        self._refuse_in_backward("guard()")
        guard = self._guard
        key, chosen = guard.choose(self._prepared, optimizer, policy)
        guard.add(key, loss, policy, window, factor)
        if self._window.accumulation != 1 and not self._window.sync:
            return
        self._nonfinite.skips()
        held = [p for one in chosen for group in one.param_groups for p in group["params"]]
        # Chosen by what is the same on all ranks, since a norm of shards is a collective.
        if rest := [p for p in held if p.requires_grad and id(p) not in self._normed]:
            self.clip_grad_norm_(rest, float("inf"))
        norms = {id(norm): norm for p in held if (norm := self._normed.get(id(p))) is not None}
        judged, step = guard.judge(key, list(norms.values()), window, factor), chosen[0].updates + 1
        if policy == "rollback" and judged[0]:
            numbers, samples = judged.tolist(), guard.samples()
            place = self._go_back()
            if place is not None:
                self._window.begin()
                self._nonfinite.forget()
                spikes.drop(chosen)
                guard.report(step, numbers, samples, place)
                return
        for one in chosen:
            one.turn.spike = judged[0]
        guard.note(step, judged)

    @contextmanager
    def averaged(self, *models: nn.Module) -> Iterator[None]:
        """Give models the moving averages of their weights inside the block: for evaluation, or `save_model`.

        An average begins as the weight before its first step, and moves at each step that moves the weight. What no step has moved (frozen
        parameters, buffers) is the same inside. Meanwhile there is a copy of the weights. All ranks call it; under strategy "local_sgd"
        each has averages of its own. Steps and `save_state` belong outside.

        Args:
            models: prepared models; none means all.

        Raises:
            RefusedError: without `ema_decay`.

        Example:
            >>> acc = Accelerator(cpu=True, ema_decay=0.999)
            >>> model = nn.Linear(2, 1)
            >>> model, optimizer = acc.prepare(model, torch.optim.SGD(model.parameters()))
            >>> with acc.averaged(model):
            ...     outputs = model(torch.ones(4, 2))
        """
        if self.plan.settings.ema_decay is None:
            words = "averaged() needs averages of the weights: ask for them by Accelerator(ema_decay=0.999)"
            raise RefusedError(words)
        self._world.settle()
        routes = self._prepared.routes(models) if models else ()
        chosen = {id(p) for route in routes for p in route.original.parameters()} if models else None
        with optim.averages_in(self._prepared.optimizers, chosen):
            yield

    def profile(self, profile_handler: ProfileKwargs | None = None) -> profiling.Profile:
        """Record the block with torch.profiler, on all ranks or on some.

        Writes a Chrome trace a rank.

        Args:
            profile_handler: what to record and when, over the constructor's. Without any: three steps after two, memory included.

        Returns:
            A torch.profiler.profile that counts the steps itself (`easymp.profiling.Profile`), for ``with``. ``summary()`` is a table of
            where time and memory went.

        Raises:
            RefusedError: none of the activities can be recorded here.

        Example:
            >>> acc = Accelerator(cpu=True)
            >>> model = acc.prepare(nn.Linear(2, 1))
            >>> with acc.profile(ProfileKwargs(activities=["cpu"])) as prof:
            ...     acc.backward(model(torch.ones(4, 2)).mean())
            >>> [path.name for path in prof.traces]
            [...]
        """
        return profiling.Profile(self, self._run, self._prepared, profile_handler or self._profiling)

    # -- logging

    def init_trackers(
        self,
        project_name: str,
        config: Any = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Name the run, and log its hyperparameters, plan, machine and easymp's version. Without this call its name is "log".

        Args:
            project_name: names files, and projects and experiments of services.
            config: hyperparameters: a dict, an argparse Namespace, or a dataclass; anything in it.
            init_kwargs: a tracker's name → further arguments of its start.

        Raises:
            SettingError: a wrong name.
            StepError: rows were logged before.

        Example:
            >>> acc = Accelerator(cpu=True)
            >>> acc.init_trackers("digits", config={"lr": 0.1})
            >>> acc.log({"loss": 0.5})
            >>> acc.end_training()  # digits.jsonl has the row
        """
        self._logbook.describe(project_name, config, init_kwargs)

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Log numbers and words by name, from the main process. On other ranks it does nothing, and no rank waits for another.

        Args:
            values: numbers, words, 0-dim tensors (as they are now, and without waiting for the device), or dicts of these; None leaves
                a value out.
            step: a whole number; None takes the number of optimizer updates, or of calls where no optimizer is prepared.
            log_kwargs: a tracker's name → further arguments of its `log`.

        Raises:
            SettingError: a wrong value or name, on every rank that calls.
            StepError: the trackers have finished.

        Example:
            >>> acc = Accelerator(cpu=True)
            >>> acc.log({"loss": torch.tensor(0.5), "val": {"accuracy": 0.9}}, step=1)
        """
        self._logbook.log(values, step, log_kwargs)

    def log_images(self, name: str, images: Any, step: int | None = None) -> None:
        """Log images by the trackers that take them, from the main process, which waits for the device.

        "jsonl" writes PNG files beside its rows; "tensorboard", "wandb" and "mlflow" show images on their pages, and need Pillow. A tracker
        without images says so once.

        Args:
            name: of the images, such as "samples".
            images: a tensor, an array, or a list of these or of pictures of PIL, all of one size: NHWC or NCHW with 1, 3 or 4 channels,
                one image without N, or grey ones without C. Where both are possible, tensors are NCHW and arrays NHWC. uint8, or floats
                from 0 to 1; values beyond are cut, with a warning.
            step: as in `log`.

        Raises:
            SettingError: another shape or dtype, on every rank that calls.
            StepError: the trackers have finished.

        Example:
            >>> acc = Accelerator(cpu=True)
            >>> acc.log_images("noise", torch.rand(2, 3, 8, 8), step=1)
            >>> acc.end_training()  # log-images/noise-00000001-0.png and -1.png
        """
        self._logbook.log_images(name, images, step)

    def log_table(
        self, name: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], step: int | None = None
    ) -> None:
        """Log a table by the trackers that take one, from the main process, which waits for the device of tensors.

        "jsonl" writes a row for each row of the table, with ``_table``, the name; "tensorboard" shows it as text. A tracker without tables
        says so once.

        Args:
            name: of the table, such as "predictions".
            columns: their names, which do not begin with an underscore.
            rows: each a number, a word, a 0-dim tensor or None for each column.
            step: as in `log`.

        Raises:
            SettingError: wrong columns, or a row that does not fit them, on every rank that calls.
            StepError: the trackers have finished.

        Example:
            >>> acc = Accelerator(cpu=True, log_with="jsonl")
            >>> acc.log_table("predictions", ["digit", "found"], [[3, 3], [5, 6]], step=1)
            >>> acc.end_training()
        """
        self._logbook.log_table(name, columns, rows, step)

    @property
    def trackers(self) -> list[Any]:
        """The trackers, on the main process; none on others.

        Example:
            >>> Accelerator(cpu=True, log_with="none").trackers
            []
        """
        return self._logbook.all()

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Get a tracker of this run by its name.

        Args:
            name: as in `log_with`.
            unwrap: return the library's own object: TensorBoard's SummaryWriter, the run of wandb or MLflow, the path of a file.

        Returns:
            The tracker; on other ranks than the main one an object that takes every call and does nothing.

        Raises:
            SettingError: there is none of this name.
            TrackerError: it could not start, or an earlier call said so.

        Example:
            >>> acc = Accelerator(cpu=True)
            >>> acc.get_tracker("jsonl", unwrap=True).name
            'log.jsonl'
            >>> acc.end_training()
        """
        return self._logbook.get(name, unwrap)

    @contextmanager
    def context_parallel(self, buffers: Sequence[Tensor], dims: Sequence[int]) -> Iterator[None]:
        """Share each sequence among neighbouring ranks, under the option `context_parallel` of "ddp", "zero1", "fsdp" and "hsdp".

        Inside, each tensor is this rank's part, in place; outside it is whole again. Forward and backward both run inside, so that torch
        passes keys and values from rank to rank. Without the option nothing happens. Parts are not neighbouring tokens: pass all tensors
        of the batch that have a sequence dimension, position ids and labels that are shifted already among them. `num_items` counts
        the tokens of the part, and a mean loss is the mean of the part.

        Args:
            buffers: tensors of one sequence length, a multiple of twice the option.
            dims: the sequence dimension of each.

        Raises:
            BatchError: the tensors cannot be split.
            StepError: attention that torch does not ring, or none.

        Example:
            >>> acc = Accelerator(cpu=True)
            >>> tokens, labels = torch.zeros(2, 8, dtype=torch.int64), torch.zeros(2, 8, dtype=torch.int64)
            >>> with acc.context_parallel([tokens, labels], dims=[1, 1]):
            ...     print(tokens.shape)  # all of it: one process
            torch.Size([2, 8])
        """
        with self._prepared.strategy.context(buffers, dims):
            yield

    # -- loaders and models

    def skip_first_batches(self, dataloader: Loader, num_batches: int = 0) -> Loader:
        """Leave the first batches of a loader out of its next pass; see `easymp.skip_first_batches`.

        Args:
            dataloader: a DataLoader, or a prepared one.
            num_batches: batches of this rank.

        Returns:
            A loader for one pass.

        Example:
            >>> acc = Accelerator(cpu=True)
            >>> loader = acc.prepare(torch.utils.data.DataLoader(range(6), batch_size=2))
            >>> [batch.tolist() for batch in acc.skip_first_batches(loader, 1)]
            [[2, 3], [4, 5]]
        """
        return data.skip_first_batches(dataloader, num_batches)

    def total_updates(self, loader: Sized, epochs: int = 1) -> int:
        """Count the optimizer updates of a training: the horizon of a learning-rate schedule.

        Args:
            loader: a prepared loader.
            epochs: passes over it.

        Returns:
            Updates, incomplete windows at the end of a pass included.

        Raises:
            PrepareError: on several processes, a loader that is not prepared.

        Example:
            >>> acc = Accelerator(cpu=True, gradient_accumulation_steps=4)
            >>> loader = acc.prepare(torch.utils.data.DataLoader(range(10)))
            >>> acc.total_updates(loader, epochs=2)  # of 10 micro-batches each
            6
        """
        given = isinstance(loader, DataLoader) and not isinstance(loader, data.PreparedLoader)
        if given and self._prepared.strategy.data_size > 1:
            raise PrepareError(
                "total_updates() of a loader that is not prepared counts the batches of all ranks: prepare the loader first, then make the "
                "schedule, and prepare the rest"
            )
        each, steps = len(loader), self._window.accumulation
        return epochs * math.ceil(each / steps) if self._window.end_with_loader else epochs * each // steps

    def unwrap_model(
        self, model: Model, keep_fp32_wrapper: bool = False, keep_torch_compile: bool = True
    ) -> Model:
        """Get the user's own module behind a prepared model, DataParallel or DistributedDataParallel.

        Args:
            model: prepared or not.
            keep_fp32_wrapper: refused: there is no such wrapper.
            keep_torch_compile: False also takes torch.compile's wrapper off.

        Returns:
            The module that was given to `prepare`.

        Raises:
            RefusedError: ``keep_fp32_wrapper=True``.

        Example:
            >>> acc = Accelerator(cpu=True, mixed_precision="bf16")
            >>> given = nn.Linear(2, 1)
            >>> model = acc.prepare(given)
            >>> acc.unwrap_model(model) is given
            True
        """
        if keep_fp32_wrapper:
            words = "the fp32 conversion lives outside the module, there is none to keep. Leave it out"
            raise RefusedError(f"keep_fp32_wrapper=True: {words}")
        return wrapper.unwrap(model, keep_torch_compile)

    # -- the end

    def free_memory(self, *objects: Any) -> Any:
        """Let go of all that was prepared, and empty the device's cache.

        Args:
            objects: other objects to let go of; the caller replaces its own variables.

        Returns:
            None; for several objects one None each, to assign to the variables.

        Example:
            >>> acc = Accelerator(cpu=True)
            >>> model = nn.Linear(2, 1)
            >>> model, optimizer = acc.prepare(model, torch.optim.SGD(model.parameters()))
            >>> model, optimizer = acc.free_memory(model, optimizer)
        """
        self._prepared.release()
        self._window.reset()
        self._guard.load_state_dict({})
        self._collection.end()
        nothing = (None,) * len(objects)
        del objects
        oom.release_memory(device=self.device)
        return None if len(nothing) <= 1 else nothing

    clear = free_memory

    def end_training(self) -> None:
        """End the run: finish trackers and checkpoints, and leave the other processes. A second call does nothing.

        Models that are whole stay callable, each rank for itself; sharded ones do not. Another Accelerator can be made afterwards.

        Raises:
            CheckpointError: the error of an asynchronous save that no later call has raised.
            WorldError: the last comparison of replicas found that they differ.
        """
        self.close()

    def close(self) -> None:
        """End the run, as `end_training` does; also at the end of a ``with`` block.

        Example:
            >>> with Accelerator(cpu=True) as acc:  # which closes it
            ...     acc.print(acc.device)
            cpu
            >>> acc.close()  # again: nothing
        """
        if self._closed:
            return
        self._closed = True
        with ExitStack() as rest:  # each of these is called, also after an error; the last one first
            for end in (self._world.close, partial(state.unregister, self._run), self._undo.close):
                rest.callback(end)
            rest.callback(self.free_memory)
            if self._saves is not None:
                rest.callback(self._saves.close)  # saves in the background still need the world's store
            rest.callback(self._logbook.finish)
            rest.callback(self._guard.finish)
            rest.callback(self._nonfinite.finish)
            if self._prepared.replicas is not None and not failing():
                self._prepared.replicas.settle()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
