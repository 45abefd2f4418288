"""An optimizer whose state is split over the ranks (ZeRO-1); parameters and gradients stay whole on every rank.

Each rank has a twin of the user's optimizer, which knows only this rank's rows of each parameter. They are views: the
twin's step writes into the whole parameters, and the rows of the other ranks are gathered afterwards. Tensors are cut
along dimension 0 as torch.chunk does (and FSDP2); one without dimensions is not cut. Twins of `elementwise` optimizers
step on plain tensors (fused, foreach), others on DTensors. From outside, the states are DTensors either way, so another
number of ranks can read a checkpoint of them.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..base.dtensor import local
from ..base.pytree import map_leaves
from ..base.rng import TORCH
from ..distributed import World
from ..errors import RefusedError, SettingError, StepError, WorldError
from ..precision.scaler import amp_attributes, takes_found_inf
from ..protocols import Counting
from .torch_step import (
    HOOKS,
    OwnOptimizer,
    WrappingOptimizer,
    fill_momentum,
    loss_of,
    note_step,
    parameters_of,
    step_without_hooks,
)

IN_PLACE = 2**20  # bytes from which a tensor is gathered in place; smaller ones are packed into one collective
IN_FLIGHT = 2  # collectives under way while the next is packed

# The older name warns from torch 2.13 on.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def cut(tensor: Tensor, rank: int, size: int) -> Tensor:
    """Rows of rank `rank` of `size`, a view."""
    if not tensor.ndim:
        return tensor
    length = tensor.shape[0]
    count = -(-length // size)
    start = min(rank * count, length)
    return tensor.narrow(0, start, min(count, length - start))


def packed_at_once(tensors: Sequence[Tensor], cap: int) -> int:
    """Elements in the buffers of a `RowGather` of `tensors`, at its peak."""
    small = [t for t in tensors if not _in_place(t)]
    width = max((t.element_size() for t in small), default=1)
    return min(sum(t.numel() for t in small), (IN_FLIGHT + 1) * cap // width)


def _in_place(tensor: Tensor) -> bool:
    return tensor.nbytes >= IN_PLACE and tensor.is_contiguous()


class RowGather:
    """Completes tensors in place, each rank giving its own rows. Packs up to `cap` bytes. Its call is a collective."""

    def __init__(self, tensors: Sequence[Tensor], world: World, cap: int) -> None:
        self._world = world
        # Each starts a collective of its tensors, and returns what waits for its end.
        self._transfers: list[tuple[Callable[[Any], Callable[[], object]], Any]] = []
        small: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for tensor in tensors:
            if tensor.ndim == 0 or tensor.numel() == 0:
                continue
            if tensor.is_complex():
                tensor = torch.view_as_real(tensor)
            if _in_place(tensor):
                even = tensor.shape[0] % world.size == 0
                self._transfers.append((self._gather_even if even else self._broadcast_rows, tensor))
            else:
                small.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        for same_kind in small.values():
            bucket: list[Tensor] = []
            for tensor in same_kind:
                if not bucket or sum(t.nbytes for t in bucket) + tensor.nbytes > cap:
                    bucket = []
                    self._transfers.append((self._gather_packed, bucket))
                bucket.append(tensor)

    def __call__(self) -> None:
        waits: deque[Callable[[], object]] = deque()
        with torch.no_grad(), self._world.explained("the gathering of parameters"):
            for start, tensors in self._transfers:
                waits.append(start(tensors))
                if len(waits) > IN_FLIGHT:
                    waits.popleft()()
            while waits:
                waits.popleft()()

    # They send bytes, so any dtype will do.

    def _gather_even(self, tensor: Tensor) -> Callable[[], object]:
        flat = tensor.view(-1).view(torch.uint8)
        work: dist.Work = _all_gather(flat, flat.chunk(self._world.size)[self._world.rank], async_op=True)
        return work.wait

    def _broadcast_rows(self, tensor: Tensor) -> Callable[[], object]:
        rows = [cut(tensor, rank, self._world.size).view(-1).view(torch.uint8) for rank in range(self._world.size)]
        works = [dist.broadcast(part, rank, async_op=True) for rank, part in enumerate(rows) if part.numel()]

        def wait() -> None:
            for work in works:
                if work is not None:
                    work.wait()

        return wait

    def _gather_packed(self, tensors: list[Tensor]) -> Callable[[], None]:
        size, rank = self._world.size, self._world.rank
        widths = [-(-t.shape[0] // size) * t[0].numel() for t in tensors]  # elements of the largest part
        packed = tensors[0].new_empty(size, sum(widths))
        rows = [cut(t, rank, size).reshape(-1) for t in tensors]
        torch._foreach_copy_([t[: part.numel()] for t, part in zip(packed[rank].split(widths), rows)], rows)
        work = _all_gather(packed.view(-1).view(torch.uint8), packed[rank].view(torch.uint8), async_op=True)

        def finish() -> None:
            work.wait()
            # Only the last parts are shorter, so the parts in a row begin with the whole tensor.
            columns = zip(tensors, packed.split(widths, dim=1))
            torch._foreach_copy_(tensors, [c.reshape(-1)[: t.numel()].view(t.shape) for t, c in columns])

        return finish


# torch's optimizers that step element by element, on parts of parameters as well as on whole ones. Others may read
# whole matrices, as Muon does, and step on DTensors.
_NAMES = "Adam AdamW SGD Adagrad RMSprop Adadelta Adamax NAdam RAdam ASGD Rprop".split()
ELEMENTWISE = tuple(getattr(torch.optim, name) for name in _NAMES)
# Before this torch, a DTensor that is a pending sum adds a number on each rank: `p.norm() + eps`.
SUMS_ARE_RIGHT = (2, 11)


def elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `optimizer` can step on plain tensors that are parts of its parameters."""
    if isinstance(optimizer, OwnOptimizer):
        return optimizer.rule is not None and optimizer.rule.survey is None
    return type(optimizer) in ELEMENTWISE


def check_sums(optimizer: torch.optim.Optimizer, strategy: str) -> None:
    """Refuse optimizers that this torch's DTensors may step wrongly, without an error."""
    if TORCH < SUMS_ARE_RIGHT and not isinstance(optimizer, (*ELEMENTWISE, OwnOptimizer)):
        subject = f"strategy {strategy!r} cannot take {type(optimizer).__name__} with torch {torch.__version__}"
        raise SettingError(
            f"{subject}, whose sharded tensors add wrongly to a sum or norm of themselves: update torch to 2.11 or "
            "newer, use strategy='ddp', or an optimizer that steps element by element, such as AdamW"
        )


# -- the optimizer -----------------------------------------------------------------------------------------------------

NOT_SCANNED = {"param_groups", "state", "defaults", "step", *HOOKS}  # for other references to parameters
_replaced: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # those that have a sharded one in their place


class _Part(NamedTuple):
    """A parameter, and the twin's part of it."""

    parameter: Tensor
    detached: Tensor  # the parameter, outside of autograd
    shard: Tensor  # this rank's rows, as the twin's parameter
    address: int  # of the parameter's memory when it was cut


class ShardedOptimizer(WrappingOptimizer):
    """Steps in place of `optimizer`, whose param groups stay the ones to read and write; a step is a collective.

    `optimizer` can no longer step itself: its state moves to the shards, and its hooks fire here. Collectives pack up
    to `cap` bytes. `frozen` has the ids of parameters whose gradients no rank averages.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, world: World, cap: int, frozen: Collection[int]) -> None:
        _check(optimizer)
        check_sums(optimizer, "zero1")
        self.optimizer = optimizer
        self.world, self._cap, self._frozen = world, cap, frozen
        self._plain = elementwise(optimizer)
        self._parts: dict[int, _Part] = {}  # by id of the parameter
        self._parameters: dict[int, Tensor] = {}  # by id of the shard
        self._meshes: dict[str, Any] = {}  # by device type
        self._stepped: list[int] = []  # ids of the parameters of the last step
        self._row_gather = RowGather((), world, cap)
        for name in HOOKS:  # shared: hooks that are registered later with either fire, too
            setattr(self, name, vars(optimizer)[name])
        self._patch_step_function()
        self._twin = _twin(optimizer)
        self._update_twin()
        optimizer.register_step_pre_hook(_refuse_step)
        _replaced.add(optimizer)

    # -- the twin ------------------------------------------------------------------------------------------------------

    def _update_twin(self) -> None:
        """Give the twin the param groups and the state that `optimizer` has now."""
        count = len(self._parts)
        groups = self._twin.param_groups
        groups += ({} for _ in self.optimizer.param_groups[len(groups) :])
        for user_group, group in zip(self.optimizer.param_groups, groups):
            group.update(user_group)
            group["params"] = [self._part(p).shard for p in user_group["params"]]
        for key, state in self.optimizer.state.items():
            if isinstance(key, Tensor):
                self._twin.state[self._part(key).shard] = self._cut_state(key, state)
            else:
                self._twin.state[key] = state
        self.optimizer.state.clear()
        if len(self._parts) != count:
            fill_momentum(self._twin)

    def _copy_groups_back(self) -> None:
        for user_group, group in zip(self.optimizer.param_groups, self._twin.param_groups):
            user_group.update((name, value) for name, value in group.items() if name != "params")

    def _part(self, parameter: Tensor) -> _Part:
        part = self._parts.get(id(parameter))
        if part is not None and part.address == parameter.data_ptr():
            return part
        detached = parameter.detach()
        shard = self._shard(parameter, detached).requires_grad_(parameter.dtype.is_floating_point)
        new = _Part(parameter, detached, shard, parameter.data_ptr())
        if part is not None:  # `p.data = …` has given it other memory
            if part.shard in self._twin.state:
                self._twin.state[new.shard] = self._twin.state.pop(part.shard)
            self._stepped = []
        self._parts[id(parameter)] = new
        self._parameters[id(new.shard)] = parameter
        return new

    def _shard(self, parameter: Tensor, tensor: Tensor) -> Tensor:
        """This rank's rows of a parameter or its gradient as the twin uses them, a view."""
        sharded = hasattr(tensor, "to_local")  # a gradient under shard_gradients
        rows = local(tensor) if sharded else self.rows(tensor)
        return rows if self._plain else self._distributed(rows, parameter, parameter if sharded else tensor)

    def _cut_state(self, parameter: Tensor, state: Any) -> Any:
        """This rank's part of a whole state, a copy."""

        def cut_value(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if hasattr(value, "full_tensor"):
                value = value.full_tensor()
            if value.ndim == 0 and (self._plain or parameter.ndim):
                return value.clone()
            value = value.to(parameter.device)
            if self._plain:
                return (self.rows(value) if value.shape == parameter.shape else value).clone()
            rowwise = bool(value.ndim and parameter.ndim and value.shape[0] == parameter.shape[0])
            return self._distributed((self.rows(value) if rowwise else value).clone(), parameter, value, rowwise)

        return map_leaves(cut_value, state)

    def _distributed(self, rows: Tensor, parameter: Tensor, like: Tensor, rowwise: bool = True) -> Tensor:
        """`rows` as a DTensor with the shape of `like`; without `rowwise` every rank has all rows."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Replicate, Shard

        kind = parameter.device.type
        if kind not in self._meshes:
            self._meshes[kind] = init_device_mesh(kind, (self.world.size,))
        placement = Shard(0) if rowwise and like.ndim else Replicate()
        return DTensor.from_local(
            rows, self._meshes[kind], [placement], run_check=False, shape=like.shape, stride=like.stride()
        )

    @property
    def twin(self) -> torch.optim.Optimizer:
        """The optimizer of this rank's rows."""
        self._update_twin()
        return self._twin

    def shard_of(self, parameter: Tensor) -> tuple[Tensor, Any]:
        """This rank's rows of `parameter`, and the mapping that their state is in."""
        return self._part(parameter).shard, self._twin.state

    def gradient(self, shard: Tensor) -> Tensor | None:
        """The gradient of `shard`, cut from the whole one."""
        parameter = self._parameters[id(shard)]
        return None if parameter.grad is None else self._shard(parameter, parameter.grad)

    def offset_of(self, shard: Tensor) -> int:
        """Offset of this rank's rows, in elements, from the beginning of the whole parameter's memory."""
        return int(shard.storage_offset()) - int(self._parameters[id(shard)].storage_offset())

    @property
    def counting(self) -> Counting:
        """How the ranks count gradients of shards."""
        world = self.world

        def add(totals: Tensor) -> None:
            totals.copy_(world.reduce(totals))

        return Counting(lambda shard: 1 if shard.ndim else world.size, add)

    def rows(self, tensor: Tensor) -> Tensor:
        """A view of this rank's rows of `tensor`, which has a parameter's shape."""
        return cut(tensor, self.world.rank, self.world.size)

    def gather_rows(self, parameters: Sequence[Tensor]) -> None:
        """Complete parameters in place, each rank giving its own rows. A collective."""
        RowGather([p.detach() for p in parameters], self.world, self._cap)()

    # -- the step ------------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update on all ranks together; `closure` is called once, before it."""
        loss = loss_of(closure)
        self.step_by(self._step_twin)
        return loss

    def step_by(self, step: Callable[[], Any]) -> None:
        """One update on all ranks together, in which `step` moves this rank's rows."""
        if not dist.is_initialized():
            raise StepError("this state is in shards of a run that has ended: step before close(), or build a new one")
        self._update_twin()
        parts = self._cut_gradients()
        try:
            step()
        finally:
            for part in parts:
                part.shard.grad = None
        self._copy_groups_back()
        stepped = [id(part.parameter) for part in parts]
        if stepped != self._stepped:
            self._row_gather = RowGather([part.detached for part in parts], self.world, self._cap)
            self._stepped = stepped
        self._row_gather()
        note_step(self.optimizer)

    def _cut_gradients(self) -> list[_Part]:
        parts = []
        for parameter in parameters_of(self.optimizer):
            if parameter.grad is None:
                continue
            subject = f"the parameter of shape {tuple(parameter.shape)} has"
            if parameter.grad.is_sparse:
                remedy = "make its embedding with sparse=False, or use strategy='ddp'"
                raise StepError(f"{subject} a sparse gradient, and zero1 cuts dense ones only: {remedy}")
            if id(parameter) in self._frozen:
                cause = "had requires_grad=False when its model was prepared, so that no rank averages it"
                remedy = "switch it on before prepare() (free_memory() lets you prepare anew)"
                raise StepError(f"{subject} a gradient but {cause}: {remedy}")
            part = self._parts[id(parameter)]
            part.shard.grad = self._shard(parameter, parameter.grad)
            parts.append(part)
        if self.world.debug:
            counts = self.world.gather_objects(len(parts))
            if len(set(counts)) > 1:
                raise WorldError(f"the ranks step on different numbers of gradients ({counts}): all need the same ones")
        return parts

    def _step_twin(self) -> None:
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        with amp_attributes(self._twin, scale, found_inf):
            step_without_hooks(type(self._twin))(self._twin)

    @property
    def _step_supports_amp_scaling(self) -> bool:  # torch's flag of an optimizer that reads `found_inf`
        has_all_groups = len(self._twin.param_groups) == len(self.optimizer.param_groups)
        return has_all_groups and takes_found_inf(self._twin)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    # -- param groups and state ----------------------------------------------------------------------------------------

    @property
    def state(self) -> Mapping[Any, dict[str, Any]]:  # type: ignore[override]  # an attribute in torch
        """Whole parameter → its state, read-only. Sharded tensors are DTensors on the shards' memory."""
        return _States(self)

    def laid_out(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """For each parameter, a DTensor that is sharded as the parameter's optimizer states are."""
        self._update_twin()
        shards = [self._part(p).shard for p in parameters]
        if not self._plain:
            return shards
        return [self._distributed(s.detach(), p, p) for p, s in zip(parameters, shards)]

    def replace_states(self, states: Mapping[Any, dict[str, Any]]) -> None:
        """Replace the states of whole parameters by these, in the form of `state`."""
        self._update_twin()
        self._twin.state.clear()
        for key, state in states.items():
            if isinstance(key, Tensor):
                key, state = self._part(key).shard, map_leaves(local, state) if self._plain else state
            self._twin.state[key] = state
        fill_momentum(self._twin)

    def state_dict(self) -> dict[str, Any]:
        """The whole state in torch's layout, in host memory, on every rank, for a plain optimizer too. A collective."""
        for prepare in self._optimizer_state_dict_pre_hooks.values():
            prepare(self)
        self._update_twin()
        packed = self._twin.state_dict()
        states, parameters = self.state, parameters_of(self)

        def on_host(value: Any) -> Any:
            gathered = value.full_tensor() if hasattr(value, "full_tensor") else value
            return gathered.detach().to("cpu", copy=gathered is value) if isinstance(value, Tensor) else value

        packed["state"] = {
            i: map_leaves(on_host, states[parameters[i]]) if isinstance(i, int) else state
            for i, state in packed["state"].items()
        }
        for hook in self._optimizer_state_dict_post_hooks.values():
            packed = hook(self, packed) or packed
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take this rank's part of a whole state, as `state_dict` of this or of a plain optimizer gives it."""
        state_dict = state_dict.copy()
        for prepare in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = prepare(self, state_dict) or state_dict
        self._update_twin()
        numbers = (i for group in state_dict["param_groups"] for i in group["params"])
        parameters = dict(zip(numbers, parameters_of(self)))
        states = {
            i: self._cut_state(parameters[i], state) if i in parameters else state
            for i, state in state_dict["state"].items()
        }
        self._twin.load_state_dict({**state_dict, "state": states})
        self._copy_groups_back()
        fill_momentum(self._twin)
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def __getattr__(self, name: str) -> Any:
        if name in ("_twin", "optimizer") or name.startswith("__"):
            raise AttributeError(name)
        value = getattr(self._twin, name)
        if callable(value):
            call = f"{type(self.optimizer).__name__}.{name}()"
            raise AttributeError(f"{call} would act on this rank's shards only: it is not available under zero1")
        return value

    def __repr__(self) -> str:
        return f"Sharded({self.optimizer!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise StepError("a sharded optimizer can be neither copied nor sent elsewhere: keep its state_dict()")


def holder_of(optimizer: torch.optim.Optimizer, parameter: Tensor) -> tuple[Tensor, Any]:
    """What `optimizer` steps for `parameter`, this rank's rows where states are split; and the mapping of its state."""
    if isinstance(optimizer, ShardedOptimizer):
        return optimizer.shard_of(parameter)
    return parameter, optimizer.state


class _States(Mapping[Any, dict[str, Any]]):
    """The states of a `ShardedOptimizer` by whole parameters."""

    def __init__(self, optimizer: ShardedOptimizer) -> None:
        self._optimizer = optimizer

    def __getitem__(self, key: Any) -> dict[str, Any]:
        optimizer = self._optimizer
        part = optimizer._parts.get(id(key))
        state: dict[str, Any] = optimizer._twin.state[key if part is None else part.shard] if key in self else {}
        if part is None or not optimizer._plain or not part.parameter.ndim:
            return state

        def distributed(value: Any) -> Any:
            cut = isinstance(value, Tensor) and value.ndim and value.shape == part.shard.shape
            return optimizer._distributed(value, key, key) if cut else value

        shown: dict[str, Any] = map_leaves(distributed, state)
        return shown

    def __contains__(self, key: object) -> bool:
        part = self._optimizer._parts.get(id(key))
        return (key if part is None else part.shard) in self._optimizer._twin.state

    def __iter__(self) -> Iterator[Any]:
        parameters = self._optimizer._parameters
        return iter([parameters.get(id(key), key) for key in self._optimizer._twin.state])

    def __len__(self) -> int:
        return len(self._optimizer._twin.state)


def _twin(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """An optimizer like `optimizer`, without parameters, state and hooks."""
    twin: torch.optim.Optimizer = object.__new__(type(optimizer))
    vars(twin).update(vars(optimizer))
    vars(twin).pop("step", None)  # a scheduler's wrapper, which calls `optimizer`
    vars(twin).update((name, OrderedDict()) for name in HOOKS)
    twin.param_groups = []
    twin.state = defaultdict(dict)
    return twin


def _check(optimizer: torch.optim.Optimizer) -> None:
    kind = type(optimizer).__name__
    if optimizer in _replaced:
        remedy = "build a new one, and load the state_dict() of what prepare() returned"
        raise RefusedError(f"this {kind} was prepared before, and its state went into shards: {remedy}")
    if any(group.get("differentiable") for group in optimizer.param_groups):
        cause = "keeps a graph through its step, which the gathering of shards cuts"
        raise RefusedError(f"{kind}(differentiable=True) {cause}: use strategy='ddp'")
    parameters = {id(p) for p in parameters_of(optimizer)}
    for name, value in vars(optimizer).items():
        items = value.values() if isinstance(value, Mapping) else value
        items = items if isinstance(value, (Mapping, list, tuple)) else (items,)
        if name not in NOT_SCANNED and any(
            isinstance(item, torch.optim.Optimizer) or id(item) in parameters for item in items
        ):
            cause = f"holds parameters or another optimizer in .{name}, beside its param groups"
            raise RefusedError(
                f"{kind} {cause}, and zero1 steps on a part of each parameter a rank: use strategy='ddp'"
            )


def _refuse_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if not isinstance(optimizer, ShardedOptimizer):
        kind = type(optimizer).__name__
        raise StepError(
            f"this {kind} was prepared under zero1, and its state is in shards: step what prepare() returned"
        )
