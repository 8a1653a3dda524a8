"""A plain GPT, for benchmarks that need a real backward pass."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = ["GPT", "LARGE"]

#: 1.42 billion parameters.
LARGE = {"layers": 24, "width": 2048, "heads": 16, "vocabulary": 50304, "length": 1024}


class Block(nn.Module):
    """Attention and a two-layer perceptron."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Calls give the loss. Blocks and the loss are checkpointed, the loss in chunks."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        x = self.norm(x).flatten(0, 1)
        # Cast once, so that the chunks' gradients are added up in the low precision and cast back once.
        weight = self.head.weight.to(torch.get_autocast_dtype("cuda")) if x.is_cuda else self.head.weight
        chunks = zip(x.chunk(4), targets.flatten().chunk(4), strict=True)
        return sum(checkpoint(_loss, part, weight, goal, use_reentrant=False) for part, goal in chunks) / 4


def _loss(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight).float(), targets)
