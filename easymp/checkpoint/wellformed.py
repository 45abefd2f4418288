"""What must hold for the tables of a manifest, whoever wrote it. Who reads one need not check again, and who writes one is checked too.

Every function raises CheckpointError in one sentence.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from itertools import pairwise
from typing import Any

from ..errors import CheckpointError
from .boxes import fault
from .header import MOST, nbytes
from .stored import BLOCK, COMMIT, MANIFEST, FileRecord, Lineage, Stored
from .trees import names

LONGEST_NAME = (
    200  # bytes of a file's name; 255 are the most on usual file systems, and temporary ones are longer
)
MOST_RANKS = 2**20  # that wrote one checkpoint; what each of them kept is looked up by its number
LONGEST_PATH = 700  # bytes of a path below the checkpoint; object stores take 1024 with all that is above it


def portable(word: str) -> bool:
    """Whether a file or folder can have this name on any file system, and it leads nowhere else."""
    return (
        bool(word)
        and word.isprintable()
        and len(word.encode()) <= LONGEST_NAME
        and not set('/\\:*?"<>|') & set(word)
        and word[0] != " "
        and word[-1] not in ". "
    )


def plain(name: str) -> bool:
    """Whether a file of this name lies right in the folder, on any file system, and is none of those that every checkpoint has."""
    return (
        portable(name) and name[0] != "." and name.casefold() not in (MANIFEST.casefold(), COMMIT.casefold())
    )


def check_number(name: str, value: object, low: int, high: int = MOST) -> None:
    if type(value) is not int or not low <= value <= high:
        raise CheckpointError(f"{name} is {value!r:.80}, and should be a whole number from {low} to {high}")


def check_text(name: str, value: object) -> None:
    """Of one line, for people."""
    if not isinstance(value, str) or len(value) > 200 or not value.isprintable():
        raise CheckpointError(f"{name} is {value!r:.80}, and should be a line of at most 200 characters")


def check_files(files: Mapping[str, FileRecord]) -> None:
    """Those that lie right in the folder."""
    for name in files:
        if not plain(name):
            raise CheckpointError(
                f"the file {name!r:.300} has no plain name: files lie right in the folder, and hold no manifest"
            )
    check_records(files)


def check_extra(names: Collection[str], files: Collection[str]) -> None:
    """Paths of hooks' files fit beside the checkpoint's own `files`, and beside one another, on file systems without cases, too."""
    own = {name.casefold() for name in (*files, MANIFEST, COMMIT)}
    taken: dict[str, str] = {}
    for name in names:
        if (
            len(name) > LONGEST_PATH
            or not all(map(portable, name.split("/")))
            or len(name.encode()) > LONGEST_PATH
        ):
            raise CheckpointError(
                f"the file {name!r:.300} of a hook has no name that every file system takes: words of letters, digits and most signs (not "
                f'\\ : * ? " < > |), / between them, and at most {LONGEST_PATH} bytes'
            )
        if name.partition("/")[0].casefold() in own:
            raise CheckpointError(
                f"the file {name!r:.300} of a hook has the name of one that is the checkpoint's own: let the hook write to a folder below "
                "the one that it is given"
            )
        if name.casefold() in taken:
            raise CheckpointError(
                f"the files {taken[name.casefold()]!r:.300} and {name!r:.300} of hooks have one name: change one"
            )
        taken[name.casefold()] = name
    for name in names:
        words = name.casefold().split("/")
        for count in range(1, len(words)):
            if file := taken.get("/".join(words[:count])):
                raise CheckpointError(
                    f"{file!r:.300} is a file of a hook, and a folder with {name!r:.300} in it: change one"
                )


def check_records(files: Mapping[str, FileRecord]) -> None:
    """Sizes and checksums."""
    for name, file in files.items():
        check_number(f"the size of {name}", file.size, 0)
        blocks = -(-file.size // BLOCK)
        if len(file.checksums) != blocks:
            raise CheckpointError(
                f"{name} has {file.size} bytes, so {blocks} checksums, and here are {len(file.checksums)}"
            )
        for checksum in file.checksums:
            check_number(f"a checksum of {name}", checksum, 0, 2**32 - 1)


def check_tensors(tensors: Mapping[str, Stored], files: Mapping[str, FileRecord]) -> None:
    """Each is covered once by its pieces, and each byte of a file belongs to one piece at most."""
    places: dict[str, list[tuple[int, int, str]]] = {}
    for name, stored in tensors.items():
        if nbytes(stored.dtype, stored.shape) is None:
            raise CheckpointError(
                f"{name!r:.300} has the shape {list(stored.shape)!r:.80}, which no {stored.dtype} can have"
            )
        for box, file, _ in stored.pieces:
            if any(type(n) is not int for side in box for n in side):
                raise CheckpointError(f"{name!r:.300} has a box {box!r:.80}, which are not all whole numbers")
            if file not in files:
                raise CheckpointError(f"{name!r:.300} lies in {file!r:.300}, which is none of the files")
        if wrong := fault(stored.shape, [piece.box for piece in stored.pieces]):
            raise CheckpointError(f"{name!r:.300} is not stored once and whole: {wrong}")
        for box, file, begin in stored.pieces:
            count = box.count * stored.dtype.itemsize
            check_number(f"the first byte of {name!r:.300} in {file}", begin, 0, files[file].size - count)
            if count:
                places.setdefault(file, []).append((begin, begin + count, name))
    for file, taken in places.items():
        taken.sort()
        for (_, end, one), (begin, _, other) in pairwise(taken):
            if begin < end:
                raise CheckpointError(f"{one!r:.300} and {other!r:.300} lie in the same bytes of {file}")


def check_aliases(aliases: Mapping[str, str], tensors: Mapping[str, Stored]) -> None:
    """They name stored tensors, not one another: so there is no cycle."""
    for name, of in aliases.items():
        if name in tensors:
            raise CheckpointError(f"{name!r:.300} is a tensor, and another name of {of!r:.300} too")
        if of not in tensors:
            raise CheckpointError(f"{name!r:.300} is another name of {of!r:.300}, which is not stored")


def check_states(states: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """They can be unpacked, and their tensors are among the `known`."""
    for name, state in states.items():
        try:
            wanted = names(state)
        except CheckpointError as error:
            raise CheckpointError(f"{name!r:.300}: {error}") from None
        for tensor in wanted:
            if tensor not in known:
                raise CheckpointError(f"{name!r:.300} has a tensor {tensor!r:.300}, which is not stored")


def check_lineage(lineage: Lineage) -> None:
    """Lines are short words, as folders get names of them."""
    for line in (lineage.line, *(line for line, _, _ in lineage.forks)):
        if not re.fullmatch("[0-9a-f]{1,32}", line):
            raise CheckpointError(
                f"the line {line!r:.80} is no identifier: it should be 1 to 32 hexadecimal digits"
            )
    check_text("parent", lineage.parent)
    for _, written, step in lineage.forks:
        check_text("the time of a fork", written)
        check_number("the step of a fork", step, 0)
