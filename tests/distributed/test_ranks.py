"""Who this process is, as announced."""

from __future__ import annotations

import pytest

from easymp import SettingError, WorldError
from easymp.distributed import Ranks, read_ranks


def announce(monkeypatch, **variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))


def test_torchrun(monkeypatch):
    announce(monkeypatch, RANK=5, WORLD_SIZE=8, LOCAL_RANK=1, LOCAL_WORLD_SIZE=4)
    ranks = read_ranks()
    assert (ranks.rank, ranks.size, ranks.local_rank, ranks.local_size, ranks.nodes) == (5, 8, 1, 4, 2)
    assert ranks.announced


def test_one_announced_process_that_has_nowhere_to_meet_is_alone(monkeypatch):
    announce(monkeypatch, RANK=0, WORLD_SIZE=1)
    assert read_ranks() == Ranks(
        alone="no launcher announced others: RANK and WORLD_SIZE announced one process"
    )


def test_without_local_ranks_all_are_on_this_node_until_they_are_counted_by_host(monkeypatch):
    announce(monkeypatch, RANK=1, WORLD_SIZE=2)
    ranks = read_ranks()
    assert (ranks.local_rank, ranks.local_size, ranks.nodes, ranks.unknown) == (1, 2, 1, "rank")


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"RANK": 1}, "RANK=1 is in the environment but WORLD_SIZE is not"),
        ({"WORLD_SIZE": 2}, "WORLD_SIZE=2 is in the environment but RANK is not"),
        ({"RANK": 2, "WORLD_SIZE": 2}, "RANK=2 does not lie in 0 … WORLD_SIZE - 1 = 1"),
        ({"RANK": -1, "WORLD_SIZE": 2}, "RANK=-1 does not lie"),
    ],
)
def test_contradictions(monkeypatch, variables, words):
    announce(monkeypatch, **variables)
    with pytest.raises(WorldError, match=words):
        read_ranks()


def test_words_where_numbers_belong(monkeypatch):
    announce(monkeypatch, RANK="first", WORLD_SIZE=2)
    with pytest.raises(SettingError, match="RANK='first'"):
        read_ranks()
