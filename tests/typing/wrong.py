"""Wrong uses. Never executed: mypy and pyright report every line that ends in "wrong", and no other."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import offbeat


def optimizers(model: nn.Module) -> None:
    offbeat.AdamW(model.parameters(), lr="x")  # wrong
    offbeat.AdamW(model.parameters(), weight_deacy=0.1)  # wrong
    offbeat.AdamW(model.parameters(), decoupled_weight_decay=True)  # wrong
    offbeat.AdamW(model.parameters(), betas=0.9)  # wrong
    offbeat.AdamW(model.parameters(), state_dtype="4bit")  # wrong
    offbeat.AdamW(model.parameters(), rounding="up")  # wrong
    offbeat.AdamW(model)  # wrong
    offbeat.AdamW()  # wrong
    offbeat.SGD(model.parameters(), 0.1, 0.9, 0.0, 0.0, True, True)  # wrong
    offbeat.SGD(model.parameters(), nesterov="yes")  # wrong
    offbeat.Muon(model.parameters(), ns_steps=5.0)  # wrong
    offbeat.Muon(model.parameters(), adjust_lr_fn="rms")  # wrong
    offbeat.AdamW(model.parameters()).step(clip="all")  # wrong
    offbeat.LBFGS(model.parameters(), line_search_fn="wolfe")  # wrong
    offbeat.LBFGS(model.parameters()).step()  # wrong
    offbeat.Chain(offbeat.AdamW(model.parameters()))  # wrong
    offbeat.split_parameters(model.parameters())  # wrong
    offbeat.muon_with_adamw(model.parameters())  # wrong
    offbeat.muon_with_adamw(model, heads=1)  # wrong
    offbeat.Adamw(model.parameters())  # wrong


def functional(model: nn.Module) -> None:
    offbeat.as_functional(offbeat.SGD, model.parameters(), lr="x")  # wrong
    offbeat.as_functional(offbeat.SGD, model.parameters(), momentm=0.9)  # wrong
    offbeat.as_functional(offbeat.SGD)  # wrong
    offbeat.as_functional(offbeat.SGD(model.parameters()))  # wrong
    offbeat.as_functional(offbeat.SGD, [], lr=0.1).step(torch.nn.Linear(1, 1))  # wrong
    offbeat.as_pure(offbeat.SGD, lr="x")  # wrong
    offbeat.as_pure(offbeat.SGD, momentm=0.9)  # wrong


def overlap(model: nn.Module, optimizer: offbeat.AdamW, ddp: DistributedDataParallel) -> None:
    offbeat.overlap(model, optimizer)  # wrong
    offbeat.overlap(optimizer, model, clip="exakt")  # wrong
    offbeat.overlap(optimizer, model, clip_norm="1")  # wrong
    offbeat.overlap(optimizer, model, clip_nrm=1.0)  # wrong
    offbeat.overlap(optimizer, model, 4)  # wrong
    offbeat.overlap(optimizer, model, scaler=True)  # wrong
    offbeat.overlap(optimizer, ddp, comm_hook="fp16")  # wrong
    offbeat.overlap(optimizer, ddp, comm_hook=lambda bucket: bucket)  # wrong
    offbeat.CodecState(codec=5)  # wrong
    offbeat.CodecState(not_finite="skip")  # wrong
    offbeat.TopK(0.03, bits=3)  # wrong
    offbeat.register_codec(8)  # wrong
    offbeat.register_codec("mine")(nn.Linear)  # wrong
    ddp.register_comm_hook(offbeat.CodecState("int8"), offbeat.codec_hok)  # wrong
    offbeat.register_overlapped(torch.optim.SGD)(nn.Linear)  # wrong
    offbeat.register_overlapped(nn.Linear)  # wrong


def replicas(model: nn.Module, inner: offbeat.AdamW) -> None:
    offbeat.LocalSGD(model, inner)  # wrong
    offbeat.LocalSGD(inner, model, every="8")  # wrong
    offbeat.LocalSGD(inner, model, every=lambda step: "8")  # wrong
    offbeat.LocalSGD(inner, model, buffers="mean")  # wrong
    offbeat.LocalSGD(inner, model, state="forget")  # wrong
    offbeat.LocalSGD(inner, model, state={"exp_avg": "mean"})  # wrong
    offbeat.LocalSGD(inner, model, snapshot="gpu")  # wrong
    offbeat.LocalSGD(inner, model, undo=True)  # wrong
    offbeat.LocalSGD(inner, model, nonfinite="ignore")  # wrong
    offbeat.LocalSGD(inner, model, group="all")  # wrong
    offbeat.LocalSGD(inner, model, subgroup="host")  # wrong
    offbeat.LocalSGD(inner, model, mesh="dp")  # wrong
    offbeat.LocalSGD(inner, model, weigthed=True)  # wrong
    offbeat.LocalSGD(inner, model).seen("32")  # wrong
    offbeat.SlowMo(inner, model, bufers="keep")  # wrong
    offbeat.SlowMo(inner, model, buffers="mean")  # wrong
    offbeat.SlowMo(inner, model, level={"dealy": 1})  # wrong
    offbeat.DiLoCo(inner, model, codec=5)  # wrong
    offbeat.DiLoCo(inner, model, outer=inner)  # wrong
    offbeat.DiLoCo(inner, model, undo="tape")  # wrong
    offbeat.DiLoCo(inner, model, fragments="strided")  # wrong
    offbeat.DiLoCo(inner, model, level={"nonfinite": "ignore"})  # wrong
    offbeat.DiLoCo(inner, model, nonfinite="ignore")  # wrong
    offbeat.SlowMo(inner, model, deadline="soon")  # wrong
    offbeat.Level(4)  # wrong
    offbeat.Level(every=4, codec=5)  # wrong
    offbeat.Level(every=4, anchor="gpu")  # wrong
    offbeat.Replica(inner, model)  # wrong
    offbeat.Replica(inner, model, [4, 16])  # wrong
    offbeat.PeriodicModelAverager()  # wrong
    offbeat.PeriodicModelAverager("4")  # wrong
    offbeat.PeriodicModelAverager(4, undo="tape")  # wrong
    offbeat.HierarchicalModelAverager({4: "two"})  # wrong
    offbeat.PostLocalSGDState(None, None)  # wrong
    offbeat.PostLocalSGDOptimizer(inner, 4)  # wrong
    offbeat.Simulation("4")  # wrong
    offbeat.Simulation(2).run(lambda rank: rank)  # wrong
    offbeat.plan.estimate(params=10, step_seconds=1, replicas=2)  # wrong
    offbeat.plan.estimate(params=10, step_seconds=1, replicas=2, bandwidth=1, strategy="dlc")  # wrong
