"""Prepared loaders: data order, sharding, position, devices.

`order` data order and sharding arithmetic · `source` the interface, map-style data sets, the way to the device,
`stream` iterable ones · `loader` the prepared loader · `prepare` makes it.
"""

from .loader import PreparedLoader, SkippedLoader, skip_first_batches
from .prepare import prepare_loader

__all__ = ["PreparedLoader", "SkippedLoader", "prepare_loader", "skip_first_batches"]
