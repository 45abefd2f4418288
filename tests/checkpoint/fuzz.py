"""Files that an enemy wrote, by the hundred thousand: ``python -m tests.checkpoint.fuzz header --runs 1000000``.

atheris (libFuzzer) keeps the inputs that reach new lines of our readers and changes them further, as bytes and as JSON. Whatever comes
in, a reader returns or raises CheckpointError, soon and in little memory; what it returns, it can write and read again.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy
import safetensors
import torch

from easymp import Accelerator, CheckpointError
from easymp.checkpoint import codec, manifest

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


class Kinds:
    """An object whose state has a value of each kind."""

    def state_dict(self) -> dict[str, Any]:
        kinds = [(1, 2.5), {3}, frozenset({None}), b"a", bytearray(b"a"), 1j, float("nan"), 2**70, "\ud800"]
        kinds += [torch.Size([2]), torch.float32, torch.device("cpu"), range(3), slice(1), OrderedDict(a=1)]
        kinds += [{1: "a", (2,): "b"}, numpy.ones(2), numpy.float32(0.5), random.Random(0).getstate()[1][:3]]
        tensors = [torch.zeros(2).to(dtype) for dtype in (torch.int8, torch.float8_e4m3fn, torch.complex128)]
        return {"kinds": kinds, "tensors": tensors}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


def always(file: Path) -> bytes:
    """A manifest without the time and the machine, so that each run has the same examples."""
    said = json.loads(file.read_bytes()) | {"written": "2026-01-01", "plan": {"a": [1]}}
    return json.dumps(said, ensure_ascii=False, separators=(",", ":")).encode()


@cache
def seeds(target: str) -> list[bytes]:
    """Real ones, as we write them."""
    with tempfile.TemporaryDirectory() as folder, Accelerator(cpu=True, seed=0, log_with="none") as acc:
        acc.prepare(torch.nn.Linear(2, 2))
        acc.register_for_checkpointing(Kinds())
        place = Path(acc.save_state(f"{folder}/a"))
        text = always(place / manifest.MANIFEST)
        acc.register_save_state_pre_hook(lambda models, weights, to: Path(to, "a.bin").write_bytes(b"a"))
        hooked = always(Path(acc.save_state(f"{folder}/b"), manifest.MANIFEST))
        file = next(place.glob("model-*.safetensors")).read_bytes()
    states = json.loads(text)["states"]
    (kept,) = (it for it in states.values() if "kinds" in it)
    size = int.from_bytes(file[:8], "little")
    data = len(file) - 8 - size
    packed = [kept, *kept["kinds"], *states.values()]
    return {
        "header": [file, data.to_bytes(2, "little") + file[8 : 8 + size].rstrip()],
        "manifest": [text, hooked],
        "strict": [codec.dumps(kept), b'[1e5,-0.0,"\\ud83d\\ude00\\n",{"a":{}}]'],
        "trees": [codec.dumps(part) for part in packed],
    }[target]


def mutated(content: bytes, rng: random.Random) -> bytes:
    """Other JSON with one value changed, removed, or repeated, or a key renamed; `content` itself where that is none."""
    start = max(content.find(b"{"), 0) if content[:1] not in (b"[", b"{") else 0
    try:
        value = json.loads(content[start:].rstrip(b"\0"))
    except (ValueError, RecursionError):
        return content
    places: list[tuple[Any, Any]] = []
    queue = [value]
    while queue and len(places) < 2000:
        at = queue.pop()
        keys = list(at) if isinstance(at, dict) else range(len(at)) if isinstance(at, list) else ()
        places += [(at, key) for key in keys]
        queue += [at[key] for key in keys]
    if not places:
        return content
    (at, key), (other, place) = rng.choice(places), rng.choice(places)
    change = rng.randrange(6)
    if change == 0:
        at[key] = json.loads(json.dumps(other[place]))
    elif change == 1:
        del at[key]
    elif change == 2 and isinstance(at, list):
        at.insert(key, at[key])
    elif change == 2:
        at[rng.choice(("$", "a", f"{key}'", "__metadata__"))] = at.pop(key)
    elif change == 3 and type(at[key]) is int:
        at[key] += rng.choice((-1, 1, 8, -8))
    else:
        at[key] = rng.choice(ODD)
    return content[:start] + json.dumps(value).encode()


def functions() -> list[FunctionType]:
    """All of ours that read."""
    found = []
    for module in (codec, manifest):
        classes = [it for it in vars(module).values() if isinstance(it, type)]
        things = [thing for held in (module, *classes) for thing in vars(held).values()]
        found += [
            it for it in things if isinstance(it, FunctionType) and it.__code__.co_filename == module.__file__
        ]
    return found


def main() -> None:
    import atheris

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=READERS)
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0, help="0: another one in each run")
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
        options |= {"seed": given.seed, "rss_limit_mb": MEGABYTES}
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
