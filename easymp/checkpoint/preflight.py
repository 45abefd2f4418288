"""Before a byte is read: the files of a checkpoint are those that the manifest describes, and so are their headers."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from ..errors import CheckpointError
from .committed import inside
from .header import Slot, decode, filed, length
from .manifest import Manifest
from .planning import key
from .storage import Storage

FIRST = 2**16  # bytes that are read at once: a header, mostly, and elsewhere its length


def preflight(storage: Storage, folder: str, manifest: Manifest, files: Collection[str]) -> None:
    """Each of `files` is a regular file right in `folder`, of the size and with the tensors that `manifest` says. Reads headers alone.

    Raises:
        CheckpointError: one is not; which, and which tensor.
        OSError: it cannot be read.
    """
    held = expected(manifest, files)
    for name in files:
        for why, _ in faults(storage, folder, name, manifest.files[name].size, held[name]):
            raise CheckpointError(
                f"{inside(inside(storage.place, folder), name)}: {why}: load another checkpoint"
            )


def expected(manifest: Manifest, files: Collection[str]) -> dict[str, dict[str, tuple[str, Slot]]]:
    """For each of `files`, what its header has by the manifest: by the name there, the full name of the tensor, and its slot."""
    held: dict[str, dict[str, tuple[str, Slot]]] = {name: {} for name in files}
    for name, stored in manifest.tensors.items():
        for box, file, begin in stored.pieces:
            if file in held:
                slot = Slot(*filed(stored.dtype, box.shape), begin, begin + box.count * stored.dtype.itemsize)
                held[file][key(name, box, stored.shape)] = (name, slot)
    return held


def faults(
    storage: Storage, folder: str, name: str, size: int, held: dict[str, tuple[str, Slot]]
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """What is wrong with a file, in words, and the tensors that it concerns. It should have `size` bytes, and a header that says `held`."""
    path = inside(folder, name)
    concerned = tuple(tensor for tensor, _ in held.values())
    found = storage.size(path)
    if found is None:
        yield "is missing, or no regular file", concerned
        return
    if found != size:
        yield f"has {found} bytes, and {size} were written", concerned
        return
    if not held and not name.endswith(".safetensors"):
        return
    try:
        text = storage.head(path, FIRST)
        if (count := length(text, size, name)) > len(text):
            text = storage.head(path, count)
        slots = decode(text, size, name)
    except CheckpointError as error:
        yield str(error).removeprefix(f"{name}: "), concerned
        return
    for word in sorted(slots.keys() | held.keys()):
        tensor, slot = held.get(word, (None, None))
        if slots.get(word) != slot:
            there, here = _said(slots.get(word)), _said(slot)
            yield (
                f"its header says other than the manifest of {word!r:.300}: {there}, not {here}",
                (tensor,) if tensor else (),
            )


def _said(slot: Slot | None) -> str:
    return (
        "nothing" if slot is None else f"{slot.dtype} {list(slot.shape)} in bytes {slot.begin} to {slot.end}"
    )
