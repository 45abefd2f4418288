"""Random scripts note the same values under a layer and under its peer, or the peer's page tells what differs."""

from __future__ import annotations

import pytest

from .random_scripts import PAGES, ROOT, ROWS, compare_all


@pytest.mark.slow
@pytest.mark.parametrize(
    ("peer", "processes"),
    [("torch_cuda", 1), ("accelerate", 1), ("accelerate", 2), ("lightning_fabric", 1), ("lightning_fabric", 2)],
)
def test_a_layer_does_what_its_peer_does(peer, processes, tmp_path):
    if peer != "torch_cuda":
        pytest.importorskip(peer)
    differences = compare_all(peer, 20, processes, 0, tmp_path)
    assert [difference for difference in differences if difference[0] == "WRONG"] == []


@pytest.mark.parametrize("row", ROWS)
def test_pages_tell_what_differs(row):
    page = (ROOT / f"docs/migrating/{PAGES[row.peer]}.md").read_text()
    assert row.words in " ".join(page.split())
