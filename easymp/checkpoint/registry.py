"""What scripts add to checkpoints: objects of their own, and hooks around saves and loads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch.utils.hooks import RemovableHandle

from .. import checkpoint
from ..errors import CheckpointError

if TYPE_CHECKING:
    from ..training.prepare import Preparation
    from ..training.state import Run
    from .hooks import Extra
    from .storage import Storage


class Registering:
    """register_for_checkpointing and the hooks."""

    _run: Run
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
            lacks = [
                name for name in ("state_dict", "load_state_dict") if not callable(getattr(item, name, None))
            ]
            if lacks:
                raise CheckpointError(
                    f"a {type(item).__name__} cannot be kept in checkpoints: it has no {' and no '.join(lacks)}"
                )
        self._objects += objects

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call ``hook(models, weights, output_dir)`` on every rank before a save.

        `models` are the prepared ones, `weights` their state dicts as they lie on this rank. Weights that rank 0's hooks remove from the
        list are not saved; what other ranks remove makes no difference, as it is the main process that scripts let see to it.

        `output_dir` is an empty local folder of this rank's own, of the checkpoint's name. What is written there becomes part of the
        checkpoint, by the same paths below its folder, and is copied, on disk and checksummed before the checkpoint counts; for a
        moment it takes its size twice, beside the checkpoint, or in TMPDIR where that is at a URL. An asynchronous save
        returns when the hooks have, and copies their files while the run goes on. Files of one name may come from several ranks if they
        are the same bytes. Empty folders are not kept.

        Errors of a hook end the save on all ranks, on its own as they are. So do, as CheckpointError, files of several ranks that are not
        the same, links, names that not every file system takes (``:``, say), and those of the checkpoint's own files.

        Returns:
            A handle, whose ``remove()`` takes the hook away.
        """
        return _register(self._save_hooks, hook)

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call ``hook(models, input_dir)`` on every rank before a load; models that it removes from the list are not loaded.

        `input_dir` is a local folder with what hooks wrote when it was saved, verified: the checkpoint's own, or, if that is at a URL, one
        in TMPDIR to which each rank downloads those files, and which goes when the load has ended. What a hook did to a model by
        then stays where the load that follows fails.

        Returns:
            A handle, whose ``remove()`` takes the hook away.
        """
        return _register(self._load_hooks, hook)

    def _before_save(self, storage: Storage, name: str) -> tuple[list[int], Extra]:
        """Calls the hooks: the numbers of the models that they leave to be saved, and the files that they wrote."""
        models = [model.view for model in self._prepared.models]
        if not self._save_hooks:
            return list(range(len(models))), checkpoint.NONE
        world = self._run.world
        folder = checkpoint.HookFolder(world, storage, name)
        try:
            weights = [model.state_dict() for model in models]
            left = self._hooked(self._save_hooks, weights, lambda hook, of: hook(models, of, folder.path))
            (left,) = world.broadcast_objects([left])
            return left, folder.collect()
        except BaseException:
            folder.close()
            raise

    @contextmanager
    def _before_load(self, storage: Storage, name: str) -> Iterator[list[int]]:
        """Calls the hooks: the numbers of the models that they leave to be loaded. What they read stays until the block's end."""
        models = [model.view for model in self._prepared.models]
        if not self._load_hooks:
            yield list(range(len(models)))
            return
        with checkpoint.folder_to_read(self._run.world, storage, name) as folder:
            yield self._loaded_by_hooks(folder)

    def _loaded_by_hooks(self, folder: str) -> list[int]:
        models = [model.view for model in self._prepared.models]
        return self._hooked(self._load_hooks, models, lambda hook, of: hook(of, folder))

    def _hooked(
        self, hooks: dict[int, Callable[..., None]], items: list[Any], call: Callable[[Any, list[Any]], None]
    ) -> list[int]:
        """The numbers of those of `items` that all `hooks` leave in the list which `call` gives them; raises on all ranks."""
        known = {id(item): i for i, item in enumerate(items)}
        left = list(
            items
        )  # `items` holds them all, so that no other object gets the id of one that was removed
        error: list[Exception] = []

        def act() -> None:
            try:
                for hook in list(hooks.values()):
                    call(hook, left)
            except Exception as raised:
                error.append(raised)
                raise

        said = self._run.world.gather_objects(checkpoint.trouble(act))
        if error:
            raise error[0]  # as it is: it is the user's own
        if wrong := checkpoint.first(said):
            raise CheckpointError(f"a hook failed: {wrong}")
        return [known[id(item)] for item in left if id(item) in known]


def _register(hooks: dict[int, Callable[..., None]], hook: Callable[..., None]) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle
