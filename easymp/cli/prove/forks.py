"""The ranks of a proof as forks of one process, where there are more ranks than processors.

``python -m easymp.cli.prove.forks FOLDER N MODULE`` imports torch, easymp and the packages that the script imports,
once, and forks; each fork calls the `main` of MODULE. A rank then starts in a tenth of a second and shares the memory
of all these modules with the others.
"""

from __future__ import annotations

import ast
import gc
import importlib
import sys
import sysconfig
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from ...errors import WorldError
from ...launcher.entrypoints import notebook_launcher
from ..harness.rank import read_task

# Of torch and easymp: imported at their first use, and so by each rank again.
AT_FIRST_USE = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.nn.parallel.distributed",
    "easymp.accelerator",
    "easymp.checkpoint.api",
    "easymp.checkpoint.export",
    "easymp.checkpoint.save",
)


def packages_of(path: Path) -> list[str]:
    """The modules of Python and of installed packages that a script imports at its top."""
    names: list[str] = []
    for node in ast.parse(path.read_bytes()).body:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names.append(node.module)
    folders = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")]
    # The script's own modules may keep what differs from rank to rank.
    files = [(name, origin(name, path.parent)) for name in names]
    return [name for name, file in files if file and any(file.is_relative_to(folder) for folder in folders)]


def origin(name: str, folder: Path) -> Path | None:
    """The file of a module's package; None if it has none, or is the script's own, in its `folder`."""
    if any(folder.glob(f"{name.partition('.')[0]}*")):
        return None
    with suppress(ImportError, ValueError):
        spec = find_spec(name.partition(".")[0])
        return Path(spec.origin) if spec and spec.has_location and spec.origin else None
    return None


def main(folder: Path, processes: int, module: str) -> int:
    task = read_task(folder)
    script = Path(task.get("reference") or task["script"])
    packages: list[str] = []
    if not task["module"]:
        with suppress(SyntaxError):  # of the script, which a rank tells
            packages = packages_of(script)
    for name in (*AT_FIRST_USE, *packages):
        with suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # so that a rank's collections do not write to memory that it shares
    try:
        notebook_launcher(importlib.import_module(module).main, (folder,), processes)
    except WorldError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
