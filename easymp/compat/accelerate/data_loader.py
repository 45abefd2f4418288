"""``accelerate.data_loader``: a prepared loader, and its beginning left out."""

from __future__ import annotations

from ...data import PreparedLoader, skip_first_batches
from .layer import layer

DataLoaderShard = DataLoaderDispatcher = PreparedLoader

__all__ = ["DataLoaderDispatcher", "DataLoaderShard", "skip_first_batches"]
__getattr__ = layer.absent(
    "accelerate.data_loader",
    dict.fromkeys(
        ("BatchSamplerShard", "IterableDatasetShard", "prepare_data_loader"),
        "use accelerator.prepare(loader)",
    ),
    lambda: __all__,
)
