"""``deepspeed.ops``: its optimizers, each the library's own of the same mathematics."""

from __future__ import annotations

from ..layer import layer
from . import adagrad, adam, lamb, lion

__all__ = ["adagrad", "adam", "lamb", "lion"]

__getattr__ = layer.absent(
    "deepspeed.ops",
    {
        "op_builder": "nothing is compiled beforehand; leave it out",
        "sparse_attention": "use torch.nn.attention.flex_attention",
        "transformer": "use torch.nn.TransformerEncoderLayer",
    },
    lambda: __all__,
)
