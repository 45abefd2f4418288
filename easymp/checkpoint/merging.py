"""From shards to whole tensors: the weights as Hugging Face's tools read them, or all of a checkpoint as another checkpoint.

No process group and no model are needed, and memory holds the largest tensor and what is read at once, not the model.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping

import torch

from ..base.units import read_bytes
from ..errors import CheckpointError, SettingError, nearest
from .blocks import Part, Tick, as_bytes, no_tick
from .commit import begin
from .folders import Opened, inside, open_checkpoint, open_storage, parted, write_manifest
from .hooks import copied
from .huggingface import Item, cut, index_of, order, write_model
from .layout import whole
from .manifest import INDEX, FileRecord, Stored
from .progress import expect
from .read_plan import one_by_one, room
from .snapshot import Brought, Division, FilePlan, divide, group

SHARD_SIZE = "5GB"
MODEL = "model"


def merge(
    folder: str | os.PathLike[str],
    out: str | os.PathLike[str],
    max_shard_size: int | str = SHARD_SIZE,
    all: bool = False,
    model: str = MODEL,
    tick: Tick = no_tick,
) -> None:
    """Write the checkpoint in `folder` to `out` with whole tensors; each is a folder or a URL.

    Args:
        max_shard_size: of a file, in bytes or as "5GB"; a larger tensor gets a file of its own.
        all: a complete checkpoint, for `load_state`, in place of the weights alone; files of hooks go along.
        model: whose weights: "model", or "model_1" and so on where several were prepared. Not with `all`.
        tick: told how many more bytes were read, now and then.

    Raises:
        CheckpointError: `folder` is no committed checkpoint, has bytes that are not what was written, or `out` holds something else.
        SettingError: no size, or `model` with `all`.
        OSError: `out` cannot be written.
    """
    most = read_bytes(max_shard_size, "max_shard_size=")
    if all and model != MODEL:
        raise SettingError(
            f"model={model!r} is one model, and all=True asks for everything: leave one of them out"
        )
    source = open_checkpoint(folder)
    (_merge_all if all else _merge_weights)(source, out, most, model, tick)


def _merge_weights(source: Opened, out: str | os.PathLike[str], most: int, model: str, tick: Tick) -> None:
    known = dict.fromkeys(group(name) for name in source.manifest.tensors if group(name).startswith("model"))
    if model not in known:
        raise CheckpointError(
            f"{source.place} has no weights of {model!r}{nearest(model, known) or '.'} It has: {', '.join(known) or 'no model'}"
        )
    prefix = f"{model}/"
    tensors = {
        name.removeprefix(prefix): t for name, t in source.manifest.tensors.items() if name.startswith(prefix)
    }
    aliases = {
        n.removeprefix(prefix): of.removeprefix(prefix)
        for n, of in source.manifest.aliases.items()
        if n.startswith(prefix)
    }
    shards = cut([Item(name, stored.dtype, stored.shape) for name, stored in tensors.items()], most)
    parts = _pass(source, (tensors[name] for name in order(shards)), tick)
    root, name = parted(out)
    write_model(open_storage(root), name, shards, lambda name: next(parts), aliases)


def _merge_all(source: Opened, out: str | os.PathLike[str], most: int, model: str, tick: Tick) -> None:
    root, name = parted(out)
    storage = open_storage(root)
    if (storage.place, name) == (source.storage.place, source.folder):
        raise CheckpointError(f"{source.place} would be replaced by itself: pass another folder")
    manifest, division = source.manifest, _divide(source.manifest.tensors, most)
    parts = _pass(source, (manifest.tensors[n] for plan in division.files for n, _ in plan.contents), tick)
    commit = begin(storage, name)
    try:
        files = {}
        for plan in division.files:
            files[plan.name] = FileRecord(
                plan.size, storage.put(inside(commit.folder, plan.name), _contents(plan, parts), plan.size)
            )
        index = index_of(division.tensors)
        if index is not None:
            files[INDEX] = FileRecord(
                len(index), storage.put(inside(commit.folder, INDEX), [index], len(index))
            )
        extra = copied(source.extra, storage, commit.folder)
        write_manifest(
            storage,
            commit.folder,
            dataclasses.replace(manifest, tensors=division.tensors, files=files, extra=extra),
        )
        commit.finish()
    finally:
        commit.close()


def _divide(tensors: Mapping[str, Stored], most: int) -> Division:
    """Whole tensors, in files of at most `most` bytes. To the plan each file's share is what one more rank would bring."""
    shares: list[list[Brought]] = []
    for word in dict.fromkeys(map(group, tensors)):
        items = [
            Item(name, stored.dtype, stored.shape) for name, stored in tensors.items() if group(name) == word
        ]
        shares += [
            [Brought(i.name, i.dtype, i.shape, whole(i.shape)) for i in shard] for shard in cut(items, most)
        ]
    return divide(shares)


def _pass(source: Opened, tensors: Iterable[Stored], tick: Tick) -> Iterator[torch.Tensor]:
    wanted = list(tensors)
    expect(tick, sum(stored.bytes for stored in wanted))
    return one_by_one(
        source.files, ((stored, whole(stored.shape)) for stored in wanted), room(len(source.files)), tick
    )


def _contents(plan: FilePlan, tensors: Iterator[torch.Tensor]) -> Iterator[Part]:
    yield plan.header
    for _ in plan.contents:
        tensor = next(tensors)
        if tensor.numel():
            yield as_bytes(tensor)
