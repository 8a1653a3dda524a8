"""offbeat inside Lightning's Trainer and Fabric, against the same training in plain PyTorch."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from offbeat.integrations import handle_of
from offbeat.integrations.attached import rank_to_load
from offbeat.overlap.consumed import ConsumedGradient
from tests.frameworks import (
    adamw,
    assert_close,
    assert_equal,
    assert_same,
    average,
    batch,
    batches,
    differ,
    launched,
    loss_of,
    make,
    plain,
    shared_folder,
)
from tests.scenarios import Scenarios

pytest.importorskip("lightning")

from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision as FabricMixedPrecision
from lightning.fabric.strategies import DataParallelStrategy
from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallel
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from offbeat.integrations.fabric import EveryRank, setup
from offbeat.integrations.lightning import Offbeat

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
scenario = Scenarios(__name__)

LOCAL: dict[str, Any] = {"every": 4, "warmup": 2, "subgroup": None}


class Module(LightningModule):
    """A training loop as Lightning wants it. Notes which gradients were used before the step."""

    def __init__(self, model: nn.Module | None = None, optimizer: Any = adamw) -> None:
        super().__init__()
        self.model = make() if model is None else model
        self._make_optimizer = optimizer
        self.used: list[bool] = []

    def training_step(self, x: torch.Tensor, index: int) -> torch.Tensor:
        return loss_of(self.model, x)

    def configure_optimizers(self) -> Any:
        return self._make_optimizer(self.parameters())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.used.append(all(isinstance(p.grad, ConsumedGradient) for p in self.parameters()))


class ByStep(Module):
    """Takes the batch of the step it is at: Lightning does not say to a DataLoader where to go on."""

    def training_step(self, x: torch.Tensor, index: int) -> torch.Tensor:
        return loss_of(self.model, batch(self.trainer.global_rank, self.global_step))


class Manual(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, x: torch.Tensor, index: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        self.manual_backward(loss_of(self.model, x))
        optimizer.step()
        optimizer.zero_grad()


def trainer(world: int = 1, *callbacks: Any, **options: Any) -> Trainer:
    options.setdefault("strategy", "ddp" if world > 1 else "auto")
    options.setdefault("enable_checkpointing", False)
    plugins = [*options.pop("plugins", []), *([LightningEnvironment()] if world > 1 else [])]
    return Trainer(
        accelerator="cpu",
        devices=world,
        plugins=plugins,
        callbacks=list(callbacks),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        max_epochs=1,
        **options,
    )


def fit(module: LightningModule, one: Trainer, rank: int, number: int, **options: Any) -> LightningModule:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning recommends things
        one.fit(module, DataLoader(batches(rank, number), batch_size=None), **options)
    return module


# In one process


def test_accumulation_on_a_single_device_is_announced():
    module = fit(Module(), trainer(1, Offbeat(overlap={"bucket_cap_mb": 1e-4}), accumulate_grad_batches=3), 0, 7)
    assert module.used == [True] * 3  # 3 batches, 3 batches, and the one that is left
    assert_same(module.model, plain(0, 7, accumulate=3))


def test_gradient_clip_val_becomes_clip_norm():
    callback = Offbeat(overlap=True)
    one = trainer(1, callback, gradient_clip_val=0.05)
    module = fit(Module(), one, 0, 4)
    assert_same(module.model, plain(0, 4, clip=0.05))
    assert one.gradient_clip_val == 0.05
    assert not callback.handles  # after training the optimizer steps after backward again


def test_manual_optimization():
    module = fit(Manual(), trainer(1, Offbeat(overlap={"bucket_cap_mb": 1e-4})), 0, 4)
    assert module.used == [True] * 4
    assert_same(module.model, plain(0, 4))


def test_manual_accumulation_is_announced_by_the_handle():
    class Accumulates(Manual):
        def training_step(self, x: torch.Tensor, index: int) -> None:  # type: ignore[override]
            optimizer = self.optimizers()
            if index % 2 == 0:
                with handle_of(optimizer).accumulate():
                    self.manual_backward(loss_of(self.model, x) / 2)
            else:
                self.manual_backward(loss_of(self.model, x) / 2)
                optimizer.step()
                optimizer.zero_grad()

    module = fit(Accumulates(), trainer(1, Offbeat(overlap=True)), 0, 6)
    assert_same(module.model, plain(0, 6, accumulate=2))


class Gan(LightningModule):
    """Each backward pass is for one of two optimizers."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.makes = make()
        self.judges = nn.Linear(3, 1)

    def configure_optimizers(self) -> Any:
        return [adamw(self.makes.parameters()), adamw(self.judges.parameters())]

    def training_step(self, x: torch.Tensor, index: int) -> None:
        losses = (
            lambda: -self.judges(self.makes(x)).mean(),
            lambda: self.judges(self.makes(x).detach()).square().mean(),
        )
        for optimizer, loss in zip(self.optimizers(), losses, strict=True):
            self.toggle_optimizer(optimizer)
            self.manual_backward(loss())
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)


def test_passes_for_one_optimizer_at_a_time():
    found = [fit(Gan(), trainer(1, *callbacks), 0, 4) for callbacks in ([], [Offbeat(overlap=True)])]
    assert_same(*found)


def test_bf16_mixed():
    def autocast_loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            return loss_of(model, x)

    module = fit(Module(), trainer(1, Offbeat(overlap=True), precision="bf16-mixed"), 0, 4)
    assert_same(module.model, plain(0, 4, loss=autocast_loss))


def test_bf16_mixed_in_fabric():
    found = []
    for over in (False, True):
        fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
        model = make()
        optimizer = adamw(model.parameters())
        wrapped, optimizer = setup(fabric, model, optimizer, overlap=True) if over else fabric.setup(model, optimizer)
        for x in batches(0, 4):
            fabric.backward(loss_of(wrapped, x))
            optimizer.step()
            optimizer.zero_grad()
        found.append(model)
    assert_same(*found)


@pytest.mark.parametrize("clip", [None, 0.05])
def test_16_mixed_with_a_scaler(clip):
    """Two steps of five overflow."""
    model, optimizer, scaler = make(), None, torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=2)
    optimizer = adamw(model.parameters())
    for x in batches(0, 5):
        with torch.autocast("cpu", torch.half, cache_enabled=False):
            loss = loss_of(model, x)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    mine = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=2)
    precision = MixedPrecision("16-mixed", "cpu", mine)
    module = fit(Module(), trainer(1, Offbeat(overlap=True), plugins=[precision], gradient_clip_val=clip), 0, 5)
    assert mine.get_scale() == scaler.get_scale() < 2.0**40
    assert_same(module.model, model)


def test_what_cannot_be_right_raises():
    class Clips(Module):
        def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
            pass

    with pytest.raises(ValueError, match=r"Clips\.configure_gradient_clipping is called after backward"):
        fit(Clips(), trainer(1, Offbeat(overlap=True)), 0, 1)
    by_value = {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}
    with pytest.raises(ValueError, match="gradient_clip_algorithm='value' cannot be used with overlap"):
        fit(Module(), trainer(1, Offbeat(overlap=True), **by_value), 0, 1)
    with pytest.raises(ValueError, match=r"gradient_clip_val is 0\.1, but overlap was given clip_norm=0\.2"):
        fit(Module(), trainer(1, Offbeat(overlap={"clip_norm": 0.2}), gradient_clip_val=0.1), 0, 1)
    with pytest.raises(ValueError, match="accumulate is set by the framework"):
        fit(Module(), trainer(1, Offbeat(overlap={"accumulate": 2})), 0, 1)
    with pytest.raises(ValueError, match="no feature is turned on"):
        Offbeat()
    with pytest.raises(ValueError, match="local_sgd and diloco cannot be used together"):
        Offbeat(local_sgd=True, diloco=True)
    with pytest.raises(TypeError, match="local_sgd must be True, False or a dictionary of options, but got 8"):
        Offbeat(local_sgd=8)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="bucket_cap_mib"):
        fit(Module(), trainer(1, Offbeat(overlap={"bucket_cap_mib": 1})), 0, 1)
    swa = StochasticWeightAveraging(0.05)
    with pytest.raises(ValueError, match="StochasticWeightAveraging keeps an average of the weights of each replica"):
        fit(Module(), trainer(1, Offbeat(local_sgd=True), swa), 0, 1)
    with pytest.raises(ValueError, match="several Offbeat callbacks; give all features to one"):
        fit(Module(), trainer(1, Offbeat(overlap=True), Offbeat(local_sgd=True)), 0, 1)


def test_what_cannot_be_right_raises_in_fabric():
    fabric = Fabric(accelerator="cpu", devices=1)
    model = make()
    model, optimizer = setup(fabric, model, adamw(model.parameters()), overlap={"clip_norm": 0.05})
    fabric.backward(loss_of(model, batch(0, 0)))
    for wrong in ({"clip_val": 0.1}, {"clip_val": 0.1, "max_norm": 0.05}, {}):
        with pytest.raises(ValueError, match=r"fabric\.clip_gradients\(clip_val=\) cannot clip"):
            fabric.clip_gradients(model, optimizer, **wrong)
    with pytest.raises(ValueError, match="was set up with Fabric already"):
        setup(fabric, make(), optimizer, overlap=True)
    with pytest.raises(ValueError, match="offbeat does not know DataParallelStrategy"):
        setup(SimpleNamespace(strategy=DataParallelStrategy()), make(), overlap=True)


def test_a_checkpoint_of_other_ranks():
    with pytest.warns(UserWarning, match="was saved by 2 ranks, and there are 1 now.*from what rank 0 saved"):
        assert rank_to_load(2) == 0


def test_a_failed_run_leaves_nothing_behind():
    class Fails(Module):
        def training_step(self, x: torch.Tensor, index: int) -> torch.Tensor:
            loss = super().training_step(x, index)
            if index == 1:
                loss.register_hook(lambda _: 1 / 0)
            return loss

    module = Fails()
    one = trainer(1, Offbeat(overlap={"bucket_cap_mb": 1e-4}), gradient_clip_val=1.0)
    with pytest.raises(ZeroDivisionError):
        fit(module, one, 0, 3)
    assert one.gradient_clip_val == 1.0
    assert all(not p._post_accumulate_grad_hooks for p in module.parameters())


def test_a_checkpoint_that_was_only_tested_is_not_gone_on_from(tmp_path):
    class Tests(ByStep):
        def test_step(self, x: torch.Tensor, index: int) -> None:
            pass

    options = {"gradient_clip_val": 0.05}
    checkpoint = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1)
    one = trainer(1, Offbeat(overlap={"clip": "previous"}), checkpoint, enable_checkpointing=True, **options)
    whole = fit(Tests(), one, 0, 2)
    (path,) = tmp_path.glob("*.ckpt")
    callback = Offbeat(overlap={"clip": "previous"})
    again = trainer(1, callback, **options)
    again.test(Tests(), DataLoader(batches(0, 1), batch_size=None), ckpt_path=path, verbose=False)
    assert_same(fit(Tests(), again, 0, 2).model, whole.model)


# In two processes


@scenario(2)
def overlap_under_ddp(rank, world):
    launched(rank, world)
    module = fit(Module(), trainer(world, Offbeat(overlap=True), accumulate_grad_batches=2), rank, 7)
    assert module.used == [True] * 4
    assert_same(module.model, plain(rank, 7, accumulate=2))
    assert not differ(module.model)
    module = fit(Module(), trainer(world, Offbeat(overlap=True), gradient_clip_val=0.05), rank, 4)
    assert_same(module.model, plain(rank, 4, clip=0.05))
    module = fit(Manual(), trainer(world, Offbeat(overlap=True)), rank, 4)
    assert module.used == [True] * 4
    assert_same(module.model, plain(rank, 4))


@scenario(2)
def replicas_with_the_trainers_clipping_and_scheduler(rank, world):
    launched(rank, world)

    class Scheduled(Module):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    options = {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2}
    module = fit(Scheduled(), trainer(world, Offbeat(local_sgd=LOCAL), **options), rank, 16)
    decay = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)  # noqa: E731
    expected = {"local": True, "every": 4, "warmup": 2}
    assert_same(module.model, plain(rank, 16, clip=0.05, accumulate=2, scheduler=decay, **expected))
    assert not differ(module.model)  # finish() was called
    module = fit(Manual(), trainer(world, Offbeat(local_sgd=LOCAL, overlap=True)), rank, 8)
    assert module.used == [True] * 8
    assert_same(module.model, plain(rank, 8, **expected))


@scenario(2)
def windows_that_end_early_and_validation_in_between(rank, world):
    launched(rank, world)

    class Validated(Module):
        def validation_step(self, x: torch.Tensor, index: int) -> None:
            self.log("steps", float(self.global_step), sync_dist=True)

        def predict_step(self, x: torch.Tensor, index: int) -> torch.Tensor:
            return self.model(x)

    others = DataLoader(batches(7, 2), batch_size=None)
    local = {"local": True, "every": 4, "warmup": 2}
    for kind in ({"local_sgd": LOCAL}, {"overlap": True, "local_sgd": LOCAL}):
        # Validation comes in the middle of windows and of periods, and the last window has two batches.
        module = Validated()
        one = trainer(world, Offbeat(**kind), accumulate_grad_batches=3, val_check_interval=4, gradient_clip_val=0.05)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            one.fit(module, DataLoader(batches(rank, 20), batch_size=None), others)
            one.validate(module, others, verbose=False)
            one.predict(module, others)
        assert_same(module.model, plain(rank, 20, accumulate=3, clip=0.05, **local))
        # Training is stopped from outside, in the middle of a period.
        module = Validated()
        stop = EarlyStopping("steps", patience=2, mode="min")
        one = trainer(world, Offbeat(**kind), stop, val_check_interval=2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            one.fit(module, DataLoader(batches(rank, 20), batch_size=None), others)
        assert one.global_step == 6
        assert_same(module.model, plain(rank, 6, **local))


@scenario(2)
def diloco_overlapped(rank, world):
    launched(rank, world)
    module = fit(Module(), trainer(world, Offbeat(overlap=True, diloco=DILOCO)), rank, 8)
    expected = plain(rank, 8, local=True, every=3, outer=OUTER)
    for p, q in zip(module.model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
    assert not differ(module.model)


@scenario(2)
def resume_is_exact_in_the_middle_of_a_period(rank, world):
    launched(rank, world)
    with shared_folder() as folder:
        kinds: dict[str, Any] = {
            "local": {"local_sgd": LOCAL},
            "late": {"overlap": True, "local_sgd": {**LOCAL, "delay": 2}},
            "diloco": {"diloco": {"every": 4, "fragments": 2, "delay": 1, "codec": "int8", "subgroup": None}},
        }
        for name, features in kinds.items():
            whole = ByStep()
            fit(whole, trainer(world, Offbeat(**features)), rank, 9)
            checkpoint = ModelCheckpoint(f"{folder}/{name}", every_n_train_steps=5, save_top_k=-1)
            first = trainer(world, Offbeat(**features), checkpoint, enable_checkpointing=True, max_steps=5)
            begun = fit(ByStep(), first, rank, 9)
            (path,) = Path(folder, name).glob("*.ckpt")
            resumed = fit(ByStep(make(1)), trainer(world, Offbeat(**features)), rank, 9, ckpt_path=path)
            assert_same(resumed.model, whole.model)
            assert not differ(resumed.model)
            # What Lightning saved is that of a run without offbeat.
            saved = torch.load(path, weights_only=True)
            assert set(saved["optimizer_states"][0]) == {"state", "param_groups"}
            assert len(saved["offbeat"]) == world
            parts = [part[0]["module"]["model.0.weight"] for part in saved["offbeat"]]
            assert not torch.equal(parts[0], parts[1])
            assert not torch.equal(begun.model[0].weight, parts[rank])  # finish() came after


@scenario(2)
def a_plain_checkpoint_is_a_start(rank, world):
    launched(rank, world)
    with shared_folder() as folder:
        checkpoint = ModelCheckpoint(folder, every_n_train_steps=3, save_top_k=-1)
        fit(ByStep(), trainer(world, checkpoint, enable_checkpointing=True, max_steps=3), rank, 9)
        (path,) = Path(folder).glob("*.ckpt")
        module = ByStep(make(1))
        one = trainer(world, Offbeat(local_sgd={"every": 4, "warmup": 0, "subgroup": None}))
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            one.fit(module, DataLoader(batches(rank, 9), batch_size=None), ckpt_path=path)
        assert any("the checkpoint was saved without offbeat" in str(one.message) for one in told)
        # The first three steps are synchronous. Replicas are averaged after steps 3, 7 and at the end.
        assert_same(module.model, plain(rank, 9, local=True, every=4, warmup=3))


@scenario(2)
def the_last_norm_is_resumed(rank, world):
    launched(rank, world)
    with shared_folder() as folder:
        features = {"overlap": {"clip": "previous"}}
        whole = fit(ByStep(), trainer(world, Offbeat(**features), gradient_clip_val=0.05), rank, 6)
        checkpoint = ModelCheckpoint(folder, every_n_train_steps=3, save_top_k=-1)
        options = {"enable_checkpointing": True, "max_steps": 3, "gradient_clip_val": 0.05}
        fit(ByStep(), trainer(world, Offbeat(**features), checkpoint, **options), rank, 6)
        (path,) = Path(folder).glob("*.ckpt")
        other = trainer(world, Offbeat(**features), gradient_clip_val=0.05)
        resumed = fit(ByStep(make(1)), other, rank, 6, ckpt_path=path)
        assert_same(resumed.model, whole.model)


@scenario(2)
def overflow_with_overlap_and_on_one_rank_with_replicas(rank, world):
    launched(rank, world)

    def scaler() -> torch.amp.GradScaler:
        # The first rank's scale is too large for two steps.
        return torch.amp.GradScaler("cpu", init_scale=2.0 ** (40 if rank == 0 else 8), growth_interval=100)

    model, mine = alone(rank, scaler())
    shared = [torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=2) for _ in range(2)]
    modules = []
    for one, callbacks in zip(shared, ([], [Offbeat(overlap=True)]), strict=True):
        plugin = MixedPrecision("16-mixed", "cpu", one)
        modules.append(fit(Module(), trainer(world, *callbacks, plugins=[plugin], gradient_clip_val=0.05), rank, 6))
    assert shared[0].get_scale() == shared[1].get_scale() < 2.0**40
    assert_same(modules[1].model, modules[0].model)
    theirs = scaler()
    features = {"local_sgd": {**LOCAL, "warmup": 0}}
    plugin = MixedPrecision("16-mixed", "cpu", theirs)
    module = fit(Module(), trainer(world, Offbeat(**features), plugins=[plugin], gradient_clip_val=0.05), rank, 6)
    assert theirs.get_scale() == mine.get_scale()
    assert_same(module.model, model)


@scenario(2)
def fsdp2_overlapped_and_resumed(rank, world):
    launched(rank, world)
    with shared_folder() as folder:

        class Sharded(ByStep):
            def configure_model(self) -> None:
                mesh = self.device_mesh["data_parallel"]
                if not hasattr(self.model[0], "unshard"):
                    for layer in (self.model[0], self.model[2], self.model):
                        fully_shard(layer, mesh=mesh)

        def one(*callbacks: Any, **options: Any) -> Trainer:
            strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
            return trainer(world, *callbacks, strategy=strategy, **options)

        def values(module: Any) -> list[torch.Tensor]:
            return [p.full_tensor() if hasattr(p, "full_tensor") else p for p in module.model.parameters()]

        without = values(fit(Sharded(), one(), rank, 6))
        module = fit(Sharded(), one(Offbeat(overlap=True)), rank, 6)
        assert module.used == [True] * 6
        for a, b in zip(values(module), without, strict=True):
            assert torch.equal(a, b)
        checkpoint = ModelCheckpoint(folder, every_n_train_steps=3, save_top_k=-1)
        fit(Sharded(), one(Offbeat(overlap=True), checkpoint, enable_checkpointing=True, max_steps=3), rank, 6)
        (path,) = Path(folder).glob("*.ckpt")
        resumed = fit(Sharded(make(1)), one(Offbeat(overlap=True)), rank, 6, ckpt_path=path)
        for a, b in zip(values(resumed), without, strict=True):
            assert torch.equal(a, b)
        clipped = fit(Sharded(), one(Offbeat(overlap=True), gradient_clip_val=0.05), rank, 6)
        for a, b in zip(values(clipped), values(fit(Sharded(), one(gradient_clip_val=0.05), rank, 6)), strict=True):
            torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6)
        with pytest.raises(ValueError, match="a checkpoint would be a mixture of replicas"):
            fit(Sharded(), one(Offbeat(local_sgd=True), enable_checkpointing=True), rank, 1)


@scenario(2)
def replicas_of_a_sharded_module(rank, world):
    """Two replicas, each sharded over a mesh of one rank."""
    launched(rank, world)

    class Sharded(ByStep):
        def configure_model(self) -> None:
            if not hasattr(self.model[0], "unshard"):
                for layer in (self.model[0], self.model[2], self.model):
                    fully_shard(layer, mesh=self.device_mesh["tensor_parallel"])

    def one(*callbacks: Any, **options: Any) -> Trainer:
        strategy = ModelParallelStrategy(2, 1, save_distributed_checkpoint=False)
        return trainer(world, *callbacks, strategy=strategy, **options)

    local = {"every": 4, "subgroup": None}
    module = fit(Sharded(), one(Offbeat(overlap=True, local_sgd=local)), rank, 7)
    assert module.used == [True] * 7
    assert_equal(module.model, plain(rank, 7, local=True, every=4))
    # In warm-up gradients are averaged before Lightning clips them.
    warm = {**local, "warmup": 3}
    module = fit(Sharded(), one(Offbeat(local_sgd=warm), gradient_clip_val=0.05), rank, 7)
    assert_close(module.model, plain(rank, 7, clip=0.05, local=True, every=4, warmup=3))
    sgd = lambda params: torch.optim.SGD(params, lr=0.1)  # noqa: E731  # without any state
    with shared_folder() as folder:
        diloco = {"every": 4, "fragments": 2, "delay": 1, "codec": "int8"}
        kinds = [
            (adamw, {"local_sgd": warm}),
            (adamw, {"overlap": True, "diloco": diloco}),
            (sgd, {"local_sgd": local}),
        ]
        for i, (cls, features) in enumerate(kinds):
            checkpoint = ModelCheckpoint(f"{folder}/{i}", every_n_train_steps=5, save_top_k=-1)
            first = one(Offbeat(**features), checkpoint, enable_checkpointing=True)
            whole = fit(Sharded(optimizer=cls), first, rank, 9)
            if cls is sgd:  # saving changes nothing, although there is no state to save
                assert_equal(whole.model, plain(rank, 9, make_optimizer=sgd, local=True, every=4))
            (path,) = Path(folder, str(i)).glob("*.ckpt")
            saved = torch.load(path, weights_only=True)
            assert set(saved["optimizer_states"][0]) == {"state", "param_groups"}
            if cls is adamw:  # Lightning cannot load its own checkpoint of an optimizer without state
                resumed = fit(Sharded(make(1), cls), one(Offbeat(**features)), rank, 9, ckpt_path=path)
                assert_equal(resumed.model, whole.model)
    module = Sharded()
    distributed = ModelParallelStrategy(2, 1)
    last = trainer(world, Offbeat(local_sgd=local), strategy=distributed)
    fit(module, last, rank, 1)
    with pytest.raises(ValueError, match="a checkpoint would be a mixture of replicas"):
        last.save_checkpoint("nowhere")


@scenario(2)
def manual_accumulation_under_ddp(rank, world):
    launched(rank, world)

    class Accumulates(Manual):
        def training_step(self, x: torch.Tensor, index: int) -> None:  # type: ignore[override]
            optimizer = self.optimizers()
            with optimizer.toggle_model(sync_grad=index % 2 == 1):
                self.manual_backward(loss_of(self.model, x) / 2)
            if index % 2:
                optimizer.step()
                optimizer.zero_grad()

    found = [
        fit(Gan(), trainer(world, *callbacks, strategy="ddp_find_unused_parameters_true"), rank, 6)
        for callbacks in ([], [Offbeat(overlap=True)])
    ]
    assert_same(*found)
    without = fit(Accumulates(), trainer(world), rank, 6)
    module = fit(Accumulates(), trainer(world, Offbeat(overlap=True)), rank, 6)
    assert_same(module.model, without.model)


@scenario(2)
def fabric_with_clipping_and_accumulation(rank, world):
    launched(rank, world)
    fabric = Fabric(accelerator="cpu", devices=world, strategy="ddp", plugins=[LightningEnvironment()])
    fabric.launch()
    model, wanted = make(), plain(rank, 8, accumulate=2, clip=0.05)
    wrapped, optimizer = setup(fabric, model, adamw(model.parameters()), overlap={"clip_norm": 0.05})
    for i, x in enumerate(batches(rank, 8)):
        with fabric.no_backward_sync(wrapped, enabled=i % 2 == 0):
            fabric.backward(loss_of(wrapped, x) / 2)
        if i % 2:
            norm = fabric.clip_gradients(wrapped, optimizer, max_norm=0.05)
            optimizer.step()
            assert torch.equal(norm, handle_of(optimizer).last_norm)
            optimizer.zero_grad()
    assert_same(model, wanted)


@scenario(2)
def fabric_scales_the_loss(rank, world):
    """Fabric makes a scaler for GPUs; one for the CPU is put in. With replicas, the first rank's steps overflow."""
    launched(rank, world)

    def scaler(scale: float) -> torch.amp.GradScaler:
        return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)

    def run(scale: float, features: Any) -> tuple[nn.Module, Any]:
        mine = scaler(scale)
        plugins = [LightningEnvironment(), FabricMixedPrecision("16-mixed", "cpu", mine)]
        fabric = Fabric(accelerator="cpu", devices=world, strategy="ddp", plugins=plugins)
        fabric.launch()
        model = make()
        optimizer = adamw(model.parameters())
        wrapped, optimizer = setup(fabric, model, optimizer, **features) if features else fabric.setup(model, optimizer)
        for x in batches(rank, 6):
            fabric.backward(loss_of(wrapped, x))
            fabric.clip_gradients(wrapped, optimizer, max_norm=0.05, error_if_nonfinite=False)
            optimizer.step()
            optimizer.zero_grad()
        if features and "local_sgd" in features:
            optimizer.finish()
        return model, mine

    model, mine = run(2.0**40, {"overlap": {"clip_norm": 0.05}})
    expected, other = run(2.0**40, None)
    assert mine.get_scale() == other.get_scale() < 2.0**40
    assert_same(model, expected)
    scale = 2.0 ** (40 if rank == 0 else 8)
    for overlap in ({}, {"overlap": {"clip_norm": 0.05}}):
        found, mine = run(scale, {**overlap, "local_sgd": {**LOCAL, "warmup": 0}})
        expected, other = alone(rank, scaler(scale))
        assert mine.get_scale() == other.get_scale()
        assert_same(found, expected)


def alone(rank: int, scaler: Any) -> tuple[nn.Module, Any]:
    """Replicas with a scaler each, in plain PyTorch."""
    model = make()
    optimizer = adamw(model.parameters())
    for step in range(6):
        with torch.autocast("cpu", torch.half, cache_enabled=False):
            loss = loss_of(model, batch(rank, step))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if step in (0, 4, 5):
            average([p.data for p in model.parameters()])
    return model, scaler


@scenario(2)
def fabric_with_fsdp2(rank, world):
    launched(rank, world)

    def run(features: Any, path: str, *, load: bool) -> nn.Module:
        strategy = FabricModelParallel(parallelize, 2, 1, save_distributed_checkpoint=False)
        fabric = Fabric(accelerator="cpu", devices=world, strategy=strategy, plugins=[LightningEnvironment()])
        fabric.launch()
        model = fabric.setup_module(make(int(load)))
        model, optimizer = setup(fabric, model, adamw(model.parameters()), **features)
        state = {"model": model, "offbeat": EveryRank(optimizer)}
        if load:
            fabric.load(path, state)
        for i in range(5 if load else 0, 7):
            if i == 5 and not load:
                fabric.save(path, state)
            with fabric.no_backward_sync(model, enabled=False):
                fabric.backward(loss_of(model, batch(rank, i)))
            optimizer.step()
            optimizer.zero_grad()
        if "local_sgd" in features:
            optimizer.finish()
        return model

    def parallelize(model: nn.Module, mesh: Any) -> nn.Module:
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh[dimension])
        return model

    with shared_folder() as folder:
        for dimension, features in (
            ("data_parallel", {"overlap": True}),
            ("tensor_parallel", {"overlap": True, "local_sgd": {"every": 4, "subgroup": None}}),
        ):
            expected = plain(rank, 7, local=dimension == "tensor_parallel", every=4)
            for load in (False, True):
                assert_equal(run(features, f"{folder}/{dimension}.ckpt", load=load), expected)
        with pytest.raises(ValueError, match=r"sharded over a mesh of size 2 .*over a mesh of size 1 "):
            run(features, f"{folder}/data_parallel.ckpt", load=True)
    strategy = FabricModelParallel(parallelize, 2, 1)
    fabric = Fabric(accelerator="cpu", devices=world, strategy=strategy, plugins=[LightningEnvironment()])
    fabric.launch()
    model = fabric.setup_module(make())
    _, optimizer = setup(fabric, model, adamw(model.parameters()), overlap=True)
    with pytest.raises(ValueError, match="EveryRank would be saved and never loaded"):
        EveryRank(optimizer)


DILOCO: dict[str, Any] = {"every": 3, "outer_lr": 0.5, "outer_momentum": 0.9, "subgroup": None}
OUTER = {"lr": 0.5, "momentum": 0.9, "nesterov": True}


@scenario(2)
def fabric_with_diloco(rank, world):
    launched(rank, world)
    fabric = Fabric(accelerator="cpu", devices=world, strategy="ddp", plugins=[LightningEnvironment()])
    fabric.launch()
    model = make()
    wrapped, optimizer = setup(fabric, model, adamw(model.parameters()), diloco=DILOCO)
    for x in batches(rank, 8):
        fabric.backward(loss_of(wrapped, x))
        optimizer.step()
        optimizer.zero_grad()
    optimizer.finish()
    assert_close(model, plain(rank, 8, local=True, every=3, outer=OUTER))


@scenario(2)
def fabric_goes_on_exactly(rank, world):
    launched(rank, world)
    with shared_folder() as folder:
        fabric = Fabric(accelerator="cpu", devices=world, strategy="ddp", plugins=[LightningEnvironment()])
        fabric.launch()

        def run(model: nn.Module, steps: range, load: bool = False, save: bool = False) -> nn.Module:
            wrapped, optimizer = setup(fabric, model, adamw(model.parameters()), overlap=True, local_sgd=LOCAL)
            state = {"offbeat": EveryRank(optimizer)}
            if load:
                fabric.load(f"{folder}/state.ckpt", state)
            for i in steps:
                fabric.backward(loss_of(wrapped, batch(rank, i)))
                optimizer.step()
                optimizer.zero_grad()
            if save:
                fabric.save(f"{folder}/state.ckpt", state)
            else:
                optimizer.finish()
            return model

        whole = run(make(), range(9))
        assert_same(whole, plain(rank, 9, local=True, every=4, warmup=2))
        assert differ(run(make(), range(5), save=True))
        assert_same(run(make(1), range(5, 9), load=True), whole)


@pytest.mark.ranks
@pytest.mark.timeout(300)
@pytest.mark.xdist_group("lightning")
@pytest.mark.parametrize(("world", "name"), scenario.cases)
def test_ranks(world, name):
    scenario.check(world, name)
