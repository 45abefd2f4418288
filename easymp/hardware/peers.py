"""How the cards reach each other, as far as torch tells."""

from __future__ import annotations

from itertools import combinations

import torch


def by_torch(count: int) -> str:
    """``"P2P"`` where each card can read each other's memory, without saying over what, else ``"PCIe"``; "" for one card."""
    if count < 2:
        return ""
    return (
        "P2P"
        if all(torch.cuda.can_device_access_peer(a, b) for a, b in combinations(range(count), 2))
        else "PCIe"
    )
