"""Files that an enemy wrote, by the hundred thousand: ``python -m tests.checkpoint.fuzz header --runs 1000000``.

atheris (libFuzzer) keeps the inputs that reach new lines of our readers and changes them further, as bytes and as JSON. Whatever comes
in, a reader returns or raises CheckpointError, soon and in little memory; what it returns, it can write and read again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import safetensors
import torch

from easymp import CheckpointError
from easymp.checkpoint import codec, manifest
from easymp.checkpoint.manifest import Box, whole

LONGEST = 4096  # bytes of an input
SECONDS, MEGABYTES = 10, 1500  # for one input; torch alone takes some 300 MB
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63), 0.5, 1e308, "", "a", "..", "/", "\x00"),
    *([], {}, [[]], [0], [1, 2], {"$": "tuple"}, {"$": "set", "items": [[]]}, {"$": "int", "value": "0x0"}, "F32", "F4", "C128"),
)  # fmt: skip


# Each reads what it is given, writes what it read, and says whether it was taken.


def read_header(content: bytes) -> bool:
    """As a whole file, and as the JSON of one whose data has the size that the first two bytes say."""
    texts = (
        [content, (len(content) - 2).to_bytes(8, "little") + content[2:]] if len(content) > 2 else [content]
    )
    read = 0
    for text, data in zip(texts, (0, int.from_bytes(content[:2], "little"))):
        size = len(text) + data
        try:
            slots, _ = codec.decode_header(text, size, "x")
        except CheckpointError:
            continue
        assert sum(s.end - s.begin for s in slots.values()) == size - 8 - int.from_bytes(text[:8], "little")
        safetensors.deserialize(text + bytes(data))  # nothing is taken that the library would refuse
        ordered = sorted(slots.items(), key=lambda item: item[1][2:])
        head, places = codec.encode_header([(name, slot.dtype, slot.shape) for name, slot in ordered])
        assert codec.decode_header(head, max([len(head), *(p.end for p in places)]), "x")[0] == dict(
            zip(dict(ordered), places)
        )
        read += 1
    return read > 0


def read_manifest(content: bytes) -> bool:
    try:
        found = manifest.decode(content, "x")
    except CheckpointError:
        return False
    assert manifest.decode(found.encode(), "x") == found
    return True


def read_strict(content: bytes) -> bool:
    try:
        value = codec.loads(content, "x")
    except CheckpointError:
        return False
    assert codec.loads(codec.dumps(value), "x") == value
    return True


def read_trees(content: bytes) -> bool:
    tensor = torch.zeros(2)
    try:
        value = codec.unpack(codec.loads(content, "x"), lambda name: tensor)
        packed = codec.pack(value, "x", {})
    except CheckpointError:
        return False
    codec.names(codec.loads(codec.dumps(packed), "x"))
    return True


READERS: dict[str, Callable[[bytes], bool]] = {
    "header": read_header,
    "manifest": read_manifest,
    "strict": read_strict,
    "trees": read_trees,
}


def seeds(target: str) -> list[bytes]:
    """Real ones, as we write them."""
    kinds = [torch.float32, torch.int8, torch.complex128, torch.float4_e2m1fn_x2]
    head, slots = codec.encode_header(
        [(f"w{i}", dtype, (2, 3)) for i, dtype in enumerate(kinds)], {"format": "pt"}
    )
    state = {
        "kinds": [
            (1, 2.5),
            {3},
            frozenset({None}),
            b"bytes",
            bytearray(b"a"),
            1j,
            float("nan"),
            2**70,
            "\ud800",
            torch.Size([2]),
        ],
        "torch": [
            torch.float32,
            torch.device("cpu"),
            range(3),
            slice(1),
            OrderedDict(a=1),
            {1: "a", (2,): "b"},
        ],
        "random": random.Random(0).getstate()[1][:3],
        "w": torch.zeros(2),
    }
    tensors: dict[str, torch.Tensor] = {}
    packed = codec.pack(state, "state", tensors)
    packed["array"] = {"$": "array", "name": "state/w"}
    packed["scalar"] = {"$": "scalar", "dtype": "float32", "value": 0.5}
    rows = (Box((0, 0), (1, 3)), Box((1, 0), (1, 3)))
    file, size = "model-00001-of-00001.safetensors", slots[-1].end
    stored = {
        "model/w0": manifest.Stored(
            torch.float32, (2, 3), tuple(manifest.Piece(b, file, 4096 + 12 * i) for i, b in enumerate(rows))
        ),
        "state/w": manifest.Stored(torch.int8, (), (manifest.Piece(whole(()), file, 4130),)),
    }
    record = manifest.FileRecord(size, (7,))
    made = manifest.Manifest(
        1, 2, "2026-01-01", "easymp", {"a": [1]}, stored, {file: record}, {"state": packed}, {"b": "state/w"}
    )
    hooked = dataclasses.replace(
        made, extra={"unet/a.bin": record, "unet/.b": manifest.FileRecord(0, ()), "c": record}
    )
    real = {
        "header": [
            head + bytes(slots[-1].end - len(head)),
            (slots[-1].end - len(head)).to_bytes(2, "little") + head[8:].rstrip(),
        ],
        "manifest": [made.encode(), hooked.encode()],
        "strict": [codec.dumps(packed), b'[1e5,-0.0,"\\ud83d\\ude00\\n",{"a":{}}]'],
        "trees": [
            codec.dumps(part)
            for part in (packed, *packed["kinds"], *packed["torch"], packed["array"], packed["scalar"])
        ],
    }
    return real[target]


def mutated(content: bytes, rng: random.Random) -> bytes:
    """Other JSON with one value changed, removed, or repeated, or a key renamed; `content` itself where that is none."""
    start = content.find(b"{") if content[:1] not in (b"[", b"{") else 0
    try:
        value = json.loads(content[max(start, 0) :].rstrip(b"\0"))
    except (ValueError, RecursionError):
        return content
    places: list[tuple[Any, Any]] = []
    queue = [value]
    while queue and len(places) < 2000:
        at = queue.pop()
        items = (
            list(at.items()) if isinstance(at, dict) else list(enumerate(at)) if isinstance(at, list) else []
        )
        places += [(at, key) for key, _ in items]
        queue += [item for _, item in items]
    if not places:
        return content
    at, key = rng.choice(places)
    change = rng.randrange(6)
    if change == 0:
        del at[key]
    elif change == 1:
        other, place = rng.choice(places)
        at[key] = json.loads(
            json.dumps(
                other.get(place) if isinstance(other, dict) else other[place] if place < len(other) else None
            )
        )
    elif change == 2 and isinstance(at, list):
        at.insert(key, at[key])
    elif change == 2:
        at[rng.choice(("$", "a", f"{key}'", "__metadata__"))] = at.pop(key)
    elif change == 3 and type(at[key]) is int:
        at[key] += rng.choice((-1, 1, 8, -8))
    else:
        at[key] = rng.choice(ODD)
    return content[: max(start, 0)] + json.dumps(value).encode()


def functions() -> list[FunctionType]:
    """All of ours that read."""
    found = []
    for module in (codec, manifest):
        classes = [
            c for c in vars(module).values() if isinstance(c, type) and c.__module__ == module.__name__
        ]
        for held in (module, *classes):
            for thing in vars(held).values():
                if isinstance(thing, FunctionType) and thing.__code__.co_filename == module.__file__:
                    found.append(thing)
    return found


def main() -> None:
    import atheris

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=READERS)
    parser.add_argument("--runs", type=int, default=100_000)
    given = parser.parse_args()
    for code in functions():
        atheris.instrument_func(code)

    def read(content: bytes) -> None:
        READERS[given.target](content)

    def change(content: bytes, longest: int, seed: int) -> bytes:
        rng = random.Random(seed)
        return mutated(content, rng)[:longest] if rng.random() < 0.5 else atheris.Mutate(content, longest)

    with tempfile.TemporaryDirectory() as folder:
        for number, seed in enumerate(seeds(given.target)):
            Path(folder, str(number)).write_bytes(seed)
        options = {"runs": given.runs, "max_len": 2 * LONGEST, "timeout": SECONDS, "print_final_stats": 1}
        options["rss_limit_mb"] = MEGABYTES
        arguments = [
            sys.argv[0],
            folder,
            f"-artifact_prefix={tempfile.gettempdir()}/",
            *(f"-{n}={v}" for n, v in options.items()),
        ]
        atheris.Setup(arguments, read, custom_mutator=change)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
