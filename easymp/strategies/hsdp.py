"""hsdp: sharded among neighbours, replicated between their groups: the heavy traffic stays inside a node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from ..base.torch_flags import TORCH
from ..distributed import World
from ..errors import RefusedError, SettingError
from ..protocols import Layout
from .fsdp import FSDP, FSDPOptions, shards_of

ZEROS = (2, 13)  # the first release that can reduce zeros for parameters without a gradient


@dataclass(frozen=True)
class HSDPOptions(FSDPOptions):
    """Options of strategy "hsdp": those of "fsdp", and one more.

    `reduce_every_micro_batch`: None is True. Each micro-batch's gradients are reduced inside a group, and sums are averaged between groups
    when the window ends.

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

    What it does to the user's model is what `FSDP` does; a rank holds 1/shard_size of it. In an accumulation window the sums of
    micro-batches' gradients are kept as fp32 shards, out of sight until the window ends.
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
        if TORCH < ZEROS:
            if self.reduces_each:
                raise SettingError(
                    f"reduce_every_micro_batch=True under hsdp needs torch {'.'.join(map(str, ZEROS))} or newer, and this is "
                    f"{torch.__version__}: before, torch adds up gradients of different parameters. Leave it out"
                )
            self.reduces_each = False
        elif self.reduces_each is None:
            self.reduces_each = True

    @staticmethod
    def layout(model: nn.Module, options: Any, size: int, local_size: int) -> Layout:
        return shards_of(model, options, options.shard_size or local_size)
