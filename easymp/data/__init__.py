"""Prepared loaders: data order, sharding, position, devices.

`order` data order and sharding arithmetic · `source` the interface, map-style data sets and the way to the device, `stream` iterable ones ·
`loader` the prepared loader · `prepare` makes it · `images` normalises uint8 images on the device.
"""

from .loader import PreparedLoader, SkippedLoader, skip_first_batches
from .prepare import UnpreparedCheck, prepare_loader

__all__ = ["PreparedLoader", "SkippedLoader", "UnpreparedCheck", "prepare_loader", "skip_first_batches"]
