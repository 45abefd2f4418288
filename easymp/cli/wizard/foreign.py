"""``easymp config --from FILE``: a configuration of Accelerate or DeepSpeed, read line by line.

Nothing is dropped in silence: each key of the file gets a sentence, which says as what it was taken, what to write in the script in its
place, or that there is no counterpart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import SettingError
from . import accelerate_file, deepspeed_file
from .document import Document, read_document
from .taking import Taking


@dataclass(frozen=True)
class Foreign:
    """What a file of another library says, in our words.

    Attributes:
        settings: of `easymp.settings.Settings`, by name.
        launching: of `easymp.settings.Launching`, by name.
        lines: (a key of the file with its value, what became of it), in the file's order.
        script: what the script has to pass, as the call of `Accelerator`; empty where that is nothing.
        origin: whose file it is, ``"Accelerate"`` or ``"DeepSpeed"``.
    """

    settings: dict[str, Any]
    launching: dict[str, Any]
    lines: list[tuple[str, str]]
    script: str = ""
    origin: str = ""


def read_foreign(path: str | Path) -> Foreign:
    """The file at `path`: what ``accelerate config`` wrote (YAML or JSON), or a configuration of DeepSpeed.

    Raises:
        SettingError: there is no such file, it is of neither library or not readable, or a value is wrong; with the line.
    """
    document = read_document(path)
    ours, theirs = (
        len(document.content.keys() & keys) for keys in (accelerate_file.ACCELERATE, deepspeed_file.DEEPSPEED)
    )
    if not ours and not theirs:
        keys = ", ".join(map(str, document.content)) or "none"
        raise SettingError(
            f"{path} is a configuration of neither Accelerate nor DeepSpeed: none of its keys is theirs ({keys})"
        )
    peer = (
        theirs >= ours and "distributed_type" not in document.content
    )  # which Accelerate always writes; a few keys are of both
    take = _deepspeed(document) if peer else _accelerate(document)
    return Foreign(
        take.settings, take.launching, take.lines, take.script(), "DeepSpeed" if peer else "Accelerate"
    )


def _deepspeed(document: Document, outer: Taking | None = None) -> Taking:
    spread = deepspeed_file.strategy(document.content)
    if outer is None:
        take = Taking(document, "DeepSpeed", spread)
    else:
        take = outer.inside(
            document, "DeepSpeed", None if accelerate_file.alone(outer.document.content) else spread
        )
    deepspeed_file.check(take)
    take.walk(document.content, deepspeed_file.DEEPSPEED)
    return take


def _accelerate(document: Document) -> Taking:
    content = document.content
    take = Taking(document, "Accelerate 1.15", accelerate_file.strategy(content))
    take.walk(content, accelerate_file.rules_for(content))
    engine = content.get("deepspeed_config")
    named = engine.get("deepspeed_config_file") if isinstance(engine, Mapping) else None
    if named and str(content.get("distributed_type")).upper() == "DEEPSPEED":
        beside = Path(document.name).parent / str(named)  # Accelerate looks in the working directory only
        place = Path(str(named)) if Path(str(named)).is_file() else beside
        _deepspeed(read_document(place), take)
    return take
