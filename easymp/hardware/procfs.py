"""Facts that the operating system keeps as text: files, and sysctl on a Mac. What is not there is the empty string."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path


def text(path: Path) -> str:
    """The file's text without the last newline, or ``""`` where it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def number(path: Path) -> int | None:
    """The file's number; None for anything else, such as "max" or -1, and for no file."""
    found = text(path)
    return int(found) if found.isdigit() else None


def line(content: str, key: str) -> str:
    """The value of the first line ``key : value``, as in /proc/cpuinfo, or ``""``."""
    for each in content.splitlines():
        before, colon, after = each.partition(":")
        if colon and before.strip() == key:
            return after.strip()
    return ""


def apple(key: str) -> str:
    """A value of sysctl on macOS; ``""`` elsewhere and for unknown keys."""
    if platform.system() != "Darwin":
        return ""
    try:
        return subprocess.run(["sysctl", "-n", key], capture_output=True, text=True, timeout=5).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
