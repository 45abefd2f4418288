"""Build the site by Zensical, the successor of MkDocs, into the folder that is named.

Zensical runs no hooks: the pages are written as the hooks of mkdocs.yml give them, and the HTML is changed afterwards.
"""

from __future__ import annotations

import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

DOCS = Path(__file__).parent
ROOT = DOCS.parent


def main(site: Path) -> int:
    """Zensical's exit code."""
    pages, cli = (runpy.run_path(str(DOCS / file)) for file in ("assets/pages.py", "reference/cli.py"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(DOCS, folder / "docs", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
        (folder / "docs/reference/cli.md").write_text(cli["page"](), encoding="utf-8")
        for page in folder.glob("docs/**/*.md"):
            page.write_text(pages["on_page_markdown"](page.read_text(encoding="utf-8")), encoding="utf-8")
        lines = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").replace("[.]", f"[{ROOT}]")
        lines = lines.replace("docs/reference/docstrings.py", str(DOCS / "reference/docstrings.py"))
        config = [line for line in lines.splitlines(keepends=True) if not line.startswith("hooks:")]
        (folder / "mkdocs.yml").write_text("".join(config), encoding="utf-8")
        command = [sys.executable, "-m", "zensical", "build", "--strict"]
        code = subprocess.run(command, cwd=folder, check=False).returncode
        for page in (folder / "site").rglob("*.html"):
            html = pages["on_page_content"](page.read_text(encoding="utf-8"))
            page.write_text(pages["on_post_page"](html), encoding="utf-8")
        shutil.rmtree(site, ignore_errors=True)
        if code == 0:
            shutil.copytree(folder / "site", site)
    return code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
