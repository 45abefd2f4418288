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
from contextlib import suppress
from importlib.machinery import PathFinder
from pathlib import Path

from ...distributed.mailbox import is_script
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
    "easymp.checkpoint.accelerate",
    "easymp.checkpoint.api",
    "easymp.checkpoint.export",
    "easymp.checkpoint.run_state",
    "easymp.trackers.logbook",
    "easymp.training.prepare",
)


def packages_of(path: Path) -> list[str]:
    """The modules of Python and of installed packages that a script imports at its top."""
    names: list[str] = []
    for node in ast.parse(path.read_bytes()).body:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names.append(node.module)
    # The script's own modules may keep what differs from rank to rank.
    specs = [PathFinder.find_spec(name.partition(".")[0], [str(path.parent), *sys.path]) for name in names]
    return [name for name, spec in zip(names, specs) if spec and spec.origin and not is_script(spec.origin)]


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
