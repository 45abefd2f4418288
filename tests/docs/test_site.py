"""The site, built by MkDocs and by Zensical, in a browser.

No error, no request that fails or leaves the site, no sideways scrolling, in both schemes.
"""

from __future__ import annotations

import functools
import http.server
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..examples.run import ROOT
from .test_pages import BLOCKS

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PYTHON = ROOT / ".venv-docs/bin/python"
BUILDERS = {"mkdocs": ["-m", "mkdocs", "build", "--strict", "--site-dir"], "zensical": ["docs/with_zensical.py"]}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="optional package is not installed: chromium"),
]


class Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module", params=BUILDERS)
def site(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    if not PYTHON.exists():
        pytest.skip("optional packages are not installed: the group docs, which `make docs` puts into .venv-docs")
    folder = tmp_path_factory.mktemp("site")
    command = [str(PYTHON), *BUILDERS[request.param], str(folder)]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=True, timeout=250)
    return folder


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    handler = functools.partial(Handler, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


def test_every_block_is_shown_as_code(site: Path) -> None:
    counts = {}
    for page, found in BLOCKS.items():
        if page != "README.md":
            folder = Path(page).relative_to("docs").with_suffix("")
            file = site / (folder.parent if folder.name == "index" else folder) / "index.html"
            counts[page] = len(found), len(re.findall(r'<div class="[^"]*\bhighlight\b', file.read_text()))
    assert {page: pair for page, pair in counts.items() if pair[0] > pair[1]} == {}


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_every_page_is_whole_in_a_browser(site: Path, address: str, width: int, scheme: str) -> None:
    reason = "an optional package is not installed: playwright (of the group pages)"
    playwright = pytest.importorskip("playwright.sync_api", reason=reason)
    wrong: list[str] = []
    with playwright.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page = context.new_page()
        say = lambda text: wrong.append(f"{page.url}: {text}")  # noqa: E731
        own = (address, "data:", "blob:")
        page.on("console", lambda said: said.type == "error" and say(said.text))
        page.on("pageerror", say)
        page.on("response", lambda answer: answer.status < 400 or say(f"{answer.url} is {answer.status}"))
        page.on("request", lambda asked: asked.url.startswith(own) or say(f"asks for {asked.url}"))
        for file in sorted(site.rglob("index.html")):
            page.goto(address + file.relative_to(site).as_posix())
            if page.evaluate("document.documentElement.scrollWidth") > width:
                say(f"wider than {width} px")
        browser.close()
    assert wrong == []
