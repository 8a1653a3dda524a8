"""Training loops with and without overlap: where × feature, and the same numbers expected of both.

A cell is one pair of loops. The loop without overlap is written as a user would write it; where torch has no such
thing (clipping by the last norm, by bucket) it is spelled out in a few lines.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook

import offbeat
from offbeat.overlap.consumed import ConsumedGradient

__all__ = ["CELLS", "OPTIMIZERS", "Cell", "train"]

STEPS = 21
LIMIT = 0.05


def chain(params: Any) -> offbeat.Chain:
    """Muon for matrices, AdamW for the rest."""
    given = [g if isinstance(g, dict) else {"params": [g]} for g in params]
    split = [
        [{**g, "params": mine} for g in given if (mine := [p for p in g["params"] if (p.dim() == 2) is matrix])]
        for matrix in (True, False)
    ]
    made = [offbeat.Muon(split[0], lr=0.01, ns_dtype=torch.float32)] if split[0] else []
    return offbeat.Chain([*made, offbeat.AdamW(split[1], lr=0.01)] if split[1] else made)


def shared(params: Any) -> offbeat.Chain:
    """The same; overlapped, the ranks of a DDP module share the work."""
    return chain(params)


OPTIMIZERS: dict[str, Any] = {
    "offbeat.Chain": chain,
    "shared": shared,
    "offbeat.AdamW": lambda params: offbeat.AdamW(params, lr=0.01, weight_decay=0.1),
    "torch.AdamW": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1),
    "torch.SGD": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.1, foreach=False),
}

EVERYWHERE = (
    "step",
    "accumulate",
    "accumulate_block",
    "clip_exact",
    "clip_previous",
    "clip_bucket",
    "scaler",
    "scaler_clip_exact",
    "scaler_clip_bucket",
    "scheduler",
    "reload",
    "two_optimizers",
    "closure",
    "accumulate_closure",
)
HOOKS = ("hook_allreduce", "hook_fp16", "hook_bf16", "hook_powersgd", "hook_post_local_sgd", "hook_own")
ONLY: dict[str, tuple[str, ...]] = {
    "plain": (),
    "ddp": (
        "accumulate_no_sync",
        "bucket_view",
        "find_unused",
        "find_unused_clip_exact",
        "find_unused_clip_bucket",
        "static_graph",
        *HOOKS,
    ),
    "fsdp2": ("accumulate_no_sync", "mixed_precision", "keep_unsharded"),
}


@dataclass(frozen=True)
class Cell:
    """One place and one feature."""

    where: str
    feature: str

    def __str__(self) -> str:
        return f"{self.where}-{self.feature}"


CELLS = [Cell(where, feature) for where in ONLY for feature in (*EVERYWHERE, *ONLY[where])]


class Model(nn.Module):
    """Several layers, a tied weight, a layer used twice, one that is used every other time, and one never."""

    def __init__(self, sometimes: bool) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.middle = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Tanh()) for _ in range(3))
        self.last = nn.Linear(16, 6, bias=False)
        self.last.weight = nn.Parameter(torch.randn(6, 16) / 4)
        self.sometimes = nn.Linear(16, 16) if sometimes else None
        self.never = nn.Linear(3, 3) if sometimes else None
        self.frozen = nn.Linear(16, 16).requires_grad_(False)

    def forward(self, x: torch.Tensor, use_all: bool) -> torch.Tensor:
        x = self.first(x)
        for layer in self.middle:
            x = layer(x)
        x = self.middle[1](x)
        if self.sometimes is not None and use_all:
            x = self.sometimes(x)
        return self.last(self.frozen(x))


def build(cell: Cell, rank: int, world: int) -> tuple[nn.Module, nn.Module]:
    """The module a user calls, and the one whose parameters are compared."""
    torch.manual_seed(0)
    model = Model(sometimes=cell.feature.startswith(("find_unused", "static_graph")) or cell.where == "plain")
    if cell.where == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(
            model,
            # torch's PowerSGD waits inside gloo's threads and hangs, without any overlap, if buckets follow closely.
            bucket_cap_mb=25 if cell.feature == "hook_powersgd" else 0.002,
            gradient_as_bucket_view=cell.feature in ("bucket_view", "hook_own"),
            find_unused_parameters=cell.feature.startswith("find_unused"),
            static_graph=cell.feature == "static_graph",
        )
        return wrapped, model
    if cell.where == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        options: dict[str, Any] = {"mesh": init_device_mesh("cpu", (world,))}
        options["reshard_after_forward"] = cell.feature != "keep_unsharded"
        if cell.feature == "mixed_precision":
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in model.middle:
            fully_shard(layer, **options)
        fully_shard(model, **options)
    return model, model


def own_hook(state: dict[str, int], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A user's hook that answers with a tensor of its own instead of the bucket's."""
    state["calls"] = state.get("calls", 0) + 1
    fresh = bucket.buffer() * 3
    work = dist.all_reduce(fresh, async_op=True)
    return work.get_future().then(lambda done: done.value()[0] / 6)


def communication(feature: str) -> tuple[Any, Any]:
    """The hook and its state, made anew for each loop."""
    if feature == "hook_powersgd":
        return powerSGD_hook.powerSGD_hook, powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=1, start_powerSGD_iter=3, min_compression_rate=0.5
        )
    if feature == "hook_post_local_sgd":
        # Local from the eighth step on: ranks part, overlapped or not.
        alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
        mine = alone[dist.get_rank()]
        state = post_localSGD_hook.PostLocalSGDState(None, mine, start_localSGD_iter=7)
        return post_localSGD_hook.post_localSGD_hook, state
    hooks = {
        "hook_allreduce": default_hooks.allreduce_hook,
        "hook_fp16": default_hooks.fp16_compress_hook,
        "hook_bf16": default_hooks.bf16_compress_hook,
        "hook_own": own_hook,
    }
    return hooks[feature], {} if feature == "hook_own" else None


def register_unchecked(ddp: nn.parallel.DistributedDataParallel, hook: Any, state: Any) -> None:
    """DDP refuses bfloat16 by the hook's name where there is no NCCL; gloo can do it."""

    def reference(state, bucket):
        return hook(state, bucket)

    ddp.register_comm_hook(state, reference)


def optimizers(cell: Cell, model: nn.Module, make: Any) -> list[Any]:
    params = [p for p in model.parameters() if p.requires_grad]
    if cell.feature != "two_optimizers":
        # Two groups, so that a bucket spans groups.
        return [make([{"params": params[::2]}, {"params": params[1::2], "lr": 0.02}])]
    return [make(params[::2]), torch.optim.SGD(params[1::2], lr=0.05, momentum=0.9)]


def buckets_of(cell: Cell, module: nn.Module, model: nn.Module) -> list[list[torch.Tensor]]:
    """A list that is filled with the buckets of every backward; the loop clears it."""
    found: list[list[torch.Tensor]] = []
    if cell.where == "ddp":

        def look(state, bucket):
            found.append([p for p in bucket.parameters() if p.requires_grad])
            return default_hooks.allreduce_hook(state, bucket)

        module.register_comm_hook(None, look)
    elif cell.where == "fsdp2":
        units = [list(layer.parameters()) for layer in reversed(model.middle)]
        inner = {id(p) for unit in units for p in unit}
        units.append([p for p in model.parameters() if id(p) not in inner])
        found.extend([p for p in unit if p.requires_grad] for unit in units)
    else:
        waiting: list[torch.Tensor] = []

        def arrived(p: torch.Tensor) -> None:
            waiting.append(p)
            if sum(q.nbytes for q in waiting) >= BUCKET_BYTES:
                found.append(waiting.copy())
                waiting.clear()

        def rest() -> list[list[torch.Tensor]]:
            if waiting:
                found.append(waiting.copy())
                waiting.clear()
            return found

        for p in model.parameters():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(arrived)
        return _Lazy(rest)  # type: ignore[return-value]
    return found


BUCKET_MB = 0.002
BUCKET_BYTES = int(BUCKET_MB * 2**20)


class _Lazy:
    def __init__(self, rest: Any) -> None:
        self.rest = rest

    def __iter__(self):
        return iter(list(self.rest()))

    def clear(self) -> None:
        self.rest().clear()


def norm_of(params: list[torch.Tensor]) -> torch.Tensor:
    norm = nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def train(cell: Cell, make: Any, overlapped: bool, rank: int, world: int) -> dict[str, Any]:
    """Run one loop; returns what must be equal with and without overlap."""
    feature = cell.feature
    module, model = build(cell, rank, world)
    opts = optimizers(cell, model, make)
    passes = 3 if feature.startswith("accumulate") else 1
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=4) if "scaler" in feature else None
    clip = next((mode for mode in ("exact", "previous", "bucket") if feature.endswith(f"clip_{mode}")), None)
    schedulers: list[Any] = []
    handles: list[Any] = []
    buckets: Any = []

    def arrange() -> None:
        options: dict[str, Any] = {"bucket_cap_mb": BUCKET_MB}
        if feature in ("accumulate", "accumulate_closure"):
            options["accumulate"] = passes
        if clip:
            options.update(clip_norm=LIMIT, clip=clip)
        if feature.startswith("hook"):
            hook, state = communication(feature)
            if overlapped:
                options.update(comm_hook=hook, comm_state=state)
            else:
                register_unchecked(module, hook, state)
        if overlapped and make is shared:
            opts[0].share_matrices(exact=True)
        if overlapped:
            handles[:] = [offbeat.overlap(opt, module, scaler=scaler, **options) for opt in opts]
        elif clip == "bucket":
            nonlocal buckets
            buckets = buckets_of(cell, module, model)
        if feature in ("scheduler", "reload"):
            schedulers[:] = [torch.optim.lr_scheduler.StepLR(opt, step_size=4, gamma=0.7) for opt in opts]

    def one_pass(step: int, micro: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
        x = torch.randn(8, 6, generator=generator)
        final = micro == passes - 1
        block: Any = contextlib.nullcontext()
        if feature == "accumulate_no_sync" and cell.where == "ddp" and not final:
            block = module.no_sync()
        elif feature == "accumulate_no_sync" and cell.where == "fsdp2":
            module.set_requires_gradient_sync(final)
        elif feature == "accumulate_block" and overlapped and not final:
            block = handles[0].accumulate()
        with block:
            # Odd ranks leave out a layer at other steps than even ones; with a static graph nobody may.
            use_all = (step + rank) % 3 > 0 and step % 5 > 0 if feature != "static_graph" else True
            loss = module(x, use_all).square().mean()
            if scaler is not None and step in (5, 11) and rank == (step == 11):
                loss = loss * float("inf")
            (scaler.scale(loss) if scaler is not None else loss).backward()
        return loss

    arrange()
    losses, norms, early, previous = [], [], [], None
    for step in range(STEPS):
        if overlapped and "closure" in feature:
            # The last pass, in the optimizer's own step; the loop without overlap never has a closure.
            for micro in range(passes - 1):
                one_pass(step, micro)
            loss = opts[0].step(lambda step=step: one_pass(step, passes - 1))
        else:
            for micro in range(passes):
                loss = one_pass(step, micro)
        losses.append(loss.detach().clone())
        early.append(sum(isinstance(p.grad, ConsumedGradient) for p in model.parameters()))
        params = [p for p in model.parameters() if p.requires_grad]
        if clip and not overlapped:
            if scaler is not None:
                scaler.unscale_(opts[0])
            norm = norm_of(params)
            if clip == "bucket":
                here = [p for bucket in buckets for p in bucket]
                left = [p for p in params if all(p is not q for q in here)]
                for bucket in [*buckets, left]:
                    members = [p for p in bucket if p.grad is not None]
                    if members:
                        nn.utils.clip_grads_with_norm_(members, LIMIT, norm_of(members))
                if cell.where != "fsdp2":
                    buckets.clear()
            else:
                by = previous if clip == "previous" and previous is not None else norm
                nn.utils.clip_grads_with_norm_(params, LIMIT, by)
                previous = norm
        for opt in opts:
            if scaler is not None:
                scaler.step(opt)
            elif not (overlapped and "closure" in feature):
                opt.step()
        skipped = False
        if scaler is not None:
            before = scaler.get_scale()
            scaler.update()
            skipped = scaler.get_scale() < before
        if clip and not skipped:
            norms.append(handles[0].last_norm if overlapped else norm)
        for opt in opts:
            opt.zero_grad()
        for scheduler in schedulers:
            scheduler.step()
        if feature == "reload" and step == 9 and overlapped:
            # A new process would do this: new model, new optimizer, new overlap, all state loaded.
            saved = [opt.state_dict() for opt in opts], [s.state_dict() for s in schedulers], model.state_dict()
            for handle in handles:
                handle.remove()
            values = [p.detach().clone() for p in model.parameters()]
            module, model = build(cell, rank, world)
            with torch.no_grad():
                for p, value in zip(model.parameters(), values, strict=True):
                    p.copy_(value)
            opts[:] = optimizers(cell, model, make)
            arrange()
            for opt, state in zip(opts, saved[0], strict=True):
                opt.load_state_dict(state)
            for scheduler, state in zip(schedulers, saved[1], strict=True):
                scheduler.load_state_dict(state)
    return {
        "params": [_whole(p) for p in model.parameters()],
        "losses": losses,
        "early": early,
        "norms": [n for n in norms if n is not None],
        "scale": scaler.get_scale() if scaler is not None else 0.0,
        "state": [
            _whole(value)
            for opt in opts
            for _, entry in sorted(opt.state_dict()["state"].items())
            for value in entry.values()
            if isinstance(value, torch.Tensor)
        ],
    }


def _whole(t: torch.Tensor) -> torch.Tensor:
    t = t.detach()
    return t.full_tensor() if hasattr(t, "full_tensor") else t.clone()
