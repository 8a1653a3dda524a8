"""The demo's model: a small GPT over bytes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["ByteGPT"]

VOCABULARY = 256
HEADS = 4


class Block(nn.Module):
    """Causal attention and a two-layer perceptron, each with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """One layer over ``x`` of shape (batch, time, width)."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        hidden: Tensor = self.down(functional.gelu(self.up(self.norm2(x))))
        return x + hidden


class ByteGPT(nn.Module):
    """A GPT over bytes that returns the loss of predicting each next byte, in nats per byte."""

    def __init__(self, *, layers: int, width: int, context: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(VOCABULARY, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """The mean loss over a batch of windows, as :mod:`offbeat.cli.data` makes them."""
        h = self.token(x) + self.place(torch.arange(x.shape[1], device=x.device))
        return functional.cross_entropy(self.head(self.norm(self.blocks(h))).flatten(0, 1), target.flatten())
