"""What packages promise each other, and the small records that travel between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    import argparse

    import torch
    import torch.distributed as dist
    from torch import Tensor, nn

T = TypeVar("T")


class Source(Enum):
    """Where a decision comes from, in the order of precedence."""

    ASKED = "asked for"
    ENVIRONMENT = "environment"
    CONFIG = "config file"
    DETECTED = "detected"
    DEFAULT = "default"


@dataclass(frozen=True)
class Choice(Generic[T]):
    """A decision, why it was taken, and who took it."""

    value: T
    reason: str
    source: Source


class Refusal(NamedTuple):
    """Why something cannot be done here, in one sentence, and the way out, in another."""

    reason: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.reason}; {self.remedy}"


class Facts(NamedTuple):
    """What a strategy or precision is asked about: the machine and the world, both frozen records.

    `device` is the type training will run on (``"cpu"``, ``"cuda"`` …), `hardware` an `easymp.hardware.Hardware`.
    """

    hardware: Any
    device: str
    world_size: int


class WrapContext(NamedTuple):
    """What a strategy does to any model, beside spreading it.

    Attributes:
        policy: dtypes, and autocast.
        place: whether to move the model to the rank's device.
        initialize: gives a module values whose tensors were on the meta device (see `materialise`).
        compile: compiles the call of a module in place; does nothing unless the user asked for it. Called by the strategy on
            the module that torch.compile should see whole.
    """

    policy: Precision
    place: bool = True
    initialize: Callable[[nn.Module], None] | None = None
    compile: Callable[[nn.Module], None] = lambda module: None


Cut = Callable[[str, "Tensor"], int]
"""A parameter's name and the parameter → how many of its elements the fullest rank holds."""


def whole(name: str, parameter: Tensor) -> int:
    """All of them: every rank holds the same."""
    return parameter.numel()


def nowhere(name: str, parameter: Tensor) -> int:
    """None: it lies in other memory, such as the host's."""
    return 0


def pieces(count: int) -> Cut:
    """One of `count` pieces along dimension 0, as torch.chunk and FSDP2 cut: all of them as large as the first, if need be by padding."""

    def cut(name: str, parameter: Tensor) -> int:
        rows = parameter.shape[0] if parameter.ndim else 1
        return -(-rows // count) * (parameter.numel() // rows) if rows else 0

    return cut


class Layout(NamedTuple):
    """What one rank holds of a model in training, in elements; `easymp.training.memory` makes bytes of it.

    Attributes:
        weights, gradients: how parameters and their gradients are divided.
        states: how the optimizer's states are, and fp32 master weights where a precision keeps them.
        copies: how autocast's half-precision copies of weights are, when forward ends.
        gathers: layers compute with gathered weights, which a half precision gathers in its own type, without copies.
        gathered: elements of other ranks' weights that are here for a while, at the peak.
        unreduced: elements of whole gradients, in the type of gathered weights, beside those in `gradients`, at the peak.
        reducing: elements of gradients in buffers of communication, at the peak.
        note: what is only approximately so.
    """

    weights: Cut = whole
    gradients: Cut = whole
    states: Cut = whole
    copies: Cut = whole
    gathers: bool = False
    gathered: int = 0
    unreduced: int = 0
    reducing: int = 0
    note: str = ""


class Counting(NamedTuple):
    """How Σ g² over all gradients comes about on the ranks, each element counted once.

    Attributes:
        copies: of a parameter, on how many ranks each element of its gradient lies, of those that `add` adds up; 0: others count it.
        add: adds up a tensor over the ranks, in place; None: gradients are whole on every rank.
        settle: gives a parameter's gradient the layout of the parameter; a collective.
    """

    copies: Callable[[Tensor], int] = lambda parameter: 1
    add: Callable[[Tensor], None] | None = None
    settle: Callable[[Tensor], None] = lambda parameter: None


class Strategy(Protocol):
    """How parameters and gradients are spread over the ranks.

    Ranks that see the same slice of the data are neighbours: ranks 0 and 1 of four with ``data_size`` 2.
    """

    name: ClassVar[str]
    Options: ClassVar[type]  # the record of its options, which the constructor takes after the world
    sharded: ClassVar[
        bool
    ]  # no rank holds the whole model; `wrap` gives meta parameters values, part by part
    whole: ClassVar[bool]  # layers see whole tensors in forward and backward
    apart: ClassVar[bool]  # optimizer states of the same parameters differ from rank to rank
    alike: ClassVar[bool]  # a plain parameter is the same on all ranks; where `apart`, after each averaging
    masters: ClassVar[bool]  # optimizers can step fp32 copies in place of low-precision parameters
    data_rank: int  # the slice of the data that this process sees; under tensor parallelism 0 of 1
    data_size: int
    data_group: dist.ProcessGroup | None  # one rank of each slice, this one among them; None: all ranks
    late_loss: ClassVar[bool]  # what `loss` returns has its value only after backward
    once: str  # why a gradient of a gradient cannot be had; "" where it can
    only_forward: str  # why methods cannot be called as forward is, as "has …"; "" where they can
    sums: (
        bool  # fp32 sums of gradients are kept outside: under no_sync `.grad` is local, and `average` reduces
    )
    early: (
        bool | None
    )  # gradients are reduced to shards under no_sync, too; None: memory decides, before `wrap`
    options: Any  # of type `Options`, where `early` can be None

    @staticmethod
    def refuse(facts: Facts) -> Refusal | None: ...

    @staticmethod
    def layout(model: nn.Module, options: Any, size: int, local_size: int) -> Layout:
        """What a rank holds of `model`, which `wrap` has not seen, by arithmetic.

        Args:
            options: of type `Options`.
            size, local_size: ranks, and ranks of a node.
        """
        ...

    def wrap(
        self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], context: WrapContext
    ) -> nn.Module:
        """Spread `model`; returns the module to call in its place.

        Where parameters are replaced, `optimizers` (those of the same `prepare`, plain ones) take the new ones.
        """
        ...

    def spread(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The optimizer to step in place of `optimizer`, whose models are wrapped; itself where nothing is to be done.

        Another one has `laid_out` and `remember`, by which checkpoints know its states (see `ShardedOptimizer`).
        """
        ...

    def loss(
        self,
        module: nn.Module,
        call: Callable[..., Any],
        loss_fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        target: Any,
        summed: bool,
    ) -> Tensor:
        """The loss of a batch, ready for backward: ``loss_fn(call(*args, **kwargs), target)``, without a target where that is None.

        Args:
            module: what `wrap` returned.
            call: calls it.
            summed: the loss is a sum over the batch, no mean.
        """
        ...

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Inside: backward accumulates locally; `model` is what `wrap` returned."""
        ...

    def force_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Inside: backward reduces gradients, although `model` was called under `no_sync`."""
        ...

    def average(self, models: Sequence[nn.Module], gradients: Sequence[Tensor]) -> None:
        """End a window for which all backwards of `models` ran under `no_sync`: `gradients` become the mean over the data ranks.

        In place, and again the mean where they are it already.
        """
        ...

    def backward_check(self, models: Sequence[nn.Module], create_graph: bool) -> Callable[[], None] | None:
        """Called before a backward that reduces gradients of `models`; what to call after it, which raises where it could not."""
        ...

    def join(self, models: Sequence[nn.Module]) -> AbstractContextManager[Any]:
        """Inside: ranks may run out of batches at different times; `models` are what `wrap` returned."""
        ...

    @property
    def counting(self) -> Counting:
        """How 2-norms of gradients come about."""
        ...

    def clip(self, parameters: Sequence[Tensor], max_norm: float, norm_type: float) -> Tensor:
        """Scale gradients so that their total norm is at most `max_norm`; returns the norm before, whatever the layout."""
        ...

    def release(self, model: nn.Module, alone: nn.Module) -> nn.Module:
        """What to call once the run lets go of `model`, from `wrap`: `alone`, this rank's, where it is whole. No collective."""
        ...


class Precision(Protocol):
    """Dtypes as data, and the two places where they touch a model."""

    name: ClassVar[str]
    param: torch.dtype  # of parameters
    compute: torch.dtype  # of matrix products
    reduce: torch.dtype  # in which gradients are reduced
    gather: torch.dtype | None  # in which shards of fp32 parameters are gathered; None: as they are stored
    output: torch.dtype | None  # of a prepared model's outputs; None leaves them as they are
    tf32: bool  # products of fp32 tensors run on TF32 Tensor Cores, where there are some
    scaled: bool  # the loss is scaled
    masters: bool  # optimizers step fp32 copies of the low-precision parameters
    raises: bool  # trainable low-precision parameters become fp32 when their model is prepared
    keeps_updates: bool  # low-precision parameters are not just rounded to the nearest after a step
    swaps: bool  # layers get a forward of their own, which takes whole tensors

    @staticmethod
    def refuse(facts: Facts) -> Refusal | None: ...

    def decide(self, model: nn.Module) -> None:
        """Settle now, without timing `model`, what is still open: for strategies under which a step cannot be repeated."""
        ...

    def convert(self, model: nn.Module) -> nn.Module:
        """Change the model itself (fp8 swap, O2/O3 cast); the identity otherwise."""
        ...

    def forward(self, model: nn.Module, device: torch.device) -> nn.Module:
        """The module to call in place of `model`: under autocast, or `model` itself."""
        ...

    def casting(self, device: torch.device, options: Any) -> AbstractContextManager[Any]:
        """Inside: what is computed outside of a prepared model follows this precision; `options` are an `AutocastKwargs`."""
        ...


class Tracker(Protocol):
    """Where the values that a run logs are kept. Only the main process has one that writes."""

    name: str

    def start(self, run: str, config: Mapping[str, Any]) -> None:
        """The run called `run` begins, or goes on after a resume, with these hyperparameters."""
        ...

    def log(self, values: Mapping[str, Any], step: int | None) -> None:
        """Numbers and words by name; tensors have become numbers. `step` is the script's, or the number of optimizer updates."""
        ...

    def finish(self) -> None:
        """The run is over: all that was logged is on disk, or with the service."""
        ...


class ResumableTracker(Tracker, Protocol):
    """One that is told where a resumed run goes on, so that rows after the checkpoint are not kept twice. The two methods are optional."""

    def position(self) -> Mapping[str, Any]:
        """Where it stands, in plain values; kept in checkpoints."""
        ...

    def resume(self, position: Mapping[str, Any]) -> None:
        """What is logged next follows that; called before `start`, or while it runs where the run goes back."""
        ...


class Command(Protocol):
    """One word after ``easymp``."""

    arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
