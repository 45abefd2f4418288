"""Models and optimizers in a checkpoint, by the names that the user's modules give their parameters.

An optimizer's state can therefore be loaded with parameters in another order and in other shards.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..base.dtensor import local
from ..errors import CheckpointError, StepError
from ..optim import PreparedOptimizer
from ..optim.torch_step import IMPLEMENTATION
from ..precision.policies import LOW
from .codec import names
from .load import FullName, Reading, Trial, check_like, is_known, names_apart, several
from .manifest import Box, Place, Stored, canonical, check_number, places_of
from .snapshot import Snapshot

Groups = list[dict[str, Any]]
Fills = list[tuple[str, Box, Tensor]]  # full name, chunk, and the live part that takes it
# Entries of a param group that are not loaded: the parameters, and the implementation of the step.
NOT_KEPT = ("params", "param_names", *IMPLEMENTATION)


KIND = "tensor subclass"  # key of the class's name, beside the tensors that a subclass is made of


def _parted(value: Any) -> Any:
    """A tensor subclass (torchao's 8-bit states) as the plain tensors in it, its class and the rest; other values as they are."""
    flatten = getattr(value, "__tensor_flatten__", None)
    if flatten is None or hasattr(value, "to_local"):
        return value
    inner, context = flatten()
    kind = f"{type(value).__module__}:{type(value).__qualname__}"
    return {KIND: kind, "context": context, "parts": {name: getattr(value, name) for name in inner}}


def _joined(value: Any) -> Any:
    """The tensor subclass of its parts. Its class is one that this process has loaded: no file makes it import a module."""
    if not isinstance(value, dict) or KIND not in value:
        return value
    module, _, name = str(value[KIND]).partition(":")
    kind = getattr(sys.modules.get(module), name, None)
    is_tensor = isinstance(kind, type) and issubclass(kind, Tensor)
    if not is_tensor or not hasattr(kind, "__tensor_unflatten__"):
        raise CheckpointError(f"the state is a {value[KIND]}, which is not loaded: import {module} first")
    return kind.__tensor_unflatten__(value["parts"], value["context"], None, None)


def leave() -> None:
    """Change nothing."""


class ModelState:
    """The `state_dict` of the user's module, with tensors in any layout; `mastered` holds ids of parameters that have fp32 masters.

    Tensors are written to in place; other values go through `load_state_dict`. An fp32 model loads the masters of low-precision parameters;
    parameters with masters load fp32 values rounded, and their masters unrounded. fp32 parameters load bf16 and fp16 values.
    """

    def __init__(self, name: str, module: nn.Module, mastered: Collection[int] = ()) -> None:
        self._name, self._module, self._mastered = name, module, mastered

    def _state(self) -> tuple[dict[str, Any], set[int]]:
        """Return the live state, and the ids of the module's own tensors in it."""
        own = {id(t) for t in [*self._module.parameters(), *self._module.buffers()]}
        return self._module.state_dict(keep_vars=True), own

    def collect(self, into: Snapshot) -> None:
        first: dict[int, str] = {}
        tree: dict[str, Any] = {}
        state, own = self._state()
        for name, value in state.items():
            name = canonical(name)
            if id(value) in first:
                into.aliases[f"{self._name}/{name}"] = f"{self._name}/{first[id(value)]}"
                continue
            if id(value) in own:
                first[id(value)] = name
            tree[name] = value
        # BatchNorm statistics differ between ranks until a forward broadcasts rank 0's.
        into.add(self._name, tree, alike={id(p) for p in self._module.parameters()})

    def restore(self, source: Reading) -> Callable[[], None]:
        if self._name not in source:
            source.complain(f"the checkpoint has no {self._name}")
            return leave
        saved = source.state(self._name, tensor=FullName)
        prefix = f"{self._name}/"
        for alias, of in source.manifest.aliases.items():
            if alias.startswith(prefix):
                saved[alias.removeprefix(prefix)] = FullName(of)
        state, own = self._state()
        live = {canonical(name): (name, value) for name, value in state.items()}
        if words := names_apart(live, saved):
            source.complain(f"{self._name}: {words}")
        there = [name for name in live if name in saved]
        rest = [name for name in there if id(live[name][1]) not in own]
        found = {n: saved[n] for n in there if id(live[n][1]) in own and isinstance(saved[n], FullName)}
        faults = [f"{n} is not a tensor in the checkpoint" for n in there if n not in found and n not in rest]
        fills: Fills = []
        filled: dict[int, tuple[str, Stored]] = {}  # id of a live tensor → its first name, and what it takes
        for name, path, stored, place in self._sources(source, found, {n: live[n][1] for n in found}):
            value = live[name][1]
            first, known = filled.setdefault(id(value), (name, stored))
            if stored.shape != place.shape:
                words = f"has shape {list(stored.shape)} in the checkpoint, and {list(place.shape)} here"
                faults.append(f"{name} {words}")
            elif not self._takes(value, stored.dtype):
                words = f"is {stored.dtype} in the checkpoint, and {value.dtype} here (load_weights converts)"
                faults.append(f"{name} {words}")
            elif known is not stored:
                faults.append(f"{name} and {first} are one tensor here, and two in the checkpoint")
            elif first == name:
                fills += [(path, box, part) for box, part in place.parts]
        if faults:
            source.complain(f"{self._name}: {several(faults)}")
        if rest:
            values = source.state(self._name, only=rest)
            named = {live[name][0]: values[name] for name in rest}
            source.trials.append(self._trial(named, dict(live[name] for name in rest), source.strict))
        return source.overwriting(fills)

    def _sources(
        self, source: Reading, found: Mapping[str, str], live: Mapping[str, Tensor]
    ) -> list[tuple[str, str, Stored, Place]]:
        """Each live tensor here: its name, the stored tensor to read (its fp32 master if there is one), and its chunks."""
        paths = [
            (value.dtype == torch.float32 and source.master(path)) or path
            for path, value in zip(found.values(), live.values())
        ]
        stored = [source.stored(path) for path in paths]
        every = zip(found, paths, stored, places_of(live.values()))
        return [(name, path, at, place) for name, path, at, place in every if place is not None]

    def _takes(self, value: Tensor, dtype: torch.dtype) -> bool:
        """Whether the live tensor `value` can hold values of `dtype` exactly, or has a master that can."""
        mastered = dtype == torch.float32 and id(value) in self._mastered
        return dtype == value.dtype or mastered or (dtype in LOW and value.dtype == torch.float32)

    def _trial(self, values: dict[str, Any], live: dict[str, Any], strict: bool) -> Trial:
        """Load values that are not the module's own tensors through its `load_state_dict`."""
        before = {
            name: value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)
            for name, value in live.items()
        }

        def change() -> None:
            unknown = self._module.load_state_dict(values, strict=False).unexpected_keys
            ignored = [name for name in unknown if name in values]
            if ignored and strict:
                raise CheckpointError(f"load_state_dict does not know {several(ignored)}: use a hook")

        def undo() -> None:
            self._module.load_state_dict(before, strict=False)

        return Trial(self._name, change, undo)


class OptimizerState:
    """An optimizer's param groups, its state of each parameter, fp32 masters, and what its class or hooks add to `state_dict`.

    A tensor of its parameter's shape is laid out like the parameter's states here; others are whole. The implementation of the step stays
    this run's. A run without masters loads saved masters into its parameters; masters that the checkpoint lacks are loaded from weights.
    `owner` maps ids of parameters to full names. `apart`: ranks have different states; on another number of ranks, rank r loads those of
    rank r % n, and a run whose ranks share their states loads rank 0's.
    """

    def __init__(
        self, name: str, optimizer: PreparedOptimizer, owner: Mapping[int, str], apart: bool = False
    ) -> None:
        self.name, self._optimizer, self._apart = name, optimizer, apart
        back = {id(master): parameter for parameter, master in optimizer.masters}
        self._names: dict[int, str] = {}
        self._parameters: dict[str, Tensor] = {}
        self._like: dict[str, Any] = {}
        for p, like in optimizer.laid_out():
            full = owner.get(id(back.get(id(p), p)))
            if full is None:
                raise StepError(
                    f"{type(optimizer.given).__name__} steps a parameter of shape {tuple(p.shape)} that belongs to no prepared model, so "
                    "it has no name in a checkpoint: add it to the model before prepare(), or prepare a module that holds it"
                )
            self._names[id(p)], self._parameters[full], self._like[full] = full, p, like
        self._group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}

    @property
    def kind(self) -> str:
        """The optimizer's class."""
        return type(self._optimizer.given).__name__

    def groups(self) -> Groups:
        """The param groups, with parameter names in place of parameters."""
        groups = self._optimizer.param_groups
        return [{**group, "params": [self._names[id(p)] for p in group["params"]]} for group in groups]

    def collect(self, into: Snapshot) -> None:
        inner = self._optimizer
        state: dict[str, Any] = {}
        shared: dict[str, Any] = {}
        for key, value in inner.state.items():
            if not isinstance(key, Tensor):
                shared[key] = value
            elif value and id(key) in self._names:
                state[self._names[id(key)]] = {name: _parted(part) for name, part in value.items()}
        facts = {"kind": self.kind, "groups": self.groups(), "updates": inner.updates}
        into.add(self.name, {**facts, "shared": shared, "rest": inner.rest()})
        into.add(f"{self.name}/state", state, own=self._apart)
        into.add(f"{self.name}/masters", {self._names[id(master)]: master for _, master in inner.masters})

    def restore(self, source: Reading) -> Callable[[], None]:
        inner = self._optimizer
        if self.name not in source:
            source.complain(f"the checkpoint has no {self.name}")
            return leave
        saved = source.state(self.name)
        if saved["kind"] != self.kind:
            source.complain(f"{self.name} was a {saved['kind']}, and is a {self.kind} here")
            return leave
        check_number(f"{self.name}/updates", saved["updates"], 0)
        groups = self._fitting_groups(saved["groups"], source)
        path = self._state_path(source)
        states = source.state(path, tensor=FullName) if path else {}
        if unknown := [name for name in states if name not in self._parameters]:
            source.complain(f"{self.name} remembers parameters not stepped here: {several(unknown)}")
        self._check_kinds(states)
        fills = self._masters(source)
        given = bool(saved["rest"]) or inner.listens()
        known = [name for name in states if name in self._like]
        placed = places_of(self._like[name] for name in known)
        stepped = dict(zip(known, self._stepped(source, known)))
        here = [name for name, place in zip(known, placed) if place is not None]
        unfit = [name for name in here if (at := stepped[name]) and at.shape != tuple(self._like[name].shape)]
        fresh = [name for name in here if name not in unfit]
        if fresh:
            tensors = self._tensors(source, path, fresh, stepped, None if given else fills)
            states = source.state(path, tensor=tensors.__getitem__, only=fresh)
        if unfit:
            source.complain(f"{self.name} remembers parameters of another shape: {several(unfit)}")
        refill = source.overwriting(fills)
        state = {**saved["shared"]}
        for name in fresh:
            state[self._parameters[name]] = {key: _joined(part) for key, part in states[name].items()}
        if given:
            source.trials.append(self._trial(saved["rest"], groups, state))

        def put() -> None:
            inner.masters  # noqa: B018  # those that are not filled follow their parameters, which have been
            refill()
            for live, group in zip(inner.param_groups, groups):
                live.update(group)
            own = {self._parameters[name]: inner.state[self._parameters[name]] for name in unfit}
            inner.remember({**state, **{p: kept for p, kept in own.items() if kept}})
            inner.updates = saved["updates"]

        return put

    def _fitting_groups(self, saved: Groups, source: Reading) -> Groups:
        """The options for each live param group, from the saved group with the same parameters, in any order."""
        by_names = {frozenset(group["params"]): group for group in saved}
        fitting = []
        for i, (mine, live) in enumerate(zip(self.groups(), self._optimizer.param_groups)):
            there = by_names.pop(frozenset(mine["params"]), None)
            if there is None and not mine["params"] and i < len(saved) and not saved[i]["params"]:
                there = saved[i]
            if there is None:
                source.complain(f"{self.name}: {_other_group(i, mine['params'], saved)}")
            taken = {k: v for k, v in (there or {}).items() if k not in NOT_KEPT}
            check_like(f"param group {i} of {self.name}", taken, dict(live))
            fitting.append({k: _like(live.get(k), v) for k, v in taken.items()})
        if len(saved) != len(fitting):
            source.complain(f"{self.name} had {len(saved)} param groups, and has {len(fitting)} here")
        return fitting

    def _state_path(self, source: Reading) -> str:
        """The name under which the states of parameters are kept; "" if they are not."""
        shared = f"{self.name}/state"
        own = source.named(shared, True) if self._apart else f"ranks/00000/{shared}"
        for name in (shared, own):
            if name in source:
                return name
        source.complain(f"the checkpoint has no {shared}")
        return ""

    def _check_kinds(self, saved: Any) -> None:
        """Check that each parameter's state is a dict; for classes of torch and easymp, also without text and alike for all parameters."""
        kinds: dict[Any, Any] = {}
        known = is_known(self._optimizer.given)
        check_like(f"{self.name}/state", saved, kinds)
        for name, state in saved.items():
            what = f"{self.name}/state[{name!r:.80}]"
            check_like(what, state, kinds if known else {})
            for key, value in state.items() if known else ():
                if isinstance(value, (str, bytes)) and not isinstance(value, FullName):
                    raise CheckpointError(
                        f"{what}[{key!r:.80}] is {value!r:.80}, and no number: load another"
                    )
                if value is not None:
                    kinds.setdefault(key, value)

    @staticmethod
    def _stepped(source: Reading, names: Sequence[str]) -> list[Stored | None]:
        """The tensors that were stepped: each parameter's master, or the parameter."""
        paths = [source.master(name) or name for name in names]
        tensors, aliases = source.manifest.tensors, source.manifest.aliases
        return [tensors.get(aliases.get(path, path)) for path in paths]

    def _tensors(
        self,
        source: Reading,
        path: str,
        fresh: Sequence[str],
        stepped: Mapping[str, Stored | None],
        fills: Fills | None,
    ) -> dict[str, Tensor]:
        """Map full names to the tensors into which states are loaded: new ones, or live ones that are added to `fills`."""
        trees = source.manifest.states[path]
        fulls = [(name, full) for name, of in zip(fresh, [names(trees[n]) for n in fresh]) for full in of]
        made: dict[str, Tensor] = {}
        kinds: dict[str, tuple[Tensor, Stored, torch.dtype]] = {}  # what `_laid_out` takes
        for (name, full), stored in zip(fulls, [source.stored(full) for _, full in fulls]):
            group = self._group_of[id(self._parameters[name])]
            if full.endswith("/step") and not (group.get("fused") or group.get("capturable")):
                made[full] = torch.empty(stored.shape, dtype=stored.dtype)  # as torch keeps it: on the CPU
                continue
            like, there = self._like[name], stepped[name]
            as_stepped = there is not None and stored.dtype == there.dtype and there.shape == like.shape
            kinds[full] = like, stored, like.dtype if as_stepped else stored.dtype
        live = {} if fills is None else self._overwritable(path, fulls, kinds, fills)
        made |= {full: _laid_out(*kind) for full, kind in kinds.items() if full not in live}
        source.fill(
            (full, box, part)
            for full, place in zip(made, places_of(made.values()))
            if place is not None
            for box, part in place.parts
        )
        return {**made, **live}

    def _overwritable(
        self,
        path: str,
        fulls: Sequence[tuple[str, str]],
        kinds: Mapping[str, tuple[Tensor, Stored, torch.dtype]],
        fills: Fills,
    ) -> dict[str, Tensor]:
        """The live states that can be overwritten: equal in form to new tensors, and without memory shared with others or with `fills`."""
        state = self._optimizer.state
        found: dict[str, Tensor] = {}
        for name, full in fulls:
            own = (state.get(self._parameters[name]) or {}).get(full.removeprefix(f"{path}/{name}/"))
            if full in kinds and isinstance(own, Tensor) and _is_like(own, *kinds[full]):
                found[full] = own
        held = [local(t) for t in self._like.values()]
        taken = {t.data_ptr() for t in (*held, *(part for *_, part in fills))}
        memories = [local(own) for own in found.values()]
        live: dict[str, Tensor] = {}
        for (full, own), memory, place in zip(found.items(), memories, places_of(found.values())):
            plain = type(memory) is Tensor and not memory.requires_grad and not memory.is_inference()
            if not plain or place is None or memory.data_ptr() in taken:
                continue
            if any(s == 0 and n > 1 for _, part in place.parts for n, s in zip(part.shape, part.stride())):
                continue
            if memory.numel():
                taken.add(memory.data_ptr())
            live[full] = own
            fills.extend((full, box, part) for box, part in place.parts)
        return live

    def _masters(self, source: Reading) -> Fills:
        """Parts of masters, each with the stored tensor to read: a master, or the weight if there is none."""
        masters = [master for _, master in self._optimizer.masters]
        named = [self._names[id(master)] for master in masters]
        paths = [source.master(name) or name for name in named]
        every = zip(paths, places_of(masters), self._stepped(source, named))
        return [
            (path, box, part)
            for path, place, stored in every
            if place is not None and stored is not None and stored.shape == place.shape
            for box, part in place.parts
        ]

    def _trial(self, rest: dict[str, Any], groups: Groups, states: Mapping[Any, Any]) -> Trial:
        """Load the whole state through `load_state_dict`, which the optimizer's class or a hook extends."""
        inner = self._optimizer
        before: list[Any] = []

        def change() -> None:
            before.append(copy.deepcopy(inner.state_dict()))
            now = inner.state_dict()
            merged = [{**own, **taken} for own, taken in zip(now["param_groups"], groups)]
            held = [p for group in inner.param_groups for p in group["params"]]
            numbers = dict(zip(map(id, held), (n for group in merged for n in group["params"])))
            numbered = {numbers[id(k)] if isinstance(k, Tensor) else k: state for k, state in states.items()}
            inner.load_state_dict({**now, "state": numbered, "param_groups": merged, **rest})

        def undo() -> None:
            if before:
                inner.load_state_dict(before.pop())

        return Trial(self.name, change, undo)


def _other_group(number: int, params: list[str], saved: Groups) -> str:
    nearest = max(saved, key=lambda group: len({*group["params"]} & {*params}), default=None)
    if nearest is None:
        return "the checkpoint has no param groups"
    words = names_apart(params, nearest["params"])
    return f"param group {number} has other parameters than any in the checkpoint; against its group {saved.index(nearest)}: {words}"


def _like(live: Any, saved: Any) -> Any:
    """An option of a param group, on the device of the live one."""
    return saved.to(live.device) if isinstance(saved, Tensor) and isinstance(live, Tensor) else saved


def _is_like(own: Tensor, like: Tensor, stored: Stored, dtype: torch.dtype) -> bool:
    """Whether a live state is strided and matches `_laid_out` in shape, dtype, device and layout."""
    if (tuple(own.shape), own.dtype, own.device) != (stored.shape, dtype, like.device):
        return False
    spread = [(getattr(t, "device_mesh", None), getattr(t, "placements", None)) for t in (own, like)]
    wanted = spread[1] if stored.shape == tuple(like.shape) else (None, None)
    return own.layout is torch.strided and spread[0] == wanted


def _laid_out(like: Any, stored: Stored, dtype: torch.dtype) -> Tensor:
    """A new tensor for the state of a parameter; in the parameter's layout if it has its shape."""
    if stored.shape == tuple(like.shape):
        return torch.empty_like(like, dtype=dtype, requires_grad=False)
    whole = torch.empty(stored.shape, dtype=dtype, device=like.device)
    if not hasattr(like, "to_local") or not stored.shape:
        return whole
    from torch.distributed.tensor import DTensor, Replicate  # a long import, paid where there are DTensors

    return DTensor.from_local(whole, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False)
