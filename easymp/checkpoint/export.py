"""What an Accelerator hands out of a model: whole weights, in memory or in the files that other tools read."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from .. import checkpoint
from ..base.lazy import modules_at_first_use
from ..base.units import read_bytes
from ..errors import CheckpointError, RefusedError
from ..training.wrapper import unwrap as unwrapped

if TYPE_CHECKING:
    from ..strategies import meta_init
    from ..training.state import Run
    from .huggingface import Bring, Item
    from .storage import Storage

modules_at_first_use(globals(), meta_init=".strategies.meta_init")


class Weights:
    """get_state_dict, save_model, save."""

    _run: Run

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The model's `state_dict` with whole tensors.

        Where every rank holds the whole model, each gets it, at no cost: the tensors are the live ones, as `state_dict` gives them (clone
        what shall stay as it is). Where it is spread over the ranks, this is a collective, rank 0 gets copies in the host's memory, and
        the others an empty dict. So does the peer.

        Args:
            model: prepared or not.
            unwrap: names as the plain module has them; False leaves in what torch.compile puts there (``_orig_mod.``).

        Raises:
            CheckpointError: tensors that the ranks do not have all of.
        """
        self._run.world.settle()
        module = unwrapped(model, keep_torch_compile=not unwrap)
        state = module.state_dict(keep_vars=True)
        names = {name: checkpoint.canonical(name) if unwrap else name for name in state}
        if not _spread(module, state):
            return {
                names[name]: value.detach() if isinstance(value, Tensor) else value
                for name, value in state.items()
            }
        first, aliases = _distinct(state)
        gathering = checkpoint.Gathering(self._run.world, first)
        whole = {name: gathering.bring(name) for name in first}
        if self._run.world.rank:
            return {}
        whole.update((name, whole[of]) for name, of in aliases.items())
        return {names[name]: whole.get(name, value) for name, value in state.items()}

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write the model's weights as Hugging Face's tools want them: ``model.safetensors``, or shards and an index.

        All ranks call it. Rank 0 writes, and holds a few whole tensors at a time: those being written, and the next one. A model that is
        in the folder is replaced when the new one is on disk, and not before. Of tied weights one is written; the metadata names the
        others. Where every rank holds the whole model, rank 0 alone may call it, and only rank 0 hears of an error.

        Args:
            save_directory: a folder, made where it is missing; a path or URL. One save at a time.
            max_shard_size: bytes of a file, or as "5GB"; a larger tensor gets a file of its own.

        Raises:
            CheckpointError: it could not be written; a model that was there is untouched.
            RefusedError: ``safe_serialization=False``.
            SettingError: `max_shard_size` is no size.
        """
        _refuse_code(safe_serialization, "save_model")
        most = read_bytes(max_shard_size, "max_shard_size=")
        world = self._run.world
        world.settle()
        module = unwrapped(model, keep_torch_compile=False)
        state = module.state_dict(keep_vars=True)
        for name, value in state.items():
            if not isinstance(value, Tensor):
                raise CheckpointError(
                    f"{name!r} in the state_dict of this {type(module).__name__} is a {type(value).__name__}, and files of weights hold "
                    "tensors: save_state keeps it, or let get_extra_state return a tensor"
                )
        first, aliases = _distinct(state)
        tensors = {checkpoint.canonical(name): tensor for name, tensor in first.items()}
        others = {checkpoint.canonical(name): checkpoint.canonical(of) for name, of in aliases.items()}
        shards = checkpoint.cut(
            [checkpoint.Item(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()], most
        )
        place = os.fspath(save_directory)
        if not _spread(module, state):
            said = (
                _written(place, shards, lambda name: checkpoint.on_host(tensors[name], name), others)
                if world.rank == 0
                else ""
            )
        else:
            said = checkpoint.hand_over(
                world,
                checkpoint.Gathering(world, tensors),
                shards,
                lambda bring: _written(place, shards, bring, others),
            )
        if said:
            raise CheckpointError(said)

    def save(self, obj: Any, f: str | os.PathLike[str], safe_serialization: bool = True) -> None:
        """Write an object to one file, on the main process. `easymp.load` reads it, and runs no code.

        Args:
            obj: tensors by name, which make a plain safetensors file; or anything of dicts, lists, tuples, sets, numbers, words, bytes,
                None and tensors, whose structure goes into such a file's metadata, or into JSON where the name ends with ``.json``.
            f: the file, which is replaced when the new one is on disk; a path or URL.

        Raises:
            CheckpointError: something in `obj` that cannot be stored so, with its place in it; or the file cannot be written.
            RefusedError: ``safe_serialization=False``, or a name that promises a file of torch.save.
        """
        _refuse_code(safe_serialization, "save")
        if self._run.world.rank == 0:
            checkpoint.save_tree(obj, f)


def _written(place: str, shards: list[list[Item]], bring: Bring, aliases: dict[str, str]) -> str:
    """Write a model; what went wrong, in words."""
    try:
        with checkpoint.Progress(f"saving {place}", f"saved {place}") as tick:
            tick.expect(sum(item.bytes for shard in shards for item in shard))
            checkpoint.write_model(*_folder(place), shards, bring, aliases, tick)
    except (OSError, CheckpointError) as error:
        return f"{place}: the model was not saved ({error})"
    return ""


def _folder(place: str) -> tuple[Storage, str]:
    """Where names of files in a folder, made or not, lead to: the storage above it where it is ours to make, and its name there."""
    storage = checkpoint.open_storage(place)
    if not storage.renames:
        return storage, ""
    above, name = os.path.split(os.path.realpath(storage.place))
    return checkpoint.open_storage(above), name


def _refuse_code(safe: bool, what: str) -> None:
    if not safe:
        raise RefusedError(
            f"{what}(safe_serialization=False) would write a file that runs code when it is read: leave it out, and "
            "safetensors are written"
        )


def _spread(module: nn.Module, state: dict[str, Any]) -> bool:
    """Whether ranks hold different parts; all of them see the same."""
    return meta_init.left_to_others(module) or any(hasattr(t, "to_local") for t in state.values())


def _distinct(state: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Each tensor under its first name, and further names → that one."""
    seen: dict[int, str] = {}
    first: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            continue
        if id(value) in seen:
            aliases[name] = seen[id(value)]
        else:
            seen[id(value)] = name
            first[name] = value
    return first, aliases
