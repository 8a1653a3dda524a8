"""The demo's model: a small GPT over bytes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["CONTEXT", "ByteGPT"]

CONTEXT = 64
VOCABULARY = 256
WIDTH = 96
HEADS = 4
LAYERS = 6


class Block(nn.Module):
    """Causal attention and a two-layer perceptron, each with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        # No bias: a key's bias cancels in the softmax, so that its gradient is only rounding noise, which Adam scales
        # up to full steps. Runs that should be equal would drift apart.
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """One layer over ``x`` of shape (batch, time, width)."""
        batch, time, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, time, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, time, WIDTH))
        hidden: Tensor = self.down(functional.gelu(self.up(self.norm2(x))))
        return x + hidden


class ByteGPT(nn.Module):
    """A GPT over bytes that returns the loss of predicting each next byte, in nats per byte."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.place = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """The mean loss over a batch of windows, as :mod:`offbeat.cli.data` makes them."""
        h = self.token(x) + self.place(torch.arange(x.shape[1]))
        for block in self.blocks:
            h = block(h)
        return functional.cross_entropy(self.head(self.norm(h)).flatten(0, 1), target.flatten())
