"""``muon_with_adamw``: Muon for a module's hidden matrices and AdamW for the rest, as one optimizer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from offbeat.optim.chain import Chain
from offbeat.optim.optimizers import AdamW, Muon
from offbeat.optim.split import split_parameters

__all__ = ["muon_with_adamw"]


def muon_with_adamw(
    module: torch.nn.Module,
    lr: float | Tensor = 2e-3,
    *,
    weight_decay: float = 0.1,
    momentum: float = 0.95,
    betas: tuple[float, float] = (0.9, 0.95),
    heads: Sequence[str] | None = None,
    rest: Sequence[str] = (),
) -> Chain:
    r"""Make one optimizer for a module: Muon for its hidden matrices, AdamW for everything else.

    It is short for :func:`offbeat.split_parameters` and :class:`offbeat.Chain`. Muon's updates are scaled by
    :math:`0.2 \sqrt{\max(\text{rows}, \text{columns})}` (``adjust_lr_fn="match_rms_adamw"``), which makes them as large
    as AdamW's. So one learning rate, found for AdamW, serves both. The ``report`` of the result lists what Muon got,
    what AdamW got, and why: read it once for a new model.

    Reference: Liu et al., arXiv 2502.16982.

    Args:
        module: the module: plain, DDP or ``fully_shard``-ed. Parameters that do not require gradients are left out.
        lr: the learning rate of both.
        weight_decay: the decoupled weight decay of both, for all parameters.
        momentum: Muon's momentum.
        betas: AdamW's betas.
        heads: a list of patterns of the names of heads, which AdamW gets; see :func:`offbeat.split_parameters`.
        rest: a list of patterns of the names of further parameters for AdamW.

    Returns:
        A chain of Muon and AdamW. If Muon has got all parameters, it is the only optimizer in it.

    Raises:
        ValueError: the module has no hidden matrices.

    Example:
        >>> import torch, offbeat
        >>> model = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 9))
        >>> optimizer = offbeat.muon_with_adamw(model, lr=1e-3)
        >>> [type(one).__name__ for one in optimizer.optimizers]
        ['Muon', 'AdamW']
        >>> print(optimizer.report)
        matrices: 1 tensors, 16 numbers
          1.weight  4x4  a hidden matrix
        rest: 4 tensors, 85 numbers
          0.weight  9x4  an embedding
          1.bias      4  a vector or a number
          2.weight  9x4  a head
          2.bias      9  a vector or a number
    """
    split = split_parameters(module, heads=heads, rest=rest)
    if not split.matrices:
        raise ValueError(
            f"{type(module).__name__} has no hidden matrices for Muon: use offbeat.AdamW(module.parameters()), or name "
            f"the heads yourself with heads= if one of these is a hidden matrix\n{split.report}"
        )
    optimizers: list[Optimizer] = [
        Muon(split.matrices, lr=lr, weight_decay=weight_decay, momentum=momentum, adjust_lr_fn="match_rms_adamw")
    ]
    if split.rest:
        optimizers.append(AdamW(split.rest, lr=lr, betas=betas, weight_decay=weight_decay))
    chain = Chain(optimizers)
    chain.report = split.report
    return chain
