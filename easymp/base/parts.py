"""The seam of all features: a part watches or changes the training loop, and holds all of one feature.

The loop calls the parts by event. A run keeps one tuple of bound methods an event, so an event that no part has costs
one look at an empty tuple. `easymp.registry.PARTS` lists easymp's own parts, in the order of their calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import wraps
from types import MethodType
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import ref

from ..errors import SettingError, StepError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


class Part:
    """A feature that watches or changes the training loop. Override the events that it needs.

    ``Accelerator(parts=[...])`` takes your own. They are called after easymp's parts, in the order of the list, on
    every rank. An event that waits for other ranks must be the same on all of them.

    Attributes:
        name: identifies the part in checkpoints, in the plan and in errors; one part of a name in a run.
        loader: (an argument of events) a prepared loader.
        optimizer: (an argument of events) a prepared optimizer.

    Example:
        >>> class LargestLoss(easymp.Part):
        ...     name = "largest_loss"
        ...     value = 0.0
        ...     def loss(self, loss, num_items=None):
        ...         self.value = max(self.value, loss.item())
        ...     def state(self):
        ...         return {"value": self.value}
        ...     def load(self, state):
        ...         self.value = state["value"]
        >>> largest = LargestLoss()
        >>> acc = Accelerator(cpu=True, parts=[largest])
        >>> model, optimizer = acc.prepare(model, optimizer)
        >>> acc.backward(model(torch.ones(4, 2)).square().mean())
        >>> largest.value > 0
        True
    """

    name: ClassVar[str] = ""
    _run: Callable[[], Any] | None = None  # a weak reference, so that a run needs no garbage collection to end
    conflicts: ClassVar[Sequence[Any]] = ()  # what the part does not go together with; see `easymp.conflicts`
    steps_in_backward: ClassVar[bool] = False  # parameters are stepped in backward, one by one
    vetoes_nonfinite: ClassVar[bool] = False  # steps by gradients that are not finite are left out
    needs_views: bool = True  # with `forward`: models are called by way of a view, so that no call is missed

    @classmethod
    def wanted(cls, settings: Any) -> Part | None:
        """Make the part that the settings ask for. Only easymp's own parts are asked.

        Args:
            settings: the run's `Settings`.

        Returns:
            The part, or None where the settings ask for none.
        """
        return cls()

    @property
    def run(self) -> Any:
        """The run that the part belongs to, or None: what easymp's own parts see."""
        return None if self._run is None else self._run()

    @property
    def accelerator(self) -> Any:
        """The `Accelerator` of the run.

        Raises:
            StepError: the part belongs to no run.

        Example:
            >>> guard = easymp.SpikeGuard()
            >>> acc = Accelerator(cpu=True, parts=[guard])
            >>> guard.accelerator is acc
            True
        """
        run = self.run
        accelerator = None if run is None else run.accelerator()
        if accelerator is None:
            raise StepError(f"part {self.name!r} belongs to no open Accelerator: pass it by Accelerator(parts=[...])")
        return accelerator

    # -- a run

    def begin(self) -> None:
        """The Accelerator is made, and nothing is prepared."""

    def preparing(self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Models are about to be wrapped.

        Args:
            models: the new ones, in which nothing has been changed yet.
            optimizers: the script's optimizers of the same `prepare`.
        """

    def prepared(self, objects: Sequence[Any]) -> None:
        """Objects were prepared.

        Args:
            objects: the new prepared models, optimizers, schedulers and loaders.
        """

    def released(self) -> None:
        """The run has let go of all that was prepared: at its end, and in `free_memory`."""

    def close(self) -> None:
        """The run ends, and everything is still prepared."""

    # -- a loop over a prepared loader

    def pass_begins(self, loader: Any) -> None:
        """A pass over a prepared loader begins."""

    def batch_ready(self, loader: Any, batch: Any) -> Any:
        """A batch is about to be handed to the script.

        Args:
            batch: the batch, on this rank's device.

        Returns:
            Another batch to hand over; None keeps this one.
        """
        return None

    def batch(self, loader: Any) -> None:
        """The script has finished the body of its loop, and asks for the next batch."""

    def pass_ends(self, loader: Any) -> None:
        """A pass ends, or is left early."""

    def epoch_ends(self, epoch: int) -> bool:
        """An epoch of ``accelerator.epochs(n)`` has ended. After a resume this comes again for the epoch before.

        Args:
            epoch: its number, from 0.

        Returns:
            True ends the training: on all ranks, if any rank returns it.
        """
        return False

    # -- an update

    def forward(self, model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> AbstractContextManager[Any] | None:
        """A prepared model is about to be called with gradients on.

        Args:
            model: the prepared model's `Route`; ``model.original`` is the script's module.
            args: positional arguments of the call.
            kwargs: keyword arguments of the call.

        Returns:
            A context in which the call runs, or None.
        """
        return None

    def loss(self, loss: Tensor, num_items: Any = None) -> Tensor | None:
        """The script calls `backward`. Under strategy "pipeline" the loss has no value before, and this comes after it.

        Args:
            loss: the loss of this rank's micro-batch, 0-dim, neither scaled nor divided.
            num_items: number of items that `loss` is a sum over; None: it is a mean.

        Returns:
            Another loss to train by; None keeps this one.
        """
        return None

    def after_backward(self) -> None:
        """A backward pass of a micro-step has ended."""

    def gradients(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """The final gradients of an update, after its last backward: averaged over the ranks, times the loss scale.

        Args:
            pairs: parameters, each with its gradient; sharded ones are DTensors. Under `optimizer_in_backward` one pair
                at a time, as each gradient is done.
        """

    def norm(self, norm: Tensor, parameters: Sequence[Tensor]) -> None:
        """The script has clipped gradients.

        Args:
            norm: their total norm before the clip, 0-dim, on the device.
            parameters: the parameters whose gradients they are.
        """

    def verdict(self, optimizer: Any, found_inf: Tensor) -> None:
        """The gradients of an optimizer were looked at, under a loss scale or ``nonfinite="skip"`` and ``"raise"``.

        Args:
            found_inf: 0-dim, on the device, the same on all ranks: above 0 if a gradient is not finite.
        """

    def step(self, optimizer: Any) -> Tensor | bool | None:
        """A prepared optimizer is about to make an update.

        Returns:
            A 0-dim float tensor on the device: above 0, the step changes nothing. True: the step is left out, and does
            not count as an update. None or False: the step is made. All ranks return the same.
        """
        return None

    def stepped(self, optimizer: Any) -> None:
        """A prepared optimizer has made an update; a skipped one counts, too."""

    def zero_grad(self, optimizer: Any) -> None:
        """A prepared optimizer is about to clear its gradients."""

    def settle(self) -> None:
        """All ranks are at one place of the program: at the end of a pass, in `wait_for_everyone`, before a save."""

    # -- what is logged and kept

    def logged(self, values: Mapping[str, Any], step: int | None) -> None:
        """The script calls `log`, on this rank.

        Args:
            values: numbers and words by name, as the script passed them.
            step: the script's step, or None.
        """

    def rows(self, rows: Sequence[Any]) -> None:
        """Rows of `log` have their numbers on the host, on the main process.

        Args:
            rows: each with `values`, `step`, `time` and `updates`.
        """

    def saving(self, call: str, path: str | None) -> str | None:
        """The script calls `save_state`, `save_model` or `save`.

        Args:
            call: "save_state", "save_model" or "save".
            path: where; None for a checkpoint in the project's folder.

        Returns:
            A path: nothing is saved, and the call returns this path. None: the call saves.
        """
        return None

    def loading(self, call: str, path: str | None) -> str | None:
        """The script calls `load_state` or `resume`.

        Args:
            call: "load_state" or "resume".
            path: from where; None for the newest checkpoint.

        Returns:
            Another path to load instead; None keeps the script's; "" lets `resume` find nothing.
        """
        return None

    def loaded(self, path: str) -> None:
        """A checkpoint was loaded, after the states of all parts.

        Args:
            path: its folder.
        """

    def resumed(self) -> None:
        """The script has called `resume`, whether there was a checkpoint or not."""

    def state(self) -> Mapping[str, Any] | None:
        """Return the part's state for checkpoints.

        Returns:
            Numbers, strings, tensors, and lists and dicts of these, by name; None keeps nothing.
        """
        return None

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue with a state of a checkpoint.

        Args:
            state: what `state` returned when the checkpoint was saved.
        """


EVENTS = tuple(
    name for name, value in vars(Part).items() if callable(value) and not isinstance(value, (classmethod, property))
)


# Makers of parts that a command, such as `easymp prove`, adds to each Accelerator of the script that it runs.
RUNNER_PARTS: list[Callable[[], Part]] = []


class Parts:
    """The parts of a run; each event is an attribute, a tuple of bound methods: ``for call in parts.stepped: …``."""

    def __init__(self) -> None:
        self.all: tuple[Part, ...] = ()
        self.users: set[Part] = set()  # parts of the script
        self._disabled: set[tuple[Part, str]] = set()  # events that a part does not need any more
        self._collect()

    if TYPE_CHECKING:

        def __getattr__(self, event: str) -> tuple[Callable[..., Any], ...]: ...

    def add(self, part: Part, run: Any, of_user: bool = False) -> None:
        """Add a part behind the others; a SettingError if it is no `Part`, or its name is none or that of another."""
        if not isinstance(part, Part):
            raise SettingError(f"parts=[{part!r}]: that is no easymp.Part: pass an object of a subclass of it")
        if not isinstance(part.name, str) or not part.name.isidentifier():
            raise SettingError(f"part {type(part).__name__} has the name {part.name!r}: set `name` to a word")
        if self.get(part.name) is not None:
            raise SettingError(f"two parts have the name {part.name!r}: give {type(part).__name__} another `name`")
        if part.run is not None:
            raise SettingError(f"part {part.name!r} belongs to another open Accelerator: make one part for each")
        part._run = ref(run)
        if of_user:
            self.users.add(part)
        self.all = (*self.all, part)
        self._collect()

    def release(self) -> None:
        """Let the parts go, which may join another run."""
        for part in self.all:
            part._run = None
        self.all = ()
        self._collect()

    def remove(self, part: Part) -> None:
        """Call `part` no more."""
        self.all = tuple(item for item in self.all if item is not part)
        self._collect()

    def end(self, part: Part, *events: str) -> None:
        """Call `part` no more for `events`."""
        self._disabled.update((part, event) for event in events)
        self._collect()

    def begin_again(self, part: Part, *events: str) -> None:
        """Call `part` again for `events`, after `end`."""
        self._disabled.difference_update((part, event) for event in events)
        self._collect()

    def get(self, name: str) -> Any:
        """The part of this name, or None."""
        return next((part for part in self.all if part.name == name), None)

    def _collect(self) -> None:
        for event in EVENTS:
            calls = [
                self._call(part, event)
                for part in self.all
                if getattr(type(part), event) is not getattr(Part, event) and (part, event) not in self._disabled
            ]
            setattr(self, event, tuple(calls))

    def _call(self, part: Part, event: str) -> Callable[..., Any]:
        """The method of `part`; errors of the script's parts say where they come from."""
        call: Callable[..., Any] = getattr(part, event)
        if part not in self.users:
            return call

        @wraps(call)
        def call_with_note(part: Part, *args: Any, **kwargs: Any) -> Any:
            try:
                return call(*args, **kwargs)
            except Exception as error:
                error.add_note(f"raised by part {part.name!r} ({type(part).__name__}) in its {event}()")
                raise

        return MethodType(call_with_note, part)
