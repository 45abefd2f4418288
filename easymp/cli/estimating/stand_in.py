"""Models of which only names and shapes are known, or only a count: modules on the meta device that layouts can cut.

They have the parameters and the blocks, and no forward that means anything.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

WORDS = 32_000  # rows of the embedding, where there are parameters for them; as many as Llama 2 has
RATIO = 128  # width over layers, as in GPT-3 and Llama (GPT-3's table 2.1: 12288 / 96)
SMALLEST = 1_000_000  # parameters; below, blocks would be too small to mean anything
EMBEDDINGS = ("emb", "wte", "wpe", "shared")  # in names of modules whose weight is a table
BUFFERS = ("running_mean", "running_var", "inv_freq", "position_ids", "masked_bias", "num_batches_tracked")


class Part(nn.Module):
    """Something with parameters or parts, and a forward that nobody calls."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class Block(Part):
    """A transformer block: 12 width² + 4 width parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        for name in ("query", "key", "value", "out"):
            setattr(self, name, nn.Linear(width, width, bias=False))
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)


def from_count(parameters: int) -> tuple[nn.Module, str] | None:
    """A transformer of exactly so many parameters, and what it is in words; None below a million."""
    if parameters < SMALLEST:
        return None
    width = max(64, round((parameters * RATIO / 12) ** (1 / 3) / 64) * 64)
    while (
        width > 64 and 2 * (12 * width**2 + 4 * width) > 2 * parameters // 3
    ):  # two blocks at least, and a table
        width -= 64
    block = 12 * width**2 + 4 * width
    table = min(WORDS * width, parameters // 3)
    layers = min(max(2, round((parameters - table) / block)), parameters // block)
    model = Part()
    with torch.device("meta"):
        model.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        rows, rest = divmod(parameters - layers * block, width)
        model.embedding = nn.Embedding(rows, width)
        model.rest = nn.Parameter(torch.empty(rest))
    return (
        model,
        f"a stand-in: a transformer of {layers} equal blocks, {width} wide, with a table of {rows:,} rows",
    )


def from_tensors(
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], dtype: torch.dtype | None
) -> nn.Module:
    """Modules by the names of `tensors`: parts inside parts, numbered ones as the blocks of a list.

    Args:
        tensors: dtype and shape by name.
        dtype: what floating-point tensors are held in; None as they are stored.
    """
    root, homes = Part(), dict[tuple[str, ...], nn.Module]()
    children: dict[tuple[str, ...], set[str]] = {}
    own: dict[tuple[str, ...], dict[str, nn.Parameter | Tensor]] = {}
    for name, (stored, shape) in tensors.items():
        *path, leaf = name.split(".")
        for depth in range(len(path)):
            children.setdefault(tuple(path[:depth]), set()).add(path[depth])
        kept = dtype if dtype is not None and stored.is_floating_point else stored
        meta = torch.empty(shape, dtype=kept, device="meta")
        parameter = stored.is_floating_point and leaf not in BUFFERS
        own.setdefault(tuple(path), {})[leaf] = nn.Parameter(meta) if parameter else meta
    homes[()] = root
    for path in sorted({*own, *children} - {()}, key=len):
        homes[path] = made = _home(path, own.get(path, {}), children.get(path, set()))
        homes[path[:-1]]._modules[path[-1]] = made  # as it is called, whatever attributes a module has
    for path, found in own.items():
        for leaf, tensor in found.items():
            into = homes[path]._parameters if isinstance(tensor, nn.Parameter) else homes[path]._buffers
            into[leaf] = tensor  # type: ignore[index]
    return root


def _home(path: tuple[str, ...], own: Mapping[str, Tensor], children: set[str]) -> nn.Module:
    """The module at `path`: a list, a layer that strategies know, or a part."""
    if not own and children and all(name.isdigit() for name in children):
        return nn.ModuleDict()
    weight = own.get("weight")
    if children or weight is None or weight.ndim != 2 or not isinstance(weight, nn.Parameter):
        return Part()
    with torch.device("meta"):  # its parameters are replaced by those of the file
        if any(word in path[-1].lower() for word in EMBEDDINGS):
            return nn.Embedding(*weight.shape)
        return nn.Linear(weight.shape[1], weight.shape[0], bias="bias" in own)
