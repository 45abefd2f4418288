"""The schedules of a pipeline: micro-batches through this rank's stage, forward and backward, behind one call of the model."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..base.pytree import concatenate, leaves, map_leaves, slice_tensors
from ..distributed import World, odd_one_out
from ..errors import BatchError, StepError, WorldError
from .cuts import Cuts
from .stage import Stage, form_of, own_stream
from .wires import Form, Wires


class Shared:
    """A parameter that several stages use: each gets the sum of its gradients.

    As in DDP, gradients are averaged over the ranks that hold it, which leaves alone what has been averaged before; so each stage's own
    part is multiplied by their number first.
    """

    def __init__(self, parameter: nn.Parameter, count: int, group: Any) -> None:
        self.parameter, self.count, self.group = parameter, count, group
        self._hook: Any = None

    def watch(self) -> None:
        """To be called before a forward: the parameter may have been unfrozen since the last one."""
        if self._hook is None and self.parameter.requires_grad:
            count = self.count
            self._hook = self.parameter.register_hook(lambda grad: grad * count)

    def sum(self) -> None:
        if self.parameter.requires_grad:
            if self.parameter.grad is None:
                self.parameter.grad = torch.zeros_like(self.parameter)
            dist.all_reduce(self.parameter.grad, group=self.group)
            self.parameter.grad /= self.count

    def let_go(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


class Passage:
    """A micro-batch between its forward and its backward in this stage.

    Attributes:
        keeps: whether a backward will follow.
        inward: forms of what came in and takes a gradient back.
        grads: those gradients, once backward has come by.
        outward: what went out and gets a gradient.
    """

    def __init__(self, keeps: bool) -> None:
        self.keeps = keeps
        self.inward: list[Form] = []
        self.grads: Sequence[Tensor] | None = None
        self.outward: list[Tensor] = []


class Arrival(torch.autograd.Function):
    """Values from the stage before: no leaves, so that a model may work on them in place."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, values: list[Tensor], passage: Passage) -> tuple[Tensor, ...]:
        ctx.passage = passage
        return tuple(values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.passage.grads = grads
        return None, None, None


class Arrived(torch.autograd.Function):
    """Outputs of the last stage, on every rank, whose backward runs that of the stages."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, values: list[Tensor], flight: Flight) -> tuple[Tensor, ...]:
        ctx.flight = flight
        return tuple(values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        flight, ctx.flight = ctx.flight, None
        if flight is None:
            raise StepError(
                "a second backward through one forward of a pipelined model: its activations are gone. Call the model again"
            )
        flight.backward(grads)
        return None, None, None


class Pipelined(nn.Module):
    """Calls the stages.

    Args:
        module: what is called: `root`, or `root` under autocast.
        root: the user's model.
        places: modules at which it may be cut, by name.
        microbatches: parts of each batch.
        twice: forwards and backwards take turns ("1f1b"), so training runs the forward once more.
        divide: called once, with args and kwargs of a micro-batch: cuts the model and keeps this rank's part.
    """

    def __init__(
        self,
        module: nn.Module,
        root: nn.Module,
        places: Mapping[str, nn.Module],
        world: World,
        microbatches: int,
        twice: bool,
        divide: Callable[[Any, Any], tuple[Cuts, list[Shared]]],
    ) -> None:
        super().__init__()
        self.module, self.root = module, root
        self.world, self.wires = world, Wires(world)
        self.microbatches, self.twice = microbatches, twice
        self.sums = True  # whether backward sums the gradients of shared parameters
        self.stage: Stage | None = None
        self.shared: list[Shared] = []
        self._places, self._divide = dict(places), divide
        # What a form of micro-batch sends along with it the first time, and what all know from then on.
        self._inward: dict[
            Any, tuple[list[Form], list[int]]
        ] = {}  # all that could come in, and which of it is wanted
        self._outward: dict[Any, tuple[list[Form], list[int]]] = {}
        self._outputs: dict[Any, Any] = {}  # form of a batch → its output, with forms in place of tensors

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        parts = split(args, kwargs, self.microbatches)
        if self.stage is None:
            self._cut(parts[0])
        for shared in self.shared:
            shared.watch()
        flight = Flight(self, parts)
        outputs = flight.forward()
        tree = self._describe(outputs, (flight.manner, form_of((args, kwargs))), flight)
        forms = [leaf for leaf in leaves(tree) if isinstance(leaf, Form)]
        tensors = self._share(outputs, forms)
        wanted = [i for i, form in enumerate(forms) if form.grad]
        if flight.trains and wanted:
            flight.wanted = wanted
            anchor = torch.zeros((), device=self.world.device, requires_grad=True)
            for i, tensor in zip(wanted, Arrived.apply(anchor, [tensors[i] for i in wanted], flight)):
                tensors[i] = tensor
        given = iter(tensors)
        return map_leaves(lambda leaf: next(given) if isinstance(leaf, Form) else leaf, tree)

    def _cut(self, part: Any) -> None:
        seen = self.world.gather_objects((str(form_of(part)), self.root.training))
        if any(s != seen[0] for s in seen):
            raise WorldError(
                f"the ranks call the model with different batches: {odd_one_out(seen)}. Under strategy 'pipeline' all see the same, which "
                "prepared loaders take care of"
            )
        cuts, self.shared = self._divide(*part)
        self.wires.connect()
        self.stage = Stage(self.module, cuts.begins, self._places, self.world.rank)

    def go(self, part: Any, manner: Any, passage: Passage) -> Any:
        """One micro-batch forward through this stage; the model's output in the last one."""
        assert self.stage is not None
        key = (manner, form_of(part))
        ended, result = self.stage(*part, lambda tensors: self._receive(tensors, key, passage))
        tensors = [leaf for leaf in leaves(result) if isinstance(leaf, Tensor)]
        if ended:
            passage.outward = tensors
            return result
        forms = [Form(tuple(t.shape), t.dtype, self._takes_gradient(t)) for t in tensors]
        if key not in self._outward:
            self.wires.tell(forms, 1)
            self._outward[key] = forms, self.wires.hear(1)
        known, wanted = self._outward[key]
        if forms != known:
            raise StepError(
                f"what {self.stage.where} passes on was {known} and is {forms} for a batch of the same form: strategy 'pipeline' needs "
                "shapes that follow from the inputs' shapes"
            )
        self.wires.send([tensors[i] for i in wanted], 1)
        passage.outward = [tensors[i] for i in wanted if forms[i].grad]
        return None

    def _takes_gradient(self, tensor: Tensor) -> bool:
        """Where forwards are run twice, the first has no graph to tell, and words in the second would meet gradients on the way."""
        return tensor.is_floating_point() or tensor.is_complex() if self.twice else tensor.requires_grad

    def _receive(self, tensors: list[Tensor], key: Any, passage: Passage) -> list[Tensor]:
        """`tensors`, among which a stage begins, with values where they are blank."""
        blank = [i for i, t in enumerate(tensors) if t.is_meta]
        if key not in self._inward:
            self._inward[key] = self.wires.hear(-1), blank
            self.wires.tell(blank, -1)
        forms, wanted = self._inward[key]
        if len(forms) != len(tensors) or wanted != blank:
            assert self.stage is not None
            raise StepError(
                f"{self.stage.where} was to get {len(tensors)} tensors, {len(blank)} of them from the stage before, and gets {len(forms)} "
                f"and {len(wanted)}: the forward takes another course there, on something else than its inputs' shapes"
            )
        values = self.wires.receive([forms[i] for i in wanted], -1)
        differentiable = [n for n, i in enumerate(wanted) if forms[i].grad and passage.keeps]
        if differentiable:
            if not torch.is_grad_enabled():
                raise StepError(
                    "a stage begins inside no_grad, but what is computed before needs gradients: split elsewhere (a checkpoint needs "
                    "use_reentrant=False)"
                )
            passage.inward = [forms[wanted[n]] for n in differentiable]
            anchor = torch.zeros((), device=self.world.device, requires_grad=True)
            for n, value in zip(
                differentiable, Arrival.apply(anchor, [values[n] for n in differentiable], passage)
            ):
                values[n] = value
        came = dict(zip(wanted, values))
        return [came.get(i, t) for i, t in enumerate(tensors)]

    def back(self, passage: Passage, grads: Sequence[Tensor]) -> None:
        """One micro-batch backward through this stage; `grads` are those of the output, in the last one."""
        assert self.stage is not None
        if self.stage.index != self.stage.last:
            grads = self.wires.receive([Form.of(t) for t in passage.outward], 1)
        pairs = [(t, g) for t, g in zip(passage.outward, grads) if t.requires_grad]
        passage.outward = []
        if pairs:
            torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
        if passage.inward:
            grads = passage.grads or [form.empty(self.world.device).zero_() for form in passage.inward]
            passage.grads = None
            self.wires.send(grads, -1)

    # -- outputs --------------------------------------------------------------------------------------------------------

    def _describe(self, outputs: Sequence[Any], key: Any, flight: Flight) -> Any:
        """The output of the whole batch with forms in place of tensors, known to all ranks."""
        tree: Any = None
        if outputs:
            tree = self._form_of_outputs(outputs, flight)
            if key in self._outputs and form_of_forms(tree) != form_of_forms(self._outputs[key]):
                raise StepError(
                    "the model's output has another form than before, for a batch of the same form: strategy 'pipeline' needs shapes that "
                    "follow from the inputs' shapes"
                )
        if key not in self._outputs:
            tree = self.world.broadcast_objects([tree], self.world.size - 1)[0]
            if isinstance(tree, BatchError):
                raise tree
            self._outputs[key] = tree
        return self._outputs[key]

    def _form_of_outputs(self, outputs: Sequence[Any], flight: Flight) -> Any:
        for output, part in zip(outputs, flight.parts):
            for leaf in leaves(output):
                if isinstance(leaf, Tensor) and (not leaf.ndim or leaf.shape[0] != length(part)):
                    return BatchError(
                        f"the model returns a tensor of shape {tuple(leaf.shape)} for {length(part)} samples: micro-batches can be put "
                        "together only along dimension 0. Return one value a sample, and reduce it outside (the loss, for example)"
                    )
                if not isinstance(leaf, Tensor) and not (
                    leaf is None or isinstance(leaf, (bool, int, float, str))
                ):
                    return BatchError(
                        f"the model returns a {type(leaf).__name__}, which cannot be put together from micro-batches: return tensors, "
                        "and lists, tuples or dicts of them"
                    )
        rows = sum(map(length, flight.parts))

        def describe(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            return Form((rows, *leaf.shape[1:]), leaf.dtype, self._takes_gradient(leaf))

        return map_leaves(describe, outputs[0])

    def _share(self, outputs: Sequence[Any], forms: Sequence[Form]) -> list[Tensor]:
        with torch.no_grad():
            if outputs:
                whole = concatenate(
                    [map_leaves(lambda t: t.detach() if isinstance(t, Tensor) else t, o) for o in outputs]
                )
                tensors = [leaf.contiguous() for leaf in leaves(whole) if isinstance(leaf, Tensor)]
            else:
                tensors = [form.empty(self.world.device) for form in forms]
            for tensor in tensors:
                self.wires.share(tensor, self.world.size - 1)
        return tensors

    @contextmanager
    def summing(self, wanted: bool) -> Iterator[None]:
        before, self.sums = self.sums, wanted
        try:
            yield
        finally:
            self.sums = before


class Flight:
    """One batch on its way through the stages: `forward`, then `backward` once, if at all.

    Attributes:
        parts: the micro-batches, each args and kwargs.
        trains: whether gradients are wanted.
        twice: whether backward runs the forward again.
        manner: what beside a micro-batch's form decides which shapes and gradients travel.
        wanted: which of the output's tensors get a gradient.
    """

    def __init__(self, pipelined: Pipelined, parts: Sequence[Any]) -> None:
        self._pipelined = pipelined
        self.parts = parts
        root, device = pipelined.root, pipelined.world.device
        flags = tuple(p.requires_grad for p in root.parameters())
        self.trains = torch.is_grad_enabled() and any(flags)
        self.twice = self.trains and pipelined.twice
        self._autocast = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
        self.manner: Any = (root.training, flags, self._autocast, self.trains)
        self.wanted: list[int] = []
        self._passages = [Passage(self.trains and not self.twice) for _ in parts]
        self._buffers = [(b, b.clone()) for b in root.buffers() if not b.is_meta] if self.twice else []
        self._key = int(torch.randint(1 << 62, (), device="cpu"))
        if self.trains and any(
            isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves(list(parts))
        ):
            raise StepError(
                "an input of a pipelined model requires a gradient, which only the first stage could compute: detach it"
            )

    def forward(self) -> list[Any]:
        """The outputs, one a micro-batch, on the last rank; nothing elsewhere."""
        there = self._pipelined
        with self._stream(), torch.no_grad() if self.twice else nullcontext():
            outputs = [
                there.go(part, self.manner, passage) for part, passage in zip(self.parts, self._passages)
            ]
        there.wires.flush()
        return outputs if there.world.rank == there.world.size - 1 else []

    def backward(self, grads: Sequence[Tensor]) -> None:
        """Gradients of this rank's parameters, from those of the wanted outputs."""
        there = self._pipelined
        sizes = [length(part) for part in self.parts]
        pieces = list(zip(*(grad.split(sizes) for grad in grads)))
        if self.twice:
            with self._stream(), self._replayed(), torch.enable_grad(), self._as_before():
                self._take_turns(pieces)
        else:
            for passage, piece in zip(self._passages, pieces):
                self._back(passage, piece)
        there.wires.flush()
        if there.sums:
            with there.world.explained("gradients of shared parameters"), torch.no_grad():
                for shared in there.shared:
                    shared.sum()

    def _take_turns(self, pieces: Sequence[Sequence[Tensor]]) -> None:
        """One forward, one backward, after as many forwards as it takes to fill the stages behind this one."""
        there = self._pipelined
        ahead = there.world.size - 1 - there.world.rank
        waiting: deque[tuple[Passage, Sequence[Tensor]]] = deque()
        for part, piece in zip(self.parts, pieces):
            passage = Passage(keeps=True)
            there.go(part, self.manner, passage)
            waiting.append((passage, piece))
            if len(waiting) > ahead:
                self._back(*waiting.popleft())
        while waiting:
            self._back(*waiting.popleft())

    def _back(self, passage: Passage, piece: Sequence[Tensor]) -> None:
        there = self._pipelined
        if there.world.rank == there.world.size - 1:
            passage.outward = [passage.outward[i] for i in self.wanted]
        there.back(passage, piece)

    def _stream(self) -> AbstractContextManager[None]:
        return own_stream(self._key, self._pipelined.world.rank, self._pipelined.world.device)

    def _as_before(self) -> AbstractContextManager[Any]:
        enabled, dtype = self._autocast
        return torch.autocast(self._pipelined.world.device.type, dtype, enabled)

    @contextmanager
    def _replayed(self) -> Iterator[None]:
        """Inside, buffers are what they were before the first forward, and what they became afterwards: it counts once."""
        became = [b.clone() for b, _ in self._buffers]
        with torch.no_grad():
            for buffer, before in self._buffers:
                buffer.copy_(before)
        try:
            yield
        finally:
            with torch.no_grad():
                for (buffer, _), after in zip(self._buffers, became):
                    buffer.copy_(after)


def split(args: Any, kwargs: Any, count: int) -> list[Any]:
    """(args, kwargs) in `count` parts along dimension 0 of all tensors, or in as many as there are samples.

    Raises:
        BatchError: tensors of different lengths, or none.
    """
    tensors = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.ndim]
    lengths = sorted({t.shape[0] for t in tensors})
    if len(lengths) != 1 or not lengths[0]:
        said = ", ".join(str(tuple(t.shape)) for t in tensors)
        raise BatchError(
            f"strategy 'pipeline' cuts a batch into micro-batches along dimension 0, and the model was called with tensors of shapes "
            f"({said}): pass tensors with one row a sample; what is no part of the batch (a mask) goes into a buffer of the model"
        )
    rows, extra = divmod(lengths[0], min(count, lengths[0]))
    parts, begin = [], 0
    for i in range(min(count, lengths[0])):
        end = begin + rows + (i < extra)
        parts.append(slice_tensors((args, kwargs), slice(begin, end)))
        begin = end
    return parts


def length(part: Any) -> int:
    """Samples in a micro-batch."""
    return next(leaf.shape[0] for leaf in leaves(part) if isinstance(leaf, Tensor) and leaf.ndim)


def form_of_forms(tree: Any) -> Any:
    return [leaf if isinstance(leaf, Form) else (type(leaf), leaf) for leaf in leaves(tree)]
