"""What an Accelerator does about checkpoints: it says what is kept, and where."""

from __future__ import annotations

import errno
import os
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from .. import checkpoint
from ..base.lazy import modules_at_first_use
from ..errors import CheckpointError, EasympError, RefusedError, SettingError, StepError, WorldError
from ..logging import get_logger
from .preemption import Epochs
from .registry import Registering

if TYPE_CHECKING:
    from ..options import ProjectConfiguration
    from ..precision import Scaler
    from ..trackers.logbook import Logbook
    from ..training.prepare import Preparation
    from ..training.state import Run
    from . import run_state
    from .accelerate_import import Translated
    from .load import Loaded
    from .save import Saves
    from .snapshot import Kept

modules_at_first_use(globals(), "run_state")

logger = get_logger(__name__)
Path = str | os.PathLike[str]


class Checkpointing(Registering):
    """save_state and load_state."""

    _run: Run
    _prepared: Preparation
    _precision: Any
    _scaler: Scaler
    _alone: bool
    _logbook: Logbook
    _saves: Saves | None = None  # from the first save or load on
    _save_on_signal: bool | None = None
    _claimed = False  # whether this run has the project's folder of checkpoints to itself
    _undo: ExitStack

    def _begin_checkpoints(self, project: ProjectConfiguration) -> None:
        run = self._run
        self._project = project
        self._epochs = Epochs(self._prepared.loaders, run.clock)
        self._objects, self._save_hooks, self._load_hooks = [], OrderedDict(), OrderedDict()

    # -- where --------------------------------------------------------------------------------------------------------

    @property
    def project_configuration(self) -> ProjectConfiguration:
        return self._project

    @property
    def project_dir(self) -> str | None:
        return self._project.project_dir

    @property
    def logging_dir(self) -> str | None:
        return self._project.logging_dir

    @property
    def save_iteration(self) -> int:
        """Saves so far, those of runs that this one resumed included."""
        return self._project.iteration

    @property
    def _root(self) -> str:
        return checkpoint.below(self._project.project_dir or os.curdir, "checkpoints")

    @property
    def _project_root(self) -> str:
        return checkpoint.below(*checkpoint.parted(self._root))

    def _claim_project(self, reading: bool = False) -> None:
        """From now on, and until `close`, no other process may save in the project's folder.

        Args:
            reading: go on without where the folder is read-only.

        Raises:
            CheckpointError: on all ranks; another process has claimed it, and lives.
        """
        if self._claimed:
            return

        def claim() -> bool:
            root, name = checkpoint.parted(self._root)
            try:
                release = checkpoint.hold(checkpoint.open_storage(root), name)
            except OSError as error:
                if not reading or error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                    raise
                return False  # nothing can be saved there; what is there can be read
            self._undo.callback(weakref.finalize(self, release))
            return True

        self._claimed = self._together(claim)

    def _claim_early(self) -> None:
        """Claim the project's folder when a run that trains is prepared: where it was given one, or asks for saves in the default one."""
        project = self._project
        saves = project.total_limit is not None or project.automatic_checkpoint_naming or self._save_on_signal
        if saves or project.project_dir is not None:
            self._claim_project(reading=not saves)

    def _saver(self) -> Saves:
        if self._saves is None:
            self._saves = checkpoint.Saves(self._run.world)
        return self._saves

    # -- what is kept -------------------------------------------------------------------------------------------------

    def _kept(self, models: list[int]) -> Iterator[Kept]:
        """All that a checkpoint keeps, in the order in which it is put back.

        Args:
            models: indices of those whose weights are kept.
        """
        prepared, run = self._prepared, self._run
        modules = [model.route.original for model in prepared.models]
        self._scaler.settle()
        training = checkpoint.kept_of(
            *(
                modules,
                prepared.optimizers,
                prepared.schedulers,
                self._scaler,
                prepared.masters.keys(),
                prepared.strategy.apart,
            )
        )
        for i, item in enumerate(training):
            yield (
                run_state.LeftOut(checkpoint.numbered("model", i))
                if i < len(modules) and i not in models
                else item
            )
        for i, loader in enumerate(prepared.loaders):
            yield checkpoint.ObjectState(
                f"loader_{i}", loader, free=("data set", "seed")
            )  # a seed may need 64 unsigned bits
        for i, item in enumerate(self._objects):
            yield checkpoint.ObjectState(f"object_{i}", item, free=True)
        yield checkpoint.ObjectState("steps", run_state.Skipped(self._scaler, prepared.optimizers))
        yield checkpoint.ObjectState("run", run_state.RunState(run, self._precision, self._project))
        yield checkpoint.ObjectState("epochs", self._epochs)
        for i, carried in enumerate(carried for carried in run.world.carried if carried.alive):
            yield run_state.Carried(i, carried, run.world)
        yield run_state.Owed(prepared.schedulers)
        yield run_state.Tracked(self._logbook)
        spread, world = prepared.strategy, run.world
        devices = run_state.drawing_devices(run, world.device)
        # The last one, so that nothing draws after it.
        yield checkpoint.RandomState(
            world.rank, world.size, devices, spread.data_rank, spread.data_size, prepared.seed
        )

    # -- saving -------------------------------------------------------------------------------------------------------

    def save_state(
        self,
        path: Path | None = None,
        async_: bool = False,
        *,
        output_dir: Path | None = None,
        safe_serialization: bool = True,
        **others: Any,
    ) -> str:
        """Write a checkpoint of all that is prepared and registered, and of what else a run needs to go on exactly; returns its folder.

        Call it on all ranks, where no accumulation window is open: after the optimizer's step. Strategy "local_sgd" averages its models
        for it.

        Args:
            path: the checkpoint's own folder, or a URL of fsspec; one that is there is replaced when the new one is complete. None takes
                ``checkpoints/step-00000100`` in the project's folder, by the number of optimizer updates, and leaves as many of those as
                `ProjectConfiguration.total_limit` says. A checkpoint of that name on another line (this run loaded an earlier one, or none)
                is renamed: ``step-00000100.line-1c9e02d7``.
            async_: return as soon as the state is copied, and write it meanwhile.
            output_dir: another name for `path`.
            safe_serialization: True only: other files would run code when they are read.

        Raises:
            StepError: in the middle of an accumulation window, or where the ranks' models differ.
            WorldError: the last comparison of replicas found that they differ.
            CheckpointError: it could not be written, on any rank; what was there before is untouched. Or another process saves in the
                project's folder.
        """
        path = _either(path, output_dir, "output_dir")
        if not safe_serialization:
            raise RefusedError(
                "safe_serialization=False asks for files that run code when they are read: leave it out"
            )
        if others:
            raise RefusedError(
                f"save_state({', '.join(others)}=…) is not honoured: files are written in one way. Leave it out"
            )
        self._check_settled()
        if self._prepared.replicas is not None:
            self._prepared.replicas.settle()
        self._logbook.settle()  # before the save begins: trackers may take long to start
        try:
            return self._save_state(path, async_)
        except WorldError as error:
            error.add_note(
                "save_state() is for all ranks: where it stands under `if accelerator.is_main_process:`, take it out"
            )
            raise

    def _save_state(self, path: Path | None, async_: bool) -> str:
        world = self._run.world
        world.settle()
        self._settle_saves()  # one at a time, and hooks write for one, too
        step = max((o.updates for o in self._prepared.optimizers), default=0)
        chosen = checkpoint.below(self._root, checkpoint.step_folder(step)) if path is None else path
        root, name = self._together(lambda: checkpoint.parted(chosen))
        place = checkpoint.below(root, name)
        if root == self._project_root and checkpoint.step_of(name) is not None:
            self._claim_project()
        before = self._listed(root, name)
        storage = checkpoint.open_storage(root)
        models, extra = self._before_save(storage, name)
        limit = (
            None if path is not None or self._project.total_limit is None else self._project.total_limit - 1
        )
        self._project.iteration += 1
        try:
            if self._listed(root, name) != before:
                raise CheckpointError(
                    f"a hook wrote to {place}, and the save that follows would replace that folder: let it write to the output_dir that it "
                    "is given"
                )
            target = checkpoint.Target(storage, name, step, self._run.plan.as_dict())
            with checkpoint.of_ranks(world, "saving", "saved", place, async_) as tick:
                self._saver().save(target, list(self._kept(models)), async_, limit, tick, extra)
        except BaseException:
            self._project.iteration -= 1
            extra.close()
            raise
        return place

    def _settle_saves(self) -> None:
        """Until what is being written is committed; raises what it met with."""
        if self._saves is not None:
            self._saves.wait()

    def _listed(self, root: str, name: str) -> list[str]:
        """What is in a folder, where hooks might write to it."""
        return self._together(lambda: checkpoint.open_storage(root).list(name)) if self._save_hooks else []  # type: ignore[no-any-return]

    def _check_settled(self) -> None:
        clock = self._run.clock
        if any(optimizer.away for optimizer in self._prepared.optimizers):
            raise StepError(
                "save_state() inside `with accelerator.averaged():` would keep averages as the weights of training: save after the block. "
                "The averages are in every checkpoint; save_model inside writes them as weights"
            )
        if clock.accumulation != 1 and not clock.sync:
            raise StepError(
                f"save_state() in micro-step {clock.micro} of {clock.accumulation}: gradients of an unfinished window are "
                "not kept. Save where accelerator.sync_gradients is true, after the optimizer's step"
            )
        if any(optimizer.unused() for optimizer in self._prepared.optimizers):
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
        load_kwargs: Any = None,
        **others: Any,
    ) -> Loaded:
        """Put a checkpoint into all that is prepared and registered.

        Strategy and number of processes may be others than those it was saved with. On the same number the run goes on bit for bit in
        fp32; on another one with the same samples in the same order. Each prepared loader goes on where it stood: the next ``for``
        over it reads the rest of the pass, once, and `skip_first_batches` counts from the start of that epoch.

        Args:
            path: the checkpoint's folder, or one that holds folders named by steps, of which the one that was saved last is taken; None
                takes the last one in the project's folder. Saves go on from it: what was saved after it is on another line from then
                on, stays, and is left out by `resume`.
            strict: whether what is missing, left over, or of another shape is an error; False leaves it out; what, is in the log and
                in `Loaded.skipped`.
            input_dir: another name for `path`.
            others: for a local folder of Accelerate's `save_state`, the options of `easymp.checkpoint.read_accelerate`, which says
                what such a folder can do to you. What it does not tell (where loaders stood) is in `Loaded.skipped`.

        Raises:
            CheckpointError: it does not fit or cannot be read, on any rank; nothing has changed. Or a local file was whole when it was
                verified, and not when it was then read into live tensors: the message says that the state was loaded in part.
        """
        path = _either(path, input_dir, "input_dir")
        accelerates = path is not None and self._together(lambda: checkpoint.is_accelerate_folder(path))
        if load_kwargs or (others and not accelerates):
            names = ", ".join([*(["load_kwargs"] if load_kwargs else []), *others])
            raise RefusedError(
                f"load_state({names}=…) is not honoured: files are read in one way. Leave it out"
            )
        if path is not None and accelerates:
            return self._load_accelerates(path, strict, others)
        self._settle_saves()  # what is being written may be what is asked for
        root, name = self._together(lambda: self._find(path))
        return self._load(root, name, strict)

    def _load_accelerates(self, folder: Path, strict: bool, options: dict[str, Any]) -> Loaded:
        left_to_hooks = self._loaded_by_hooks(os.fspath(folder))
        prepared, world = self._prepared, self._run.world
        models = [model.route.original for model in prepared.models]
        unsaid = {f"loader_{i}" for i in range(len(prepared.loaders))} | {"steps", "run", "epochs"}
        kept = [
            k
            for k in self._kept(left_to_hooks)
            if not (isinstance(k, checkpoint.ObjectState) and k.name in unsaid)
        ]
        optimizers = [k for k in kept if isinstance(k, checkpoint.OptimizerState)]

        def open_it() -> Translated:
            there = checkpoint.Translated(
                folder, models, optimizers, prepared.seed, world.rank, strict, **options
            )
            there.skipped += [checkpoint.LOADERS] if prepared.loaders else []
            return there

        loaded = checkpoint.put_in_place(world, os.fspath(folder), open_it, kept)
        self._saver().line.begin_anew()
        return loaded

    def _find(self, path: Path | None) -> tuple[str, str]:
        if path is not None:
            root, name = checkpoint.parted(path)
            if checkpoint.is_checkpoint(checkpoint.open_storage(root), name):
                return root, name
        place = self._root if path is None else checkpoint.below(root, name)
        inside = checkpoint.below(*checkpoint.parted(place))
        folder, said, _ = checkpoint.newest(checkpoint.open_storage(inside))
        if folder is None:
            raise CheckpointError("; ".join([f"{inside}: no checkpoint there", *said]))
        for words in said:
            logger.warning("left out: %s", words)
        return inside, folder

    def _load(self, root: str, name: str, strict: bool) -> Loaded:
        world, place, storage = self._run.world, checkpoint.below(root, name), checkpoint.open_storage(root)
        with (
            self._before_load(storage, name) as models,
            checkpoint.of_ranks(world, "loading", "loaded", place) as tick,
        ):
            loaded = checkpoint.load_checkpoint(world, storage, name, list(self._kept(models)), strict, tick)
        self._saver().line.loaded(storage, name, loaded.manifest)
        return loaded

    def _together(self, act: Callable[[], Any]) -> Any:
        """What `act` returns on rank 0, on all ranks; its error, too."""
        world = self._run.world
        said: list[Any] = [None, ""]
        if world.rank == 0:
            try:
                said[0] = act()
            except (OSError, EasympError) as error:
                if world.size == 1 and isinstance(error, EasympError):
                    raise
                said[1] = str(error)
        result, words = world.broadcast_objects(said)
        if words:
            raise CheckpointError(words)
        return result


def _either(path: Path | None, other: Path | None, name: str) -> Path | None:
    if path is not None and other is not None:
        raise SettingError(f"path and {name} are two names for one thing: pass one of them")
    return path if other is None else other
