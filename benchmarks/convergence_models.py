"""The models of the convergence benchmark: samples in, a row of logits for each target out."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from benchmarks.gpt import Block

__all__ = ["ByteGPT", "ConvNet"]


class ByteGPT(nn.Module):
    """A small GPT over bytes: (batch, time) in, (batch, time, 256) out. 0.88 million parameters."""

    def __init__(self, layers: int = 4, width: int = 128, heads: int = 4, length: int = 128) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        return self.head(self.norm(self.blocks(h)))


class ConvNet(nn.Module):
    """Three convolutions, each with BatchNorm, for images of 8 x 8: (batch, 1, 8, 8) in, (batch, 10) out."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        widths = (1, width, 2 * width, 2 * width)
        layers: list[nn.Module] = []
        for before, after in pairwise(widths):
            layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
        layers.insert(6, nn.MaxPool2d(2))
        self.body = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)
