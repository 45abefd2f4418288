"""Real runs: what finishes, what fails and what takes too long is told apart, and the page opens in a browser."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from easymp.comparing import running
from easymp.comparing.running import FAILURE, FINISHED, LATE
from easymp.comparing.variants import Variant

from ..examples.run import ROOT
from .scripts import TINY

PHONE, DESK = 360, 1180  # pixels


def easymp(*words: str, directory: Path) -> subprocess.Popen[str]:
    foreign = ("EASYMP_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMP_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "easymp", *words]
    return subprocess.Popen(
        command, cwd=directory, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize(
    ("code", "status", "why"),
    [
        ("pass", FINISHED, ""),
        ("import sys; print('last words'); sys.exit(3)", FAILURE, "last words"),
        ("import os; os.abort()", FAILURE, "exit code -6"),
        ("print('rank 1 of 2 failed first: ValueError: no'); raise SystemExit(1)", FAILURE, "ValueError: no"),
        ("import time; time.sleep(60)", LATE, "stopped after 0.3 seconds (--timeout)"),
        # One that leaves a child behind, and does not go when told to.
        (
            (
                "import signal, subprocess, sys, time; signal.signal(15, signal.SIG_IGN); "
                "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); time.sleep(60)"
            ),
            LATE,
            "stopped after 0.3 seconds (--timeout)",
        ),
    ],
)
def test_ends(code: str, status: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "command", lambda task, variant: [sys.executable, "-c", code])
    monkeypatch.setattr(running, "GRACE", 0.3)
    before = set(psutil.Process().children(recursive=True))
    end = running.run(
        running.Task("x.py", timeout=0.3 if status == LATE else 60), Variant("x"), tmp_path / "a"
    )
    assert (end.status, end.why) == (status, why)
    assert end.others is not None
    assert set(psutil.Process().children(recursive=True)) <= before


def test_a_run_gets_its_settings_and_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import os; print(os.environ['EASYMP_OVERRIDE'], os.environ['EASYMP_RECORD'])"
    monkeypatch.setattr(running, "command", lambda task, variant: [sys.executable, "-c", code])
    monkeypatch.setenv("EASYMP_OVERRIDE", "timeout=9")
    running.run(running.Task("x.py"), Variant("x", {"strategy": "ddp"}), tmp_path / "a b", seed=3)
    folder = tmp_path / "a b"
    expected = f"timeout=9 strategy=ddp project_dir='{folder}/project' seed=3 {folder}\n"
    assert (folder / "output.txt").read_text() == expected


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_finishes_and_what_fails(tmp_path: Path) -> None:
    (tmp_path / "tiny.py").write_text(TINY)
    words = "compare tiny.py --precision fp32,fp8 --processes 2 --output out --json -- --lr 1"
    with easymp(*words.split(), directory=tmp_path) as process:
        out, err = process.communicate()
    assert process.returncode == 1, err
    plans = {plan["name"]: plan["runs"][0] for plan in json.loads(out)["plans"]}
    assert [plans[name]["status"] for name in ("fp32", "fp8")] == ["finished", "failed"]
    assert plans["fp8"]["why"].startswith(
        "RefusedError: mixed_precision='fp8' in EASYMP_OVERRIDE cannot run here: fp8 needs"
    )
    record = plans["fp32"]["record"]
    assert (record["updates"], record["samples"]) == (15 // 2, 112)
    assert [value for _, _, value in record["curves"]["accuracy"]] == [0.5, 0.6]
    folders = sorted(path.name for path in (tmp_path / "out" / "runs").iterdir())
    assert folders == ["1-fp32-1", "2-fp8-1"]
    first = tmp_path / "out" / "runs" / "1-fp32-1"
    assert "arguments ['--lr', '1']" in (first / "output.txt").read_text()
    assert list(first.glob("project/checkpoints/step-*"))  # in a folder of its own
    assert not (tmp_path / "checkpoints").exists()
    assert (tmp_path / "out" / "compare.html").exists()


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_signal_ends_the_run_and_its_ranks_and_shows_what_is_done(tmp_path: Path) -> None:
    """By SIGTERM, of which Ctrl-C's SIGINT is the simpler case."""
    (tmp_path / "tiny.py").write_text(TINY)
    with easymp(
        "compare", "tiny.py", "--precision", "fp32,O3", "--output", "out", directory=tmp_path
    ) as process:
        waiting = tmp_path / "out" / "runs" / "2-O3-1" / "rank-0.jsonl"
        while process.poll() is None and not waiting.exists():
            time.sleep(0.05)
        ranks = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=100)
    assert process.returncode == 130, err
    assert out.splitlines()[1].startswith("fp32 ")
    assert "O3 interrupted: stopped by a signal" in out
    assert (tmp_path / "out" / "compare.html").exists()
    _, alive = psutil.wait_procs(ranks, timeout=10)
    assert not alive


# -- the page in a browser ---------------------------------------------------------------------------------------------


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Any]:
    """Chromium without a window; skipped where Debian's packages `chromium` and `chromium-driver` are not installed."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip(
            "optional packages are not installed: chromium and chromium-driver (apt-get install them)"
        )
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    flags = "headless no-sandbox disable-gpu disable-quic no-first-run disable-background-networking disable-component-update disable-sync"
    for flag in [*flags.split(), f"user-data-dir={tmp_path / 'profile'}"]:
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    made = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield made
    made.quit()


def look(browser: Any, page: Path, width: int, scheme: str) -> dict[str, Any]:
    """What `page` is at `width` pixels, in light or dark."""
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width == PHONE}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    )
    browser.get(page.as_uri())
    return browser.execute_script(
        """
        const texts = [...document.querySelectorAll('figure svg text')];
        const box = document.querySelector('figure svg').getBoundingClientRect();
        return {
          width: document.documentElement.scrollWidth,
          plots: document.querySelectorAll('figure svg').length,
          paths: Math.min(...[...document.querySelectorAll('figure svg')].map(svg => svg.querySelectorAll('path').length)),
          columns: new Set([...document.querySelectorAll('figure')].map(figure => figure.getBoundingClientRect().left)).size,
          smallest: Math.min(...texts.map(text => parseFloat(getComputedStyle(text).fontSize) * text.getScreenCTM().a)),
          outside: texts.filter(text => {
            const own = text.getBoundingClientRect(), svg = text.closest('svg').getBoundingClientRect();
            return own.left < svg.left - 1 || own.right > svg.right + 1;
          }).map(text => text.textContent),
          ink: getComputedStyle(texts[0]).fill,
          ground: getComputedStyle(document.querySelector('figure')).backgroundColor,
        };
        """
    )


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_digits_compared_and_looked_at(browser: Any, tmp_path: Path) -> None:
    words = [
        "compare",
        str(ROOT / "examples/digits.py"),
        "--precision",
        "fp32,bf16,O1",
        "--output",
        "out",
        "--",
        "--epochs",
        "3",
    ]
    with easymp(*words, directory=tmp_path) as process:
        out, err = process.communicate()
    assert process.returncode == 0, err
    assert [line.split()[0] for line in out.splitlines()[1:4]] == ["fp32", "bf16", "O1"]
    assert [line.split()[0] for line in out.splitlines()[:1]] == ["time"]
    accuracies = [float(line.split()[-3].rstrip("%")) for line in out.splitlines()[1:4]]
    assert min(accuracies) > 90
    assert not list(tmp_path.glob("*.jsonl"))
    page = tmp_path / "out" / "compare.html"
    for scheme in ("light", "dark"):
        for width in (PHONE, DESK):
            seen = look(browser, page, width, scheme)
            assert seen["width"] <= width, seen  # nothing to scroll sideways
            assert (seen["plots"], seen["columns"]) == (6, 1 if width == PHONE else 2), seen
            assert seen["paths"] > 5
            assert seen["smallest"] >= 9, seen
            assert not seen["outside"]
            bright = sum(map(int, seen["ink"][4:-1].split(",")))
            assert (bright > 450) == (scheme == "dark"), seen
    assert browser.get_log("browser") == []
    sent = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = {
        each["params"]["request"]["url"] for each in sent if each["method"] == "Network.requestWillBeSent"
    }
    assert {url for url in asked if not url.startswith(("data:", "chrome:"))} == {page.as_uri()}
