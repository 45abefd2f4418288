"""The methods of an Accelerator that save and load. The work is in the modules beside this one, which are imported at first use."""

from __future__ import annotations

import errno
import os
import re
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..base import units
from ..base.lazy import modules_at_first_use
from ..errors import CheckpointError, RefusedError, SettingError, StepError, WorldError
from ..logging import get_logger
from .resume import RESTART, Epochs, Preemption

if TYPE_CHECKING:
    from ..distributed import World
    from ..options import ProjectConfiguration
    from ..precision import Scaler
    from ..trackers.logbook import Logbook
    from ..training.prepare import Preparation
    from ..training.state import Run
    from . import (
        accelerate,
        commit,
        folders,
        hooks,
        huggingface,
        load,
        ring,
        run_state,
        save,
        snapshot,
        storage,
        weight_stream,
    )
    from .load import Loaded
    from .save import Saves
    from .snapshot import Kept

modules_at_first_use(
    globals(),
    *("accelerate", "commit", "folders", "hooks", "huggingface"),
    *("load", "ring", "run_state", "save", "snapshot", "storage", "weight_stream"),
)

logger = get_logger(__name__)
Path = str | os.PathLike[str]


class Checkpoints:
    """save_state, load_state, resume, epochs, hooks, and the export of weights; a part of the Accelerator."""

    _run: Run
    _prepared: Preparation
    _precision: Any
    _scaler: Scaler
    _alone: bool
    _logbook: Logbook
    _guard: Any  # `training.spikes.Guard`
    _nonfinite: Any  # `training.nonfinite.Nonfinite`
    _norms: list[Tensor]
    _ring: ring.Ring  # where `replay` is set
    _undo: ExitStack
    close: Callable[[], None]
    _saves: Saves | None = None  # from the first save or load on
    _save_on_signal: bool | None = None
    _save_calls: save.SaveCalls  # where the main process may save alone
    _claimed = False  # whether this run holds the lock of its project's checkpoints
    _last: tuple[str, str] | None = None  # folder and name of this run's last checkpoint

    def _begin_checkpoints(self, project: ProjectConfiguration) -> None:
        self._project = project
        self._epochs = Epochs(self._prepared.loaders, self._run.window)
        self._objects: list[Any] = []
        # Handles need a class that takes weak references.
        self._save_hooks: dict[int, Callable[..., object]] = OrderedDict()
        self._load_hooks: dict[int, Callable[..., object]] = OrderedDict()
        if self._run.plan.settings.replay:
            listened = (self._scaler, self._nonfinite, self._norms)
            self._ring = ring.Ring(self._run, self._prepared, *listened, project.project_dir or os.curdir)
            self._undo.callback(self._ring.close)

    def _listen(self, save_on_signal: bool | None) -> None:
        me = weakref.ref(self)  # no cycle: an Accelerator that nothing refers to is gone at once
        self._preemption = Preemption(
            self._run.world,
            self._run.window,
            lambda number: me()._leave(number),  # type: ignore[union-attr]
        )
        self._save_on_signal = save_on_signal
        if save_on_signal and not self._preemption.start():
            raise RefusedError(
                "save_on_signal=True in a thread: signals reach the main one, so make the Accelerator there"
            )

    # -- the project's folder -----------------------------------------------------------------------------------------

    @property
    def project_configuration(self) -> ProjectConfiguration:
        """Where this run keeps checkpoints and logs, and how many."""
        return self._project

    @property
    def project_dir(self) -> str | None:
        """The folder or URL below which ``checkpoints/`` lies; None for the working directory."""
        return self._project.project_dir

    @property
    def logging_dir(self) -> str | None:
        """The folder of logs; None for the working directory."""
        return self._project.logging_dir

    @property
    def save_iteration(self) -> int:
        """Saves so far, including those of the runs that this one resumed."""
        return self._project.iteration

    @property
    def _root(self) -> str:
        return folders.inside(self._project.project_dir or os.curdir, "checkpoints")

    @property
    def _project_root(self) -> str:
        return folders.inside(*folders.parted(self._root))

    def _claim_early(self) -> None:
        """Lock the project folder when the first optimizer is prepared, if the run will save there."""
        project = self._project
        saves = project.total_limit is not None or project.automatic_checkpoint_naming or self._save_on_signal
        if saves or project.project_dir is not None:
            self._claim_project(reading=not saves)

    def _claim_project(self, reading: bool = False, world: World | None = None) -> None:
        """Lock the project's checkpoints for this process until `close`. With `reading`, a read-only folder is not locked."""

        def claim() -> bool:
            root, name = folders.parted(self._root)
            try:
                release = commit.hold(folders.open_storage(root), name)
            except OSError as error:
                if not reading or error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                    raise
                return False
            self._undo.callback(weakref.finalize(self, release))
            return True

        self._claimed = self._claimed or snapshot.on_rank_0(world or self._run.world, claim)

    # -- what scripts add ---------------------------------------------------------------------------------------------

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Keep further objects in checkpoints. The state of rank 0 is saved, and all ranks load it.

        Args:
            objects: each with `state_dict` and `load_state_dict`; in the same order in every run. A state may hold numbers, strings,
                bytes, None, tensors, and lists, tuples, sets and dicts of these.

        Raises:
            CheckpointError: an object without `state_dict` or `load_state_dict`.

        Example:
            >>> class Best:
            ...     loss = float("inf")
            ...     def state_dict(self):
            ...         return {"loss": self.loss}
            ...     def load_state_dict(self, state):
            ...         self.loss = state["loss"]
            >>> Accelerator(cpu=True).register_for_checkpointing(Best())
        """
        for item in objects:
            lacks = [n for n in ("state_dict", "load_state_dict") if not callable(getattr(item, n, None))]
            if lacks:
                raise CheckpointError(f"a {type(item).__name__} cannot be kept: no {' and no '.join(lacks)}")
        self._objects += objects

    def register_save_state_pre_hook(
        self, hook: Callable[[list[Any], list[dict[str, Any]], str], object]
    ) -> RemovableHandle:
        """Call ``hook(models, weights, output_dir)`` on every rank before each save.

        `models` are the prepared ones, `weights` their state dicts as they lie on this rank. Weights that a hook on rank 0 removes from
        the list are not saved.

        `output_dir` is an empty local folder of this rank, with the checkpoint's name. Files that the hook writes there become part of the
        checkpoint under the same relative paths: they are copied, checksummed and on disk before the checkpoint counts. The folder lies
        beside the checkpoint, or in TMPDIR if that is at a URL, and for a moment takes the files' size twice. An asynchronous save copies
        them in the background. Several ranks may write files of one name if the bytes are the same. Empty folders are not kept.

        An error of a hook ends the save on all ranks; on its own rank it is raised as it is. A CheckpointError is raised for different
        files of one name, links, names that not every file system takes (with ``:``, say), and names of the checkpoint's own files.

        Args:
            hook: called with the two lists and the folder's path.

        Returns:
            A handle; its ``remove()`` removes the hook.

        Example:
            >>> from pathlib import Path
            >>> acc = Accelerator(cpu=True)
            >>> def note(models, weights, output_dir):
            ...     Path(output_dir, "note.txt").write_text("first run")
            >>> handle = acc.register_save_state_pre_hook(note)
            >>> Path(acc.save_state("one"), "note.txt").read_text()
            'first run'
        """
        return _add(self._save_hooks, hook)

    def register_load_state_pre_hook(self, hook: Callable[[list[Any], str], object]) -> RemovableHandle:
        """Call ``hook(models, input_dir)`` on every rank before each load; models that it removes from the list are not loaded.

        `input_dir` is a local folder with the files that hooks wrote, verified: the checkpoint's own folder, or, if that is at a URL, a
        download in TMPDIR that is removed after the load. What a hook did to a model stays if the load fails afterwards.

        Args:
            hook: called with the list and the folder's path.

        Returns:
            A handle; its ``remove()`` removes the hook.

        Example:
            >>> acc = Accelerator(cpu=True)
            >>> place = acc.save_state("one")
            >>> handle = acc.register_load_state_pre_hook(lambda models, input_dir: print(len(models), "models"))
            >>> loaded = acc.load_state(place)
            0 models
        """
        return _add(self._load_hooks, hook)

    def _views(self) -> list[Any]:
        return [model.view for model in self._prepared.models]

    def _parts(self, models: Collection[int]) -> list[Kept]:
        """See `run_state.parts`."""
        return run_state.parts(
            *(self._run, self._prepared, self._scaler, self._precision, self._project),
            *(self._epochs, self._objects, self._logbook, self._guard, models),
        )

    # -- saving -------------------------------------------------------------------------------------------------------

    def save_state(
        self,
        path: Path | None = None,
        async_: bool = False,
        *,
        output_dir: Path | None = None,
        safe_serialization: bool = True,
    ) -> str:
        """Write a checkpoint of everything prepared and registered, and of the rest that an exact resume needs.

        Call it on all ranks after the optimizer's step, when no accumulation window is open. Strategy "local_sgd" averages its models
        first.

        Args:
            path: the checkpoint's own folder, or a URL of fsspec; an existing one is replaced when the new one is complete. None takes
                ``checkpoints/step-00000100`` in the project's folder, by the number of optimizer updates, and keeps
                `ProjectConfiguration.total_limit` of those. A checkpoint of that name on another line (this run loaded an earlier one,
                or none) is renamed: ``step-00000100.line-1c9e02d7``.
            async_: return when the state is copied, and write it in the background.
            output_dir: another name for `path`.
            safe_serialization: True only: other files would run code when they are read.

        Returns:
            The checkpoint's folder.

        Raises:
            StepError: in the middle of an accumulation window, or while the ranks' models differ.
            WorldError: the last comparison of replicas found that they differ.
            CheckpointError: it could not be written, on any rank, and what was there before is untouched; or another process holds the
                project's folder.
            RefusedError: ``safe_serialization=False``.
            SettingError: both `path` and `output_dir`.

        Example:
            >>> acc = Accelerator(cpu=True)
            >>> model = acc.prepare(nn.Linear(2, 1))
            >>> acc.save_state()
            '.../checkpoints/step-00000000'
        """
        path = _one_of(path, output_dir, "output_dir")
        _refuse_code(safe_serialization, "save_state")
        self._check_settled()
        if self._prepared.replicas is not None:
            self._prepared.replicas.settle()
        self._logbook.settle()  # before the save begins: trackers may take long to start
        try:
            return self._save_state(path, async_)
        except WorldError as error:
            error.add_note("all ranks call save_state(): take it out of `if accelerator.is_main_process:`")
            raise

    def _save_alone(self, path: Path | None) -> str:
        """Write a checkpoint while the other ranks are elsewhere. Threads of theirs write the parts of a split optimizer's state."""
        world, calls = self._run.world, self._save_calls
        split = [o for o in self._prepared.optimizers if o.optimizer is not o.given]  # under zero1
        if self._prepared.strategy.sharded or world.settling or (split and calls.ended):
            raise RefusedError(
                f"save_state() under `if accelerator.is_main_process:`: with strategy {self._prepared.strategy.name!r} every rank has a "
                "part of the state. Take the call out of the condition, so that all ranks make it"
            )
        self._check_settled()
        self._logbook.settle()
        return self._save_state(path, False, save.one_rank(world), calls.with_helpers if split else None)

    def _help(self, there: save.StoreWorld) -> None:
        """In a thread, while rank 0 saves alone: write this rank's part of split states."""
        with there:
            (root, name, step, models, names), *_ = there.gather_objects(None)
            target = save.Target(folders.open_storage(root), name, step, {})
            parts = [part for part in self._parts(models) if isinstance(part, run_state.OF_EACH_RANK)]
            save.Saves(there).save(target, parts, extra=folders.Extra(names=names))

    def _save_state(
        self,
        path: Path | None,
        async_: bool,
        world: World | None = None,
        with_helpers: Callable[[], save.StoreWorld] | None = None,
    ) -> str:
        project, saver = self._project, self._saver()
        self._settle_saves()  # one at a time, and hooks write for one, too
        if world is None:
            world = self._run.world
            world.settle()
        else:
            saver = save.Saves(world)
            saver.line = self._saver().line
        step = max((o.updates for o in self._prepared.optimizers), default=0)

        def chosen() -> tuple[str, str]:
            return folders.parted(
                folders.inside(self._root, self._folder_name(step)) if path is None else path
            )

        root, name = snapshot.on_rank_0(world, chosen)
        if root == self._project_root and folders.step_of(name) is not None:
            self._claim_project(world=world)
        target = save.Target(folders.open_storage(root), name, step, self._run.plan.as_dict())
        limit = None if path is not None or project.total_limit is None else project.total_limit - 1
        place, views = folders.inside(root, name), self._views()
        models: Collection[int] = range(len(views))
        extra = folders.NONE
        if self._save_hooks:
            models, extra = hooks.before_save(world, self._save_hooks, views, target.storage, name)
        project.iteration += 1
        try:
            with ExitStack() as open_, storage.of_ranks(world, "saving", "saved", place, async_) as tick:
                if with_helpers is not None:
                    there = open_.enter_context(with_helpers())
                    there.gather_objects((root, name, step, list(models), tuple(extra.names)))
                    saver = save.Saves(there)
                    saver.line = self._saver().line
                saver.save(target, self._parts(models), async_, limit, tick, extra)
        except BaseException:
            project.iteration -= 1
            extra.close()
            raise
        self._last = root, name
        return place

    def _folder_name(self, step: int) -> str:
        """The name of a checkpoint that the script did not name."""
        return folders.step_folder(step)

    def _saver(self) -> Saves:
        if self._saves is None:
            self._saves = save.Saves(self._run.world)
        return self._saves

    def _settle_saves(self) -> None:
        """Wait for a background save, and raise its error."""
        if self._saves is not None:
            self._saves.wait()

    def _check_settled(self) -> None:
        window, optimizers = self._run.window, self._prepared.optimizers
        if any(optimizer.away for optimizer in optimizers):
            raise StepError(
                "save_state() inside `with accelerator.averaged():` would keep averages as the weights of training: save after the block. "
                "The averages are in every checkpoint; save_model inside writes them as weights"
            )
        if window.accumulation != 1 and not window.sync:
            raise StepError(
                f"save_state() in micro-step {window.micro} of {window.accumulation}: gradients of an unfinished window are "
                "not kept. Save where accelerator.sync_gradients is true, after the optimizer's step"
            )
        if any(optimizer.unused() for optimizer in optimizers):
            logger.warning(
                "save_state() while gradients wait for an optimizer's step: they are not kept, so a run that resumes here goes on without "
                "them. Save after the step"
            )
        if self._alone and self._run.world.size > 1:
            raise StepError(
                "save_state() inside no_sync() or LocalSGD, where the ranks' models differ, and one of them would be kept: save after the "
                "block. Strategy 'local_sgd' can be saved at any step"
            )

    # -- loading ------------------------------------------------------------------------------------------------------

    def load_state(
        self,
        path: Path | None = None,
        strict: bool = True,
        *,
        input_dir: Path | None = None,
        allow_pickle: bool = False,
    ) -> Loaded:
        """Load a checkpoint into everything prepared and registered.

        Strategy and number of processes may differ from those of the save. On the same number the run continues bit for bit in fp32; on
        another one with the same samples in the same order. Each prepared loader continues where it stood: the next ``for`` over it reads
        the rest of the pass, once, and `skip_first_batches` counts from the start of that epoch.

        Args:
            path: the checkpoint's folder, or a folder that holds folders named by steps: then the last save in it. None takes the last
                save in the project's folder. Later saves of the run continue from the loaded checkpoint: those that were made after
                it are on another line from then on; they stay, and `resume` leaves them out.
            strict: whether missing, surplus or misshapen state is an error; False leaves it out and tells so in the log and in
                `Loaded.skipped`.
            input_dir: another name for `path`.
            allow_pickle: for a local folder of Accelerate's `save_state` only: read its pickles. A crafted one runs code of its writer's
                choice. State that such a folder does not hold (where loaders stood) is in `Loaded.skipped`.

        Returns:
            What was loaded: ``place`` is the folder, ``skipped`` the names that were left out.

        Raises:
            CheckpointError: it does not fit or cannot be read, on any rank; nothing has changed. Or a local file changed between its
                verification and its reading: the message says that the state was loaded in part.
            RefusedError: `allow_pickle` for a checkpoint of easymp.
            SettingError: both `path` and `input_dir`.

        Example:
            >>> acc = Accelerator(cpu=True)
            >>> model = acc.prepare(nn.Linear(2, 1))
            >>> place = acc.save_state("runs/best")
            >>> acc.load_state("runs/best").skipped
            ()
        """
        path = _one_of(path, input_dir, "input_dir")
        foreign = path is not None and snapshot.on_rank_0(self._run.world, lambda: _is_of_accelerate(path))
        if path is not None and foreign:
            return self._load_accelerate(os.fspath(path), strict, allow_pickle)
        if allow_pickle:
            raise RefusedError(
                "load_state(allow_pickle=True) is for a local folder of Accelerate's save_state: checkpoints of easymp hold no pickles. "
                "Leave it out"
            )
        self._settle_saves()  # the save being written may be the one that is asked for
        root, name = snapshot.on_rank_0(self._run.world, lambda: self._find(path))
        return self._load(root, name, strict)

    def _load_accelerate(self, folder: str, strict: bool, allow_pickle: bool) -> Loaded:
        prepared, world = self._prepared, self._run.world
        models = hooks.call_load_hooks(world, self._load_hooks, self._views(), folder)
        unknown = {f"loader_{i}" for i in range(len(prepared.loaders))} | {"steps", "run", "epochs"}
        parts = [part for part in self._parts(models) if getattr(part, "name", "") not in unknown]
        modules = [model.original for model in prepared.models]

        def opened() -> accelerate.Translated:
            found = accelerate.Translated(
                folder, modules, parts, prepared.seed, world.rank, strict, allow_pickle
            )
            found.skipped += [accelerate.LOADERS] if prepared.loaders else []
            return found

        loaded = load.put_in_place(world, folder, opened, parts)
        self._saver().line.begin_anew()
        return loaded

    def _find(self, path: Path | None) -> tuple[str, str]:
        """The folder above the checkpoint that `load_state` is asked for, and its name there."""
        if path is not None:
            root, name = folders.parted(path)
            above = folders.open_storage(root)
            if folders.is_checkpoint(above, folders.current(above, name)):
                return root, name
        root, folder, said, _ = self._newest(path)
        if folder is None:
            raise CheckpointError("; ".join([f"{root}: no checkpoint there", *said]))
        return root, folder

    def _newest(
        self, path: Path | None, passed: Collection[str] = ()
    ) -> tuple[str, str | None, list[str], bool]:
        """The folder at `path` or the project's, and what `folders.newest` finds in it."""
        root = folders.inside(*folders.parted(self._root if path is None else path))
        folder, said, damaged = folders.newest(folders.open_storage(root), passed)
        for words in said:
            logger.warning("left out: %s", words)
        return root, folder, said, damaged

    def _go_back(self) -> str | None:
        """Load the checkpoint that this run saved or loaded last, except for the place in the data; returns its folder, if there is one."""
        self._settle_saves()
        last: tuple[str, str] | None = snapshot.on_rank_0(self._run.world, lambda: self._last)
        if last is None:
            return None
        self._guard.goes_back(folders.inside(*last))
        return self._load(*last, strict=True, data=False).place

    def _load(self, root: str, name: str, strict: bool, data: bool = True) -> Loaded:
        world, place, above = self._run.world, folders.inside(root, name), folders.open_storage(root)
        views = self._views()
        models: Any = nullcontext(range(len(views)))
        if self._load_hooks:
            models = hooks.before_load(world, self._load_hooks, views, above, name)
        with models as left, storage.of_ranks(world, "loading", "loaded", place) as tick:
            parts = self._parts(left)
            if not data:
                parts = [run_state.without_data(part) for part in parts]
            loaded = load.load_checkpoint(world, above, name, parts, strict, tick)
        self._saver().line.loaded(above, name, loaded.manifest)
        self._last = root, name
        return loaded

    # -- resuming -----------------------------------------------------------------------------------------------------

    def resume(self, path: Path | None = None, strict: bool = True) -> str | None:
        """Continue from the last complete checkpoint, if there is one.

        Call it once, on all ranks, when everything is prepared and registered. Incomplete and damaged checkpoints are left out with a line
        in the log; so are those of abandoned lines. Without `path`, the project's folder belongs to this run until `close`: another
        process that resumes or saves there is refused. `load_state` never is.

        From now on SIGTERM and SIGUSR1 save the run and end it, unless the Accelerator was made with ``save_on_signal=False``.

        Args:
            path: the folder that holds folders named by steps; None takes the project's.
            strict: as in `load_state`.

        Returns:
            The checkpoint's folder; None if there is none.

        Raises:
            CheckpointError: the last complete checkpoint does not fit this run, or all of them are damaged, or another process holds the
                project's folder.

        Example:
            >>> acc = Accelerator(cpu=True)
            >>> model, loader = acc.prepare(nn.Linear(2, 1), torch.utils.data.DataLoader(torch.ones(4, 2)))
            >>> print(acc.resume())  # nothing yet
            None
            >>> for epoch in acc.epochs(2):
            ...     for x in loader:
            ...         acc.backward(model(x).mean())
            ...     place = acc.save_state()
            >>> acc.resume()
            '.../checkpoints/step-00000000'
            >>> acc.end_training()
        """
        if path is None or folders.inside(*folders.parted(path)) == self._project_root:
            self._claim_project(reading=True)
        if self._save_on_signal is None:
            self._preemption.start()
        self._settle_saves()  # the save being written may be the newest
        world = self._run.world
        passed: list[str] = []
        while True:
            root, name, said, damaged = snapshot.on_rank_0(world, lambda: self._newest(path, passed))
            if name is None and (passed or damaged):
                raise CheckpointError(
                    f"{root}: no checkpoint is whole any more: {'; '.join([*passed, *said])}. Move the folder away to begin anew, or "
                    "load_state() one that `easymp checkpoint list` says is not on the current line"
                )
            if name is None:
                logger.info("nothing to resume in %s", root)
                return None
            try:
                self._load(root, name, strict)
            except CheckpointError as error:
                damage = snapshot.on_rank_0(world, partial(folders.damage, folders.open_storage(root), name))
                if not damage:
                    raise
                logger.warning("left out: %s (%s)", damage, error)
                passed.append(name)
                continue
            place = folders.inside(root, name)
            logger.info("resumed from %s", storage.shown(place))
            return place

    def epochs(self, count: int) -> Iterator[int]:
        """Yield ``range(count)``, or after `resume` or `load_state` the epochs of it that are left.

        - A checkpoint taken while a prepared loader was being read continues in the same epoch. That loader gives the rest of its pass,
          and loaders that had finished theirs give nothing, once each, so that a body that trains and then validates continues in the
          validation. A checkpoint taken at a loader's last batch continues with an empty rest.
        - A checkpoint taken while none was being read continues with the next epoch if any loader had finished its pass. An epoch in
          which no loader was read begins again. With no loader prepared, the next epoch begins.

        So the work of once an epoch belongs before `save_state`, ``scheduler.step()`` above all. Several loops in a script are told apart
        by their order.

        Args:
            count: epochs of the whole training.

        Yields:
            Numbers of epochs, from 0.

        Raises:
            SettingError: `count` is not a number of epochs.
            StepError: the checkpoint was saved in another kind of loop.

        Example:
            >>> acc = Accelerator(cpu=True)
            >>> list(acc.epochs(3))  # nothing was resumed
            [0, 1, 2]
        """
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise SettingError(f"epochs({count!r}) is not a number of epochs")
        return self._epochs.run(count)

    def _leave(self, number: int | None) -> None:
        """Save, close and exit, after a signal to any rank."""
        try:
            self._settle_saves()
        except CheckpointError as error:  # of an earlier save: this one may succeed
            logger.error("%s", error)
        place = self.save_state()
        self._settle_saves()
        by = f" by signal {number}" if number else ""
        logger.warning("preempted%s: saved %s, and exiting with %d", by, storage.shown(place), RESTART)
        self.close()
        end = SystemExit(RESTART)
        end.add_note(storage.shown(place))  # for the launcher's last line
        raise end

    # -- export -------------------------------------------------------------------------------------------------------

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Get a model's `state_dict` with whole tensors. All ranks call it if the model is sharded.

        Args:
            model: prepared or not.
            unwrap: use the plain module's names; False keeps torch.compile's prefix (``_orig_mod.``).

        Returns:
            Tensors by name. If every rank holds the whole model, they are the live ones (clone what must not change). If the model is
            sharded, rank 0 gets copies in host memory and the others an empty dict, as with Accelerate.

        Raises:
            CheckpointError: the ranks together do not have all of a tensor.

        Example:
            >>> acc = Accelerator(cpu=True)
            >>> list(acc.get_state_dict(acc.prepare(nn.Linear(2, 1))))
            ['weight', 'bias']
        """
        return huggingface.get_state_dict(self._run.world, model, unwrap)

    def weights(
        self, model: nn.Module | None = None, *, dtype: torch.dtype | None = None, bucket: int | str = "1GiB"
    ) -> weight_stream.WeightStream:
        """Stream a model's whole weights: for another program, such as an inference server, or a file format of your own.

        All ranks loop over the stream together, under every strategy, and each gets every tensor. A rank holds its own part of the model
        and about one bucket. `each_bucket` of what this returns calls a function with each bucket, on all ranks or on one.

        Where every rank holds the whole model, its tensors are the live ones (clone what must not change), nothing is communicated, and
        ranks may loop alone. Else all ranks run the loop to its end, or leave it after the same tensor: the others raise an error for a
        rank that leaves early, with its number. (An iterator that a rank keeps open and never ends is not noticed while that rank lives.)

        Args:
            model: prepared or not; None: the one that is prepared.
            dtype: of floating-point tensors, which travel in it; None: as they are.
            bucket: bytes that are gathered together, or as "500MB"; a larger tensor travels by itself.

        Returns:
            An iterable of (name, tensor) with the names of the plain model's `state_dict`, tensors on the run's device. Names of tied
            weights follow one another, with one tensor.

        Raises:
            StepError: without `model`, where none or several are prepared.
            SettingError: another `dtype`, or `bucket` is not a size.
            CheckpointError: a state that is not a tensor; or, during the loop, the ranks together do not have all of a tensor, or one of
                them has left.

        Example:
            >>> acc = Accelerator(cpu=True)
            >>> model = acc.prepare(nn.Linear(2, 1))
            >>> for name, tensor in acc.weights(dtype=torch.bfloat16, bucket="500MB"):
            ...     print(name, tuple(tensor.shape), tensor.dtype)
            weight (1, 2) torch.bfloat16
            bias (1,) torch.bfloat16
        """
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise SettingError(
                f"weights(dtype={dtype!r}): pass a floating-point dtype, such as torch.bfloat16"
            )
        size, prepared = units.read_bytes(bucket, "bucket="), self._prepared.models
        if model is None and len(prepared) != 1:
            raise StepError(
                f"weights() of {len(prepared) or 'no'} prepared models: say which, by weights(model)"
            )
        chosen = prepared[0].view if model is None else model
        return weight_stream.WeightStream(self._run.world, chosen, dtype, size)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write the model's weights in Hugging Face's form: ``model.safetensors``, or shards and an index.

        All ranks call it. Where ranks hold parts of the model, all that see the folder write shards at the same time, each with a few
        whole tensors in memory; else rank 0 writes. A model in the folder is replaced when the new one is on disk. Of tied weights one
        is written, and the metadata names the others. If every rank holds the whole model, rank 0 alone may call it, and only rank 0
        gets an error.

        Args:
            model: prepared or not.
            save_directory: a folder, made if it is missing; a path or URL. One save at a time.
            max_shard_size: bytes of a file, or as "5GB"; a larger tensor gets a file of its own.
            safe_serialization: True only.

        Raises:
            CheckpointError: it could not be written; a model that was there is untouched.
            RefusedError: ``safe_serialization=False``.
            SettingError: `max_shard_size` is not a size.

        Example:
            >>> import os
            >>> acc = Accelerator(cpu=True)
            >>> acc.save_model(acc.prepare(nn.Linear(2, 1)), "model")
            >>> os.listdir("model")
            ['model.safetensors']
        """
        _refuse_code(safe_serialization, "save_model")
        huggingface.save_model(self._run.world, model, os.fspath(save_directory), max_shard_size)

    def save(self, obj: Any, f: str | os.PathLike[str], safe_serialization: bool = True) -> None:
        """Write an object to one file, on the main process. `easymp.load` reads it, and runs no code.

        Args:
            obj: tensors by name, which make a plain safetensors file; or dicts, lists, tuples, sets, numbers, strings, bytes, None and
                tensors, nested: the structure goes into the file's metadata, or into JSON if the name ends with ``.json``.
            f: the file, replaced when the new one is on disk; a path or URL.
            safe_serialization: True only.

        Raises:
            CheckpointError: `obj` holds something that cannot be stored, with its path in it; or the file cannot be written.
            RefusedError: ``safe_serialization=False``, or a name that promises a file of torch.save.

        Example:
            >>> acc = Accelerator(cpu=True)
            >>> acc.save({"mean": torch.ones(2), "classes": ["cat", "dog"]}, "facts.safetensors")
            >>> easymp.load("facts.safetensors")
            {'mean': tensor([1., 1.]), 'classes': ['cat', 'dog']}
        """
        _refuse_code(safe_serialization, "save")
        if self._run.world.rank == 0:
            huggingface.save_tree(obj, f)


def _is_of_accelerate(path: Path) -> bool:
    """Whether `path` looks like a folder of Accelerate's `save_state`; no file is opened."""
    try:
        names = os.listdir(path)
    except OSError:
        return False
    return "manifest.json" not in names and any(re.fullmatch(r"random_states_\d+\.pkl", n) for n in names)


def _one_of(path: Path | None, other: Path | None, name: str) -> Path | None:
    if path is not None and other is not None:
        raise SettingError(f"path and {name} are two names for one thing: pass one of them")
    return path if other is None else other


def _add(registered: dict[int, Callable[..., object]], hook: Callable[..., object]) -> RemovableHandle:
    handle = RemovableHandle(registered)
    registered[handle.id] = hook
    return handle


def _refuse_code(safe: bool, what: str) -> None:
    if not safe:
        raise RefusedError(
            f"{what}(safe_serialization=False) would write a file that runs code when it is read: leave it out, and "
            "safetensors are written"
        )
