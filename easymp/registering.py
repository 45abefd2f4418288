"""What scripts add to checkpoints: objects of their own, and hooks around saves and loads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.hooks import RemovableHandle

from .errors import CheckpointError
from .preparing import Preparation


class Registering:
    """register_for_checkpointing and the hooks."""

    _prepared: Preparation
    _objects: list[Any]
    _save_hooks: dict[int, Callable[..., None]]  # of a class that takes weak references, which handles need
    _load_hooks: dict[int, Callable[..., None]]

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Keep these in checkpoints, too; in the same order in every run.

        What their `state_dict` returns may hold numbers, words, bytes, None, tensors, and lists, tuples, sets and dicts of these. It
        is rank 0's that is kept, and that all ranks take.

        Raises:
            CheckpointError: an object without `state_dict` or `load_state_dict`.
        """
        for item in objects:
            lacks = [name for name in ("state_dict", "load_state_dict") if not callable(getattr(item, name, None))]
            if lacks:
                raise CheckpointError(
                    f"a {type(item).__name__} cannot be kept in checkpoints: it has no {' and no '.join(lacks)}"
                )
        self._objects += objects

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call ``hook(models, weights, output_dir)`` on every rank before a save.

        `models` are the prepared ones, `weights` their state dicts as they lie on this rank; weights that the hook removes from the list
        are not saved. `output_dir` is where the checkpoint will be: it is made by the save, so files that a hook writes belong elsewhere.

        Returns:
            A handle, whose ``remove()`` takes the hook away.
        """
        return _register(self._save_hooks, hook)

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call ``hook(models, input_dir)`` on every rank before a load; models that it removes from the list are not loaded.

        Returns:
            A handle, whose ``remove()`` takes the hook away.
        """
        return _register(self._load_hooks, hook)

    def _hooked(self, hooks: dict[int, Callable[..., None]], place: str, weights: bool = False) -> list[int]:
        """Calls the hooks; returns the numbers of the models that they leave to be saved or loaded."""
        models = [model.view for model in self._prepared.models]
        if not hooks:
            return list(range(len(models)))
        left: list[Any] = [model.state_dict() for model in models] if weights else list(models)
        known = {id(item): i for i, item in enumerate(left)}
        held = list(left)  # so that no other object gets the id of one that was removed
        for hook in list(hooks.values()):
            hook(models, left, place) if weights else hook(left, place)
        del held
        return [known[id(item)] for item in left if id(item) in known]


def _register(hooks: dict[int, Callable[..., None]], hook: Callable[..., None]) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle
