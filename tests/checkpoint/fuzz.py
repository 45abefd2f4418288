"""Files that an enemy wrote, by the hundred thousand: ``python -m tests.checkpoint.fuzz header --runs 1000000``.

atheris (libFuzzer) keeps the inputs that reach new lines of our readers and changes them further, as bytes and as JSON.
Whatever comes in, a reader returns or raises CheckpointError, soon and in little memory; what it returns, it can write
and read again.
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

from easymp import CheckpointError
from easymp.checkpoint import codec, manifest
from easymp.compat.accelerate import Accelerator

from .samples import Holder

LONGEST = 4096  # bytes of an input
SECONDS, MEGABYTES = 10, 1500  # for one input; torch alone takes some 300 MB
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63), 0.5, 1e308),
    *("", "a", "..", "/", "\x00", "F32", "F4", "C128"),
    *([], {}, [[]], [0], [1, 2], {"$": "tuple"}, {"$": "set", "items": [[]]}, {"$": "int", "value": "0x0"}),
)  # fmt: skip


# Each reads what it is given, writes what it read, and says whether it was taken.


def read_header(content: bytes) -> bool:
    """As a whole file, and as the JSON of one whose data has the size that the first two bytes say."""
    texts = [content, (len(content) - 2).to_bytes(8, "little") + content[2:]] if len(content) > 2 else [content]
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
        head, slots_again = codec.encode_header([(name, slot.dtype, slot.shape) for name, slot in ordered])
        assert codec.decode_header(head, max([len(head), *(p.end for p in slots_again)]), "x")[0] == dict(
            zip(dict(ordered), slots_again)
        )
        read += 1
    return read > 0


def read_manifest(content: bytes) -> bool:
    try:
        decoded = manifest.decode(content, "x")
    except CheckpointError:
        return False
    assert manifest.decode(decoded.encode(), "x") == decoded
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
    again = codec.unpack(codec.loads(codec.dumps(packed), "x"), lambda name: tensor)
    assert codec.pack(again, "x", {}) == packed
    return True


READERS: dict[str, Callable[[bytes], bool]] = {
    "header": read_header,
    "manifest": read_manifest,
    "strict": read_strict,
    "trees": read_trees,
}


def kinds() -> dict[str, Any]:
    """A value of each kind."""
    values = [(1, 2.5), b"a", float("nan"), 2**70]
    values += [torch.Size([2]), torch.float32, OrderedDict(a=1)]
    values += [{1: "a", (2,): "b"}, numpy.ones(2), numpy.float32(0.5), random.Random(0).getstate()[1][:3]]
    tensors = [torch.zeros(2).to(dtype) for dtype in (torch.int8, torch.float8_e4m3fn, torch.complex128)]
    return {"kinds": values, "tensors": tensors}


def always(file: Path) -> bytes:
    """A manifest without the time and the machine, so that each run has the same examples."""
    manifest = json.loads(file.read_bytes()) | {"written": "2026-01-01", "plan": {"a": [1]}}
    return json.dumps(manifest, ensure_ascii=False, separators=(",", ":")).encode()


@cache
def seeds(target: str) -> list[bytes]:
    """Real ones, as we write them."""
    with tempfile.TemporaryDirectory() as folder, Accelerator(cpu=True, seed=0, log_with="none") as acc:
        acc.prepare(torch.nn.Linear(2, 2))
        acc.register_for_checkpointing(Holder(kinds()))
        folder_a = Path(acc.save_state(f"{folder}/a"))
        text = always(folder_a / manifest.MANIFEST)
        acc.register_save_state_pre_hook(lambda models, weights, to: Path(to, "a.bin").write_bytes(b"a"))
        hooked = always(Path(acc.save_state(f"{folder}/b"), manifest.MANIFEST))
        file = next(folder_a.glob("model-*.safetensors")).read_bytes()
    states = json.loads(text)["states"]
    (object_state,) = (state for state in states.values() if "kinds" in state)
    size = int.from_bytes(file[:8], "little")
    data = len(file) - 8 - size
    packed = [object_state, *object_state["kinds"], *states.values()]
    return {
        "header": [file, data.to_bytes(2, "little") + file[8 : 8 + size].rstrip()],
        "manifest": [text, hooked],
        "strict": [codec.dumps(object_state), b'[1e5,-0.0,"\\ud83d\\ude00\\n",{"a":{}}]'],
        "trees": [codec.dumps(part) for part in packed],
    }[target]


def mutated(content: bytes, rng: random.Random) -> bytes:
    """Other JSON with one value changed, removed, or repeated, or a key renamed.

    `content` itself where that is none.
    """
    start = max(content.find(b"{"), 0) if content[:1] not in (b"[", b"{") else 0
    try:
        value = json.loads(content[start:].rstrip(b"\0"))
    except (ValueError, RecursionError):
        return content
    slots: list[tuple[Any, Any]] = []
    queue = [value]
    while queue and len(slots) < 2000:
        at = queue.pop()
        keys = list(at) if isinstance(at, dict) else range(len(at)) if isinstance(at, list) else ()
        slots += [(at, key) for key in keys]
        queue += [at[key] for key in keys]
    if not slots:
        return content
    (at, key), (source, source_key) = rng.choice(slots), rng.choice(slots)
    change = rng.randrange(6)
    if change == 0:
        at[key] = json.loads(json.dumps(source[source_key]))
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
    functions_found = []
    for module in (codec, manifest):
        classes = [value for value in vars(module).values() if isinstance(value, type)]
        values = [value_in for namespace in (module, *classes) for value_in in vars(namespace).values()]
        functions_found += [
            value
            for value in values
            if isinstance(value, FunctionType) and value.__code__.co_filename == module.__file__
        ]
    return functions_found


def main() -> None:
    import atheris

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=READERS)
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0, help="0: another one in each run")
    options_given = parser.parse_args()
    for code in functions():
        atheris.instrument_func(code)

    def read(content: bytes) -> None:
        READERS[options_given.target](content)

    def change(content: bytes, longest: int, seed: int) -> bytes:
        rng = random.Random(seed)
        return mutated(content, rng)[:longest] if rng.random() < 0.5 else atheris.Mutate(content, longest)

    with tempfile.TemporaryDirectory() as folder:
        for number, seed in enumerate(seeds(options_given.target)):
            Path(folder, str(number)).write_bytes(seed)
        options = {"runs": options_given.runs, "max_len": 2 * LONGEST, "timeout": SECONDS, "print_final_stats": 1}
        options |= {"seed": options_given.seed, "rss_limit_mb": MEGABYTES}
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
