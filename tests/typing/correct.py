"""Correct uses of every public name. Never executed: mypy (strict) and pyright (strict) find nothing to report."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import assert_type

import offbeat


def optimizers(model: nn.Module) -> None:
    assert_type(offbeat.__version__, str)
    adamw = offbeat.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    assert_type(adamw.step(), None)
    assert_type(adamw.step(lambda: torch.zeros(())), Tensor)
    assert_type(adamw.step(closure=lambda: 0.5, clip=0.1, zero_grad=True), float)
    assert_type(adamw.param_groups, list[dict[str, Any]])
    assert_type(adamw.tiers(), list[offbeat.Choice])
    assert_type(adamw.tiers()[0].tier, str)
    adamw.load_state_dict(adamw.state_dict())
    as_torch: torch.optim.Optimizer = adamw
    torch.optim.lr_scheduler.ExponentialLR(as_torch, 0.9)
    offbeat.Adam(model.named_parameters(), torch.tensor(0.1), decoupled_weight_decay=True)
    offbeat.SGD([{"params": list(model.parameters()), "lr": 0.1}, {"params": [torch.ones(1)]}], 0.1, 0.9)
    offbeat.SGD(model.parameters(), state_dtype=torch.bfloat16, rounding="kahan")
    offbeat.Lion([torch.ones(1)], state_dtype="8bit", rounding="stochastic")
    offbeat.Adadelta([p for p in model.parameters() if p.requires_grad], rho=0.9)
    offbeat.Adafactor(model.parameters(), eps=(None, 1e-3), d=1.0, beta2_decay=-0.8)
    offbeat.Adagrad(model.parameters(), initial_accumulator_value=0.1).share_memory()
    offbeat.Adamax(model.parameters(), capturable=True)
    offbeat.ASGD(model.parameters(), t0=1e6)
    offbeat.NAdam(model.parameters(), momentum_decay=4e-3)
    offbeat.RAdam(model.parameters(), foreach=False)
    offbeat.RMSprop(model.parameters(), centered=True)
    offbeat.Rprop(model.parameters(), etas=(0.5, 1.2))
    offbeat.SparseAdam(model.parameters(), maximize=True)
    split = offbeat.split_parameters(model, heads=["lm_head.*"], rest=())
    muon = offbeat.Muon(split.matrices, ns_steps=5, adjust_lr_fn="match_rms_adamw", ns_dtype=torch.float32)
    muon.share_matrices(None, exact=True)
    matrices, rest = split
    assert_type(matrices, list[Tensor])
    assert_type(split, offbeat.Split)
    chain = offbeat.Chain([muon, offbeat.AdamW(rest), torch.optim.SGD(model.parameters())])
    chain.load_state_dict(chain.state_dict())
    assert_type(chain.step(), None)
    assert_type(chain.step(lambda: 1.0), float)
    assert_type(chain.optimizers, tuple[torch.optim.Optimizer, ...])
    both = offbeat.muon_with_adamw(model, 1e-3, weight_decay=0.0, betas=(0.9, 0.99), heads=["lm_head.*"])
    assert_type(both, offbeat.Chain)
    assert_type(both.report, str)
    lbfgs = offbeat.LBFGS(model.parameters(), line_search_fn="strong_wolfe")
    assert_type(lbfgs.step(lambda: torch.zeros(())), Tensor)


def functional(model: nn.Module) -> None:
    made = offbeat.as_functional(offbeat.SGD, list(model.parameters()), lr=0.5)
    assert_type(made, offbeat.FunctionalOptimizer)
    made.step([torch.ones(1), None])
    made.step_param(torch.ones(1), None)
    offbeat.as_functional(offbeat.Adam, [{"params": [torch.ones(1)]}, {"params": [torch.ones(2)], "lr": 0.1}])
    offbeat.as_functional(torch.optim.SGD, [], 0.1, momentum=0.9)
    offbeat.as_functional(offbeat.AdamW, params=model.named_parameters(), betas=(0.9, 0.95))
    offbeat.as_functional(offbeat.Chain([offbeat.SGD(model.parameters())]))
    pure = offbeat.as_pure(offbeat.AdamW, lr=torch.tensor(0.1), weight_decay=0.0)
    assert_type(pure, offbeat.PureOptimizer)
    params = {"w": torch.ones(2)}
    state = pure.init(params)
    params, state = pure.update(params, {"w": torch.ones(2)}, state, lr=0.1)
    assert_type(params, dict[str, Tensor])
    offbeat.as_pure(torch.optim.SGD, lr=0.1)


def own_rule(rule: offbeat.Rule) -> None:
    class Mine(offbeat.RuleOptimizer, rule=rule): ...

    Mine([torch.ones(1)], lr=0.1).step()
    offbeat.Slot("momentum_buffer", init=0.0)


def overlap(model: nn.Module, ddp: DistributedDataParallel) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    handle = offbeat.overlap(optimizer, model, accumulate=4, clip_norm=1.0, clip="previous", bucket_cap_mb=25)
    assert_type(handle, offbeat.Overlap)
    assert_type(handle.last_norm, Tensor | None)
    with handle.accumulate():
        pass
    handle.load_state_dict(handle.state_dict())
    handle.reset()
    handle.remove()
    scaler = torch.amp.GradScaler("cpu")  # pyright: ignore[reportPrivateImportUsage]
    offbeat.overlap(optimizer, model, scaler=scaler, accumulate=lambda: False)
    offbeat.overlap(optimizer, ddp, comm_hook=fp16_compress_hook)
    state = offbeat.CodecState("int8", error_feedback=1.0, not_finite="nan", scaler=torch.amp.GradScaler(enabled=False))
    offbeat.overlap(optimizer, ddp, comm_hook=offbeat.codec_hook, comm_state=state)
    ddp.register_comm_hook(offbeat.CodecState(offbeat.TopK(0.03, bits=2)), offbeat.codec_hook)


@offbeat.register_codec("signs")
class Signs(offbeat.BlockCodec):
    block = 64

    def record_bytes(self, width: int) -> int:
        return width

    def encode_rows(self, rows: Tensor, records: Tensor) -> Tensor:
        records.copy_(rows >= 0)
        return self.decode_rows(records, rows.shape[1])

    def decode_rows(self, records: Tensor, width: int) -> Tensor:
        return records * 2.0 - 1


def codecs() -> None:
    codec: offbeat.Codec = Signs()
    assert_type(codec.encoded_bytes(100), int)
    assert_type(offbeat.CodecState("signs").codec, offbeat.Codec)
    offbeat.CodecState(codec)


class Custom(torch.optim.Optimizer):
    def update_some(self, params: Sequence[Tensor], grads: Sequence[Tensor]) -> None: ...


@offbeat.register_overlapped(Custom)
class OverlappedCustom(offbeat.OverlappedOptimizer):
    def step_bucket(self, params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        self.optimizer.update_some(params, grads)


@offbeat.register_overlapped
class StepsBuckets(torch.optim.Optimizer):
    def step_bucket(self, params: Sequence[Tensor], grads: Sequence[Tensor]) -> None: ...


def replicas(model: nn.Module, group: dist.ProcessGroup, mesh: DeviceMesh) -> None:
    assert_type(OverlappedCustom(Custom(model.parameters(), {})), OverlappedCustom)
    assert_type(StepsBuckets(model.parameters(), {}), StepsBuckets)
    inner = offbeat.AdamW(model.parameters())
    local = offbeat.LocalSGD(inner, model, every=8, warmup=100, delay=4, state="reset", buffers="broadcast")
    assert_type(local.steps, int)
    assert_type(local.syncs, int)
    assert_type(local.bytes_sent, int)
    assert_type(local.is_local, bool)
    assert_type(local.optim, torch.optim.Optimizer)
    assert_type(local.outer, torch.optim.Optimizer | None)
    assert_type(local.step(), None)
    assert_type(local.step(lambda: torch.zeros(())), Tensor)
    local.load_state_dict(local.state_dict())
    local.seen(32)
    local.sync()
    local.finish()
    torch.optim.lr_scheduler.ExponentialLR(local, 0.9)
    offbeat.LocalSGD(inner, model, every={4: 2, 16: None}, nonfinite="skip", snapshot="cpu")
    offbeat.LocalSGD(inner, model, [(4, "node"), (16, group), (64, None)], mesh=mesh, deadline=10.0)
    offbeat.LocalSGD(inner, model, every=lambda step: step // 10 + 1, warmup=lambda step: step < 100)
    offbeat.LocalSGD(inner, model, group=group, subgroup=group, state={"exp_avg": "average"}, bucket_mb=16)
    offbeat.LocalSGD(inner, model, subgroup=dist.new_group([0, 1]), group=dist.new_group())
    offbeat.LocalSGD(inner, model, subgroup=None, comm_hook=fp16_compress_hook, reduce_dtype=torch.float32)
    offbeat.SlowMo(inner, model, every=12, slow_momentum=0.6, level={"nonfinite": "skip"})
    nesterov = functools.partial(offbeat.SGD, lr=0.7, momentum=0.9, nesterov=True)
    diloco = offbeat.DiLoCo(
        inner, model, 32, fragments=("strided", 4), codec="int4", error_feedback=0.95, weighted=True
    )
    assert_type(diloco.anchors(), dict[str, Tensor])
    assert_type(diloco.outers, list[torch.optim.Optimizer | None])
    offbeat.DiLoCo(inner, model, codec=offbeat.TopK(), outer=nesterov, delay=1, level={"anchor": "cpu"})
    offbeat.DiLoCo(inner, model, outer=offbeat.Lion, fragments=[["weight"], ["bias"]], subgroup=None)
    levels = [
        offbeat.Level(every=4, group=2, phase=1),
        offbeat.Level(every=16, group="rack", deadline=3),
        offbeat.Level(every=64, outer=lambda groups: offbeat.SGD(groups, lr=0.7), codec="bf16", nonfinite="raise"),
    ]
    offbeat.Replica(inner, model, levels, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("rack", "rank")))
    offbeat.Replica(inner, model, levels[0], warmup=10)


def elastic(model: nn.Module, scheduler: torch.optim.lr_scheduler.LRScheduler) -> None:
    group = offbeat.Elastic("host:29510", replica="a", replicas=2, min_replicas=2, carry={"scheduler": scheduler})
    optimizer = offbeat.DiLoCo(offbeat.SGD(model.parameters(), lr=0.1), model, group=group)

    def seen(report: offbeat.RoundReport) -> None:
        assert_type(report.bytes_sent["parameters"] + report.step, int)

    optimizer.register_round_hook(seen, norms=True).remove()
    if optimizer.last_round is not None:
        assert_type(optimizer.last_round.reason, str)
    offbeat.log_rounds(optimizer, path="rounds.jsonl").remove()


def replica(rank: int, peers: Any, model: nn.Module, every: int = 2) -> float:
    optimizer = offbeat.LocalSGD(offbeat.SGD(model.parameters()), model, every, group=peers)
    optimizer.step()
    return 0.0


def simulation(model: nn.Module) -> None:
    network = offbeat.Simulation(4, bandwidth=1e9, latency=0.01)
    assert_type(network.run(replica, model), list[float])
    assert_type(network.run(replica, model, every=4), list[float])
    assert_type(network.seconds, list[float])
    assert_type(network.bytes_sent, list[int])


def averagers(ddp: DistributedDataParallel, group: dist.ProcessGroup) -> None:
    periodic = offbeat.PeriodicModelAverager(period=4, warmup_steps=100, process_group=group)
    periodic.average_parameters(ddp.parameters())
    assert_type(periodic.step, int)
    hierarchical = offbeat.HierarchicalModelAverager({4: 2, 16: 8}, 100)
    hierarchical.average_parameters(offbeat.SGD(ddp.parameters()).param_groups)
    state = offbeat.PostLocalSGDState(None, None, start_localSGD_iter=100)
    ddp.register_comm_hook(state, offbeat.post_local_sgd_hook)
    ddp.register_comm_hook(state, offbeat.post_localSGD_hook)
    optimizer = offbeat.PostLocalSGDOptimizer(torch.optim.SGD(ddp.parameters()), periodic)
    assert_type(optimizer.step(), None)
    offbeat.PostLocalSGDOptimizer(optim=offbeat.SGD(ddp.parameters()), averager=PeriodicModelAverager(4))


def errors() -> None:
    try:
        pass
    except offbeat.GradientError as error:
        as_value_error: ValueError = error
        raise as_value_error from None
    except offbeat.CaptureError as error:
        as_runtime_error: RuntimeError = error
        raise as_runtime_error from None
    except (offbeat.Disagreement, offbeat.ExchangeError) as error:
        lost: RuntimeError = error
        raise lost from None
    except offbeat.NotFinite as error:
        assert_type(error.ranks, tuple[int, ...])


def plan() -> None:
    costs = offbeat.plan.estimate(params=1e9, step_seconds=0.1, replicas=2, bandwidth=125e6, codec="int4")
    assert_type(costs, offbeat.plan.Estimate)
    assert_type(costs.step_seconds, float)
    assert_type(costs.peak_bytes, int)
    machine = offbeat.plan.Machine(busy=1e-9, local={"diloco/int8": 1e-9})
    offbeat.plan.estimate(
        params=10, step_seconds=1, replicas=2, bandwidth=1, latency=0.1, strategy="slowmo", every=12, fragments=2,
        delay=3, codec=offbeat.TopK(0.03), machine=machine,
    )  # fmt: skip


def checkpoints(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    saved = offbeat.save_checkpoint("folder", model=model, optimizer=optimizer, extra={"epoch": 3}, keep=2)
    offbeat.save_checkpoint("folder", model=model, step=7, background=True, generators=False).wait(60.0)
    print(saved.wait().name, saved.done)
    loaded = offbeat.load_checkpoint(saved.wait(), model=model, optimizer=optimizer, step=7, strict=False)
    assert_type(loaded.step, int)
    assert_type(loaded.missing + loaded.unexpected, list[str])
    epoch: int = loaded["epoch"]
    assert_type([one.step for one in offbeat.list_checkpoints("folder") if one.complete], list[int])
    error: type[RuntimeError] = offbeat.CheckpointError
    print(epoch, error)
