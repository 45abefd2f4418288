"""``easymp.toml``: what a project says of its runs, in a file that people write and read.

Settings stand at its top, those of `easymp launch` in the table ``[launch]``, options of the strategy in ``[strategy_options]``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import env
from .errors import SettingError

FILE = "easymp.toml"
VARIABLE = env.PREFIX + "CONFIG"  # names another one
LAUNCH = "launch"  # the table of `easymp launch`
OPTIONS = "strategy_options"  # the table of the strategy's own


@dataclass(frozen=True)
class ProjectFile:
    """What stands in the file.

    Attributes:
        path: as it was named; None where there is no file.
        content: keys and values at its top, and in its tables.
        text: as it was read, for line numbers.
    """

    path: Path | None = None
    content: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""

    def where(self, key: str, table: str = "") -> str:
        """``"easymp.toml, line 3"``: where `key` of `table` is set; without a line where it is written in a way unforeseen here."""
        name = f"""["']?{re.escape(key)}["']?"""
        inside = ""
        for number, line in enumerate(self.text.splitlines(), 1):
            header = re.match(r"\s*\[+\s*([^\[\]]+?)\s*\]+", line)
            if header and "=" not in line.split("]")[0]:
                inside = header[1].strip("\"'")
                if not table and inside.split(".")[0].strip("\"' ") == key:
                    return f"{self.path}, line {number}"
            elif re.match(
                rf"\s*{name}\s*[.=]" if inside == table else rf"\s*{re.escape(table)}\s*\.\s*{name}\s*=", line
            ):
                return f"{self.path}, line {number}"
        return str(self.path)


def read(path: Path | str | None = None) -> ProjectFile:
    """The file at `path`; None: the one that EASYMP_CONFIG names, or the one in the working directory, if there is one.

    Raises:
        SettingError: a file that was named is not there, or one is not TOML.
    """
    named = env.read(VARIABLE) if path is None else str(path)
    place = Path(named or FILE)
    if not place.is_file():
        if path is not None:
            raise SettingError(
                f"{named!r} is no file: pass the path of a project file, as `easymp config` writes it"
            )
        if named:
            raise SettingError(
                f"{VARIABLE}={named!r} in the environment names no file: correct the path or unset it"
            )
        return ProjectFile()
    import tomllib  # not needed by most runs, and not free

    try:
        text = place.read_text(encoding="utf-8")
        return ProjectFile(place, tomllib.loads(text), text)
    except OSError as error:
        raise SettingError(f"{place} cannot be read: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingError(f"{place} is not valid TOML: {error}") from error
