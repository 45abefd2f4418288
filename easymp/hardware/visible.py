"""Which NVIDIA cards ``CUDA_VISIBLE_DEVICES`` leaves, worked out as CUDA does, without asking CUDA.

Rules from the CUDA C++ Programming Guide, "CUDA Environment Variables", and the MIG User Guide, "Device Enumeration".
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple


class Card(NamedTuple):
    """A card, or an instance of one that is divided (Multi-Instance GPU)."""

    handle: Any  # NVML's
    uuid: str  # "GPU-…" or "MIG-…"
    name: str
    capability: tuple[int, int]
    memory: int
    divided: bool = False
    instances: tuple[Card, ...] = ()


def visible(text: str | None, cards: tuple[Card, ...]) -> tuple[Card, ...]:
    """The cards left by `text`, in CUDA's order; `cards` are all of them, in the order that indices mean.

    `text` is None for an unset variable, else a comma-separated list of indices, or of UUIDs, which may be cut short where
    that stays unambiguous. The first entry that names nothing ends the list; a repeated one empties it.
    A process sees a single MIG instance, and then no whole card.
    """
    chosen = cards if text is None else _chosen(text, cards)
    seen = [
        card.instances[0] if card.divided else card for card in chosen if card.instances or not card.divided
    ]
    instance = next((card for card in seen if card.uuid.startswith("MIG-")), None)
    return (instance,) if instance else tuple(seen)


def by_uuid(text: str | None) -> bool:
    """Whether the list names cards by UUID, which means the same in every order."""
    return bool(text) and text.startswith(("GPU-", "MIG-"))


def _chosen(text: str, cards: tuple[Card, ...]) -> list[Card]:
    chosen: list[Card] = []
    for entry in text.split(","):
        card = _card(entry.strip(), cards)
        if card is None:
            break
        if card in chosen:
            return []
        chosen.append(card)
    return chosen


def _card(entry: str, cards: tuple[Card, ...]) -> Card | None:
    if entry.startswith(("GPU-", "MIG-")):
        everything = [*cards, *(instance for card in cards for instance in card.instances)]
        matches = [card for card in everything if card.uuid.startswith(entry)]
        return matches[0] if len(matches) == 1 else None
    index = re.match(r"\+?\d+", entry)  # as C's strtoul reads it: "1gpu" is 1, "-1" ends the list
    return cards[int(index[0])] if index and int(index[0]) < len(cards) else None
