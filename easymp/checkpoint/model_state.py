"""Models and optimizers in a checkpoint, by the names that the user's modules give their parameters.

So an optimizer's state fits another order of the parameters, and other shards.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..base.dtensor import local
from ..errors import CheckpointError, StepError
from ..optim import PreparedOptimizer
from ..optim.torch_step import IMPLEMENTATION
from ..precision.policies import LOW
from .layout import Box, Place, place_of
from .load import FullName, Reading, Trial, check_like, is_known, names_apart, once, several
from .manifest import Stored, check_number
from .snapshot import Snapshot
from .source import canonical

Groups = list[dict[str, Any]]
Fills = list[tuple[str, Box, Tensor]]  # full name, chunk, and the live part that takes it
# Of a param group these stay this run's: its parameters, and the implementation of its step.
NOT_KEPT = ("params", "param_names", *IMPLEMENTATION)


def leave() -> None:
    """Put nothing in place."""


class ModelState:
    """The `state_dict` of the user's module, however a strategy laid out its tensors.

    Tensors are written to in place. Other values (extra state, the results of `state_dict` hooks) go through `load_state_dict`. A model in
    fp32 takes the fp32 masters of parameters that were saved in low precision. Parameters that have masters here take fp32 values, rounded;
    the masters take them whole. fp32 parameters take bf16 and fp16 values.

    Args:
        name: "model", or "model_1" and so on.
        mastered: ids of parameters that have masters here.
    """

    def __init__(self, name: str, module: nn.Module, mastered: Collection[int] = ()) -> None:
        self._name, self._module, self._mastered = name, module, mastered

    def _state(self) -> tuple[dict[str, Any], set[int]]:
        """The live state, and the ids of the module's own tensors in it."""
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
        # A BatchNorm's statistics are each rank's own until a forward shares rank 0's.
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
        fills: Fills = []
        filled: dict[int, tuple[str, Stored]] = {}  # id of a live tensor → its first name, and what it takes
        rest: list[str] = []
        faults: list[str] = []
        for name, (_, value) in live.items():
            if name not in saved:
                continue
            if id(value) not in own:
                rest.append(name)
            elif not isinstance(saved[name], FullName):
                faults.append(f"{name} is no tensor in the checkpoint")
            elif (place := place_of(value)) is not None:
                path = self._path(saved[name], value, source)
                stored = source.stored(path)
                first, known = filled.setdefault(id(value), (name, stored))
                if fault := self._fault(stored, place, value):
                    faults.append(f"{name} {fault}")
                elif known is not stored:
                    faults.append(f"{name} and {first} are one tensor here, and two in the checkpoint")
                elif first == name:
                    fills += [(path, box, part) for box, part in place.parts]
        if faults:
            source.complain(f"{self._name}: {several(faults)}")
        if rest:
            values = {live[name][0]: source.state(self._name, within=[name]) for name in rest}
            source.trials.append(self._trial(values, dict(live[name] for name in rest), source.strict))
        return source.overwriting(fills)

    def _path(self, name: FullName, value: Tensor, source: Reading) -> str:
        """The stored tensor to read for `value`: the master, if the model is in fp32 and the parameter had one."""
        master = source.master(name)
        return master if master is not None and value.dtype == torch.float32 else name

    def _fault(self, stored: Stored, place: Place, value: Tensor) -> str:
        if stored.shape != place.shape:
            return f"has shape {list(stored.shape)} in the checkpoint, and {list(place.shape)} here"
        mastered = stored.dtype == torch.float32 and id(value) in self._mastered
        raised = stored.dtype in LOW and value.dtype == torch.float32  # exact
        if stored.dtype != value.dtype and not mastered and not raised:
            return f"is {stored.dtype} in the checkpoint, and {value.dtype} here (load_weights converts)"
        return ""

    def _trial(self, values: dict[str, Any], live: dict[str, Any], strict: bool) -> Trial:
        """Load values that are no tensors of the module's own through its `load_state_dict`."""
        before = {
            name: value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)
            for name, value in live.items()
        }

        def change() -> None:
            unknown = self._module.load_state_dict(values, strict=False).unexpected_keys
            ignored = [name for name in unknown if name in values]
            if ignored and strict:
                raise CheckpointError(
                    f"load_state_dict does not know {several(ignored)}, which state_dict shows: take it with a hook"
                )

        def undo() -> None:
            self._module.load_state_dict(before, strict=False)

        return Trial(self._name, change, undo)


class OptimizerState:
    """An optimizer's param groups, its state of each parameter, fp32 masters, and the additions of its class or of hooks to `state_dict`.

    A tensor of its parameter's shape is laid out like the parameter's states here; others are whole. The implementation of the step
    (fused, foreach, capturable) stays this run's. A run without masters ignores saved ones, for its parameters take them (see
    `ModelState`); masters that the checkpoint lacks take the weights in it. The optimizer's own `load_state_dict` is called only if its
    class or a hook extends it.

    Args:
        name: "optimizer", or "optimizer_1" and so on.
        owner: id of a parameter → its full name in the checkpoint, such as "model/0.weight".
        apart: each rank has other states of the same parameters. On another number of ranks, rank r takes those of rank r % n; a run
            whose ranks share their states takes rank 0's.
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
        """Its param groups, with names of parameters."""
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
                state[self._names[id(key)]] = dict(value)
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
            source.complain(
                f"{self.name} was a {saved['kind']}, and is a {self.kind} here, which remembers other things"
            )
            return leave
        check_number(f"{self.name}/updates", saved["updates"], 0)
        groups = self._fitting_groups(saved["groups"], source)
        path = self._state_path(source)
        states = source.state(path, tensor=FullName) if path else {}
        if unknown := [name for name in states if name not in self._parameters]:
            source.complain(
                f"{self.name} remembers parameters that it does not step here: {several(unknown)}"
            )
        self._check_kinds(states)
        fills = self._masters(source)
        given = bool(saved["rest"]) or inner.listens()
        taken = None if given else {_memory(t) for t in [*self._like.values(), *(part for *_, part in fills)]}
        fresh: dict[Any, Any] = {}
        unfit: list[str] = []
        for name in states:
            if name in self._like and place_of(self._like[name]) is not None:
                there = self._stepped(source, name)
                if there is not None and there.shape != tuple(self._like[name].shape):
                    unfit.append(name)
                else:
                    fresh[self._parameters[name]] = self._state_of(source, path, name, taken, fills)
        if unfit:
            source.complain(f"{self.name} remembers parameters of another shape: {several(unfit)}")
        refill = source.overwriting(fills)
        state = {**saved["shared"], **fresh}
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
        """The options for each live param group: of the saved one with the same parameters, wherever it stood."""
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
        """The state of a parameter is a dict; in torch's and easymp's classes without text, and of the same kinds for all parameters."""
        kinds: dict[Any, Any] = {}
        known = is_known(self._optimizer.given)
        check_like(f"{self.name}/state", saved, kinds)
        for name, state in saved.items():
            what = f"{self.name}/state[{name!r:.80}]"
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
        """The parameter as it was stepped: its master, if it had one."""
        path = source.master(name) or name
        return source.manifest.tensors.get(source.manifest.aliases.get(path, path))

    def _state_of(self, source: Reading, path: str, name: str, taken: set[int] | None, fills: Fills) -> Any:
        """The state of one parameter in new tensors; live tensors that can be overwritten join `fills` and are kept."""
        parameter, like = self._parameters[name], self._like[name]
        group, there = self._group_of[id(parameter)], self._stepped(source, name)
        live = self._optimizer.state.get(parameter) or {}

        def tensor(full: str) -> Tensor:
            stored = source.stored(full)
            if full.endswith("/step") and not (group.get("fused") or group.get("capturable")):
                return source.whole(full)  # as torch keeps it: on the CPU
            as_stepped = there is not None and stored.dtype == there.dtype and there.shape == like.shape
            dtype = like.dtype if as_stepped else stored.dtype
            own = live.get(full.removeprefix(f"{path}/{name}/"))
            if taken is not None and (parts := _overwritable(own, like, stored.shape, dtype, taken)):
                fills.extend((full, box, part) for box, part in parts)
                return own
            made = _laid_out(like, stored.shape, dtype)
            place = place_of(made)
            assert place is not None, "the parameter lies here"
            for box, part in place.parts:
                source.fill(full, box, part)
            return made

        return source.state(path, tensor=tensor, within=[name])

    def _masters(self, source: Reading) -> Fills:
        """Parts of masters, and the stored tensors for them: masters, or the weights if there are none."""
        fills: Fills = []
        for _, master in self._optimizer.masters:
            name = self._names[id(master)]
            place, stored = place_of(master), self._stepped(source, name)
            if place is not None and stored is not None and stored.shape == place.shape:
                fills += [(source.master(name) or name, box, part) for box, part in place.parts]
        return fills

    def _trial(self, rest: dict[str, Any], groups: Groups, states: Mapping[Any, Any]) -> Trial:
        """All of it through `load_state_dict`, which its class or a hook extends."""
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


def _memory(tensor: Tensor) -> int:
    return local(tensor).data_ptr()


def _overwritable(
    live: Any, like: Tensor, shape: tuple[int, ...], dtype: torch.dtype, taken: set[int]
) -> list[tuple[Box, Tensor]] | None:
    """The parts of `live` if a load may write into it, so that the state is in memory once: it is what a new tensor would be.

    Args:
        like: a tensor that is laid out as the parameter's states are.
        taken: addresses of tensors that a load writes to already; grows.
    """
    if not isinstance(live, Tensor):
        return None
    if (tuple(live.shape), live.dtype, live.device) != (shape, dtype, like.device):
        return None
    spread = [(getattr(t, "device_mesh", None), getattr(t, "placements", None)) for t in (live, like)]
    if spread[0] != (spread[1] if shape == tuple(like.shape) else (None, None)):
        return None
    memory, place = local(live), place_of(live)
    if type(memory) is not Tensor or memory.requires_grad or memory.is_inference():
        return None
    if memory.layout is not torch.strided or place is None or memory.data_ptr() in taken:
        return None
    if any(once(box, part)[0] != box for box, part in place.parts):
        return None
    if memory.numel():
        taken.add(memory.data_ptr())
    return list(place.parts)


def _laid_out(like: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A new tensor for the state of a parameter; in the parameter's layout if it has its shape."""
    if shape == tuple(like.shape):
        return torch.empty_like(like, dtype=dtype, requires_grad=False)
    whole = torch.empty(shape, dtype=dtype, device=like.device)
    if not hasattr(like, "to_local") or not shape:
        return whole
    from torch.distributed.tensor import DTensor, Replicate  # a long import, paid where there are DTensors

    return DTensor.from_local(whole, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False)
