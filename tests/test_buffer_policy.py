"""``buffers=``: what a round does to the module's buffers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import offbeat
from tests.harness import (
    everyone,
    ranks,
    sgd,
)

pytestmark = pytest.mark.xdist_group("buffer_policy")


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)))


@ranks(2)
def test_buffer_policies(rank, world):
    """BatchNorm's statistics after an average, and between averages each rank's own."""
    for policy in ("average", "broadcast", "keep"):
        for delay in (0, 2):
            torch.manual_seed(0)
            model = Norm()
            ddp = DistributedDataParallel(model)
            inner = torch.optim.SGD(model.parameters(), lr=0.01)
            local = offbeat.LocalSGD(inner, ddp, every=4, warmup=2, buffers=policy, subgroup=None, delay=delay)
            for step in range(9):
                if step == 3:
                    model.scratch.fill_(rank)  # not persistent: nobody's business
                launches = step in (2, 6)
                x = torch.randn(5, 6, generator=torch.Generator().manual_seed(10 * step + rank)) + rank
                ddp(x).square().mean().backward()
                before = everyone(model.norm.running_var.clone())
                if launches:
                    sent = before
                local.step()
                local.zero_grad()
                now = everyone(model.norm.running_var.clone())
                landed = step in (2 + delay, 6 + delay)
                if policy == "keep" or not landed:
                    assert torch.equal(now[rank], before[rank])  # step() left them alone
                elif policy == "average":
                    torch.testing.assert_close(now[rank], (sent[0] + sent[1]) / 2)
                else:
                    assert torch.equal(now[rank], sent[0])
                assert int(model.norm.num_batches_tracked) == step + 1
                if step == 3:  # DDP would have broadcast rank 0's at the beginning of this step's forward
                    assert not torch.equal(*now)
            assert model.scratch[0].item() == rank
            assert ddp.broadcast_buffers is False
    ddp = DistributedDataParallel(Norm())
    offbeat.LocalSGD(sgd(ddp.parameters()), ddp, warmup=3)
    ddp(torch.randn(5, 6))
    assert ddp.broadcast_buffers is True
    with pytest.raises(ValueError, match="buffers must be one of"):
        offbeat.LocalSGD(sgd(ddp.parameters()), ddp, buffers="mean")


class Flags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.register_buffer("flag", torch.tensor([False, False]))
        self.register_buffer("place", torch.tensor([0]))
        self.register_buffer("short", torch.zeros(4, dtype=torch.int16))
        self.register_buffer("num_batches_tracked", torch.tensor(0))


@ranks(2)
def test_late_buffers_of_whole_numbers(rank, world):
    """Flags stay flags and places stay in range; only what counts batches goes on counting."""
    for delay in (0, 2):
        module = Flags()
        local = offbeat.LocalSGD(torch.optim.SGD([module.weight], lr=0.0), module, every=4, subgroup=None, delay=delay)
        for step in range(delay + 1):
            module.num_batches_tracked += 1
            module.flag[0] = rank == 0 or step > 0
            module.place.fill_((60 * (1 - rank) + step) % 64)
            module.short.fill_(7 - rank)
            local.step()
        assert module.flag.view(torch.uint8).tolist() == [1, 0]
        assert module.place.item() == 60
        assert module.short.tolist() == [7] * 4
        assert module.num_batches_tracked.item() == delay + 1
