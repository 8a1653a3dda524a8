"""The parameter sets the benchmarks run on."""

from __future__ import annotations

__all__ = ["CUDA_SETS", "SETS", "shapes_of"]

Shapes = list[tuple[int, ...]]


def many_small(count: int = 2000, size: int = 4096) -> Shapes:
    return [(size,)] * count


def resnet50() -> Shapes:
    """161 tensors, 25.6 M parameters, in the order torchvision's model has them."""
    shapes: Shapes = [(64, 3, 7, 7), (64,), (64,)]
    inner, outer_before = 64, 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = inner * 2**stage
        for block in range(blocks):
            first = outer_before if block == 0 else width * 4
            shapes += [(width, first, 1, 1), (width,), (width,), (width, width, 3, 3), (width,), (width,)]
            shapes += [(width * 4, width, 1, 1), (width * 4,), (width * 4,)]
            if block == 0:
                shapes += [(width * 4, first, 1, 1), (width * 4,), (width * 4,)]
        outer_before = width * 4
    return [*shapes, (1000, 2048), (1000,)]


def gpt2(layers: int = 12, width: int = 768, vocabulary: int = 50257, context: int = 1024) -> Shapes:
    """148 tensors, 124 M parameters: GPT-2 small with tied embeddings."""
    block = [
        (width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,),
        (width,), (width,), (4 * width, width), (4 * width,), (width, 4 * width), (width,),
    ]  # fmt: skip
    return [(vocabulary, width), (context, width), *(block * layers), (width,), (width,)]


def gpt_large() -> Shapes:
    """292 tensors, 1.31 B parameters: 24 layers of width 2048."""
    return gpt2(24, 2048)


SETS = {"2000 x 4096": many_small, "ResNet-50": resnet50, "GPT-2": gpt2}


CUDA_SETS = {"ResNet-50": resnet50, "GPT-2": gpt2, "1.3 B": gpt_large}


def shapes_of(name: str) -> Shapes:
    return (SETS | CUDA_SETS)[name]()
