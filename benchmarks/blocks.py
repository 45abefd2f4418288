"""The transformer block that the benchmarks' models are made of."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Attention and an MLP, each after a norm; [batch, length, width] to the same.

    Args:
        head: width of an attention head. How many there are follows from q, k and v, which may have been divided among
            ranks.
    """

    def __init__(self, width: int, head: int) -> None:
        super().__init__()
        self.head = head
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        q, k, v = (f(y).unflatten(-1, (-1, self.head)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x))))
