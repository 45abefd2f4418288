"""The methods of an Accelerator that save and load; the modules that do the work are imported at first use."""

from __future__ import annotations

import copy
import errno
import os
import re
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..base import units
from ..base.lazy import modules_at_first_use
from ..errors import CheckpointError, RefusedError, SettingError, StepError, WorldError, check_whole
from ..logging import get_logger
from .resume import EpochRange, Epochs

if TYPE_CHECKING:
    from ..base.parts import Parts
    from ..distributed import World
    from ..options import ProjectConfiguration
    from ..training.prepare import Preparation
    from ..training.state import Run
    from . import accelerate, export, folders, hooks, load, locks, progress, ranks, run_state, save
    from .load import Loaded
    from .save import Saveable, Saves

modules_at_first_use(
    globals(),
    *("accelerate", "export", "folders", "hooks", "load", "locks"),
    *("progress", "ranks", "run_state", "save"),
)

logger = get_logger(__name__)
Path = str | os.PathLike[str]


class Checkpoints:
    """save_state, load_state, resume, epochs, hooks, and the export of weights; a part of the Accelerator."""

    _run: Run
    _prepared: Preparation
    _parts: Parts
    _undo: ExitStack
    close: Callable[[], None]
    _saves: Saves | None = None  # from the first save or load on
    _save_calls: ranks.SaveCalls  # where the main process may save alone
    _will_save: bool  # whether the settings say that the run saves in its project
    _claimed = False  # whether this run holds the lock of its project's checkpoints
    _last: tuple[str, str] | None = None  # folder and name of this run's last checkpoint

    def _begin_checkpoints(self, project: ProjectConfiguration) -> None:
        self._project = project
        self._epochs = Epochs(self._prepared.loaders, self._run.window, self._run.world)
        names_checkpoints = project.total_limit is not None or project.automatic_checkpoint_naming
        self._will_save = names_checkpoints or bool(self._run.plan.settings.save_on_signal)
        self._objects: list[Any] = []
        # Handles need a class that takes weak references.
        self._save_hooks: dict[int, Callable[..., object]] = OrderedDict()
        self._load_hooks: dict[int, Callable[..., object]] = OrderedDict()

    @property
    def project_dir(self) -> str | None:
        """The folder or URL below which ``checkpoints/`` lies; None for the working directory."""
        return self._project.project_dir

    @property
    def _root(self) -> str:
        return folders.join(self._project.project_dir or os.curdir, "checkpoints")

    def _is_root(self, path: Path) -> bool:
        return folders.split(path) == folders.split(self._root)

    def _claim_project(self, reading: bool = False, world: World | None = None) -> None:
        """Lock the project's checkpoints until `close`; with `reading`, a read-only folder is not locked."""

        def claim() -> bool:
            root, name = folders.split(self._root)
            try:
                release = locks.acquire_shared(folders.open_storage(root), name)
            except OSError as error:
                if not reading or error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                    raise
                return False
            self._undo.callback(weakref.finalize(self, release))
            return True

        self._claimed = self._claimed or ranks.run_on_rank_0(world or self._run.world, claim)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Keep further objects in checkpoints. The state of rank 0 is saved, and all ranks load it.

        Args:
            objects: each with `state_dict` and `load_state_dict`; in the same order in every run. A state may hold
                numbers, strings, bytes, None, tensors, and lists, tuples and dicts of these.

        Raises:
            CheckpointError: an object without `state_dict` or `load_state_dict`.

        Example:
            >>> class Best:
            ...     loss = float("inf")
            ...     def state_dict(self):
            ...         return {"loss": self.loss}
            ...     def load_state_dict(self, state):
            ...         self.loss = state["loss"]
            >>> acc.register_for_checkpointing(Best())
        """
        for item in objects:
            lacks = [n for n in ("state_dict", "load_state_dict") if not callable(getattr(item, n, None))]
            if lacks:
                raise CheckpointError(f"a {type(item).__name__} cannot be kept: no {' and no '.join(lacks)}")
        self._objects += objects

    def _saved_items(self, models: Collection[int], with_data: bool = True) -> list[Saveable]:
        return run_state.items_of(self._run, self._epochs, self._objects, models, with_data)

    def _ask_parts(self, questions: Iterable[Callable[[str, str | None], Any]], call: str, path: Path | None) -> Any:
        """Ask all parts about a call with this path; returns the first answer that is not None (see `Part.saving`)."""
        answers = [question(call, None if path is None else os.fspath(path)) for question in questions]
        return next((answer for answer in answers if answer is not None), None)

    def save_state(
        self,
        path: Path | None = None,
        async_: bool = False,
        *,
        output_dir: Path | None = None,
        safe_serialization: bool = True,
    ) -> str:
        """Write a checkpoint of everything prepared and registered, and of the rest that an exact resume needs.

        Call it on all ranks after the optimizer's step, when no accumulation window is open. Strategy "local_sgd"
        averages its models first.

        Args:
            path: the checkpoint's own folder, or a URL of fsspec; an existing one is replaced when the new one is
                complete. None takes ``checkpoints/step-00000100`` in the project's folder, by the number of optimizer
                updates, and keeps `ProjectConfiguration.total_limit` of those. A checkpoint of that name on another
                line (this run loaded an earlier one, or none) is renamed: ``step-00000100.line-1c9e02d7``.
            async_: return when the state is copied, and write it in the background.
            output_dir: another name for `path`.
            safe_serialization: True only: other files would run code when they are read.

        Returns:
            The checkpoint's folder.

        Raises:
            StepError: in the middle of an accumulation window, or while the ranks' models differ.
            WorldError: the last comparison of replicas found that they differ.
            CheckpointError: it could not be written, on any rank, and what was there before is untouched; or another
                process holds the project's folder.
            RefusedError: ``safe_serialization=False``.
            SettingError: both `path` and `output_dir`.

        Example:
            >>> acc.save_state()
            '.../checkpoints/step-00000000'
        """
        path = _one_of(path, output_dir, "output_dir")
        _refuse_code(safe_serialization, "save_state")
        answer: str | None = self._ask_parts(self._parts.saving, "save_state", path)
        if answer is not None:
            return answer
        self._check_settled()
        try:
            self._run.world.settle()
            return self._save_state(self._saver(), path, async_)
        except WorldError as error:
            error.add_note("all ranks call save_state(): take it out of `if accelerator.is_main_process:`")
            raise

    def _save_alone(self, path: Path | None) -> str:
        """Write a checkpoint while the other ranks are elsewhere."""
        is_split = any(o.optimizer is not o.given for o in self._prepared.optimizers)  # under zero1
        if self._prepared.strategy.sharded or self._parts.settle or is_split:
            raise RefusedError(
                f"save_state() under `if accelerator.is_main_process:`: with strategy {self._prepared.strategy.name!r} "
                "every rank has a part of the state. Take the call out of the condition, so that all ranks make it"
            )
        self._ask_parts(self._parts.saving, "save_state", path)
        self._check_settled()
        single_world = copy.copy(self._run.world)
        single_world.size = 1
        return self._save_state(save.Saves(single_world, self._saver().line), path)

    def _save_state(self, saves: Saves, path: Path | None, async_: bool = False) -> str:
        project, world = self._project, saves.world
        self._settle_saves()  # one at a time, and hooks write for one, too
        step = max((o.updates for o in self._prepared.optimizers), default=0)
        root, name = ranks.run_on_rank_0(
            world, lambda: folders.split(folders.join(self._root, self._folder_name(step)) if path is None else path)
        )
        if folders.step_of(name) is not None and self._is_root(root):
            self._claim_project(world=world)
        target = save.Target(folders.open_storage(root), name, step, self._run.plan.as_dict())
        limit = None if path is not None or project.total_limit is None else project.total_limit - 1
        views, extra = [model.view for model in self._prepared.models], save.NO_FILES
        models: Collection[int] = range(len(views))
        if self._save_hooks:
            models, extra = hooks.run_save_hooks(world, self._save_hooks, views, target.storage, name)
        project.iteration += 1
        folder = folders.join(root, name)
        try:
            with progress.Progress.of_ranks(world, "saving", "saved", folder, async_) as tick:
                saves.save(target, self._saved_items(models), async_, limit, tick, extra)
        except BaseException:
            project.iteration -= 1
            extra.close()
            raise
        self._last = root, name
        return folder

    def _folder_name(self, step: int) -> str:
        return f"step-{step:08d}"

    def _saver(self) -> Saves:
        if self._saves is None:
            self._saves = save.Saves(self._run.world)
        return self._saves

    def _settle_saves(self) -> None:
        if self._saves is not None and self._saves.thread is not None:
            self._saves.wait()

    def _check_settled(self) -> None:
        window = self._run.window
        if window.accumulation != 1 and not window.sync:
            raise StepError(
                f"save_state() in micro-step {window.micro} of {window.accumulation}: gradients of an unfinished "
                "window are not kept. Save where accelerator.sync_gradients is true, after the optimizer's step"
            )
        if any(optimizer.has_unused_gradients() for optimizer in self._prepared.optimizers):
            logger.warning(
                "save_state() while gradients wait for an optimizer's step: they are not kept, so a run that resumes "
                "here goes on without them. Save after the step"
            )
        if window.ranks_differ and self._run.world.size > 1:
            raise StepError(
                "save_state() inside no_sync() or LocalSGD, where the ranks' models differ, and one of them would be "
                "kept: save after the block. Strategy 'local_sgd' can be saved at any step"
            )

    def load_state(
        self,
        path: Path | None = None,
        strict: bool = True,
        *,
        input_dir: Path | None = None,
        allow_pickle: bool = False,
    ) -> Loaded:
        """Load a checkpoint into everything prepared and registered.

        Strategy and number of processes may differ from those of the save. On the same number the run continues bit for
        bit in fp32; on another one with the same samples in the same order. The next ``for`` over each prepared loader
        reads the rest of its pass, once; `skip_first_batches` counts from the start of that epoch.

        Args:
            path: the checkpoint's folder, or one that holds folders named by steps: then the last save in it. None
                takes the last save in the project's folder. Later saves continue from the loaded checkpoint; those made
                after it stay on a line of their own, which `resume` leaves out.
            strict: whether missing, surplus or misshapen state is an error; False leaves it out and tells so in the log
                and in `Loaded.skipped`.
            input_dir: another name for `path`.
            allow_pickle: for a local folder of Accelerate's `save_state` only: read its pickles. A crafted one runs
                code of its writer's choice. State that such a folder does not hold (where loaders stood) is in
                `Loaded.skipped`.

        Returns:
            What was loaded: ``place`` is the folder, ``skipped`` the names that were left out.

        Raises:
            CheckpointError: it does not fit or cannot be read, on any rank; nothing has changed. Or a local file
                changed between its verification and its reading: the message says that the state was loaded in part.
            RefusedError: `allow_pickle` for a checkpoint of easymp.
            SettingError: both `path` and `input_dir`.

        Example:
            >>> place = acc.save_state("runs/best")
            >>> acc.load_state("runs/best").skipped
            ()
        """
        path = _one_of(path, input_dir, "input_dir")
        path = self._ask_parts(self._parts.loading, "load_state", path) or path
        self._settle_saves()  # the save being written may be the one that is asked for
        root, name = ranks.run_on_rank_0(self._run.world, lambda: self._locate(path))
        if name is None:
            return self._load_accelerate(root, strict, allow_pickle)
        if allow_pickle:
            raise RefusedError(
                "load_state(allow_pickle=True) is for a local folder of Accelerate's save_state: checkpoints of "
                "easymp hold no pickles. Leave it out"
            )
        return self._load(root, name, strict)

    def _load_accelerate(self, folder: str, strict: bool, allow_pickle: bool) -> Loaded:
        prepared, world = self._prepared, self._run.world
        views = [model.view for model in prepared.models]
        models = hooks.run_hooks(world, self._load_hooks, views, lambda hook, models: hook(models, folder))
        unknown = {f"loader_{i}" for i in range(len(prepared.loaders))} | {"run"}
        items = [item for item in self._saved_items(models) if getattr(item, "name", "") not in unknown]
        modules = [model.original for model in prepared.models]

        def open_reader() -> accelerate.AccelerateReader:
            reader = accelerate.AccelerateReader(
                folder, modules, items, prepared.seed, world.rank, strict, allow_pickle
            )
            reader.skipped += [accelerate.LOADERS] if prepared.loaders else []
            return reader

        loaded = load.load_items(world, folder, open_reader, items)
        self._saver().line = folders.SaveLine()
        return loaded

    def _locate(self, path: Path | None) -> tuple[str, str | None]:
        """The folder above the checkpoint to load, and its name there; a folder of Accelerate's itself, and None."""
        if path is not None:
            if _is_of_accelerate(path):
                return os.fspath(path), None
            root, name = folders.split(path)
            storage = folders.open_storage(root)
            if folders.is_checkpoint(storage.list(folders.newest_save(storage, name))):
                return root, name
        root, newest = self._find_newest(path)
        if newest.folder is None:
            raise CheckpointError("; ".join([f"{root}: no checkpoint there", *newest.faults]))
        return root, newest.folder

    def _find_newest(self, path: Path | None, excluded: Collection[str] = ()) -> tuple[str, folders.Newest]:
        root = folders.join(*folders.split(self._root if path is None else path))
        newest = folders.find_newest(folders.open_storage(root), excluded)
        for fault in newest.faults:
            logger.warning("left out: %s", fault)
        return root, newest

    def _last_checkpoint(self) -> str | None:
        """The folder of the checkpoint that this run saved or loaded last, if there is one."""
        self._settle_saves()
        self._last = ranks.run_on_rank_0(self._run.world, lambda: self._last)
        return None if self._last is None else folders.join(*self._last)

    def _load_last_checkpoint(self) -> None:
        """Load `_last_checkpoint`, except for the place in the data."""
        assert self._last is not None
        self._load(*self._last, strict=True, data=False)

    def _load(self, root: str, name: str, strict: bool, data: bool = True) -> Loaded:
        world, folder, storage = self._run.world, folders.join(root, name), folders.open_storage(root)
        views = [model.view for model in self._prepared.models]
        models: Collection[int] = range(len(views))
        if self._load_hooks:
            hook_folder = hooks.verified_folder(world, storage, name)
            models = hooks.run_hooks(world, self._load_hooks, views, lambda hook, models: hook(models, hook_folder))
        with progress.Progress.of_ranks(world, "loading", "loaded", folder) as tick:
            loaded = load.load_checkpoint(world, storage, name, self._saved_items(models, data), strict, tick)
        self._saver().line.loaded(storage, name, loaded.manifest)
        self._last = root, name
        for notify in self._parts.loaded:
            notify(loaded.place)
        return loaded

    def resume(self, path: Path | None = None, strict: bool = True) -> str | None:
        """Continue from the last complete checkpoint, if there is one.

        Call it once, on all ranks, when everything is prepared and registered. Incomplete and damaged checkpoints are
        left out with a line in the log; so are those of abandoned lines. Without `path`, another process that resumes
        or saves in the project's folder is refused until `close`. From now on SIGTERM and SIGUSR1 save the run and end
        it, unless the Accelerator was made with ``save_on_signal=False``.

        Args:
            path: the folder that holds folders named by steps; None takes the project's.
            strict: as in `load_state`.

        Returns:
            The checkpoint's folder; None if there is none.

        Raises:
            CheckpointError: the last complete checkpoint does not fit this run, or all of them are damaged, or another
                process holds the project's folder.

        Example:
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
        if path is None or self._is_root(path):
            self._claim_project(reading=True)
        for notify in self._parts.resumed:
            notify()
        self._settle_saves()  # the save being written may be the newest
        replacement: str | None = self._ask_parts(self._parts.loading, "resume", path)
        if replacement is not None:
            return self._load(*folders.split(replacement), strict).place if replacement else None
        world = self._run.world
        damaged: list[str] = []
        while True:
            root, newest = ranks.run_on_rank_0(world, lambda: self._find_newest(path, damaged))
            if newest.folder is None and (damaged or newest.is_damaged):
                raise CheckpointError(
                    f"{root}: no checkpoint is whole any more: {'; '.join([*damaged, *newest.faults])}. Move the "
                    "folder away to begin anew, or load_state() one that `easymp checkpoint list` says is not on the "
                    "current line"
                )
            if newest.folder is None:
                logger.info("nothing to resume in %s", root)
                return None
            try:
                folder = self._load(root, newest.folder, strict).place
            except CheckpointError as error:
                storage = folders.open_storage(root)
                damage = ranks.run_on_rank_0(world, partial(folders.damage_text, storage, newest.folder))
                if not damage:
                    raise
                logger.warning("left out: %s (%s)", damage, error)
                damaged.append(newest.folder)
                continue
            logger.info("resumed from %s", folder)
            return folder

    def epochs(self, count: int) -> EpochRange:
        """Loop over ``range(count)``, or after `resume` or `load_state` over the epochs of it that are left.

        - A checkpoint taken while a prepared loader was being read continues in the same epoch: that loader gives the
          rest of its pass (at its last batch, nothing), and loaders that had finished theirs give nothing, once each.
        - A checkpoint taken while none was being read continues with the next epoch, unless a loader is prepared and
          none had been read in this one. So the work of once an epoch belongs before `save_state`,
          ``scheduler.step()`` above all.

        Several loops in a script are told apart by their order. After a load in a process that has run loops already,
        the next one continues where the loaded state stands; one that is to begin at 0 uses ``range(count)``.

        Args:
            count: epochs of the whole training.

        Returns:
            An iterable of the numbers of epochs, from 0; ``len`` of it is how many are left.

        Raises:
            SettingError: `count` is not a number of epochs.
            StepError: the checkpoint was saved in another kind of loop.

        Example:
            >>> len(acc.epochs(3)), list(acc.epochs(3))  # nothing was resumed
            (3, [0, 1, 2])
        """
        check_whole(f"epochs({count!r})", count, 0)
        return EpochRange(self._epochs, count)

    def weights(
        self, model: nn.Module | None = None, *, dtype: torch.dtype | None = None, bucket: int | str = "1GiB"
    ) -> export.WeightStream:
        """Stream a model's whole weights to another program, such as an inference server, or a file format of your own.

        All ranks loop over the stream together, under every strategy, and each gets every tensor. A rank holds its own
        part of the model and about one bucket. The stream's method `each_bucket` calls a function with each bucket, on
        all ranks or on one.

        If every rank holds the whole model, ranks may loop alone, and the tensors are the live ones: clone those that
        must not change. Otherwise all ranks run the loop to its end, or leave it after the same tensor. If a rank
        leaves early, the others raise an error that names it.

        Args:
            model: prepared or not; None: the one that is prepared.
            dtype: to which floating-point tensors are cast before they are sent; None: as they are.
            bucket: bytes that are gathered together, a number or text such as "500MB"; a larger tensor is sent alone.

        Returns:
            An iterable of (name, tensor) with the names of the plain model's `state_dict`, tensors on the run's device.
            Tied weights follow one another, each name with the same tensor.

        Raises:
            StepError: without `model`, where none or several are prepared.
            SettingError: another `dtype`, or `bucket` is not a size.
            CheckpointError: a state that is not a tensor; or, during the loop, the ranks together do not have all of a
                tensor, or one of them has left.

        Example:
            >>> for name, tensor in acc.weights(model, dtype=torch.bfloat16, bucket="500MB"):
            ...     print(name, tuple(tensor.shape), tensor.dtype)
            weight (1, 2) torch.bfloat16
            bias (1,) torch.bfloat16
        """
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise SettingError(f"weights(dtype={dtype!r}): pass a floating-point dtype, such as torch.bfloat16")
        size, models = units.read_bytes(bucket, "bucket="), self._prepared.models
        if model is None and len(models) != 1:
            raise StepError(f"weights() of {len(models) or 'no'} prepared models: say which, by weights(model)")
        return export.WeightStream(self._run.world, models[0].view if model is None else model, dtype, size)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write the model's weights in Hugging Face's form: ``model.safetensors``, or shards and an index.

        All ranks call it, and rank 0 writes, with a bucket of whole tensors in memory. A model in the folder is
        replaced when the new one is on disk. Of tied weights one is written, and the metadata names the others. If
        every rank holds the whole model, rank 0 alone may call it, and only rank 0 gets an error.

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
            >>> acc.save_model(model, "model")
            >>> os.listdir("model")
            ['model.safetensors']
        """
        _refuse_code(safe_serialization, "save_model")
        if self._ask_parts(self._parts.saving, "save_model", save_directory) is not None:
            return
        export.save_model(self._run.world, model, os.fspath(save_directory), max_shard_size)

    def save(self, obj: Any, f: str | os.PathLike[str], safe_serialization: bool = True) -> None:
        """Write an object to one file, on the main process. `easymp.load` reads it, and runs no code.

        Args:
            obj: tensors by name, which make a plain safetensors file; or dicts, lists, tuples, numbers, strings,
                bytes, None and tensors, nested: the structure goes into the file's metadata, or into JSON if the name
                ends with ``.json``.
            f: the file, replaced when the new one is on disk; a path or URL.
            safe_serialization: True only.

        Raises:
            CheckpointError: `obj` holds something that cannot be stored, with its path in it; or the file cannot be
                written.
            RefusedError: ``safe_serialization=False``, or a name that promises a file of torch.save.

        Example:
            >>> acc.save({"mean": torch.ones(2), "classes": ["cat", "dog"]}, "facts.safetensors")
            >>> easymp.load("facts.safetensors")
            {'mean': tensor([1., 1.]), 'classes': ['cat', 'dog']}
        """
        _refuse_code(safe_serialization, "save")
        if self._ask_parts(self._parts.saving, "save", f) is not None:
            return
        if self._run.world.rank == 0:
            export.save_tree(obj, f)


def _is_of_accelerate(path: Path) -> bool:
    """Whether `path` looks like a folder of Accelerate's `save_state`; no file is opened."""
    try:
        names = os.listdir(path)
    except OSError:
        return False
    return "manifest.json" not in names and any(re.fullmatch(r"random_states_\d+\.pkl", n) for n in names)


def _one_of(path: Path | None, synonym: Path | None, name: str) -> Path | None:
    if path is not None and synonym is not None:
        raise SettingError(f"path and {name} are two names for one thing: pass one of them")
    return path if synonym is None else synonym


def _refuse_code(safe: bool, method: str) -> None:
    if not safe:
        raise RefusedError(
            f"{method}(safe_serialization=False) would write a file that runs code when it is read: leave it out, and "
            "safetensors are written"
        )
