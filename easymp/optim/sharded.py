"""An optimizer whose state is split over the ranks (ZeRO-1); parameters and gradients stay whole on every rank.

Each rank has a twin of the user's optimizer, which knows only this rank's rows of each parameter. They are views: the twin's step
writes into the whole parameters, and the rows of the other ranks are gathered afterwards. Tensors are cut along dimension 0 as
torch.chunk does (and FSDP2): ceil(length / ranks) rows each, the last ranks fewer or none; one without dimensions is not cut.
Twins of optimizers that work element by element step on plain tensors (fused, foreach), those of others on DTensors (`elementwise`).
From outside, the states are DTensors either way, so another number of ranks can read a checkpoint of them.
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
from ..precision.scaler import takes_found_inf
from .fused import FusedOptimizer
from .torch_step import HOOKS, evaluated, fill_momentum, indifferent, parameters_of, step_without_hooks

ALONE = 2**20  # bytes from which a tensor is gathered in place; smaller ones are packed into one collective
AT_A_TIME = 2  # collectives under way while the next is packed

# The older name warns from torch 2.13 on.
_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def cut(tensor: Tensor, rank: int, size: int) -> Tensor:
    """Rows of rank `rank` of `size`, a view."""
    if not tensor.ndim:
        return tensor
    length = tensor.shape[0]
    each = -(-length // size)
    start = min(rank * each, length)
    return tensor.narrow(0, start, min(each, length - start))


def packed_at_once(tensors: Sequence[Tensor], cap: int) -> int:
    """Elements in the buffers of a `RowGather` of `tensors`, at its peak."""
    small = [t for t in tensors if not _alone(t)]
    width = max((t.element_size() for t in small), default=1)
    return min(sum(t.numel() for t in small), (AT_A_TIME + 1) * cap // width)


def _alone(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.element_size() >= ALONE and tensor.is_contiguous()


class RowGather:
    """Completes tensors in place, each rank giving its own rows; packs up to `cap` bytes. Calling it is a collective."""

    def __init__(self, tensors: Sequence[Tensor], world: World, cap: int) -> None:
        self._world = world
        self._transfers: list[tuple[Callable[..., Iterator[None]], Any]] = []
        small: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for tensor in tensors:
            if tensor.ndim == 0 or tensor.numel() == 0:
                continue
            if tensor.is_complex():
                tensor = torch.view_as_real(tensor)
            if _alone(tensor):
                even = tensor.shape[0] % world.size == 0
                self._transfers.append((self._even if even else self._ragged, tensor))
            else:
                small.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        for alike in small.values():
            held = cap + 1  # so that the first one begins a bucket
            for tensor in alike:
                size = tensor.numel() * tensor.element_size()
                held += size
                if held > cap:
                    bucket: list[Tensor] = []
                    self._transfers.append((self._packed, bucket))
                    held = size
                bucket.append(tensor)

    def __call__(self) -> None:
        under_way: deque[Iterator[None]] = deque()
        with torch.no_grad(), self._world.explained("the gathering of parameters"):
            for transfer, tensors in self._transfers:
                running = transfer(tensors)
                next(running)
                under_way.append(running)
                if len(under_way) > AT_A_TIME:
                    next(under_way.popleft(), None)
            for running in under_way:
                next(running, None)

    # Each starts its collective, and waits for its end when it is asked again. It sends bytes, so any dtype will do.

    def _even(self, tensor: Tensor) -> Iterator[None]:
        flat = tensor.view(-1).view(torch.uint8)
        work = _gather(flat, flat.chunk(self._world.size)[self._world.rank], async_op=True)
        yield
        work.wait()

    def _ragged(self, tensor: Tensor) -> Iterator[None]:
        parts = [cut(tensor, rank, self._world.size) for rank in range(self._world.size)]
        works = [
            dist.broadcast(part.view(-1).view(torch.uint8), rank, async_op=True)
            for rank, part in enumerate(parts)
            if part.numel()
        ]
        yield
        for work in works:
            work.wait()

    def _packed(self, tensors: list[Tensor]) -> Iterator[None]:
        size, rank = self._world.size, self._world.rank
        room = [-(-t.shape[0] // size) * t[0].numel() for t in tensors]  # elements of the largest part
        whole = tensors[0].new_empty(size, sum(room))
        parts = [cut(t, rank, size).reshape(-1) for t in tensors]
        mine = [here[: part.numel()] for here, part in zip(whole[rank].split(room), parts)]
        torch._foreach_copy_(mine, parts)
        work = _gather(whole.view(-1).view(torch.uint8), whole[rank].view(torch.uint8), async_op=True)
        yield
        work.wait()
        # Only the last parts are shorter, so the parts in a row begin with the whole tensor.
        columns = zip(tensors, whole.split(room, dim=1))
        torch._foreach_copy_(tensors, [c.reshape(-1)[: t.numel()].view(t.shape) for t, c in columns])


# torch's optimizers that step element by element: parts of their parameters do as well as whole ones. Others may read whole matrices
# (Muon does), and step on DTensors, whose norms and products are those of the whole matrix.
_NAMES = "Adam AdamW SGD Adagrad RMSprop Adadelta Adamax NAdam RAdam ASGD Rprop".split()
ELEMENTWISE = tuple(getattr(torch.optim, name) for name in _NAMES)
# Before this torch, a DTensor that is a pending sum adds a number on each rank: `p.norm() + eps`, `p.sum() + 1` are wrong.
SUMS_ARE_RIGHT = (2, 11)


def elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `optimizer` can step on plain tensors that are parts of its parameters."""
    if isinstance(optimizer, FusedOptimizer):
        return optimizer.rule.survey is None
    return type(optimizer) in ELEMENTWISE


def check_sums(optimizer: torch.optim.Optimizer, strategy: str) -> None:
    """Refuse optimizers that this torch's DTensors may step wrongly, without an error."""
    if TORCH < SUMS_ARE_RIGHT and not isinstance(optimizer, (*ELEMENTWISE, FusedOptimizer)):
        raise SettingError(
            f"strategy {strategy!r} cannot take {type(optimizer).__name__} with torch {torch.__version__}, whose sharded tensors add "
            f"wrongly to a sum or norm of themselves: update torch to {'.'.join(map(str, SUMS_ARE_RIGHT))} or newer, use strategy='ddp', "
            "or an optimizer that steps element by element, such as AdamW"
        )


# -- the optimizer ----------------------------------------------------------------------------------------------------------

OWN = {"param_groups", "state", "defaults", "step", *HOOKS}  # not scanned for other references to parameters

# Optimizers that have a sharded one in their place.
_taken: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


class _Part(NamedTuple):
    """A parameter, and the twin's part of it."""

    parameter: Tensor
    whole: Tensor  # the parameter, outside of autograd
    shard: Tensor  # this rank's rows, as the twin's parameter
    place: int  # address of the whole one when it was cut


class ShardedOptimizer(torch.optim.Optimizer):
    """Steps in place of `given`, whose param groups stay the ones to read and write; a step is a collective.

    `given` can no longer step itself. Its state, and any state loaded into it, moves to the shards; its hooks fire here.

    Args:
        given: the user's optimizer, on whole parameters.
        cap: bytes that are packed into one collective.
        frozen: ids of the parameters whose gradients are not averaged over the ranks.
    """

    def __init__(self, given: torch.optim.Optimizer, world: World, cap: int, frozen: Collection[int]) -> None:
        _check(given)
        check_sums(given, "zero1")
        self.given = given
        self.world, self._cap, self._frozen = world, cap, frozen
        self._plain = elementwise(given)
        self._parts: dict[int, _Part] = {}
        self._wholes: dict[int, Tensor] = {}  # id of a shard → its parameter
        self._meshes: dict[str, Any] = {}
        self._stepped: list[int] = []  # ids of the parameters of the last step
        self._row_gather = RowGather((), world, cap)
        for name in HOOKS:  # shared: hooks that are registered later with either fire, too
            setattr(self, name, vars(given)[name])
        self._patch_step_function()  # torch's own __init__ would build param groups and state a second time
        self._twin = _twin(given)
        if self._plain and isinstance(self._twin, FusedOptimizer):
            self._twin.first = self._first
        self._follow()
        given.register_step_pre_hook(_refuse_alone)
        _taken.add(given)

    def _follow(self) -> None:
        """Give the twin the param groups and the state that `given` has now."""
        before = len(self._parts)
        groups = self.given.param_groups
        mine = self._twin.param_groups
        mine += ({} for _ in groups[len(mine) :])
        for theirs, own in zip(groups, mine):
            own.update(theirs)
            own["params"] = [self._part(p).shard for p in theirs["params"]]
        if self.given.state:
            for parameter, state in self.given.state.items():
                key = parameter
                if isinstance(parameter, Tensor):
                    key = self._part(parameter).shard
                    state = map_leaves(lambda v, p=parameter: self._cut(p, v), state)
                self._twin.state[key] = state
            self.given.state.clear()
        if len(self._parts) != before:
            fill_momentum(self._twin)

    @property
    def twin(self) -> torch.optim.Optimizer:
        """The optimizer of this rank's rows; `mine` maps a parameter to its rows."""
        self._follow()
        return self._twin

    def mine(self, parameter: Tensor) -> tuple[Tensor, Any]:
        """This rank's rows of `parameter`, and where their state is."""
        return self._part(parameter).shard, self._twin.state

    def gradient(self, shard: Tensor) -> Tensor | None:
        """The gradient of `shard`, cut from the whole one."""
        parameter = self._wholes[id(shard)]
        return None if parameter.grad is None else self._shard(parameter, parameter.grad)

    def _first(self, shard: Tensor) -> int:
        """The number of the first element of this rank's rows in the memory of the whole parameter."""
        return shard.storage_offset() - self._wholes[id(shard)].storage_offset()

    def rows(self, whole: Tensor) -> Tensor:
        """This rank's rows of a tensor that has a parameter's shape, a view."""
        return cut(whole, self.world.rank, self.world.size)

    def gather_rows(self, parameters: Sequence[Tensor]) -> None:
        """Complete parameters in place, each rank giving its own rows. A collective."""
        RowGather([p.detach() for p in parameters], self.world, self._cap)()

    def _lead(self) -> None:
        """Copy the twin's entries of param groups to those of `given`."""
        for theirs, own in zip(self.given.param_groups, self._twin.param_groups):
            theirs.update((name, value) for name, value in own.items() if name != "params")

    def _part(self, parameter: Tensor) -> _Part:
        part = self._parts.get(id(parameter))
        if part is not None and part.place == parameter.data_ptr():
            return part
        whole = parameter.detach()
        shard = self._shard(parameter, whole).requires_grad_(parameter.dtype.is_floating_point)
        new = _Part(parameter, whole, shard, parameter.data_ptr())
        if part is not None:  # `p.data = …` has given it other memory
            if part.shard in self._twin.state:
                self._twin.state[new.shard] = self._twin.state.pop(part.shard)
            self._stepped = []
        self._parts[id(parameter)] = new
        self._wholes[id(new.shard)] = parameter
        return new

    def _shard(self, parameter: Tensor, whole: Tensor) -> Tensor:
        """This rank's rows of `whole` as the twin wants them, a view."""
        cut_here = hasattr(whole, "to_local")  # a gradient under shard_gradients
        here = local(whole) if cut_here else self.rows(whole)
        return here if self._plain else self._distributed(here, parameter, parameter if cut_here else whole)

    def _cut(self, parameter: Tensor, value: Any) -> Any:
        """This rank's part of an entry of a whole state, a copy."""
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
        here = self.rows(value) if rowwise else value
        return self._distributed(here.clone(), parameter, value, rowwise)

    def _distributed(self, here: Tensor, parameter: Tensor, whole: Tensor, rowwise: bool = True) -> Tensor:
        # Half a second, which most runs do not need.
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Replicate, Shard

        kind = parameter.device.type
        if kind not in self._meshes:
            self._meshes[kind] = init_device_mesh(kind, (self.world.size,))
        placement = Shard(0) if rowwise and whole.ndim else Replicate()
        return DTensor.from_local(
            here, self._meshes[kind], [placement], run_check=False, shape=whole.shape, stride=whole.stride()
        )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update on all ranks together; `closure` is called once, before it."""
        loss = evaluated(closure)
        self.step_by(self._step_twin)
        return loss

    def step_by(self, step: Callable[[], Any]) -> None:
        """One update on all ranks together, in which `step` moves this rank's rows."""
        if not dist.is_initialized():
            why = "this optimizer's state is in shards of a run that has ended"
            raise StepError(f"{why}: step before close(), or build a new one")
        self._follow()
        parts = self._take_gradients()
        try:
            step()
        finally:
            for part in parts:
                part.shard.grad = None
        self._lead()
        stepped = [id(part.parameter) for part in parts]
        if stepped != self._stepped:
            self._row_gather = RowGather([part.whole for part in parts], self.world, self._cap)
            self._stepped = stepped
        self._row_gather()
        if hasattr(vars(self.given).get("step"), "_wrapped_by_lr_sched"):
            self.given._opt_called = True  # type: ignore[attr-defined]  # by which torch's schedulers know the order of calls

    def _take_gradients(self) -> list[_Part]:
        parts = []
        for parameter in parameters_of(self.given):
            grad, shape = parameter.grad, tuple(parameter.shape)
            if grad is None:
                continue
            if grad.is_sparse:
                why = f"the parameter of shape {shape} has a sparse gradient, and zero1 cuts dense ones only"
                raise StepError(f"{why}: make its embedding with sparse=False, or use strategy='ddp'")
            if id(parameter) in self._frozen:
                why = f"the parameter of shape {shape} has a gradient but had requires_grad=False"
                ways = "switch it on before prepare() (free_memory() lets you prepare anew)"
                raise StepError(f"{why} when its model was prepared, so that no rank averages it: {ways}")
            part = self._parts[id(parameter)]
            part.shard.grad = self._shard(parameter, grad)
            parts.append(part)
        if self.world.debug:
            count = self.world.gather_objects(len(parts))
            if len(set(count)) > 1:
                why = f"the ranks step on different numbers of gradients ({count})"
                raise WorldError(f"{why}: all must have the same ones")
        return parts

    def _step_twin(self) -> None:
        # torch's own protocol for fused optimizers under a loss scale.
        told = {name: vars(self)[name] for name in ("found_inf", "grad_scale") if name in vars(self)}
        vars(self._twin).update(told)
        try:
            step_without_hooks(type(self._twin))(self._twin)
        except RuntimeError as error:  # NotImplementedError is one
            signs = ("dtensor", "sharding strategy", "sharding propagation", "placement changes")
            if self._plain or not any(sign in str(error).lower() for sign in signs):
                raise
            why = f"cannot step on sharded parameters ({str(error).splitlines()[0]})"
            raise StepError(f"{type(self.given).__name__} {why}: use strategy='ddp'") from error
        finally:
            for name in told:
                del vars(self._twin)[name]

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """torch's word for an optimizer that reads `found_inf`."""
        return takes_found_inf(self._twin)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.given.param_groups

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.given.defaults

    @property
    def state(self) -> Mapping[Any, dict[str, Any]]:  # type: ignore[override]
        """Whole parameter → its state; tensors that are cut are DTensors on the shards' memory. Read only."""
        return States(self)

    def laid_out(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Whole parameters as DTensors whose shards are those of their states."""
        self._follow()
        shards = [self._part(p).shard for p in parameters]
        if not self._plain:
            return shards
        return [self._distributed(s.detach(), p, p) for p, s in zip(parameters, shards)]

    def remember(self, states: Mapping[Any, dict[str, Any]]) -> None:
        """Replace the states of whole parameters by these, in the form of `state`."""
        self._follow()
        self._twin.state.clear()
        for key, state in states.items():
            if isinstance(key, Tensor):
                key, state = self._part(key).shard, map_leaves(local, state) if self._plain else state
            self._twin.state[key] = state
        fill_momentum(self._twin)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.given.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """On all ranks; the parameters are a prepared model's."""
        self.given.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The whole state in torch's layout, in host memory, on every rank: a plain optimizer can load it. A collective."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        self._follow()
        packed = self._twin.state_dict()
        order = parameters_of(self)
        packed["state"] = {
            i: map_leaves(lambda v, p=order[i]: self._whole(p, v), state) if isinstance(i, int) else state
            for i, state in packed["state"].items()
        }
        for after in self._optimizer_state_dict_post_hooks.values():
            packed = after(self, packed) or packed
        return packed

    def _whole(self, parameter: Tensor, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if hasattr(value, "full_tensor"):
            return value.full_tensor().cpu()
        if self._is_cut(parameter, value):
            whole = value.new_empty(parameter.shape)
            self.rows(whole).copy_(value)
            RowGather([whole], self.world, self._cap)()
            return whole.cpu()
        return value.detach().cpu().clone()

    def _is_cut(self, parameter: Tensor, value: Tensor) -> bool:
        both = self._plain and value.ndim and parameter.ndim
        return bool(both and value.shape == self._parts[id(parameter)].shard.shape)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take this rank's part of a whole state, as `state_dict` of this or of a plain optimizer gives it."""
        state_dict = state_dict.copy()
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        self._follow()
        order = parameters_of(self)
        named = dict(zip((i for group in state_dict["param_groups"] for i in group["params"]), order))
        parts = {
            i: map_leaves(lambda v, p=named[i]: self._cut(p, v), state) if i in named else state
            for i, state in state_dict["state"].items()
        }
        self._twin.load_state_dict({**state_dict, "state": parts})
        self._lead()
        fill_momentum(self._twin)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def __getattr__(self, name: str) -> Any:
        if name in ("_twin", "given") or name.startswith("__"):
            raise AttributeError(name)
        value = getattr(self._twin, name)
        if callable(value):
            why = "would act on this rank's shards only: it is not available under zero1"
            raise AttributeError(f"{type(self.given).__name__}.{name}() {why}")
        return value

    def __repr__(self) -> str:
        return f"Sharded({self.given!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise StepError("a sharded optimizer can be neither copied nor sent elsewhere: keep its state_dict()")


def holder_of(optimizer: torch.optim.Optimizer, parameter: Tensor) -> tuple[Tensor, Any]:
    """The tensor that `optimizer` steps for `parameter`, this rank's rows where states are split, and the mapping of its state."""
    if isinstance(optimizer, ShardedOptimizer):
        return optimizer.mine(parameter)
    return parameter, optimizer.state


class States(Mapping[Any, dict[str, Any]]):
    """The states of a `ShardedOptimizer` by whole parameters."""

    def __init__(self, optimizer: ShardedOptimizer) -> None:
        self._optimizer = optimizer

    def __getitem__(self, key: Any) -> dict[str, Any]:
        it = self._optimizer
        part = it._parts.get(id(key))
        state = it._twin.state[key if part is None else part.shard] if key in self else {}
        if part is None or not it._plain:
            return state

        def shown(value: Any) -> Any:
            is_cut = isinstance(value, Tensor) and it._is_cut(key, value)
            return it._distributed(value, key, key) if is_cut else value

        return map_leaves(shown, state)

    def __contains__(self, key: object) -> bool:
        part = self._optimizer._parts.get(id(key))
        return (key if part is None else part.shard) in self._optimizer._twin.state

    def __iter__(self) -> Iterator[Any]:
        wholes = {id(part.shard): part.parameter for part in self._optimizer._parts.values()}
        return iter([wholes.get(id(key), key) for key in self._optimizer._twin.state])

    def __len__(self) -> int:
        return len(self._optimizer._twin.state)


def _twin(given: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """An optimizer like `given`, without parameters, state and hooks; not by its constructor, whose arguments are not known."""
    twin: torch.optim.Optimizer = object.__new__(type(given))
    vars(twin).update(vars(given))
    vars(twin).pop("step", None)  # a scheduler's wrapper, which calls `given`
    vars(twin).update((name, OrderedDict()) for name in HOOKS)
    twin.param_groups = []
    twin.state = defaultdict(dict)
    return twin


def _check(given: torch.optim.Optimizer) -> None:
    kind = type(given).__name__
    if given in _taken:
        why = f"this {kind} was prepared before, and its state went into shards"
        raise RefusedError(f"{why}: build a new one, and load the state_dict() of what prepare() returned")
    if any(group.get("differentiable") for group in given.param_groups):
        why = "keeps a graph through its step, which the gathering of shards cuts"
        raise RefusedError(f"{kind}(differentiable=True) {why}: use strategy='ddp'")
    held = {id(p) for group in given.param_groups for p in group["params"]}
    for name, value in vars(given).items():
        items = value.values() if isinstance(value, Mapping) else value
        items = items if isinstance(value, (Mapping, list, tuple)) else (items,)
        if name not in OWN and any(isinstance(i, torch.optim.Optimizer) or id(i) in held for i in items):
            why = f"{kind} holds parameters or another optimizer in .{name}, beside its param groups"
            raise RefusedError(
                f"{why}, and zero1 steps on a part of each parameter a rank: use strategy='ddp'"
            )


def _refuse_alone(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if not isinstance(optimizer, ShardedOptimizer):
        why = "was prepared under zero1, and its state is in shards"
        raise StepError(f"this {type(optimizer).__name__} {why}: step what prepare() returned")


indifferent.add(_refuse_alone)
