"""Flags of ``accelerate launch`` as flags of `easymp launch`, by the rules for files of ``accelerate config``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import RefusedError, SettingError
from ..settings import LAUNCHING
from .config.accelerate import ACCELERATE, import_document
from .config.rules import Document, read_document

SWITCHES = {"cpu", "multi_gpu", "use_fsdp", "use_deepspeed", "use_megatron_lm", "debug", "same_network"}
KINDS = {
    "use_fsdp": "FSDP",
    "use_deepspeed": "DEEPSPEED",
    "use_megatron_lm": "MEGATRON_LM",
    "multi_gpu": "MULTI_GPU",
}
SAME = {"machine_rank": "--node-rank", "max_restarts": "--max-restarts"}
SECTIONS = {key: name for name, rules in ACCELERATE.items() if isinstance(rules, Mapping) for key in rules}
REFUSED = ("no counterpart", "not in force", "unknown")


def translate(words: Sequence[str], own: Mapping[str, bool]) -> list[str]:
    """The command line behind ``--as accelerate``, up to the script, in easymp's flags.

    Args:
        words: flags of either, the script, and its arguments.
        own: easymp's flags, and whether each takes a value.

    Raises:
        RefusedError: a flag of Accelerate's that has no counterpart.
        SettingError: one without its value, or with a wrong one.
    """
    content: dict[str, Any] = {}
    kept: list[str] = []
    rest = list(words)
    while rest and rest[0].startswith("-"):
        flag, equals, value = rest.pop(0).partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        if flag in own and "_" not in flag:
            kept += [f"{flag}{equals}{value}", *([rest.pop(0)] if own[flag] and not equals and rest else [])]
            continue
        if name in SWITCHES:
            value = "true"
        elif not equals and not rest:
            raise SettingError(f"{flag} has no value")
        elif not equals:
            value = rest.pop(0)
        if name in SAME:
            kept += [SAME[name], value]
        elif name == "config_file":
            content = {**read_document(value).content, **content}
        elif name in KINDS:
            content["distributed_type"] = KINDS[name]
        elif name == "cpu":
            content["use_cpu"] = True
        elif name in ACCELERATE:
            content[name] = _plain(value)
        elif name in SECTIONS:
            content.setdefault(SECTIONS[name], {})[name] = _plain(value)
        else:
            raise RefusedError(
                f"{flag} of accelerate launch has no counterpart: leave it out, or see easymp launch --help"
            )
    if content.get("num_processes", 1) != 1 and "distributed_type" not in content:
        content["distributed_type"] = "MULTI_CPU" if content.get("use_cpu") else "MULTI_GPU"
    return [*kept, *_flags(content), *rest]


def _flags(content: dict[str, Any]) -> Iterator[str]:
    """The settings in the content of a file of Accelerate's, as flags."""
    if not content:
        return
    found = import_document(Document("accelerate launch", content, ""), Path())
    for what, sentence in found.lines:
        if sentence.startswith(REFUSED):
            raise RefusedError(f"accelerate launch: {what}: {sentence}")
    port = found.values.pop("main_port", None)
    for name, value in found.values.items():
        if name in LAUNCHING:
            yield from (
                f"--{name.replace('_', '-')}",
                f"{value}:{port}" if name == "main_address" and port else str(value),
            )
        elif isinstance(value, Mapping):
            for option, one in value.items():
                yield from ("--set", f"{name}.{option}={_word(one)}")
        else:
            yield from ("--set", f"{name}={_word(value)}")


def _plain(word: str) -> Any:
    try:
        return json.loads(word.lower() if word.lower() in ("true", "false") else word)
    except ValueError:
        return word


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
