"""Write requirements/ci.txt.

The newest versions that fit pyproject.toml and constraints.txt, without torch and the drivers it brings.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXTRAS = "cuda13"
GROUPS = ("test", "pages", "docs", "dist")
HEAD = "# Written by `make lock`: versions for CI, as constraints beside constraints.txt, which has torch's.\n"
OF_TORCH = re.compile(r"torch|triton|nvidia-.*|cuda-.*")  # another torch needs others
PINNED_BY_TORCH = {"torch", "nvidia-cuda-nvrtc"}  # by its builds for CUDA, each to a version of its own


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


done = subprocess.run(
    [
        *(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
        *("--dry-run", "--ignore-installed", "--report", "-", "--constraint", str(ROOT / "constraints.txt")),
        *(word for group in GROUPS for word in ("--group", f"{ROOT / 'pyproject.toml'}:{group}")),
        *(f"{ROOT}[{EXTRAS}]", "pip>=25.1"),  # pip: the Makefile needs one that knows groups
    ],
    check=True,
    stdout=subprocess.PIPE,
    text=True,
)
found = [package["metadata"] for package in json.loads(done.stdout)["install"]]
packages = {plain(metadata["name"]): metadata for metadata in found}
ours = {plain(re.split(r"[^\w.-]", words)[0]) for words in packages.pop("easymp")["requires_dist"]}
kept = [name for name in sorted(packages) if name in ours - PINNED_BY_TORCH or not OF_TORCH.fullmatch(name)]
lines = [f"{name}=={packages[name]['version']}\n" for name in kept]
(ROOT / "requirements/ci.txt").write_text(HEAD + "".join(lines))
print(f"requirements/ci.txt: {len(lines)} packages")
