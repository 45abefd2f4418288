"""CUDA_VISIBLE_DEVICES, as CUDA reads it."""

import pytest

from easymp.hardware.visible import Card, by_uuid, visible

CARDS = tuple(Card(i, f"GPU-{x}{x}{x}{x}-{i}", f"card {i}", (8, 0), 1) for i, x in enumerate("abc"))
INSTANCES = tuple(Card(f"1.{i}", f"MIG-{i}{i}{i}{i}", "slice", (8, 0), 1) for i in range(2))
DIVIDED = Card(1, "GPU-dddd-1", "card 1", (8, 0), 8, divided=True, instances=INSTANCES)


@pytest.mark.parametrize(
    ("text", "indices"),
    [
        (None, [0, 1, 2]),
        ("0,1,2", [0, 1, 2]),
        ("2,0", [2, 0]),
        ("1", [1]),
        (" 1 , 2 ", [1, 2]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("0,-1,2", [0]),
        ("0,7,1", [0]),
        ("1,1", []),
        ("1gpu,2ampere", [1, 2]),
        ("GPU-bbbb-1", [1]),
        ("GPU-cccc,GPU-aaaa", [2, 0]),
        ("GPU-", []),  # fits all of them
        ("GPU-zzzz", []),
        ("GPU-bbbb,GPU-bbbb-1", []),
    ],
)
def test_whole_cards(text, indices):
    assert [card.handle for card in visible(text, CARDS)] == indices


@pytest.mark.parametrize(
    ("text", "handles"),
    [
        (None, ["1.0"]),  # one instance, and no whole card beside it
        ("0", [0]),
        ("1", ["1.0"]),
        ("0,1", ["1.0"]),
        ("MIG-1111", ["1.1"]),
        ("MIG-0000,MIG-1111", ["1.0"]),
        ("GPU-dddd-1", ["1.0"]),
        ("MIG-9999", []),
    ],
)
def test_divided_cards(text, handles):
    assert [card.handle for card in visible(text, (CARDS[0], DIVIDED))] == handles


def test_a_card_to_be_divided_that_has_no_instance_is_not_there():
    empty = Card(0, "GPU-eeee", "card", (9, 0), 1, divided=True)
    assert visible(None, (empty, CARDS[1])) == (CARDS[1],)


def test_only_uuids_mean_the_same_in_every_order():
    assert by_uuid("GPU-1") and by_uuid("MIG-1")
    assert not by_uuid("0,1") and not by_uuid(None) and not by_uuid("")
