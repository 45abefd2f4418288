"""Loaders that know their rank: sharding, order, position, devices.

`shard` index arithmetic · `order` f(seed, epoch) · `mapped`, `stream`, `dispatch` the sources · `prefetch` the way to the device ·
`loader` what a loop iterates · `prepare` picks among them · `skip` leaves batches out · `images` makes floats of uint8 ones ·
`unprepared` says that a loader was left out.
"""

from .loader import PreparedLoader, SkippedLoader, skip_first_batches
from .prepare import Unprepared, prepare_loader

__all__ = ["PreparedLoader", "SkippedLoader", "Unprepared", "prepare_loader", "skip_first_batches"]
