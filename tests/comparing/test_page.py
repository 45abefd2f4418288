"""The page and the picture, of runs whose names and words are hostile."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from easymp.comparing import report
from easymp.comparing.page import page
from easymp.comparing.series import MANY, running_mean, thinned
from easymp.comparing.variants import Variant

from .made import comparison, run

EVIL = "<script>alert(1)</script>\"'&$\\frac{1}"
LOSSES = [2.0**-i for i in range(100)]


class Elements(HTMLParser):
    """What a page holds."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def html() -> str:
    values = {"loss": LOSSES, EVIL: [0.1, 0.2]}
    plain, evil = Variant("fp32"), Variant(EVIL)
    runs = [run(plain, 10 + i, i, values=values) for i in (1, 2)] + [
        run(evil, 6 + i, i, values=values) for i in (1, 2)
    ]
    return page(
        comparison(*runs, run(Variant("O1"), None, why=EVIL), metrics=("loss", EVIL), script=f"/x/{EVIL}.py")
    )


def test_what_comes_from_outside_is_text(html: str) -> None:
    found = Elements(html)
    assert "script" not in found.tags
    assert found.text.count(EVIL) > 10
    assert not [name for name, _ in found.attributes if name.startswith("on")]


def test_it_needs_nothing_else(html: str) -> None:
    found = Elements(html)
    assert not set(found.tags) & {"script", "iframe", "img", "object", "embed", "base"}
    outside = [
        (name, value) for name, value in found.attributes if "//" in value and not name.startswith("xmlns")
    ]
    assert not outside
    assert [
        value for name, value in found.attributes if name == "href" and not value.startswith(("#", "data:,"))
    ] == []
    style = html[html.index("<style>") : html.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style


def test_each_plot_is_one_svg_with_lines_in_the_colours_of_the_page(html: str) -> None:
    figures = re.findall(r"<figure.*?</figure>", html, re.DOTALL)
    titles = [
        "loss against update",
        "loss against time",
        "memory allocated over time",
        "throughput, samples a second",
    ]
    assert [figure for title in titles if len(figure := [f for f in figures if f">{title}<" in f]) != 1] == []
    assert len(figures) == 6
    for figure in figures:
        assert figure.count("<svg") == 1
        assert figure.count("<path") > 5
        assert "var(--plan-0)" in figure
        assert "var(--plan-1)" in figure
        assert not re.search(r"(fill|stroke): ?#", figure)
    names = [value for name, value in Elements(html).attributes if name == "id"]
    assert len(names) == len(set(names))


def test_numbers_of_several_runs_have_their_spread(html: str) -> None:
    text = re.sub(r"\s+", " ", Elements(html).text)
    assert "11.5 s11.0 s … 12.0 s" in text
    assert "0.65" in text
    assert "2 × H100, 80.0 GiB" in text
    assert f"failed: {EVIL}" in text


def test_files(tmp_path: Path) -> None:
    a, b = Variant("fp32"), Variant("bf16")
    values = {"loss": [1.0, float("nan"), 0.5]}
    found = comparison(run(a, 2, values=values), run(b, 1, values=values), folder=tmp_path)
    written = [report.write_json(found)]
    assert report.write_report(found, written) == ""
    assert [path.name for path in written] == ["compare.json", "compare.html", "compare.png"]
    assert written[2].read_bytes().startswith(b"\x89PNG")
    record = json.loads(written[0].read_text())
    assert [plan["seconds"]["median"] for plan in record["plans"]] == [2, 1]
    assert record["plans"][0]["runs"][0]["record"]["curves"]["loss"][1][2] is None
    assert record["verdict"]["sentence"] == found.verdict.sentence


def test_without_matplotlib_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "find_spec", lambda name: None if name == "matplotlib" else object())
    written: list[Path] = []
    assert report.write_report(comparison(run(Variant("fp32"), 2)), written) == (
        "No page and no picture: matplotlib is not installed. pip install 'easymp[report]' brings what they need."
    )
    assert not written


def test_a_page_of_runs_that_all_failed_has_no_plots(tmp_path: Path) -> None:
    found = comparison(run(Variant("fp32"), None, why="no"), folder=tmp_path)
    assert "<figure" not in page(found)
    written: list[Path] = []
    report.write_report(found, written)
    assert [path.name for path in written] == ["compare.html"]


def test_long_curves_are_thinned_and_keep_their_peaks() -> None:
    points = [(float(i), float(i == 7000)) for i in range(20000)]
    thin = thinned(points)
    assert len(thin) <= MANY
    assert (thin[0], thin[-1]) == (points[0], points[-1])
    assert (7000.0, 1.0) in thin
    assert thin == sorted(thin)
    assert thinned(points[:9]) == points[:9]


def test_a_running_mean_is_that_of_the_values_around() -> None:
    points = [(float(i), float(i % 2)) for i in range(100)]
    mean = running_mean(points)
    assert [x for x, _ in mean] == [x for x, _ in points]
    assert mean[0] == points[0]
    assert mean[50][1] == pytest.approx(sum(i % 2 for i in range(48, 53)) / 5)
