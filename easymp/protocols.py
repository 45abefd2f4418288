"""Interfaces between packages, and the small records that they exchange."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

T = TypeVar("T")


class Source(Enum):
    """Where a decision comes from, in the order of precedence.

    Example:
        >>> Accelerator(cpu=True).plan.device.source
        <Source.ASKED: 'asked for'>
    """

    ASKED = "asked for"
    ENVIRONMENT = "environment"
    CONFIG = "config file"
    DETECTED = "detected"
    DEFAULT = "default"


@dataclass(frozen=True)
class Choice(Generic[T]):
    """A decision of the plan.

    Attributes:
        value: what was decided.
        reason: why, in words.
        source: who decided it.

    Example:
        >>> Accelerator(cpu=True, mixed_precision="bf16").plan.precision.value
        'bf16'
    """

    value: T
    reason: str
    source: Source


class Refusal(NamedTuple):
    """The reason why something cannot be done here, and the remedy; one sentence each."""

    reason: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.reason}; {self.remedy}"


class Conflict(NamedTuple):
    """Two words that do not go together, in any order, and why; a row of the table of `easymp.conflicts`."""

    word: str
    other: str
    reason: str  # as a clause
    remedy: str  # as a sentence without its full stop

    def __str__(self) -> str:
        return f"{self.word} and {self.other} do not go together: {self.reason}. {self.remedy}"


class Facts(NamedTuple):
    """Machine and world, by which a strategy or precision runs here or not; `device` is a type such as ``"cuda"``."""

    hardware: Any
    device: str
    world_size: int


class WrapContext(NamedTuple):
    """What a strategy applies to a model while it wraps it."""

    policy: Precision  # dtypes, and autocast
    place: bool = True  # whether to move the model to the rank's device
    initialize: Callable[[nn.Module], object] | None = None  # gives values to a module on the meta device
    # Compiles the call of a module in place, if the user asked for it: of that which torch.compile should see whole.
    compile: Callable[[nn.Module], None] = lambda module: None


Elements = Callable[[str, "Tensor"], int]
"""Maps a parameter's name and the parameter to the number of its elements on the fullest rank."""


def all_elements(name: str, parameter: Tensor) -> int:
    """Every rank holds the whole parameter."""
    return parameter.numel()


def no_elements(name: str, parameter: Tensor) -> int:
    """The device holds no element, because the parameter is in the host's memory."""
    return 0


def chunk_elements(count: int) -> Elements:
    """Elements of one of `count` chunks of dimension 0, padded to the first's size, as in torch.chunk and FSDP2."""

    def elements(name: str, parameter: Tensor) -> int:
        rows = parameter.shape[0] if parameter.ndim else 1
        return -(-rows // count) * (parameter.numel() // rows) if rows else 0

    return elements


class Layout(NamedTuple):
    """Elements that one rank holds of a model in training; `easymp.training.memory` converts them to bytes."""

    weights: Elements = all_elements
    gradients: Elements = all_elements
    states: Elements = all_elements  # of each optimizer state, and of fp32 master weights
    copies: Elements = all_elements  # of autocast's half-precision copies of weights, at the end of forward
    gathers: bool = False  # layers compute with gathered weights, which half precisions gather in their own dtype
    gathered: int = 0  # other ranks' weights that are gathered here, at the peak
    unreduced: int = 0  # whole gradients in the dtype of gathered weights, beside those in `gradients`, at the peak
    reducing: int = 0  # gradients in communication buffers, at the peak
    early: int = 0  # gradients held at once under `optimizer_in_backward`; 0: those of the largest parameter
    note: str = ""  # which figures are approximate


class Counting(NamedTuple):
    """How the ranks compute Σ g² over all gradients, each element once."""

    # Ranks, among those that `add` sums over, that hold each element of a parameter's gradient; 0: other ranks count
    # it.
    copies: Callable[[Tensor], int] = lambda parameter: 1
    # Sums a tensor over the ranks, in place; None: gradients are whole on every rank.
    add: Callable[[Tensor], None] | None = None
    # Gives a parameter's gradient the layout of the parameter; a collective.
    settle: Callable[[Tensor], None] = lambda parameter: None


# Words of the table of conflicts.
SMALL_EPS = "Adam with an eps below 1e-4"
UNROUNDED = "bf16 weights without stochastic rounding"  # which need fp32 masters


class Strategy:
    """How parameters and gradients are distributed over the ranks. `strategies.single.Single` is the plainest one.

    Ranks that see the same slice of the data are neighbours: ranks 0 and 1 of four with ``data_size`` 2. Methods that a
    strategy does not override leave their argument as it is, and all ranks alike.
    """

    name: ClassVar[str]
    Options: ClassVar[type]  # the record of its options, the constructor's second argument
    several: ClassVar[str] = ""  # its use of several processes, in words; "" for one process
    sharded: ClassVar[bool] = False  # no rank holds the whole model; `wrap` gives meta parameters values part by part
    spreads_states: ClassVar[bool] = False  # each rank keeps its share of the optimizers' states
    splits_layers: ClassVar[bool] = False  # layers compute with parts of their tensors
    local_updates: ClassVar[bool] = False  # ranks update by themselves, and parameters are averaged now and then
    replicated: ClassVar[bool] = True  # plain parameters are equal on all ranks, or will be when averaged
    late_loss: ClassVar[bool] = False  # the result of `loss` has its value only after backward
    conflicts: ClassVar[Sequence[Conflict]] = ()  # what it does not go together with
    data_rank: int  # the slice of the data that this process sees; under tensor parallelism 0 of 1
    data_size: int
    data_group: Any = None  # the process group of one rank of each slice, with this one; None: all ranks
    context_size: int = 1  # neighbours that share each sequence of their slice
    words: set[str]  # its name, and those of its options that the table of conflicts knows
    sums: bool = True  # fp32 gradient sums are kept outside: under no_sync `.grad` is local, and `average` reduces
    reduces_each: bool | None = False  # each micro-batch reduces gradients to shards; None: memory decides
    options: Any  # of type `Options`, where `reduces_each` can be None

    @classmethod
    def refuse(cls, facts: Facts) -> Refusal | None:
        """Say why the strategy cannot run on the machine and the number of processes of `facts`."""
        if cls.several and facts.world_size == 1:
            return Refusal(
                f"strategy {cls.name!r} {cls.several}, and there is one",
                "start several (`easymp launch --processes N script.py`), or use 'auto'",
            )
        if not cls.several and facts.world_size > 1:
            reason = f"strategy {cls.name!r} is for one process, and {facts.world_size} were started"
            return Refusal(f"{reason}: each would train alone", "use strategy='ddp' or 'auto', or start one process")
        return None

    @staticmethod
    def option_words(options: Any) -> Collection[str]:
        """The words of `options` that the table of conflicts knows."""
        return ()

    def in_step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether all ranks that hold a parameter of `optimizer` have the same values now."""
        return True

    def context(self, buffers: Sequence[Tensor], dims: Sequence[int]) -> AbstractContextManager[Any]:
        """A context in which `buffers` are this rank's part of each sequence along `dims`, for forward and backward."""
        return nullcontext()

    @staticmethod
    def layout(model: nn.Module, options: Any, size: int, local_size: int) -> Layout:
        """The part of `model` that one rank holds, before `wrap`; with `size` ranks, and `local_size` on a node."""
        return Layout()

    def wrap(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], context: WrapContext) -> nn.Module:
        """Distribute `model`; returns the module to call in its place.

        If parameters are replaced, `optimizers` (the plain ones of the same `prepare`) get the new parameters.
        """
        raise NotImplementedError(f"{type(self).__name__} has no wrap()")

    def spread(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return the optimizer to step in place of `optimizer`, after its models were wrapped; usually itself.

        A replacement has `laid_out` and `replace_states`, for checkpoints of its states (see `ShardedOptimizer`).
        """
        return optimizer

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
        """The loss of a batch, for backward: ``loss_fn(call(*args, **kwargs), target)``, without a `target` of None.

        `call` calls `module`, the result of `wrap`; a `summed` loss is a sum over the batch, not a mean.
        """
        outputs = call(*args, **kwargs)
        loss: Tensor = loss_fn(outputs) if target is None else loss_fn(outputs, target)
        return loss

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """A context in which backward accumulates gradients locally; `model` is the result of `wrap`."""
        return nullcontext()

    def drop(self, model: nn.Module, parameters: Callable[[], set[int]]) -> None:
        """Drop gradients that are kept elsewhere than in ``.grad``, of the parameters with these ids."""

    def average(self, models: Sequence[nn.Module], gradients: Sequence[Tensor]) -> None:
        """Average `gradients` over the data ranks, in place, after a window whose backwards ran under `no_sync`."""

    def after_backward(self, models: Sequence[nn.Module], create_graph: bool) -> Callable[[], None] | None:
        """Called before a backward that reduces; returns the check to run after it, which raises if some are not."""
        return None

    def join(self, models: Sequence[nn.Module]) -> AbstractContextManager[Any]:
        """A context in which ranks may run out of batches at different times; `models` are results of `wrap`."""
        return nullcontext()

    @property
    def counting(self) -> Counting:
        """The way in which 2-norms of gradients are computed."""
        return Counting()

    def clip(self, parameters: Sequence[Tensor], max_norm: float, norm_type: float) -> Tensor:
        """Scale gradients so that their total norm is at most `max_norm`; returns the norm before, in any layout."""
        raise NotImplementedError(f"{type(self).__name__} has no clip()")

    def release(self, model: nn.Module, alone: nn.Module) -> nn.Module:
        """The module to call after the run: `alone`, this rank's own, where that is whole. Not a collective."""
        return alone


class Precision:
    """The dtypes of a training, and how a model computes in them. The base of all precisions, which changes nothing."""

    name: ClassVar[str]
    param: ClassVar[torch.dtype]  # of parameters
    compute: ClassVar[torch.dtype]  # of matrix products
    reduce: ClassVar[torch.dtype]  # in which gradients are reduced
    tf32: ClassVar[bool] = False  # products of fp32 tensors run on TF32 Tensor Cores, where there are some
    scaled: ClassVar[bool] = False  # the loss is scaled
    masters: ClassVar[bool] = False  # optimizers step fp32 copies of the low-precision parameters
    raises: ClassVar[bool] = False  # trainable low-precision parameters become fp32 when their model is prepared
    keeps_updates: ClassVar[bool] = True  # low-precision parameters are not just rounded to the nearest after a step
    swaps: ClassVar[bool] = False  # layers get a forward of their own, which takes whole tensors
    rounds: ClassVar[bool] = False  # weights are kept rounded from an update's first forward to its step
    conflicts: ClassVar[Sequence[Conflict]] = ()  # what it does not go together with

    @staticmethod
    def refuse(facts: Facts) -> Refusal | None:
        """Say why the precision cannot run on the machine of `facts`."""
        return None

    @property
    def gather(self) -> torch.dtype | None:
        """The dtype in which shards of fp32 parameters are gathered; None: as they are stored."""
        return None

    def convert(self, model: nn.Module) -> nn.Module:
        """Change the model itself (fp8 swap, O2/O3 cast)."""
        return model

    def forward(self, model: nn.Module, device: torch.device) -> nn.Module:
        """The module to call in place of `model`: one that runs it under autocast, or `model` itself."""
        return model

    def casting(self, device: torch.device, options: Any) -> AbstractContextManager[Any]:
        """A context for computations outside of prepared models in this precision; `options`: `AutocastKwargs`."""
        return nullcontext()


class Tracker(Protocol):
    """The interface of trackers that a script brings. Only the main process calls one.

    Further methods are optional. ``position()`` returns the position in plain values, which checkpoints keep, and
    ``resume(position)`` continues after it: before `start`, or while the tracker runs if the run goes back to a
    checkpoint. ``log_images(values, step)`` takes names with uint8 arrays of shape (N, H, W, C) of 1, 3 or 4 channels,
    and ``log_table(table_name, columns, data, step)`` rows of numbers, words and None.

    Attributes:
        name: identifies it in `get_tracker` and `log_kwargs`.

    Example:
        >>> class Printer:
        ...     name = "printer"
        ...     def start(self, run, config): ...
        ...     def log(self, values, step): print(step, values)
        ...     def finish(self): ...
        >>> acc = Accelerator(cpu=True, log_with=Printer())
        >>> acc.log({"loss": 0.5}, step=1)
        >>> acc.end_training()  # calls Printer.start, .log and .finish
        1 {'loss': 0.5}
    """

    name: str

    def start(self, run: str, config: Mapping[str, Any]) -> None:
        """Begin the run of this name, or continue it after a resume.

        Args:
            run: its name.
            config: hyperparameters.
        """
        ...

    def log(self, values: Mapping[str, Any], step: int | None) -> None:
        """Keep a row.

        Args:
            values: numbers and words by name; tensors have become numbers.
            step: the script's, or the number of optimizer updates.
        """
        ...

    def finish(self) -> None:
        """End the run. All rows must be on disk or with the service when it returns."""
        ...
