"""The Accelerator: it makes the plan, prepares models, optimizers and loaders, and runs the step.

The plan holds its decisions and their reasons, the strategy distributes models, the precision holds dtypes, and the
world connects the ranks.
"""

from __future__ import annotations

import atexit
import html
import math
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial, wraps
from inspect import signature
from typing import TYPE_CHECKING, Any, Self, TypeAlias, TypedDict, TypeVar, TypeVarTuple, Unpack, overload

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from . import distributed, launcher, profiling, trackers
from .base.accumulation import UpdateWindow
from .base.lazy import modules_at_first_use
from .base.parts import RUNNER_PARTS, Part, Parts
from .base.rng import set_seed, set_torch_flags
from .checkpoint.api import Checkpoints
from .errors import OTHER_ATTRIBUTES, PrepareError, RefusedError, StepError, refuse_argument
from .registry import PARTS, reported
from .training import wrapper
from .training.collectives import Collectives

if TYPE_CHECKING:
    from . import data, precision
    from . import options as records
    from .options import (
        AutocastKwargs,
        DataLoaderConfiguration,
        DistributedDataParallelKwargs,
        GradientAccumulationPlugin,
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
    from .strategies.tensor_parallel import TensorParallelOptions
    from .strategies.transforms import CompileOptions
    from .trackers import TrackerName
    from .trackers.logbook import GeneralTracker
    from .training import gradients, oom, prepare, state

    OneTracker: TypeAlias = TrackerName | LoggerType | Tracker | GeneralTracker | type[Tracker] | type[GeneralTracker]
    StrategyOptions: TypeAlias = (
        DistributedDataParallelKwargs | FSDPOptions | LocalSGDOptions | PipelineOptions | TensorParallelOptions
    )

    class PrepareKeywords(TypedDict, total=False):
        """Keywords of `Accelerator.prepare`."""

        device_placement: Sequence[bool | None] | None
        forward_methods: str | Sequence[str]


# Modules that an Accelerator uses; to import the class does not load them.
modules_at_first_use(
    globals(),
    data="data",
    precision="precision",
    gradients="training.gradients",
    oom="training.oom",
    prepare="training.prepare",
    records="options",
    state="training.state",
)
Init = TypeVar("Init", bound=Callable[..., None])
Model = TypeVar("Model", bound=nn.Module)
Loader = TypeVar("Loader", bound=Iterable[Any])
T = TypeVar("T")
First = TypeVar("First")
Second = TypeVar("Second")
Others = TypeVarTuple("Others")


def _explain_keywords(init: Init) -> Init:
    """Decorate ``Accelerator.__init__``: a keyword that it does not take is an error that names the right one."""
    parameters = signature(init).parameters

    @wraps(init)
    def checked_init(self: Accelerator, *arguments: Any, **keywords: Any) -> None:
        if sys.excepthook is sys.__excepthook__:
            sys.excepthook = state.report_end  # shows this error, and refused settings, without a traceback
        for name in keywords.keys() - parameters:
            refuse_argument(name, parameters)
        init(self, *arguments, **keywords)

    return checked_init  # type: ignore[return-value]


def _close(reference: Callable[[], Accelerator | None]) -> None:
    accelerator = reference()
    if accelerator is not None:
        accelerator.close()


class Accelerator(Collectives, Checkpoints):
    """Trains a script on the hardware that is here, from a laptop to several nodes.

    Settings come from these arguments, ``EASYMP_`` variables, ``easymp.toml``, or are detected; ``print(accelerator)``
    shows each decision with its reason.

    Args:
        mixed_precision: "auto", or a precision of `easymp.registry.PRECISIONS`; "no" and "fp32" are the same. "bf16",
            "fp16", "fp8" and "O1" raise trainable parameters that arrive in bf16 or fp16 to fp32. "bf16-true",
            "fp16-true", "O2" and "O3" cast the model. Optimizers then step fp32 masters of its weights, except under
            "O3", and under "bf16-true" with the setting ``stochastic_rounding``. The others cast nothing.
        strategy: how models are distributed: "auto", or a strategy of `easymp.registry.STRATEGIES`.
        strategy_options: the strategy's record (`FSDPOptions` …), or a dict of its fields.
        gradient_accumulation_steps: micro-batches in an update, see `accumulate`; or a `GradientAccumulationPlugin`.
        cpu: train on the CPU although there is an accelerator.
        dataloader_config: how prepared loaders read.
        activation_checkpointing: modules that keep only their inputs and are computed again in backward: True for the
            repeated blocks, or a pattern of names or classes, or several. "attention": the blocks, which also keep
            their matrix products and attention. "16GiB": as many blocks as a rank needs to stay below this size.
        compile: torch.compile of the whole model (True or "model"), of each repeated block ("blocks"), or as
            `CompileOptions` say.
        seed: seed of all random streams; see `set_seed`.
        deterministic: use deterministic algorithms only.
        ema_decay: decay of a moving average of the weights, for example 0.999; see `averaged`.
        nonfinite: the answer to a loss or gradient norm that is infinite or not a number. "warn": say it once. "skip":
            no rank steps where a gradient of any rank is not finite (see `optimizer_step_was_skipped`). "raise": all
            ranks raise a NonfiniteError before that step, or where a loss is not finite. "skip" and "raise" check all
            gradients before each step, may wait for the device, and refuse closures. None: "skip" under a loss scale
            (overflows while it looks for its size are not reported), else "warn". The first module with such numbers
            is named where it can be found: by a second forward ("raise", and on a CPU), or by hooks in the next update.
        project_dir: a folder, or a URL of fsspec, for checkpoints (in ``checkpoints/``), or a `ProjectConfiguration`.
            Default: the working directory.
        log_with: where `log` writes: "jsonl" (the default), "console", another tracker by name, several, "all" (those
            that are installed and keep rows), "none", or a `Tracker` of your own.
        save_on_signal: answer to SIGTERM and SIGUSR1: end the run at the next batch of a prepared loader, or the next
            epoch of `epochs`, with a checkpoint in the project's folder and exit code 75. One more signal, 5 seconds
            later or more, ends it at once. None: from `resume` on; True: from the beginning; False: never.
        parts: features of your own that watch or change the loop; see `Part`.
        settings: all other settings, see `Settings`; the arguments above win over it.

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
        >>> acc.plan.strategy.value, acc.mixed_precision, acc.scaler.enabled, acc.plan.hardware.cpu.threads > 0
        ('single', 'no', False, True)
        >>> acc.project_dir is None
        True
        >>> acc.end_training()
    """

    @_explain_keywords
    def __init__(
        self,
        *,
        mixed_precision: PrecisionName | None = None,
        strategy: StrategyName | None = None,
        strategy_options: StrategyOptions | Mapping[str, Any] | None = None,
        gradient_accumulation_steps: int | GradientAccumulationPlugin | None = None,
        cpu: bool | None = None,
        dataloader_config: DataLoaderConfiguration | None = None,
        activation_checkpointing: bool | str | Sequence[str] | None = None,
        compile: bool | Compiled | CompileOptions | None = None,
        seed: int | None = None,
        deterministic: bool | None = None,
        ema_decay: float | None = None,
        nonfinite: NonfiniteAnswer | None = None,
        project_dir: str | os.PathLike[str] | ProjectConfiguration | None = None,
        log_with: OneTracker | Sequence[OneTracker] | None = None,
        save_on_signal: bool | None = None,
        parts: Sequence[Part] = (),
        settings: Settings | None = None,
    ) -> None:
        request = state.read_request(
            settings,
            gradient_accumulation_steps,
            project_dir,
            log_with,
            mixed_precision=mixed_precision,
            strategy=strategy,
            strategy_options=strategy_options,
            cpu=cpu,
            dataloader_config=dataloader_config,
            activation_checkpointing=activation_checkpointing,
            compile=compile,
            seed=seed,
            deterministic=deterministic,
            ema_decay=ema_decay,
            nonfinite=nonfinite,
            save_on_signal=save_on_signal,
        )
        settings, plan = request.settings, request.plan
        reference = weakref.ref(self)
        self._sync_each_batch = request.accumulation.sync_each_batch
        self._autocast = request.autocast
        self._closed = False
        self._trigger = False  # whether `set_trigger` was called
        self._loss_is_late = False  # whether the loss has its value only after backward
        self._undo = ExitStack()  # what `close` undoes outside of this object: torch's flags, locks, the exit handler
        device = torch.device(plan.device.value)
        self._parts = Parts()
        self._window = UpdateWindow(plan.accumulation.value, request.accumulation.sync_with_dataloader, self._parts)
        self._world = distributed.World(plan.ranks, device, settings.timeout, settings.debug)
        self._world.parts = self._parts
        with ExitStack() as undo_on_error:
            undo_on_error.callback(self._world.close)
            undo_on_error.callback(self._undo.close)
            run = self._run = state.Run(self._world, plan, self._window, reference, self._parts, request.project)
            state.OPEN_RUNS[id(run)] = run
            undo_on_error.callback(state.OPEN_RUNS.pop, id(run), None)
            self._world.start_hang_watch(settings.hang_after, settings.project_dir)
            for name in PARTS.asked(settings):
                part = PARTS[name].wanted(settings)
                if part is not None:
                    self._parts.add(part, run)
            for part in (*parts, *(make() for make in RUNNER_PARTS)):
                self._parts.add(part, run, of_user=True)
            precision_class: Any = precision.PRECISIONS[plan.precision.value]
            run.precision = self._precision = precision_class(request.autocast)
            checks_finite = not request.scaled and settings.nonfinite in ("skip", "raise")
            run.scaler = self._scaler = precision.Scaler(
                request.scaling, self._world, request.scaled, checks_finite, self._window
            )
            option_records = request.options, request.accumulation, request.autocast, request.scaling, request.loading
            run.prepared = self._prepared = prepare.Preparation(
                run,
                request.strategy(self._world, request.options),
                self._change_preparing(prepare.PrepareOptions(request.loading, request.compile, option_records)),
                no_sync=lambda model: reference().no_sync(model),  # type: ignore[union-attr]  # it is alive then
            )
            self._gradients = gradients.Gradients(run)
            self._begin_checkpoints(request.project)  # sets self._project
            self._logbook = trackers.Logbook(run, self._project, settings, request.trackers)
            self._parts.add(self._logbook, run)
            for begin in self._parts.begin:
                begin()
            set_torch_flags(self._precision.tf32 and device.type != "cpu", settings.deterministic, self._undo.callback)
            if settings.seed is not None:
                set_seed(settings.seed)
            close_at_exit = atexit.register(partial(_close, reference))
            self._undo.callback(atexit.unregister, close_at_exit)
            undo_on_error.pop_all()

    def _change_preparing(self, options: prepare.PrepareOptions) -> prepare.PrepareOptions:
        """Return the options of `prepare`. Migration layers override this to change them."""
        return options

    # -- the decision

    def __repr__(self) -> str:
        process = f"process {self.process_index} of {self.num_processes}, precision {self._precision.name}"
        return f"{type(self).__name__}({process}, strategy {self.plan.strategy.value}, device {self.device})"

    def __str__(self) -> str:
        batch = f"\nbatch         {self._prepared.batch}" if self._prepared.batch else ""
        return self.plan.explain() + batch

    def _repr_html_(self) -> str:
        """The plan, as a notebook shows it at the end of a cell."""
        return f"<pre>{html.escape(str(self))}</pre>"

    # -- properties

    @property
    def plan(self) -> Plan:
        """The decisions and their reasons; refined as models and optimizers are prepared."""
        return self._run.plan

    @property
    def _sharded(self) -> bool:
        return self._prepared.strategy.sharded

    @property
    def mixed_precision(self) -> PrecisionName:
        """The name of the precision that runs; "no" for fp32."""
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
        number = records.GradientAccumulationPlugin(steps).num_steps  # which checks `steps`
        window = self._window
        if number > 1:
            self._run.refuse("gradient_accumulation_steps")
        if number != window.accumulation and not window.sync:
            raise StepError(
                f"gradient_accumulation_steps = {number} after micro-step {window.micro} of {window.accumulation}, "
                f"whose loss was divided by {window.accumulation}: set it where sync_gradients is true"
            )
        window.accumulation = number

    @property
    def updates(self) -> int:
        """Optimizer updates of the run so far, with those before a resume. Of several optimizers, the largest count."""
        return max((optimizer.updates for optimizer in self._prepared.optimizers), default=0)

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-step ends its accumulation window."""
        return self._window.sync

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last step of any prepared optimizer was skipped for an overflow (fp16: waits for the device)."""
        return any(optimizer.step_was_skipped for optimizer in self._prepared.optimizers)

    @staticmethod
    def launch(processes: int | None = None) -> None:
        """Run this script again on several processes; see `easymp.launch`. Call it at the beginning of the script.

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
    def prepare(self, given: T, /, **keywords: Unpack[PrepareKeywords]) -> T: ...

    @overload
    def prepare(
        self, first: First, second: Second, /, *others: *Others, **keywords: Unpack[PrepareKeywords]
    ) -> tuple[First, Second, *Others]: ...

    def prepare(  # type: ignore[misc]  # mypy compares *Others with *objects wrongly
        self,
        *objects: Any,
        device_placement: Sequence[bool | None] | None = None,
        forward_methods: str | Sequence[str] = (),
    ) -> Any:
        """Make models, optimizers, schedulers and loaders ready for this run.

        Args:
            objects: each a Module, Optimizer, scheduler, DataLoader, something prepared before, or None; in any order.
            device_placement: whether to move each object to the device, one value an object; None takes the
                constructor's.
            forward_methods: names of methods that compute as forward does ("embed", "generate"). On the prepared model
                they run under autocast and the strategy, so that they train, too. Each model takes the names that it
                has; methods that `easymp.forward_method` decorates need not be named.

        Returns:
            The prepared objects in the same order; of one object, itself. Models have the class, parameters and names
            of the given ones; optimizers, loaders and schedulers (`PreparedOptimizer`, `PreparedLoader`,
            `PreparedScheduler`) their attributes.

        Raises:
            PrepareError: objects that do not fit together, or cannot be prepared; a name in `forward_methods` that no
                model has.
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
        prepared_objects = self._prepared.prepare(objects, device_placement, forward_methods)
        if self._prepared.optimizers and (self._will_save or self._project.project_dir is not None):
            # Two runs would overwrite each other's checkpoints: fail here, not at the first save.
            self._claim_project(reading=not self._will_save)
        return prepared_objects[0] if len(prepared_objects) == 1 else tuple(prepared_objects)

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
            loss: a mean over this rank's micro-batch (divided by the accumulation steps here), 0-dim; or with
                `num_items` a sum. In a batch that ``tokens=`` has packed, a mean is weighted by the number of labels.
            num_items: how many items (tokens) `loss` sums over on this rank. The gradients become those of the sum over
                the whole window and all ranks, divided by their common count: equal to one big batch.
            gradient: as in `torch.Tensor.backward`.
            retain_graph: as there.
            create_graph: as there.
            inputs: as there.

        Raises:
            StepError: a loss that is not a scalar, or has no graph; one that holds the gradient of a gradient, where
                that is refused; gradients that no rank averages, since their model was not called.
            NonfiniteError: a loss that is not finite, under ``nonfinite="raise"``.
            WorldError: another rank is missing or elsewhere.

        Example:
            >>> outputs, targets = model(torch.ones(4, 2)), torch.tensor([[0.0], [1.0], [2.0], [-100.0]])
            >>> losses = (outputs - targets).abs()[targets != -100]
            >>> acc.backward(losses.sum(), num_items=len(losses))
        """
        wrapper.check_loss(loss, gradient)
        if self._parts.loss and not self._loss_is_late:
            loss = self._loss_of_parts(loss, num_items)
        if inputs is not None:
            self._run.refuse("backward(inputs=...)")
        if num_items is not None or self._window.accumulation != 1 or self._window.packed:
            gradient = self._window.starting_gradient(loss, gradient, num_items, self._world)
        check_reduced = self._gradients.begin_backward(create_graph)
        try:
            self._scaler.scale(loss).backward(gradient, retain_graph, create_graph, inputs)
        except RuntimeError as error:
            self._world.blame(error, "backward")
            wrapper.explain_backward(error)
            raise
        if check_reduced is not None:
            check_reduced()
        self._gradients.end_backward(self._sync_each_batch)
        for notify in self._parts.after_backward:
            notify()
        if self._window.sync and self._parts.gradients:
            pairs = self._gradients.final()
            for notify in self._parts.gradients:
                notify(pairs)

    def _loss_of_parts(self, loss: Tensor, num_items: int | Tensor | None) -> Tensor:
        """Pass the loss to the parts, each of which may return another one; returns the loss to train by."""
        for part_loss in self._parts.loss:
            new_loss = part_loss(loss, num_items)
            loss = loss if new_loss is None else new_loss
        return loss

    def forward_backward(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Tensor],
        *inputs: Any,
        target: Any = None,
        num_items: int | Tensor | None = None,
        **keywords: Any,
    ) -> Tensor:
        """Run forward, loss and backward of one micro-step, under every strategy; pipelines need this call.

        It replaces ``backward(loss_fn(model(*inputs), target))``, with the same gradients. Accumulation, `num_items`
        and the loss scale work as in `backward`. Under strategy "pipeline" `loss_fn` is called with the output of a
        micro-batch and its part of `target`, and the loss is the mean over the samples (with `num_items` the sum).

        Args:
            model: a prepared model.
            loss_fn: called as ``loss_fn(outputs, target)``, or ``loss_fn(outputs)`` without a target; returns one
                number.
            inputs: arguments of the model.
            keywords: keyword arguments of the model.
            target: the second argument of `loss_fn`, a tensor or a nested batch of tensors.
            num_items: as in `backward`.

        Returns:
            The loss of this rank's batch without a graph, 0-dim, as `loss_fn` gives it: neither scaled nor divided.

        Raises:
            StepError: as `backward`, and where `loss_fn` returns no number.

        Example:
            >>> model = acc.prepare(nn.Linear(2, 3))
            >>> labels = torch.tensor([0, 1, 2, 0])
            >>> loss = acc.forward_backward(model, nn.functional.cross_entropy, torch.ones(4, 2), target=labels)
            >>> loss.requires_grad, model.weight.grad.shape
            (False, torch.Size([3, 2]))
        """
        (route,) = self._prepared.routes((model,))
        strategy = self._prepared.strategy
        loss = strategy.loss(route.module, route.call, loss_fn, inputs, keywords, target, summed=num_items is not None)
        self._loss_is_late = strategy.late_loss
        try:
            self.backward(loss, num_items=num_items)
        finally:
            self._loss_is_late = False
        if strategy.late_loss:
            self._loss_of_parts(loss, num_items)  # parts can only see it: backward has run
        return loss.detach()

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """Wrap one micro-step: forward, backward, step and zero_grad.

        Gradients are reduced and optimizers step on every `gradient_accumulation_steps`-th micro-step, and on the last
        batch of the loader being read, which restarts the count.

        Args:
            models: prepared models whose gradients are accumulated; none means all.

        Raises:
            StepError: a model that is not prepared.

        Example:
            >>> acc = Accelerator(cpu=True, gradient_accumulation_steps=2)
            >>> model = acc.prepare(model)
            >>> for _ in range(2):
            ...     with acc.accumulate(model):
            ...         acc.backward(model(torch.ones(4, 2)).mean())
            ...         print(acc.sync_gradients)
            False
            True
        """
        return self._gradients.micro_step(models, self._sync_each_batch)

    @contextmanager
    def no_sync(self, model: nn.Module | None = None) -> Iterator[None]:
        """Keep gradients to this rank inside the block: for accumulation by hand.

        Args:
            model: a prepared model; None means all.

        Raises:
            StepError: a model that is not prepared.

        Example:
            >>> with acc.no_sync(model):
            ...     acc.backward(model(torch.ones(4, 2)).mean())
        """
        self._run.refuse("no_sync()")
        if self._window.joining and self._world.size > 1:
            self._run.refuse("no_sync()", "join_uneven_inputs()")
        with ExitStack() as stack:
            for route in self._prepared.routes((model,) if model is not None else ()):
                stack.enter_context(self._prepared.strategy.no_sync(route.module))
            stack.callback(setattr, self._window, "ranks_differ", self._window.ranks_differ)  # restores it
            self._window.ranks_differ = True
            yield

    def join_uneven_inputs(
        self, joinables: Sequence[nn.Module], even_batches: bool | None = None
    ) -> AbstractContextManager[None]:
        """Let ranks run out of batches at different times in the block; those that end join the others' reductions.

        A gradient is the mean over the ranks that still have a batch, each rank's batch with the same weight: with
        batches of one size the training equals that of one process which is given the same samples together. At the end
        all ranks take the parameters, optimizer states, schedules and loss scale of a rank that had the most batches.

        Args:
            joinables: prepared models.
            even_batches: replaces the loaders' setting inside the block.

        Raises:
            RefusedError: the strategy, a synchronised batch-norm, gradient accumulation, or a `comm_hook` needs every
                rank.

        Example:
            >>> with acc.join_uneven_inputs([model], even_batches=False):
            ...     for x in loader:
            ...         acc.backward(model(x).mean())
        """
        self._run.refuse("join_uneven_inputs()")
        return self._prepared.join(joinables, even_batches)

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Compute under the run's autocast, outside of a prepared model.

        Args:
            autocast_handler: options in place of the constructor's.

        Returns:
            A context manager, for ``with``.

        Example:
            >>> acc = Accelerator(cpu=True, mixed_precision="bf16")
            >>> with acc.autocast():
            ...     nn.Linear(2, 1)(torch.ones(4, 2)).dtype
            torch.bfloat16
        """
        context: AbstractContextManager[Any] = self._precision.casting(self.device, autocast_handler or self._autocast)
        return context

    def unscale_gradients(
        self, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None
    ) -> None:
        """Divide gradients by the loss scale, to look at them or change them before the step.

        Acts once a window, and does nothing without a loss scale.

        Args:
            optimizer: one or several, prepared or not; None means all prepared ones.

        Example:
            >>> acc.backward(model(torch.ones(4, 2)).mean())
            >>> acc.unscale_gradients(optimizer)
            >>> model.bias.grad
            tensor([1.])
        """
        if self._window.accumulation != 1 and not self._window.sync:
            return
        optimizers: Sequence[torch.optim.Optimizer] = self._prepared.optimizers
        if optimizer is not None:
            optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer
        self._gradients.unscale(optimizers)
        self._gradients.show(optimizers)

    def clip_grad_norm_(
        self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2.0
    ) -> Tensor | None:
        """Scale gradients so that their total norm is at most `max_norm`. Acts once a window, as the optimizer does.

        Under torch's fused step or ours (see the plan), and where `parameters` are all that one or several prepared
        optimizers step, this call only measures: the step clips and unscales gradients as it reads them. Until the step
        `.grad` is as backward left it, and changing it is an error. After the step it may be clipped or not. To read
        or change clipped gradients before the step, pass ``Settings(fused=False)``. Under a loss scale, an overflow in
        any of `parameters` skips the steps of all these optimizers.

        Args:
            parameters: those of prepared models.
            max_norm: the largest norm.
            norm_type: p of the p-norm.

        Returns:
            The norm before, 0-dim, on the device; None on micro-steps that do not end a window.

        Raises:
            StepError: gradients were changed between the last clip and its step; or, under a loss scale, there are no
                gradients.

        Example:
            >>> acc.backward(model(torch.ones(4, 2)).mean())
            >>> acc.clip_grad_norm_(model.parameters(), max_norm=1.0)  # of three ones
            tensor(1.7321)
        """
        self._run.refuse("clip_grad_norm_()")
        if self._window.accumulation != 1 and not self._window.sync:
            return None
        norm, clipped = self._gradients.clip(parameters, max_norm, norm_type)
        for notify in self._parts.norm:
            notify(norm, clipped)
        return norm

    def clip_grad_value_(self, parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
        """Clamp every element of the gradients to [-clip_value, clip_value]. Acts once a window, as the optimizer does.

        Args:
            parameters: those of prepared models.
            clip_value: the largest magnitude.

        Example:
            >>> acc.backward(model(torch.ones(4, 2)).mean())
            >>> acc.clip_grad_value_(model.parameters(), 0.5)
            >>> model.bias.grad
            tensor([0.5000])
        """
        self._run.refuse("clip_grad_value_()")
        if self._window.accumulation == 1 or self._window.sync:
            self._gradients.clamp(parameters, float(clip_value))

    @contextmanager
    def averaged(self, *models: nn.Module) -> Iterator[None]:
        """Give models the moving averages of their weights inside the block: for evaluation, or `save_model`.

        An average begins as the weight before its first step, and moves at each step that moves the weight. Frozen
        parameters and buffers have no average and stay as they are. A copy of the weights is kept for the end of the
        block. All ranks call it; under strategy "local_sgd" each has averages of its own. Call `save_state` and the
        optimizer's `step` outside of the block.

        Args:
            models: prepared models; none means all.

        Raises:
            RefusedError: without `ema_decay`.

        Example:
            >>> acc = Accelerator(cpu=True, ema_decay=0.999)
            >>> model, optimizer = acc.prepare(model, optimizer)
            >>> with acc.averaged(model):
            ...     outputs = model(torch.ones(4, 2))
        """
        part = self._parts.get("ema")
        if part is None:
            raise RefusedError("averaged() needs averages of the weights: ask for them by Accelerator(ema_decay=0.999)")
        with part.averaged(models):
            yield

    def profile(self, profile_handler: ProfileKwargs | None = None) -> profiling.Profile:
        """Record the block with torch.profiler, on all ranks or on some; each of these writes a Chrome trace.

        Args:
            profile_handler: what to record and when. None: three steps after two, memory included.

        Returns:
            A torch.profiler.profile that counts the steps itself (`easymp.profiling.Profile`), for ``with``.
            ``summary()`` is a table of where time and memory went.

        Raises:
            RefusedError: none of the activities can be recorded here.

        Example:
            >>> with acc.profile(ProfileKwargs(activities=["cpu"])) as prof:
            ...     acc.backward(model(torch.ones(4, 2)).mean())
            >>> [path.name for path in prof.traces]
            [...]
        """
        return profiling.Profile(self._run, profile_handler)

    # -- logging

    def init_trackers(
        self, project_name: str, config: Any = None, init_kwargs: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        """Name the run ("log" without this call), and log its hyperparameters, plan, machine and easymp's version.

        Args:
            project_name: names files, and projects and experiments of services.
            config: hyperparameters: a dict, an argparse Namespace, or a dataclass, with values of any type.
            init_kwargs: a tracker's name → further arguments of its start.

        Raises:
            SettingError: a wrong name.
            StepError: rows were logged before.

        Example:
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
        """Log numbers and words by name, from the main process.

        On other ranks it does nothing, and no rank waits for another.

        Args:
            values: numbers, words, 0-dim tensors (as they are now, and without waiting for the device), or dicts of
                these; None leaves a value out.
            step: a whole number; None takes the number of optimizer updates, or of calls where no optimizer is
                prepared.
            log_kwargs: a tracker's name → further arguments of its `log`.

        Raises:
            SettingError: a wrong value or name, on every rank that calls.
            StepError: the trackers have finished.

        Example:
            >>> acc.log({"loss": torch.tensor(0.5), "val": {"accuracy": 0.9}}, step=1)
        """
        self._logbook.log(values, step, log_kwargs)
        for notify in self._parts.logged:
            notify(values, step)

    def log_images(self, name: str, images: Any, step: int | None = None) -> None:
        """Log images by the trackers that take them, from the main process, which waits for the device.

        "jsonl" writes PNG files beside its rows; "tensorboard", "wandb" and "mlflow" show images on their pages, and
        need Pillow. A tracker without images says so once.

        Args:
            name: of the images, such as "samples".
            images: a tensor, an array, or a list of these or of pictures of PIL, all of one size: NHWC or NCHW with 1,
                3 or 4 channels, one image without N, or grey ones without C. Where both are possible, tensors are NCHW
                and arrays NHWC. uint8, or floats from 0 to 1; values beyond are cut, with a warning.
            step: as in `log`.

        Raises:
            SettingError: another shape or dtype, on every rank that calls.
            StepError: the trackers have finished.

        Example:
            >>> acc.log_images("noise", torch.rand(2, 3, 8, 8), step=1)
            >>> acc.end_training()  # log-images/noise-00000001-0.png and -1.png
        """
        self._logbook.log_images(name, images, step)

    def log_table(
        self, name: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], step: int | None = None
    ) -> None:
        """Log a table by the trackers that take one, from the main process, which waits for the device of tensors.

        "jsonl" writes a row for each row of the table, with ``_table``, the name; "tensorboard" shows it as text. A
        tracker without tables says so once.

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

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Get a tracker of this run by its name.

        Args:
            name: as in `log_with`.
            unwrap: return the library's own object: TensorBoard's SummaryWriter, the run of wandb or MLflow, the path
                of a file.

        Returns:
            The tracker; on other ranks than the main one an object that takes every call and does nothing.

        Raises:
            SettingError: there is none of this name.
            TrackerError: it could not start, now or at an earlier call.

        Example:
            >>> acc.get_tracker("jsonl", unwrap=True).name
            'log.jsonl'
            >>> acc.end_training()
        """
        return self._logbook.get(name, unwrap)

    @contextmanager
    def context_parallel(self, buffers: Sequence[Tensor], dims: Sequence[int]) -> Iterator[None]:
        """Share each sequence among neighbouring ranks, under `context_parallel` of "ddp", "zero1", "fsdp" and "hsdp".

        Inside, each tensor is cut in place to this rank's part; outside it is whole again. Run forward and backward
        inside: there attention exchanges parts of sequences for heads between the ranks. Without the option nothing
        happens. Pass every tensor of the batch that has a sequence dimension, also position ids, and labels that are
        shifted before the block. `num_items` counts the tokens of the part, and a mean loss is the mean over the part.

        Args:
            buffers: tensors of one sequence length, a multiple of the option.
            dims: the sequence dimension of each.

        Raises:
            BatchError: the tensors cannot be split.
            RefusedError: attention with a mask or returned weights, or with heads that the option does not divide.
            StepError: no attention was called inside.

        Example:
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
        unprepared = isinstance(loader, DataLoader) and not isinstance(loader, data.PreparedLoader)
        if unprepared and self._prepared.strategy.data_size > 1:
            raise PrepareError(
                "total_updates() of a loader that is not prepared counts the batches of all ranks: prepare the loader "
                "first, then make the schedule, and prepare the rest"
            )
        lengths = loader.lengths(epochs) if isinstance(loader, data.PreparedLoader) else [len(loader)] * epochs
        steps = self._window.accumulation
        if self._window.end_with_loader:
            return sum(math.ceil(batches / steps) for batches in lengths)
        return sum(lengths) // steps

    def unwrap_model(self, model: Model, keep_fp32_wrapper: bool = False, keep_torch_compile: bool = True) -> Model:
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
            reason = "the fp32 conversion lives outside the module, there is none to keep. Leave it out"
            raise RefusedError(f"keep_fp32_wrapper=True: {reason}")
        unwrapped: Model = wrapper.unwrap(model, keep_torch_compile)
        return unwrapped

    # -- the end

    def free_memory(self, *objects: Any) -> Any:
        """Let go of all that was prepared, and empty the device's cache.

        Args:
            objects: other objects to let go of; the caller replaces its own variables.

        Returns:
            None; for several objects one None each, to assign to the variables.

        Example:
            >>> model, optimizer = acc.free_memory(model, optimizer)
        """
        self._release()
        nothing = (None,) * len(objects)
        del objects  # this frame's references, before memory is collected
        oom.release_memory(device=self.device)
        return None if len(nothing) <= 1 else nothing

    def _release(self) -> None:
        self._prepared.release()
        for notify in self._parts.released:
            notify()
        self._window.reset()
        self._epochs.forget()
        oom.empty_cache(self.device.type)

    def end_training(self) -> None:
        """End the run: finish trackers and checkpoints, and leave the other processes. A second call does nothing.

        Models that are whole stay callable, each rank for itself; sharded ones do not. Another Accelerator can be made
        afterwards.

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
        """
        if self._closed:
            return
        self._closed = True
        with ExitStack() as last_first:  # read from the bottom up; each is called even after an error
            last_first.callback(self._parts.release)
            last_first.callback(self._world.close)
            last_first.callback(state.OPEN_RUNS.pop, id(self._run), None)
            last_first.callback(self._undo.close)
            last_first.callback(self._release)
            for close_part in reversed(self._parts.close):
                last_first.callback(close_part)
            if self._saves is not None:
                last_first.callback(self._saves.close)  # saves in the background still need the world's store
            last_first.callback(self._logbook.settle_rows)

    if not TYPE_CHECKING:  # type checkers would take it for a class that has every name

        def __getattr__(self, name: str) -> Any:
            remedy = OTHER_ATTRIBUTES.get(name)
            hint = "" if remedy is None else f": {remedy}"
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}", name=name, obj=self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, KeyboardInterrupt) and not self._closed:
            error.add_note(state.interruption(self))
        self.close()
