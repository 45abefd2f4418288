"""Files of torch.save, for scripts that ask for ``safe_serialization=False``. All of them can be read with ``weights_only=True``."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError, RefusedError
from ..settings import read_bytes
from .huggingface import Item, cut
from .snapshot import encode_index

FILES = {
    "MODEL_NAME": "pytorch_model",
    "SAFE_MODEL_NAME": "model",
    "SAFE_WEIGHTS_INDEX_NAME": "model.safetensors.index.json",
    "SAFE_WEIGHTS_NAME": "model.safetensors",
    "SAFE_WEIGHTS_PATTERN_NAME": "model{suffix}.safetensors",
    "WEIGHTS_INDEX_NAME": "pytorch_model.bin.index.json",
    "WEIGHTS_NAME": "pytorch_model.bin",
    "WEIGHTS_PATTERN_NAME": "pytorch_model{suffix}.bin",
}


def write(obj: Any, f: str | os.PathLike[str]) -> None:
    """Write an object by torch.save; a file that was there is replaced when the new one is written.

    Raises:
        RefusedError: an object that ``torch.load(weights_only=True)`` does not read.
        CheckpointError: the file cannot be written.
    """
    place, fresh = os.fspath(f), f"{os.fspath(f)}.tmp"
    try:
        torch.save(obj, fresh)
        torch.load(fresh, mmap=True, weights_only=True)
        os.replace(fresh, place)
    except (pickle.PickleError, AttributeError, TypeError) as error:
        said = str(error).splitlines()[0]
        raise RefusedError(
            f"{place}: torch.load(weights_only=True) does not read this {type(obj).__name__} ({said}), and other reading can run code: "
            "save tensors, numbers, strings, lists and dicts of these, such as state_dict() gives"
        ) from error
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{place}: cannot be written ({error})") from error
    finally:
        with suppress(FileNotFoundError):
            os.remove(fresh)


def read(file: str) -> Any:
    """The weights in a file of torch.save, on the CPU."""
    return torch.load(file, map_location="cpu", weights_only=True)


def write_model(state: Mapping[str, Any], folder: str, max_shard_size: int | str) -> None:
    """Write weights as ``pytorch_model.bin``, or as shards and their index; shards of an earlier model are removed."""
    os.makedirs(folder, exist_ok=True)
    first: dict[int, str] = {}
    twins = {name: first.setdefault(id(value), name) for name, value in state.items()}
    items = [
        Item(name, value.dtype, tuple(value.shape)) for name, value in state.items() if twins[name] == name
    ]
    shards = [
        {item.name for item in shard} for shard in cut(items, read_bytes(max_shard_size, "max_shard_size="))
    ]
    count = len(shards)
    names = [
        "pytorch_model.bin" if count == 1 else f"pytorch_model-{i:05d}-of-{count:05d}.bin"
        for i in range(1, count + 1)
    ]
    weights = {}
    for file, shard in zip(names, shards):
        mine = {name: value for name, value in state.items() if twins[name] in shard}
        write(mine, Path(folder, file))
        weights.update(dict.fromkeys(mine, file))
    if count > 1:
        Path(folder, FILES["WEIGHTS_INDEX_NAME"]).write_bytes(
            encode_index(weights, sum(i.bytes for i in items))
        )
    for there in os.listdir(folder):
        if re.fullmatch(r"pytorch_model(-\d{5}-of-\d{5})?\.bin", there) and there not in names:
            os.remove(Path(folder, there))


def beside(models: list[Any], weights: list[dict[str, Any]], folder: str, main: bool) -> None:
    """A save hook: the weights once more, by the names that Accelerate gives them in a checkpoint. All ranks call it."""
    for number, state in enumerate(weights):
        whole = {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in state.items()}
        if main:
            write(
                {name: t.detach() if isinstance(t, Tensor) else t for name, t in whole.items()},
                Path(folder, f"pytorch_model{f'_{number}' if number else ''}.bin"),
            )
