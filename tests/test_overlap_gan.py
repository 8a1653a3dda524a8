"""A GAN: the generator's loss goes through the discriminator, and what that adds to its gradients is thrown away."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.nn.parallel import DistributedDataParallel

import offbeat
from tests.ranks import run_ranks

#: How a loop avoids the gradients of the discriminator, or throws them away.
WAYS = (
    "tutorial",
    "tutorial, exact",
    "tutorial, previous",
    "tutorial, scaler",
    "accumulate",
    "accumulate, scaler",
    "frozen",
    "frozen, scaler",
    "inputs",
    "inputs, scaler",
    "grad",
    "grad, scaler",
)


def modules(kind: str) -> list[nn.Module]:
    """The generator and the discriminator."""
    torch.manual_seed(0)
    made: list[Any] = [nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4)), nn.Sequential()]
    made[1].extend([nn.Linear(4, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1)])
    if kind == "fsdp":
        from torch.distributed.fsdp import fully_shard

        return [fully_shard(module) for module in made]
    if kind == "plain":
        return made
    view, cap = kind == "views", 0.0002
    return [DistributedDataParallel(module, bucket_cap_mb=cap, gradient_as_bucket_view=view) for module in made]


def clip_by(params: list[torch.Tensor], limit: float, last: list[torch.Tensor]) -> None:
    """Clip by the norm of the last step, which is added to ``last``; by this one's if there is none."""
    norm = nn.utils.clip_grad_norm_(params, float("inf"))
    coefficient = torch.clamp(limit / ((last[-1] if last else norm) + 1e-6), max=1.0)
    for p in params:
        p.grad.mul_(coefficient)
    last.append(norm)


def train(way: str, kind: str, overlapped: str, rank: int = 0, set_to_none: bool = True) -> list[torch.Tensor]:
    way, _, extra = way.partition(", ")
    generator, discriminator = modules(kind)
    of_g, of_d = (offbeat.Adam(one.parameters(), lr=0.05, betas=(0.5, 0.9)) for one in (generator, discriminator))
    limit = 0.2 if extra in ("exact", "previous") else None
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=extra == "scaler")
    in_turns = way == "tutorial"
    handle, last = None, []
    if overlapped in ("both", "generator"):
        offbeat.overlap(of_g, generator, scaler=scaler)
    if overlapped in ("both", "discriminator"):
        options: dict[str, Any] = {"clip_norm": limit, "clip": extra} if limit is not None else {}
        handle = offbeat.overlap(of_d, discriminator, accumulate=2 if in_turns else 1, scaler=scaler, **options)
    needs_block = way == "accumulate" or (in_turns and extra == "scaler")
    discard = handle.accumulate if handle is not None and needs_block else contextlib.nullcontext
    yes, no = torch.ones(5, 1), torch.zeros(5, 1)

    def step_discriminator() -> None:
        if handle is None and extra == "exact":
            nn.utils.clip_grad_norm_(discriminator.parameters(), limit)
        elif handle is None and extra == "previous":
            clip_by(list(discriminator.parameters()), limit, last)
        scaler.step(of_d)

    for step in range(5):
        numbers = torch.Generator().manual_seed(10 * step + rank)
        real, noise = torch.randn(5, 4, generator=numbers), torch.randn(5, 3, generator=numbers)
        if step == 2 and extra == "scaler":
            real *= float("inf")
        if in_turns:  # as in the DCGAN tutorial
            discriminator.zero_grad(set_to_none=set_to_none)
            scaler.scale(bce(discriminator(real), yes)).backward()
            fake = generator(noise)
            scaler.scale(bce(discriminator(fake.detach()), no)).backward()
            step_discriminator()
            of_g.zero_grad(set_to_none=set_to_none)  # of FSDP2, the module would clear the gathered parameters here
            with discard():
                scaler.scale(bce(discriminator(fake), yes)).backward()
            scaler.step(of_g)
            scaler.update()
            continue
        of_g.zero_grad(set_to_none=set_to_none)
        fake = generator(noise)
        discriminator.requires_grad_(way != "frozen")
        loss = scaler.scale(bce(discriminator(fake), yes))
        if way == "inputs":
            loss.backward(inputs=list(generator.parameters()))
        elif way == "grad":
            fake.backward(*torch.autograd.grad(loss, fake, retain_graph=True))
        else:
            with discard():
                loss.backward()
        discriminator.requires_grad_(True)
        scaler.step(of_g)
        of_d.zero_grad(set_to_none=set_to_none)
        scaler.scale(bce(discriminator(real), yes) + bce(discriminator(fake.detach()), no)).backward()
        step_discriminator()
        scaler.update()
    every = [p for module in (generator, discriminator) for p in module.parameters()]
    return [p.full_tensor() if kind == "fsdp" else p.detach().clone() for p in every]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


def near(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.allclose(p, q, atol=2e-6) for p, q in zip(a, b, strict=True))


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("overlapped", ["both", "generator", "discriminator"])
@pytest.mark.parametrize("way", WAYS)
def test_a_gan_of_plain_modules(way, overlapped, set_to_none):
    expected = train(way, "plain", "", set_to_none=set_to_none)
    assert equal(train(way, "plain", overlapped, set_to_none=set_to_none), expected)


def on_ranks(rank: int, world: int) -> list[Any]:
    wrong = []
    for kind in ("ddp", "views", "fsdp"):
        for way in WAYS:
            # Norms of shards are added up in another order.
            agree = near if kind == "fsdp" and way in ("tutorial, exact", "tutorial, previous") else equal
            for set_to_none in (True, False):
                pair = [train(way, kind, overlapped, rank, set_to_none) for overlapped in ("", "both")]
                if not agree(*pair):
                    wrong.append((kind, way, set_to_none))
    return wrong


@pytest.mark.ranks
@pytest.mark.xdist_group("overlap_ranks")
@pytest.mark.timeout(120)
def test_a_gan_on_two_ranks():
    assert run_ranks(on_ranks, 2, seconds=90) == [[], []]


def test_a_pass_through_the_discriminator_that_nobody_announced():
    """Its gradients are cleared before, so that they could be meant. The error names a way out: see WAYS."""
    generator, discriminator = modules("plain")
    optimizer = offbeat.Adam(discriminator.parameters(), lr=0.05)
    offbeat.overlap(optimizer, discriminator)
    discriminator(generator(torch.ones(1, 3))).sum().backward()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"thrown away.*`with handle.accumulate\(\):`"):
        discriminator(torch.ones(1, 4)).sum().backward()


@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_gradients_of_an_earlier_step_are_not_stepped_twice(clip_norm):
    """Without zero_grad() a step raises, and changes nothing; with exact clipping it is the step of torch."""
    models = [modules("plain")[1] for _ in range(2)]
    optimizers = [offbeat.SGD(model.parameters(), lr=0.1) for model in models]
    offbeat.overlap(optimizers[0], models[0], clip_norm=clip_norm)
    for model, optimizer in zip(models, optimizers, strict=True):
        for step in range(2):
            model(torch.full((1, 4), 1.0 + step)).sum().backward()
            before = [p.detach().clone() for p in model.parameters()]
            if clip_norm is not None and model is models[1]:
                nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            if clip_norm is None and model is models[0] and step == 1:
                with pytest.raises(RuntimeError, match=r"in an earlier step.*call optimizer\.zero_grad\(\)"):
                    optimizer.step()
                assert equal(before, list(model.parameters()))
                return
            optimizer.step()
    assert equal(*(list(model.parameters()) for model in models))


def test_with_a_scaler_the_pass_that_is_thrown_away_must_be_announced():
    """The gradients of the discriminator's step are real ones: to add to them could be meant."""
    generator, discriminator = modules("plain")
    optimizer, scaler = offbeat.Adam(discriminator.parameters(), lr=0.05), torch.amp.GradScaler("cpu")
    offbeat.overlap(optimizer, discriminator, scaler=scaler)
    scaler.scale(discriminator(torch.ones(1, 4)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    before = [p.detach().clone() for p in discriminator.parameters()]
    scaler.scale(discriminator(generator(torch.ones(1, 3))).sum()).backward()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"thrown away.*`with handle.accumulate\(\):`"):
        scaler.scale(discriminator(torch.ones(1, 4)).sum()).backward()
    assert equal(before, list(discriminator.parameters()))
