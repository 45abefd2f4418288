"""Files of torch.save: those that ``torch.load(weights_only=True)`` reads, which runs no code, and no others."""

from __future__ import annotations

import os
import pickle  # noqa: TID251
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..base.units import read_bytes
from ..errors import CheckpointError, RefusedError
from .codec import TensorSpec, decode_index, encode_index, split_into_shards

SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
SINGLE, INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
STATE_KEYS = ("state_dict", "model_state_dict", "model", "module")  # under which trainers keep the model's


def is_torch_save(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is a file of torch.save by its name, or a local folder with one and no safetensors."""
    path = Path(path)
    if path.is_file():
        return path.suffix in SUFFIXES or path.name == INDEX
    return any((path / name).is_file() for name in (SINGLE, INDEX)) and not list(path.glob("*.safetensors"))


def read_model(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The state dict of a model, in one file or in shards; mapped into memory if the format allows it."""
    path = Path(path)
    if path.is_dir():
        path = path / (SINGLE if (path / SINGLE).is_file() else INDEX)
    if path.name != INDEX:
        return read_state_dict(path)
    tensors: dict[str, Tensor] = {}
    for file in dict.fromkeys(decode_index(path.read_bytes(), str(path)).values()):
        tensors.update(read_state_dict(path.parent / file))
    return tensors


def read_state_dict(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Tensors by name in a file of torch.save, at its top or under one of STATE_KEYS; no code in it is run."""
    try:
        try:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)  # noqa: TID251
        except RuntimeError:  # a file without the zip format cannot be mapped
            content = read(path)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} holds more than plain data, and running it is not done here: in the program that wrote it, save "
            "the model by safetensors.torch.save_model"
        ) from error
    except Exception as error:
        raise unreadable(path, error) from error
    top = content if isinstance(content, Mapping) else {}
    for candidate in (top, *(top[key] for key in STATE_KEYS if key in top)):
        if isinstance(candidate, Mapping) and candidate and all(isinstance(v, Tensor) for v in candidate.values()):
            return {str(name): value for name, value in candidate.items()}
    keys = ", ".join(map(str, list(top)[:5])) if top else type(content).__name__
    raise CheckpointError(f"{path}: no state dict at its top or under {', '.join(STATE_KEYS)}; it has {keys}")


def read(file: str | os.PathLike[str]) -> Any:
    return torch.load(file, map_location="cpu", weights_only=True)  # noqa: TID251


def unreadable(path: Any, error: Exception, hint: str = "") -> CheckpointError:
    return CheckpointError(f"{path}: cannot be read ({type(error).__name__}: {error}){hint}")


def write(obj: Any, f: str | os.PathLike[str]) -> None:
    """Write an object by torch.save, if ``torch.load(weights_only=True)`` reads it; an older file is replaced."""
    path, temporary = os.fspath(f), f"{os.fspath(f)}.tmp"
    try:
        torch.save(obj, temporary)  # noqa: TID251
        torch.load(temporary, mmap=True, weights_only=True)  # noqa: TID251
        os.replace(temporary, path)
    except (pickle.PickleError, AttributeError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise RefusedError(
            f"{path}: torch.load(weights_only=True) does not read this {type(obj).__name__} ({reason}), and other "
            "reading can run code: save tensors, numbers, strings, lists and dicts of these, such as state_dict() gives"
        ) from error
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{path}: cannot be written ({error})") from error
    finally:
        with suppress(FileNotFoundError):
            os.remove(temporary)


def write_model(state: Mapping[str, Any], folder: str | os.PathLike[str], max_shard_size: int | str) -> None:
    """Write weights as ``pytorch_model.bin``, or as shards and their index; shards of an earlier model are removed."""
    os.makedirs(folder, exist_ok=True)
    first_names: dict[int, str] = {}
    first = {name: first_names.setdefault(id(value), name) for name, value in state.items()}
    specs = [TensorSpec(name, t.dtype, tuple(t.shape)) for name, t in state.items() if first[name] == name]
    shards = split_into_shards(specs, read_bytes(max_shard_size, "max_shard_size="))
    count = len(shards)
    files = [SINGLE] if count == 1 else [f"pytorch_model-{i:05d}-of-{count:05d}.bin" for i in range(1, count + 1)]
    weight_map: dict[str, str] = {}
    for file, shard in zip(files, shards):
        names = {spec.name for spec in shard}
        tensors = {name: value for name, value in state.items() if first[name] in names}
        write(tensors, Path(folder, file))
        weight_map.update(dict.fromkeys(tensors, file))
    if count > 1:
        Path(folder, INDEX).write_bytes(encode_index(weight_map, sum(spec.bytes for spec in specs)))
    for name in os.listdir(folder):
        if re.fullmatch(r"pytorch_model(-\d{5}-of-\d{5})?\.bin", name) and name not in files:
            os.remove(Path(folder, name))
