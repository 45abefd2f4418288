"""pipeline: the model in stages, one a rank; each batch goes through them in micro-batches.

The script stays as it is: ``loss_fn(model(x), y)`` and ``backward(loss)`` on every rank. All ranks see the same batch. The last stage's
outputs are sent to all, so losses and metrics are the same everywhere, and the outputs carry a backward that sends gradients through
the stages. That is also what it costs: the outputs of the whole batch are sent to every rank.

Two schedules. ``"gpipe"``: ``model(x)`` runs all forwards, backward all backwards; a rank holds the activations of all micro-batches in
between. ``"1f1b"`` takes turns, so that a rank holds those of as many micro-batches as there are stages, at most; but the first backward
needs the loss, which needs all outputs. So ``model(x)`` runs a forward that keeps nothing, and backward runs another one, with the same
random numbers and buffers: less memory, for the time of a second forward.

The stages are run here and not by torch.distributed.pipelining: its schedules take the loss function inside, want one shape for good, and
its tracing fixes one mode. What a rank sends and computes in which order is theirs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..base.dtensor import follow
from ..base.pytree import concatenate, leaves, map_leaves, slice_tensors
from ..distributed import World, odd_one_out
from ..errors import BatchError, PrepareError, RefusedError, SettingError, StepError, WorldError
from ..optim.torch_step import multiply, values
from ..protocols import Counting, Facts, Layout, Manner, Refusal
from .meta_init import LEFT
from .pipeline_stage import Cuts, Stage, balance, candidates, choose, form_of, own_stream, survey
from .single import counting

SCHEDULES = ("gpipe", "1f1b")


@dataclass(frozen=True)
class PipelineOptions:
    """Options of strategy "pipeline".

    Attributes:
        splits: names of the modules at whose first call stages 1, 2 … begin, one less than processes. All that is computed before and
            needed after must be passed to that module. None finds places that divide the parameters evenly.
        microbatches: parts of each batch, along dimension 0; None: as many as processes. More of them keep the stages busier. Batch-norm
            sees one at a time.
        schedule: "gpipe", or "1f1b", which needs less memory and computes the forward twice.
    """

    splits: tuple[str, ...] | None = None
    microbatches: int | None = None
    schedule: str = "gpipe"

    def __post_init__(self) -> None:
        if isinstance(self.splits, list):
            object.__setattr__(self, "splits", tuple(self.splits))
        splits = self.splits
        if splits is not None and not (
            isinstance(splits, tuple) and splits and all(isinstance(name, str) for name in splits)
        ):
            raise SettingError(
                f"splits={splits!r} is neither None nor a tuple of module names such as ('blocks.2', 'blocks.4')"
            )
        if splits is not None and len(set(splits)) != len(splits):
            raise SettingError(f"splits={splits!r} names a module twice: each stage begins at another one")
        count = self.microbatches
        if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
            raise SettingError(f"microbatches={count!r} is neither None nor a whole number of at least 1")
        if self.schedule not in SCHEDULES:
            raise SettingError(f"schedule={self.schedule!r} is neither 'gpipe' nor '1f1b'")


class Pipeline:
    """One stage a rank.

    The model is cut at its first call, when the order of its modules shows: one forward without values. Until then every rank holds
    it whole, where it was built, with rank 0's values. From then on, in place: parameters and buffers of other stages are on the meta
    device, which takes no memory; they stay the same objects under the same names, get no gradients and no optimizer state. This rank's
    are moved to its device. So `state_dict` holds this rank's stage, and meta tensors in place of the others'; loading a whole state fills
    what is here. Whole weights are in `save_model` and `get_state_dict`, whole trainings in `save_state`, which any strategy loads.
    While the model runs, calls of its modules are intercepted.

    Weights that several stages use (a tied embedding) lie on each of these, and get the sum of the gradients: by a hook on the parameter,
    and an average over these ranks after each backward that is not under `no_sync`.

    Gradients of low-precision parameters add up in their own type under accumulation, without fp32 sums; precisions with fp32 masters are
    refused.

    A stage draws random numbers from a stream of its own, seeded at each call from the one that all ranks share.
    """

    name: ClassVar[str] = "pipeline"
    Options: ClassVar[type] = PipelineOptions
    whole: ClassVar[bool] = True
    apart: ClassVar[bool] = False
    alike: ClassVar[bool] = False
    masters: ClassVar[bool] = False  # optimizers take them before it shows which parameters are here
    sums = False  # likewise
    early: ClassVar[bool] = False
    sharded: ClassVar[bool] = False
    once = (
        "under pipeline gradients travel between stages without a graph. Use strategy='ddp', or a loss without the gradient of a "
        "gradient"
    )
    only_forward = "divides forward into stages, and no other method"
    data_rank = 0
    data_size = 1
    data_group = None

    def __init__(self, world: World, options: PipelineOptions) -> None:
        if options.splits is not None and len(options.splits) != world.size - 1:
            raise SettingError(
                f"splits={options.splits!r} make {len(options.splits) + 1} stages, and there are {world.size} processes: name "
                f"{world.size - 1} modules, or leave splits out"
            )
        self._world = world
        self._options = options
        self._optimizers: list[torch.optim.Optimizer] = []
        self._homes: dict[int, int] = {}  # id of a parameter in a stage → the first rank that holds it

    @staticmethod
    def refuse(facts: Facts) -> Refusal | None:
        if facts.world_size == 1:
            return Refusal(
                "strategy 'pipeline' gives each process a stage of the model, and there is one process",
                "start several (`easymp launch --processes N script.py`), or use 'auto'",
            )
        return None

    @staticmethod
    def layout(model: nn.Module, options: Any, size: int, local_size: int) -> Layout:
        """The fullest stage, taking modules to be called in the order in which they were registered."""
        places = candidates(model, options.splits or ())
        order = {
            id(p): i
            for i, module in enumerate(places.values(), 1)
            for p in reversed(list(module.parameters()))
        }
        parameters = [(name, p, order.get(id(p), 0)) for name, p in model.named_parameters()]
        weights = [
            sum(p.numel() for _, p, i in parameters if i == segment) for segment in range(len(places) + 1)
        ]
        if options.splits is not None:
            at = sorted(list(places).index(name) + 1 for name in options.splits)
        else:
            at = balance(weights, range(1, len(places) + 1), size)
        stages = {name: sum(segment >= cut for cut in at) for name, _, segment in parameters}
        sums = [sum(p.numel() for name, p, _ in parameters if stages[name] == stage) for stage in range(size)]
        fullest = sums.index(max(sums))

        def cut(name: str, parameter: Tensor) -> int:
            return parameter.numel() if stages.get(name) == fullest else 0

        return Layout(cut, cut, cut, cut, note="the fullest stage, as far as it shows without a batch")

    def wrap(
        self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], manner: Manner
    ) -> nn.Module:
        if type(model) in (nn.ModuleList, nn.ModuleDict):
            raise PrepareError(
                f"a {type(model).__name__} cannot be called, so it has no stages: put it into a module with a forward"
            )
        policy = manner.policy
        policy.decide(model)
        model = policy.convert(model)
        places = candidates(model, self._options.splits or ())
        inside = {id(part) for place in places.values() for part in place.modules()}
        for name, part in model.named_modules():
            if id(part) not in inside and (
                "_orig_mod" in part._modules or vars(part).get("_compiled_call_impl") is not None
            ):
                raise PrepareError(
                    f"{name or 'the model'} is compiled, as one function, and stages begin and end inside of it: pass it uncompiled, or "
                    "compile its blocks"
                )
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                if tensor.numel():
                    tensor.copy_(self._world.broadcast(tensor))
        module = policy.forward(model, self._world.device)
        options, stages = self._options, self._world.size

        def divide(args: Any, kwargs: Any) -> tuple[Cuts, list[Shared]]:
            watch = survey(model, module, places, args, kwargs)
            cuts = choose(model, watch, options.splits, stages)
            return cuts, self._divide(model, cuts, manner)

        return Pipelined(
            module,
            model,
            places,
            self._world,
            options.microbatches or stages,
            options.schedule == "1f1b",
            divide,
        )

    def spread(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        self._optimizers.append(optimizer)
        return optimizer

    def _divide(self, model: nn.Module, cuts: Cuts, manner: Manner) -> list[Shared]:
        """Keep this rank's stage of `model`; the parameters that others hold, too."""
        rank = self._world.rank
        shared = []
        groups: dict[tuple[int, ...], Any] = {tuple(range(self._world.size)): None}
        kept: list[nn.Module] = []
        with torch.no_grad():
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                users = cuts.users[name]
                if rank not in users:
                    self._let_go(name, tensor)
                elif manner.place:
                    tensor.data = tensor.data.to(self._world.device)
                if isinstance(tensor, nn.Parameter):
                    self._homes[id(tensor)] = users[0]
                    if len(users) > 1:
                        if users not in groups:
                            groups[users] = self._world.group(users)
                        if rank in users:
                            shared.append(Shared(tensor, len(users), groups[users]))
        LEFT.add(model)
        for optimizer in self._optimizers:
            for parameter in list(optimizer.state):
                if isinstance(parameter, Tensor) and parameter.is_meta:
                    del optimizer.state[parameter]
            follow(optimizer, {})
        for module in candidates(model, cuts.begins).values():
            mine = [*module.parameters(), *module.buffers()]
            if mine and not any(t.is_meta for t in mine):
                kept.append(module)
        for module in kept:
            manner.compile(module)
        return shared

    @staticmethod
    def _let_go(name: str, tensor: Tensor) -> None:
        nothing: Any = torch.empty_like(tensor, device="meta")
        if isinstance(tensor, nn.Parameter):
            tensor.grad = None
            nothing = nn.Parameter(nothing, tensor.requires_grad)
        try:
            torch.utils.swap_tensors(tensor, nothing)
        except RuntimeError as error:
            raise PrepareError(
                f"{name!r} belongs to another rank's stage and cannot be let go of here ({error}): call a prepared model before anything "
                "else keeps its parameters, such as a graph of an earlier forward or a weak reference"
            ) from error

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        with _of(model).summing(False):
            yield

    @contextmanager
    def force_sync(self, model: nn.Module) -> Iterator[None]:
        with _of(model).summing(True):
            yield

    def average(self, models: Sequence[nn.Module], gradients: Sequence[Tensor]) -> None:
        raise AssertionError("no sums are kept for it")

    def join(self, models: Sequence[nn.Module]) -> AbstractContextManager[Any]:
        raise RefusedError(
            "strategy 'pipeline' cannot join uneven inputs: every batch goes through the stages of all ranks, which all see the same ones. "
            "There is nothing to join: leave join_uneven_inputs out"
        )

    @property
    def counting(self) -> Counting:
        rank, size, homes = self._world.rank, self._world.size, self._homes

        def copies(parameter: Tensor) -> int:
            home = homes.get(id(parameter))
            return size if home is None else int(home == rank)  # of no stage: the same on all ranks

        return counting(self._world)._replace(copies=copies)

    def clip(self, parameters: Sequence[Tensor], max_norm: float, norm_type: float) -> Tensor:
        rank = self._world.rank
        grads = [(self._homes.get(id(p)), p.grad) for p in parameters if p.grad is not None]
        zero = torch.zeros((), device=self._world.device)
        here = [values(grad) for home, grad in grads if home == rank]
        alike = [values(grad) for home, grad in grads if home is None]  # of no stage: the same on all ranks
        norms = self._world.gather(nn.utils.get_total_norm(here, norm_type).to(zero) if here else zero)
        if alike:
            norms = torch.cat([norms, nn.utils.get_total_norm(alike, norm_type)[None].to(norms.device)])
        total = torch.linalg.vector_norm(norms, norm_type)
        factor = (max_norm / (total + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_
        multiply([grad for _, grad in grads], factor)
        return total

    def release(self, model: nn.Module, alone: nn.Module) -> nn.Module:
        pipelined = _of(model)
        for shared in pipelined.shared:
            shared.let_go()
        self._optimizers.clear()
        self._homes.clear()
        return Released() if pipelined.stage is not None else alone


class Released(nn.Module):
    """What is called in place of a model whose run has let go of it: one rank has one stage."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise StepError(
            "this model is one stage of a run that has let go of it (close, free_memory), and one rank alone cannot call it: call it "
            "before, or build it anew"
        )


def _of(model: nn.Module) -> Pipelined:
    assert isinstance(model, Pipelined), "what wrap made"
    return model


# -- What travels between neighbouring pipeline stages: tensors, gradients the other way, and now and then a word about their form.


class Form:
    """Shape and dtype of a tensor that travels, and whether a gradient comes back for it. No dataclass: in a nested batch it is a leaf."""

    __slots__ = ("dtype", "grad", "shape")

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, grad: bool) -> None:
        self.shape, self.dtype, self.grad = shape, dtype, grad

    @classmethod
    def of(cls, tensor: Tensor) -> Form:
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Form) and repr(self) == repr(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{self.dtype}{list(self.shape)}{' with gradient' if self.grad else ''}"


class Wires:
    """Sends to the next stage and receives from the one before, or the other way round for gradients.

    Tensors travel as bytes, for not every backend knows every dtype.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._up: Any = None  # on devices, gradients have connections of their own: what waits for one does not stop the other
        self._going: list[tuple[Any, Tensor]] = []  # kept until it is gone

    def connect(self) -> None:
        """A collective, before anything is sent."""
        if self._world.device.type != "cpu":
            self._up = self._world.group(range(self._world.size))

    def send(self, tensors: Sequence[Tensor], step: int) -> None:
        """To the stage `step` (1 or -1) from here, without waiting."""
        self._going = [(work, data) for work, data in self._going if not work.is_completed()]
        with self._world.explained(f"sending to rank {self._world.rank + step}"):
            for tensor in tensors:
                if tensor.numel():
                    data = _bytes(tensor.detach().contiguous())
                    work = dist.isend(data, self._world.rank + step, group=self._up if step < 0 else None)
                    self._going.append((work, data))

    def receive(self, forms: Sequence[Form], step: int) -> list[Tensor]:
        """From the stage `step` (1 or -1) from here."""
        tensors = [form.empty(self._world.device) for form in forms]
        group = self._up if step > 0 else None
        with self._world.explained(f"receiving from rank {self._world.rank + step}"):
            works = [
                dist.irecv(_bytes(t), self._world.rank + step, group=group) for t in tensors if t.numel()
            ]
            for work in works:
                if work is not None:
                    work.wait()
        return tensors

    def flush(self) -> None:
        """Wait until all is sent."""
        going, self._going = self._going, []
        with self._world.explained("sending to another stage"):
            for work, _ in going:
                work.wait()

    def tell(self, item: Any, step: int) -> None:
        with self._world.explained(f"sending to rank {self._world.rank + step}"):
            dist.send_object_list([item], self._world.rank + step)

    def hear(self, step: int) -> Any:
        items: list[Any] = [None]
        with self._world.explained(f"receiving from rank {self._world.rank + step}"):
            dist.recv_object_list(items, self._world.rank + step)
        return items[0]

    def share(self, tensor: Tensor, source: int) -> None:
        """Fill `tensor` on every rank with that of rank `source`."""
        if tensor.numel():
            with self._world.explained("the outputs of the last stage"):
                dist.broadcast(_bytes(tensor), source)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.uint8)


# -- The schedules of a pipeline: micro-batches through this rank's stage, forward and backward, behind one call of the model.


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
