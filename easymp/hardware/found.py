"""What a probe hands back."""

from __future__ import annotations

from typing import NamedTuple

from .facts import Device


class Found(NamedTuple):
    """The devices a probe saw, or the sentence that says why it saw none."""

    vendor: str  # as in Hardware.vendor
    devices: tuple[Device, ...] = ()
    links: str = ""  # as in Hardware.links
    missing: tuple[
        str, ...
    ] = ()  # as in Hardware.looked_for: why there is no device, or what one of them lacks
