"""Models and optimizers in a checkpoint, by the names that the user's modules give their parameters.

An optimizer's state can therefore be loaded with parameters in another order and in other shards.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..base.dtensor import local
from ..errors import CheckpointError, StepError, join_some
from ..optim import PreparedOptimizer
from ..optim.torch_step import IMPLEMENTATION
from ..precision.policies import LOW
from .codec import TensorName
from .load import ABSENT, CheckpointReader, Trial, check_like, is_known, name_differences, tensor_names, with_tensors
from .manifest import Box, StoredTensor, canonical, check_number, local_chunks, per_rank
from .save import Snapshot

Groups = list[dict[str, Any]]
Fills = list[tuple[str, Box, Tensor]]  # full name, chunk, and the live view that takes it
# Entries of a param group that are not loaded: the parameters, and the implementation of the step.
NOT_LOADED = ("params", "param_names", *IMPLEMENTATION)
SUBCLASS = "tensor subclass"  # key of the class's name, beside the tensors that a subclass is made of


def _flatten_subclass(value: Any) -> Any:
    """A tensor subclass (torchao's 8-bit states) as its plain tensors, class and context; other values as they are.

    A sparse tensor, such as SGD's momentum of a sparse gradient, becomes a dense one, with which SGD goes on alike.
    """
    if isinstance(value, Tensor) and value.layout is torch.sparse_coo:
        return value.to_dense()
    flatten = getattr(value, "__tensor_flatten__", None)
    if flatten is None or hasattr(value, "to_local"):
        return value
    names, context = flatten()
    class_name = f"{type(value).__module__}:{type(value).__qualname__}"
    return {SUBCLASS: class_name, "context": context, "parts": {name: getattr(value, name) for name in names}}


def _unflatten_subclass(value: Any) -> Any:
    """The tensor subclass of its parts. Its class must be loaded: no file makes this process import a module."""
    if not isinstance(value, dict) or SUBCLASS not in value:
        return value
    module, _, name = str(value[SUBCLASS]).partition(":")
    subclass = getattr(sys.modules.get(module), name, None)
    unflatten = getattr(subclass, "__tensor_unflatten__", None)
    if unflatten is None or not isinstance(subclass, type) or not issubclass(subclass, Tensor):
        raise CheckpointError(f"the state is a {value[SUBCLASS]}, which is not loaded: import {module} first")
    return unflatten(value["parts"], value["context"], None, None)


@dataclass(eq=False)
class ModelState:
    """The `state_dict` of the user's module; `mastered` holds ids of parameters that have fp32 masters."""

    _name: str
    _module: nn.Module
    _mastered: Collection[int] = ()

    def _state(self) -> tuple[dict[str, Any], set[int]]:
        """The state dict, and the ids of the module's own tensors."""
        own_ids = {id(t) for t in [*self._module.parameters(), *self._module.buffers()]}
        return self._module.state_dict(keep_vars=True), own_ids

    def collect(self, into: Snapshot) -> None:
        first_names: dict[int, str] = {}
        tree: dict[str, Any] = {}
        state, own_ids = self._state()
        for name, value in state.items():
            name = canonical(name)
            if id(value) in first_names:
                into.aliases[f"{self._name}/{name}"] = f"{self._name}/{first_names[id(value)]}"
                continue
            if id(value) in own_ids:
                first_names[id(value)] = name
            tree[name] = value
        # BatchNorm statistics differ between ranks until a forward broadcasts rank 0's.
        into.add(self._name, tree, replicated={id(p) for p in self._module.parameters()})

    def restore(self, source: CheckpointReader) -> Callable[[], None] | None:
        tree = source.tree(self._name)
        if tree is ABSENT:
            return None
        saved = {**tree}
        prefix = f"{self._name}/"
        for alias, target in source.manifest.aliases.items():
            if alias.startswith(prefix):
                saved[alias.removeprefix(prefix)] = TensorName(target)
        state, own_ids = self._state()
        live = {canonical(name): (name, value) for name, value in state.items()}
        if differences := name_differences(live, saved):
            source.complain(f"{self._name}: {differences}")
        faults: list[str] = []
        fills: Fills = []
        filled: dict[int, tuple[str, StoredTensor]] = {}  # id of a live tensor → its first name, and what it takes
        own_tensors = {name: value for name, (_, value) in live.items() if name in saved and id(value) in own_ids}
        for (name, value), chunks in zip(own_tensors.items(), local_chunks(own_tensors.values())):
            if not isinstance(saved[name], TensorName):
                faults.append(f"{name} is not a tensor in the checkpoint")
                continue
            if chunks is None:
                continue
            path = source.stepped(saved[name])[0] if value.dtype == torch.float32 else saved[name]
            stored = source.stored(path)
            first_name, first_stored = filled.setdefault(id(value), (name, stored))
            if stored.shape != tuple(value.shape):
                shapes = f"has shape {list(stored.shape)} in the checkpoint, and {list(value.shape)} here"
                faults.append(f"{name} {shapes}")
            elif (
                stored.dtype != value.dtype
                and not (stored.dtype == torch.float32 and id(value) in self._mastered)  # its master takes the values
                and not (stored.dtype in LOW and value.dtype == torch.float32)
            ):
                dtypes = f"is {stored.dtype} in the checkpoint, and {value.dtype} here (load_weights converts)"
                faults.append(f"{name} {dtypes}")
            elif first_stored is not stored:
                faults.append(f"{name} and {first_name} are one tensor here, and two in the checkpoint")
            elif first_name == name:
                fills += [(path, box, view) for box, view in chunks]
        if faults:
            source.complain(f"{self._name}: {join_some(faults)}")
        # Of get_extra_state, and of hooks.
        if extra := [name for name in live if name in saved and name not in own_tensors]:
            values = with_tensors({live[name][0]: saved[name] for name in extra}, source.read_tensor)
            source.trials.append(self._trial(values, dict(live[name] for name in extra), source.strict))
        return source.fill_live(fills)

    def _trial(self, values: dict[str, Any], live: dict[str, Any], strict: bool) -> Trial:
        """Load values that are not the module's own tensors through its `load_state_dict`."""
        previous = {
            name: value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)
            for name, value in live.items()
        }

        def change() -> None:
            unexpected = self._module.load_state_dict(values, strict=False).unexpected_keys
            ignored = [name for name in unexpected if name in values]
            if ignored and strict:
                raise CheckpointError(f"load_state_dict does not know {join_some(ignored)}: use a hook")

        return Trial(self._name, change, lambda: self._module.load_state_dict(previous, strict=False))


class OptimizerState:
    """An optimizer's param groups, states, fp32 masters, and what its class or hooks add to `state_dict`."""

    def __init__(
        self, name: str, optimizer: PreparedOptimizer, owner: Mapping[int, str], differs_by_rank: bool = False
    ) -> None:
        self.name, self._optimizer, self._differs_by_rank = name, optimizer, differs_by_rank
        self.kind = type(optimizer.given).__name__
        parameter_of = {id(master): parameter for parameter, master in optimizer.masters}
        self._names: dict[int, str] = {}
        self._parameters: dict[str, Tensor] = {}
        self._layouts: dict[str, Any] = {}
        for p, layout in optimizer.laid_out():
            full_name = owner.get(id(parameter_of.get(id(p), p)))
            if full_name is None:
                raise StepError(
                    f"{self.kind} steps a parameter of shape {tuple(p.shape)} that belongs to no "
                    "prepared model, so it has no name in a checkpoint: add it to the model before prepare(), or "
                    "prepare a module that holds it"
                )
            self._names[id(p)], self._parameters[full_name], self._layouts[full_name] = full_name, p, layout
        self._group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}

    def groups(self) -> Groups:
        """The param groups, with parameter names in place of parameters."""
        groups = self._optimizer.param_groups
        return [{**group, "params": [self._names[id(p)] for p in group["params"]]} for group in groups]

    def collect(self, into: Snapshot) -> None:
        optimizer = self._optimizer
        state: dict[str, Any] = {}
        shared: dict[str, Any] = {}
        for key, value in optimizer.state.items():
            if not isinstance(key, Tensor):
                shared[key] = value
            elif value and id(key) in self._names:
                state[self._names[id(key)]] = {name: _flatten_subclass(entry) for name, entry in value.items()}
        facts = {"kind": self.kind, "groups": self.groups(), "updates": optimizer.updates}
        into.add(self.name, {**facts, "shared": shared, "rest": optimizer.extra_state()})
        into.add(f"{self.name}/state", state, own=self._differs_by_rank)
        into.add(f"{self.name}/masters", {self._names[id(master)]: master for _, master in optimizer.masters})

    def restore(self, source: CheckpointReader) -> Callable[[], None] | None:
        optimizer = self._optimizer
        saved = source.state(self.name)
        if saved is ABSENT:
            return None
        if saved["kind"] != self.kind:
            source.complain(f"{self.name} was a {saved['kind']}, and is a {self.kind} here")
            return None
        check_number(f"{self.name}/updates", saved["updates"], 0)
        groups = self._fitting_groups(saved["groups"], source)
        path = f"{self.name}/state"
        if (states := source.tree(path, required=False)) is ABSENT:
            # Where ranks have different states, rank r of another number of ranks loads those of rank r % n.
            path = per_rank(source.rank % source.manifest.world_size if self._differs_by_rank else 0, path)
            if (states := source.tree(path, required=False)) is ABSENT:
                source.complain(f"the checkpoint has no {self.name}/state")
                states = {}
        if unknown := [name for name in states if name not in self._parameters]:
            source.complain(f"{self.name} remembers parameters not stepped here: {join_some(unknown)}")
        self._check_kinds(states)
        fills = self._master_fills(source) if optimizer.has_masters else []
        # A class or hook that adds to `state_dict` loads the whole state, so that live tensors are not filled directly.
        through_class = bool(saved["rest"]) or optimizer.customises_load()
        known_names = [name for name in states if name in self._layouts]
        stepped = {name: source.stepped(name)[1] for name in known_names}
        chunks_by_name = zip(known_names, local_chunks(self._layouts[name] for name in known_names))
        present = [name for name, chunks in chunks_by_name if chunks is not None]
        unfit = [n for n in present if (stored := stepped[n]) and stored.shape != tuple(self._layouts[n].shape)]
        fitting = [name for name in present if name not in unfit]
        if fitting:
            tensors = self._state_tensors(
                source, path, {n: states[n] for n in fitting}, stepped, None if through_class else fills
            )
            states = with_tensors({name: states[name] for name in fitting}, tensors.__getitem__)
        if unfit:
            source.complain(f"{self.name} remembers parameters of another shape: {join_some(unfit)}")
        fill_live = source.fill_live(fills)
        state = {**saved["shared"]}
        for name in fitting:
            state[self._parameters[name]] = {key: _unflatten_subclass(entry) for key, entry in states[name].items()}
        if through_class:
            source.trials.append(self._trial(saved["rest"], groups, state))

        def load() -> None:
            optimizer.masters  # noqa: B018  # those that are not filled follow their parameters, which have been
            fill_live()
            for live, group in zip(optimizer.param_groups, groups):
                live.update(group)
            unfit_states = [(self._parameters[name], optimizer.state[self._parameters[name]]) for name in unfit]
            optimizer.replace_states({**state, **{p: entries for p, entries in unfit_states if entries}})
            optimizer.updates = saved["updates"]

        return load

    def _fitting_groups(self, saved: Groups, source: CheckpointReader) -> Groups:
        """The options for each live param group, from the saved group with the same parameters, in any order."""
        by_names = {frozenset(group["params"]): group for group in saved}
        fitting = []
        for i, (named_group, live) in enumerate(zip(self.groups(), self._optimizer.param_groups)):
            group = by_names.pop(frozenset(named_group["params"]), None)
            if group is None and not named_group["params"] and i < len(saved) and not saved[i]["params"]:
                group = saved[i]
            if group is None:
                source.complain(f"{self.name}: {_group_mismatch(i, named_group['params'], saved)}")
            options = {key: value for key, value in (group or {}).items() if key not in NOT_LOADED}
            check_like(f"param group {i} of {self.name}", options, dict(live))
            for key, value in options.items():
                if isinstance(value, Tensor) and isinstance(live.get(key), Tensor):
                    options[key] = value.to(live[key].device)
            fitting.append(options)
        if len(saved) != len(fitting):
            remedy = "make the same groups before the load, those of add_param_group too"
            source.complain(f"{self.name} had {len(saved)} param groups, and has {len(fitting)} here: {remedy}")
        return fitting

    def _check_kinds(self, saved: Any) -> None:
        """Check that each parameter's state is a dict; for classes that are known, that they are alike, too."""
        example: dict[Any, Any] = {}
        is_torch_class = is_known(self._optimizer.given)
        check_like(f"{self.name}/state", saved, example)
        for name, state in saved.items():
            path = f"{self.name}/state[{name!r:.80}]"
            check_like(path, state, example if is_torch_class else {})
            for key, value in state.items() if is_torch_class else ():
                if isinstance(value, (str, bytes)) and not isinstance(value, TensorName):
                    raise CheckpointError(f"{path}[{key!r:.80}] is {value!r:.80}, and no number: load another")
                if value is not None:
                    example.setdefault(key, value)

    def _state_tensors(
        self,
        source: CheckpointReader,
        path: str,
        states: Mapping[str, Any],
        stepped: Mapping[str, StoredTensor | None],
        fills: Fills | None,
    ) -> dict[str, Tensor]:
        """Map full names to the tensors into which states are loaded: new ones, or live ones, added to `fills`."""
        live_states = self._optimizer.state
        full_names = [(name, full_name) for name, state in states.items() for full_name in tensor_names(state)]
        stored_tensors = [source.stored(full_name) for _, full_name in full_names]
        new: dict[str, Tensor] = {}
        forms: dict[str, tuple[Any, StoredTensor, torch.dtype]] = {}
        candidates: dict[str, Tensor] = {}  # live states of these forms
        for (name, full_name), stored in zip(full_names, stored_tensors):
            p, layout, parameter = self._parameters[name], self._layouts[name], stepped[name]
            group = self._group_of[id(p)]
            if full_name.endswith("/step") and not (group.get("fused") or group.get("capturable")):
                new[full_name] = torch.empty(stored.shape, dtype=stored.dtype)  # as torch keeps it: on the CPU
                continue
            as_stepped = parameter and (parameter.dtype, parameter.shape) == (stored.dtype, layout.shape)
            forms[full_name] = layout, stored, layout.dtype if as_stepped else stored.dtype
            live = (live_states.get(p) or {}).get(full_name.removeprefix(f"{path}/{name}/"))
            if isinstance(live, Tensor) and _has_form(live, *forms[full_name]):
                candidates[full_name] = live
        reused = {} if fills is None else self._reusable(candidates, fills)
        new |= {full_name: _empty_state(*form) for full_name, form in forms.items() if full_name not in reused}
        source.fill(
            (full_name, box, view)
            for full_name, chunks in zip(new, local_chunks(new.values()))
            for box, view in chunks or ()
        )
        return {**new, **reused}

    def _reusable(self, candidates: Mapping[str, Tensor], fills: Fills) -> dict[str, Tensor]:
        """Those that share no memory with others, parameters or `fills`. Their chunks are added to `fills`."""
        used_memory = {t.data_ptr() for t in (*map(local, self._layouts.values()), *(view for *_, view in fills))}
        reused: dict[str, Tensor] = {}
        for (full_name, live), chunks in zip(candidates.items(), local_chunks(candidates.values())):
            memory = local(live)
            is_plain = type(memory) is Tensor and not memory.requires_grad and not memory.is_inference()
            if not is_plain or chunks is None or memory.data_ptr() in used_memory:
                continue
            if any(s == 0 and n > 1 for _, view in chunks for n, s in zip(view.shape, view.stride())):
                continue
            if memory.numel():
                used_memory.add(memory.data_ptr())
            reused[full_name] = live
            fills.extend((full_name, box, view) for box, view in chunks)
        return reused

    def _master_fills(self, source: CheckpointReader) -> Fills:
        """Chunks of masters, each with the stored tensor to read: a master, or the weight if there is none."""
        masters = [master for _, master in self._optimizer.masters]
        stepped = [source.stepped(self._names[id(master)]) for master in masters]
        return [
            (path, box, view)
            for master, (path, stored), chunks in zip(masters, stepped, local_chunks(masters))
            if stored is not None and stored.shape == tuple(master.shape)
            for box, view in chunks or ()
        ]

    def _trial(self, additions: dict[str, Any], groups: Groups, states: Mapping[Any, Any]) -> Trial:
        """Load the whole state through `load_state_dict`, which the optimizer's class or a hook extends."""
        optimizer = self._optimizer
        previous: list[Any] = []

        def change() -> None:
            previous.append(copy.deepcopy(optimizer.state_dict()))
            live = optimizer.state_dict()
            merged = [{**live_group, **options} for live_group, options in zip(live["param_groups"], groups)]
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            numbers = dict(zip(map(id, parameters), (n for group in merged for n in group["params"])))
            numbered = {numbers[id(k)] if isinstance(k, Tensor) else k: state for k, state in states.items()}
            optimizer.load_state_dict({**live, "state": numbered, "param_groups": merged, **additions})

        def undo() -> None:
            if previous:
                optimizer.load_state_dict(previous.pop())

        return Trial(self.name, change, undo)


def _group_mismatch(number: int, params: list[str], saved: Groups) -> str:
    nearest = max(saved, key=lambda group: len({*group["params"]} & {*params}), default=None)
    if nearest is None:
        return "the checkpoint has no param groups"
    differences = name_differences(params, nearest["params"])
    return (
        f"param group {number} has other parameters than any in the checkpoint; against its group "
        f"{saved.index(nearest)}: {differences}"
    )


def _has_form(live: Tensor, layout: Tensor, stored: StoredTensor, dtype: torch.dtype) -> bool:
    """Whether a live state is strided and matches `_empty_state` in shape, dtype, device and layout."""
    if (tuple(live.shape), live.dtype, live.device) != (stored.shape, dtype, layout.device):
        return False
    placements = [(getattr(t, "device_mesh", None), getattr(t, "placements", None)) for t in (live, layout)]
    expected = placements[1] if stored.shape == tuple(layout.shape) else (None, None)
    return live.layout is torch.strided and placements[0] == expected


def _empty_state(layout: Any, stored: StoredTensor, dtype: torch.dtype) -> Tensor:
    """A new tensor for the state of a parameter; in the parameter's layout if it has its shape."""
    if stored.shape == tuple(layout.shape):
        return torch.empty_like(layout, dtype=dtype, requires_grad=False)
    tensor = torch.empty(stored.shape, dtype=dtype, device=layout.device)
    if not hasattr(layout, "to_local") or not stored.shape:
        return tensor
    from torch.distributed.tensor import DTensor, Replicate  # a long import, paid where there are DTensors

    return DTensor.from_local(tensor, layout.device_mesh, [Replicate()] * layout.device_mesh.ndim, run_check=False)
