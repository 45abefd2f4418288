"""The part of a tensor that lies on this rank."""

from __future__ import annotations

from torch import Tensor


def local(tensor: Tensor) -> Tensor:
    """The shard of a DTensor, sharing its memory; any other tensor itself.

    What is done element by element needs no more, and on shards it costs no dispatch through DTensor and works in one list with
    plain tensors. DTensor is known by its method, for importing its class costs more than most runs have use for.
    """
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()
