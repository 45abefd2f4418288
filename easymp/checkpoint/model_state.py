"""A model's parameters and buffers in a checkpoint, by the names that the user's module gives them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..base.dtensor import local
from ..errors import CheckpointError, StepError
from ..optim import PreparedOptimizer
from ..optim.torch_step import IMPLEMENTATION
from ..precision.mixed import LOW
from .layout import Box, Place, place_of
from .load import FullName, Reading, Trial, check_like, is_known, names_apart, once, several
from .manifest import Stored, check_number
from .snapshot import Snapshot
from .source import canonical


def nothing() -> None:
    """Puts nothing into place."""


class ModelState:
    """What `state_dict` of the user's module shows, whatever a strategy made of its tensors.

    Tensors are written to in place. What is no tensor of the module's own (extra state, what a hook of `state_dict` makes) goes through
    `load_state_dict`. Of low-precision parameters whose optimizer kept fp32 masters, a model in fp32 takes the masters; and parameters
    that have masters here take what was saved in fp32, rounded, as their masters take it whole. fp32 parameters take bf16 and fp16 ones.

    Args:
        name: "model", or "model_1" and so on.
        mastered: ids of parameters that have masters here.
    """

    def __init__(self, name: str, module: nn.Module, mastered: Collection[int] = ()) -> None:
        self._name, self._module, self._mastered = name, module, mastered

    def bring(self, into: Snapshot) -> None:
        first: dict[int, str] = {}
        tree: dict[str, Any] = {}
        own = self._own()
        for name, value in self._module.state_dict(keep_vars=True).items():
            name = canonical(name)
            if id(value) in own:
                if id(value) in first:
                    into.aliases[f"{self._name}/{name}"] = f"{self._name}/{first[id(value)]}"
                    continue
                first[id(value)] = name
            tree[name] = value
        # A BatchNorm's statistics are each rank's own until a forward shares rank 0's.
        into.add(self._name, tree, alike={id(p) for p in self._module.parameters()})

    def _own(self) -> set[int]:
        return {id(t) for t in [*self._module.parameters(), *self._module.buffers()]}

    def take(self, source: Reading) -> Callable[[], None]:
        if self._name not in source:
            source.complain(f"the checkpoint has no {self._name}")
            return nothing
        saved = source.state(self._name, tensor=FullName)
        prefix = f"{self._name}/"
        saved.update(
            {
                k.removeprefix(prefix): FullName(of)
                for k, of in source.manifest.aliases.items()
                if k.startswith(prefix)
            }
        )
        live = {
            canonical(name): (name, value) for name, value in self._module.state_dict(keep_vars=True).items()
        }
        own = self._own()
        if words := names_apart(live, saved):
            source.complain(f"{self._name}: {words}")
        fills: list[tuple[str, Box, Tensor]] = []
        filled: dict[int, tuple[str, Stored]] = {}  # id of a live tensor → its first name, and what it takes
        rest: list[str] = []
        faults: list[str] = []
        for name in [name for name in live if name in saved]:
            value, there = live[name][1], saved[name]
            if id(value) not in own:
                rest.append(name)
            elif fault := "is no tensor in the checkpoint" if not isinstance(there, FullName) else "":
                faults.append(f"{name} {fault}")
            elif (place := place_of(value)) is not None:
                path = self._path(there, value, source)
                first, known = filled.setdefault(id(value), (name, source.stored(path)))
                if fault := self._fault(source.stored(path), place, value):
                    faults.append(f"{name} {fault}")
                elif known is not source.stored(path):
                    faults.append(f"{name} and {first} are one tensor here, and two in the checkpoint")
                elif first == name:
                    fills += [(path, box, part) for box, part in place.parts]
        if faults:
            source.complain(f"{self._name}: {several(faults)}")
        if rest:
            values = {live[name][0]: source.state(self._name, within=[name]) for name in rest}
            source.trials.append(
                self._trial(values, {live[name][0]: live[name][1] for name in rest}, source.strict)
            )
        return source.overwriting(fills)

    def _path(self, name: FullName, value: Tensor, source: Reading) -> str:
        """The tensor to read for `value`: of low-precision parameters the master, for a model in fp32."""
        master = source.master(name)
        return master if master is not None and value.dtype == torch.float32 else name

    def _fault(self, stored: Stored, place: Place, value: Tensor) -> str:
        if stored.shape != place.shape:
            return f"has shape {list(stored.shape)} in the checkpoint, and {list(place.shape)} here"
        mastered = stored.dtype == torch.float32 and id(value) in self._mastered
        raised = (
            stored.dtype in LOW and value.dtype == torch.float32
        )  # by "bf16" and "fp16", at `prepare`; exact
        if stored.dtype != value.dtype and not mastered and not raised:
            return f"is {stored.dtype} in the checkpoint, and {value.dtype} here (load_weights converts)"
        return ""

    def _trial(self, values: dict[str, Any], before: dict[str, Any], strict: bool) -> Trial:
        """What is no tensor of the module's own, given to its `load_state_dict`."""
        before = dict(_copies(before))

        def change() -> None:
            ignored = [
                name
                for name in self._module.load_state_dict(values, strict=False).unexpected_keys
                if name in values
            ]
            if ignored and strict:
                raise CheckpointError(
                    f"load_state_dict does not know {several(ignored)}, which state_dict shows: take it with a hook"
                )

        def undo() -> None:
            self._module.load_state_dict(before, strict=False)

        return Trial(self._name, change, undo)


def _copies(values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        yield name, value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


# -- An optimizer's state in a checkpoint: by names of parameters, so that it fits another order of them, and other shards.


Groups = list[dict[str, Any]]
Fills = list[tuple[str, Box, Tensor]]  # full name, box, and the live part that takes it
NOT_KEPT = (
    "params",
    "param_names",
    *IMPLEMENTATION,
)  # of a param group: who is in it is known, how its step runs is this run's


class OptimizerState:
    """Param groups, what is remembered of each parameter, fp32 masters, and what its class or a hook adds to `state_dict`.

    A tensor of the shape of its parameter lies as the parameter's states do here; others are whole. Which implementation steps (fused,
    foreach, capturable) stays this run's. A run without masters passes them by, for its parameters are the masters (see `ModelState`);
    masters that the checkpoint does not have are the weights in it. The optimizer's own `load_state_dict` is called only where its class
    or a hook has a part in it.

    Args:
        name: "optimizer", or "optimizer_1" and so on.
        owner: id of a parameter → its full name in the checkpoint, such as "model/0.weight".
        apart: each rank remembers something else, of the same parameters. On another number of ranks, rank r takes what was rank
            r % n's; where ranks shall remember the same again, all take what was rank 0's.
    """

    def __init__(
        self, name: str, optimizer: PreparedOptimizer, owner: Mapping[int, str], apart: bool = False
    ) -> None:
        self._name, self._optimizer, self._apart = name, optimizer, apart
        back = {id(master): parameter for parameter, master in optimizer.masters}
        laid_out = optimizer.laid_out()
        self._names = {}
        for p, _ in laid_out:
            full = owner.get(id(back.get(id(p), p)))
            if full is None:
                raise StepError(
                    f"{type(optimizer.given).__name__} steps a parameter of shape {tuple(p.shape)} that belongs to no prepared model, so "
                    "it has no name in a checkpoint: add it to the model before prepare(), or prepare a module that holds it"
                )
            self._names[id(p)] = full
        self._parameters = {self._names[id(p)]: p for p, _ in laid_out}
        self._like = {self._names[id(p)]: like for p, like in laid_out}
        self._group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}

    @property
    def name(self) -> str:
        return self._name

    def layout(self) -> tuple[str, list[list[str]]]:
        """The optimizer's class, and the names of the parameters in each param group."""
        return type(self._optimizer.given).__name__, [group["params"] for group in self._groups()]

    def _groups(self) -> Groups:
        return [
            {
                **{k: v for k, v in group.items() if k != "params"},
                "params": [self._names[id(p)] for p in group["params"]],
            }
            for group in self._optimizer.param_groups
        ]

    def bring(self, into: Snapshot) -> None:
        inner = self._optimizer
        state: dict[str, Any] = {}
        shared: dict[str, Any] = {}
        for key in inner.state:
            if isinstance(key, Tensor):
                if inner.state[key] and id(key) in self._names:
                    state[self._names[id(key)]] = dict(inner.state[key])
            else:
                shared[key] = inner.state[key]
        kind = type(inner.given).__name__
        into.add(
            self._name,
            {
                "kind": kind,
                "groups": self._groups(),
                "updates": inner.updates,
                "shared": shared,
                "rest": inner.rest(),
            },
        )
        into.add(f"{self._name}/state", state, own=self._apart)
        into.add(f"{self._name}/masters", {self._names[id(master)]: master for _, master in inner.masters})

    def take(self, source: Reading) -> Callable[[], None]:
        if self._name not in source:
            source.complain(f"the checkpoint has no {self._name}")
            return nothing
        saved = source.state(self._name)
        kind = type(self._optimizer.given).__name__
        if saved["kind"] != kind:
            source.complain(
                f"{self._name} was a {saved['kind']}, and is a {kind} here, which remembers other things"
            )
            return nothing
        check_number(f"{self._name}/updates", saved["updates"], 0)
        groups = self._fitting_groups(saved["groups"], source)
        names = self._remembered(source)
        saved_state = source.state(names, tensor=FullName) if names else {}
        unknown = [name for name in saved_state if name not in self._parameters]
        if unknown:
            source.complain(
                f"{self._name} remembers parameters that it does not step here: {several(unknown)}"
            )
        self._check_kinds(saved_state)
        fresh: dict[Any, Any] = {}
        given = bool(saved["rest"]) or self._optimizer.listens()
        fills = self._masters(source)
        reused = None if given else Reused([*self._like.values(), *(part for _, _, part in fills)])
        unfit: list[str] = []
        for name in saved_state:
            if name in self._like and place_of(self._like[name]) is not None:
                there = self._stepped(source, name)
                if there is not None and there.shape != tuple(self._like[name].shape):
                    unfit.append(name)
                else:
                    fresh[self._parameters[name]] = self._fresh(source, names, name, reused, fills)
        if unfit:
            source.complain(f"{self._name} remembers parameters of another shape: {several(unfit)}")
        refill = source.overwriting(fills)
        if given:
            source.trials.append(self._trial(saved["rest"], groups, {**saved["shared"], **fresh}))

        def put() -> None:
            inner = self._optimizer
            inner.masters  # noqa: B018  # those that are not filled follow their parameters, which have been
            refill()
            for live, group in zip(inner.param_groups, groups):
                live.update(group)
            own = {self._parameters[name]: inner.state[self._parameters[name]] for name in unfit}
            inner.remember({**saved["shared"], **fresh, **{p: state for p, state in own.items() if state}})
            inner.updates = saved["updates"]

        return put

    # -- param groups -------------------------------------------------------------------------------------------------

    def _fitting_groups(self, saved: Groups, source: Reading) -> Groups:
        """What each live param group is to take: from the one with the same parameters, wherever it stood."""
        by_names = {frozenset(group["params"]): group for group in saved}
        fitting = []
        for i, (group, live) in enumerate(zip(self._groups(), self._optimizer.param_groups)):
            there = by_names.pop(frozenset(group["params"]), None)
            if there is None and not group["params"] and i < len(saved) and not saved[i]["params"]:
                there = saved[i]
            if there is None:
                source.complain(f"{self._name}: {self._other_group(i, group['params'], saved)}")
            taken = {k: v for k, v in (there or {}).items() if k not in NOT_KEPT}
            check_like(f"param group {i} of {self._name}", taken, dict(live))
            fitting.append({k: _like(live.get(k), v) for k, v in taken.items()})
        if len(saved) != len(fitting):
            source.complain(f"{self._name} had {len(saved)} param groups, and has {len(fitting)} here")
        return fitting

    @staticmethod
    def _other_group(number: int, params: list[str], saved: Groups) -> str:
        nearest = max(saved, key=lambda group: len({*group["params"]} & {*params}), default=None)
        if nearest is None:
            return "the checkpoint has no param groups"
        words = names_apart(params, nearest["params"])
        return f"param group {number} has other parameters than any in the checkpoint; against its group {saved.index(nearest)}: {words}"

    # -- what is remembered of each parameter -------------------------------------------------------------------------

    def _remembered(self, source: Reading) -> str:
        """The name under which that is kept; "" where it is not."""
        shared = f"{self._name}/state"
        if shared in source:
            return shared
        own = source.named(shared, True) if self._apart else f"ranks/00000/{shared}"
        if own in source:
            return own
        source.complain(f"the checkpoint has no {shared}")
        return ""

    def _check_kinds(self, saved: Any) -> None:
        """What is remembered of a parameter is a dict; of torch's classes and easymp's, one without text, and of the same kinds as of the
        other parameters."""
        kinds: dict[Any, Any] = {}
        known = is_known(self._optimizer.given)
        check_like(f"{self._name}/state", saved, kinds)
        for name, state in saved.items():
            what = f"{self._name}/state[{name!r:.80}]"
            check_like(what, state, kinds if known else {})
            for key, value in state.items() if known else ():
                if isinstance(value, (str, bytes)) and not isinstance(value, FullName):
                    raise CheckpointError(
                        f"{what}[{key!r:.80}] is {value!r:.80}, which no optimizer keeps: load another checkpoint"
                    )
                if value is not None:
                    kinds.setdefault(key, value)

    @staticmethod
    def _stepped(source: Reading, name: str) -> Stored | None:
        """A parameter as it was stepped: its master, where it had one."""
        path = source.master(name) or name
        return source.manifest.tensors.get(source.manifest.aliases.get(path, path))

    def _fresh(self, source: Reading, names: str, name: str, reused: Reused | None, fills: Fills) -> Any:
        """The state of one parameter, in new tensors; or in its own ones, where `reused` takes them, which join `fills`."""
        parameter, like = self._parameters[name], self._like[name]
        group = self._group_of[id(parameter)]
        there = self._stepped(source, name)
        live = self._optimizer.state.get(parameter) or {}

        def tensor(path: str) -> Tensor:
            stored = source.stored(path)
            if path.endswith("/step") and not (group.get("fused") or group.get("capturable")):
                return source.whole(path)  # as torch keeps it: on the CPU
            dtype = (
                like.dtype
                if there is not None and stored.dtype == there.dtype and there.shape == like.shape
                else stored.dtype
            )
            key = path.removeprefix(f"{names}/{name}/")
            if (
                reused is not None
                and (parts := reused.parts(live.get(key), like, stored.shape, dtype)) is not None
            ):
                fills.extend((path, box, part) for box, part in parts)
                return live[key]
            made = _laid_out(like, stored.shape, dtype)
            place = place_of(made)
            assert place is not None, "the parameter lies here"
            for box, part in place.parts:
                source.fill(path, box, part)
            return made

        return source.state(names, tensor=tensor, within=[name])

    # -- masters, and what else there may be --------------------------------------------------------------------------

    def _masters(self, source: Reading) -> Fills:
        """Parts of masters, and what they are to take: what they were; else the weights in the checkpoint."""
        fills: Fills = []
        for _, master in self._optimizer.masters:
            name = self._names[id(master)]
            path = source.master(name) or name
            place, stored = place_of(master), self._stepped(source, name)
            if place is not None and stored is not None and stored.shape == place.shape:
                fills += [(path, box, part) for box, part in place.parts]
        return fills

    def _trial(self, rest: dict[str, Any], groups: Groups, states: Mapping[Any, Any]) -> Trial:
        """All of it through `load_state_dict`, which its class or a hook has a part in."""
        inner = self._optimizer
        before: list[Any] = []

        def change() -> None:
            before.append(copy.deepcopy(inner.state_dict()))
            now = inner.state_dict()
            merged = [{**own, **taken} for own, taken in zip(now["param_groups"], groups)]
            held = [p for group in inner.param_groups for p in group["params"]]
            numbers = dict(zip(map(id, held), (n for group in merged for n in group["params"])))
            numbered = {
                numbers[id(key)] if isinstance(key, Tensor) else key: state for key, state in states.items()
            }
            inner.load_state_dict({**now, "state": numbered, "param_groups": merged, **rest})

        def undo() -> None:
            if before:
                inner.load_state_dict(before.pop())

        return Trial(self._name, change, undo)


def _like(live: Any, saved: Any) -> Any:
    """An option of a param group: a tensor where the live one is."""
    return saved.to(live.device) if isinstance(saved, Tensor) and isinstance(live, Tensor) else saved


def _laid_out(like: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A new tensor for the state of a parameter: where it has the parameter's shape, in the parameter's layout."""
    if shape == tuple(like.shape):
        return torch.empty_like(like, dtype=dtype, requires_grad=False)
    whole = torch.empty(shape, dtype=dtype, device=like.device)
    if not hasattr(like, "to_local") or not shape:
        return whole
    from torch.distributed.tensor import (
        DTensor,
        Replicate,
    )  # DTensors are here, so its long import has been paid

    return DTensor.from_local(whole, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False)


# -- Which tensors of an optimizer a load reads into, rather than put new ones in their place: the state then lies in memory once.


Parts = list[tuple[Box, Tensor]]


class Reused:
    """The tensors that were chosen; none is chosen twice, nor one that lies where a tensor of `others` does."""

    def __init__(self, others: Iterable[Tensor]) -> None:
        self._taken = {local(t).data_ptr() for t in others}

    def parts(self, live: Any, like: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Parts | None:
        """Those of `live`, if it is what a new state of this shape and dtype would be, for a parameter that lies as `like` does."""
        if not isinstance(live, Tensor) or (tuple(live.shape), live.dtype, live.device) != (
            shape,
            dtype,
            like.device,
        ):
            return None
        spread = [(getattr(t, "device_mesh", None), getattr(t, "placements", None)) for t in (live, like)]
        if spread[0] != (spread[1] if shape == tuple(like.shape) else (None, None)):
            return None
        memory = local(live)
        if (
            type(memory) is not Tensor
            or memory.requires_grad
            or memory.layout is not torch.strided
            or memory.is_inference()
        ):
            return None
        place = place_of(live)
        if (
            place is None
            or memory.data_ptr() in self._taken
            or any(once(box, part)[0] != box for box, part in place.parts)
        ):
            return None
        if memory.numel():
            self._taken.add(memory.data_ptr())
        return list(place.parts)
