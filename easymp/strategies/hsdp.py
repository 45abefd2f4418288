"""hsdp: sharded among neighbours, replicated between their groups: the heavy traffic stays inside a node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from ..errors import RefusedError, SettingError
from ..protocols import Facts, Layout, Refusal
from ..world import World
from .fsdp import FSDP, FSDPOptions, shards_of


@dataclass(frozen=True)
class HSDPOptions(FSDPOptions):
    """Options of strategy "hsdp": those of "fsdp", and one more.

    Attributes:
        shard_size: neighbouring ranks that hold one copy of the model among them; None for as many as a node has. It divides the
            number of ranks.
    """

    shard_size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        size = self.shard_size
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 2):
            raise SettingError(
                f"shard_size={size!r} is not a whole number of at least 2 (with 1 every rank holds the whole model, as in 'ddp')"
            )


class HSDP(FSDP):
    """FSDP on a mesh of two dimensions: gathered and reduced inside a group of `shard_size` ranks, averaged between groups.

    What it does to the user's model is what `FSDP` does; a rank holds 1/shard_size of it.
    """

    name: ClassVar[str] = "hsdp"
    Options: ClassVar[type] = HSDPOptions

    def __init__(self, world: World, options: HSDPOptions) -> None:
        super().__init__(world, options)
        size = options.shard_size or world.local_size
        said = f"shard_size={size}" if options.shard_size else f"a node's {size} ranks"
        if size == world.size and options.shard_size is None:
            raise RefusedError(
                f"strategy 'hsdp' shards inside a node and replicates between nodes, and all {size} ranks are on one: pass "
                "strategy_options=HSDPOptions(shard_size=...), or use strategy='fsdp'"
            )
        if size >= world.size:
            raise RefusedError(
                f"strategy 'hsdp' with {said} leaves nothing to replicate among {world.size} ranks: use strategy='fsdp', or a smaller "
                "shard_size"
            )
        if size < 2:
            raise RefusedError(
                "strategy 'hsdp' shards inside a node, and each has one rank: use 'ddp' or 'fsdp', or pass "
                "strategy_options=HSDPOptions(shard_size=...)"
            )
        if world.size % size:
            raise RefusedError(
                f"strategy 'hsdp' splits {world.size} ranks into groups of equal size, which {said} does not allow: pass a shard_size "
                f"that divides {world.size}"
            )
        self._shape = (world.size // size, size)

    @staticmethod
    def refuse(facts: Facts) -> Refusal | None:
        if facts.world_size == 1:
            return Refusal(
                "strategy 'hsdp' shards a model over processes, and there is one",
                "start several (`easymp launch --processes N script.py`), or use 'auto'",
            )
        return None

    @staticmethod
    def layout(model: nn.Module, options: Any, size: int, local_size: int) -> Layout:
        return shards_of(model, options, options.shard_size or local_size)
