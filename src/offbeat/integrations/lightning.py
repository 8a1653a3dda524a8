"""offbeat in Lightning's ``Trainer``: a callback. :mod:`offbeat.integrations.fabric` is for Fabric."""

from __future__ import annotations

from typing import Any

from offbeat.frameworks import inner_optimizer
from offbeat.integrations.attached import Attached, gather_parts, rank_to_load, warn_of_plain_checkpoint
from offbeat.integrations.features import Features, Options

try:
    from lightning.pytorch import Callback
    from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning.pytorch.utilities.model_helpers import is_overridden
except ImportError as error:
    raise ImportError(
        'offbeat.integrations.lightning needs Lightning; install it with pip install "lightning>=2.6.6,<2.7"'
    ) from error

__all__ = ["Offbeat"]

_KEY = "offbeat"


class Offbeat(Callback):
    """Turns on features of offbeat for the optimizers of a ``LightningModule``. The module stays as it is.

    Each argument is True, or a dictionary of options; those of :func:`offbeat.overlap`, :class:`offbeat.LocalSGD`,
    :class:`offbeat.SlowMo`, :class:`offbeat.DiLoCo` and :class:`offbeat.Replica`. ``overlap`` can be combined with one
    of the others.

    Args:
        overlap: step during backward. ``gradient_clip_val`` becomes overlap's ``clip_norm``, and accumulation and loss
            scaling are taken from the Trainer.
        local_sgd: average replicas every few steps.
        slowmo: give the mean change of replicas to a momentum.
        diloco: give the mean change of replicas to an outer optimizer.
        replica: several levels.

    At the end of training replicas agree one last time. Checkpoints hold every rank's part, gathered on the first rank,
    so that training goes on exactly; the entries that Lightning writes are those of a run without offbeat, and load
    in one.

    Example::

        trainer = Trainer(strategy="ddp", devices=2, callbacks=[Offbeat(overlap=True, local_sgd={"every": 8})])
        trainer.fit(module)

    Limits: strategies ``ddp``, ``ModelParallelStrategy`` (FSDP2) and a single device. Between averages every rank
    validates its own replica.
    """

    def __init__(
        self,
        *,
        overlap: Options = None,
        local_sgd: Options = None,
        slowmo: Options = None,
        diloco: Options = None,
        replica: Options = None,
    ) -> None:
        self._wanted = {
            "overlap": overlap,
            "local_sgd": local_sgd,
            "slowmo": slowmo,
            "diloco": diloco,
            "replica": replica,
        }
        Features(**self._wanted)  # raises now if they make no sense
        self._attached: list[Attached] = []
        self._loaded: list[Any] | None = None
        self._clip: tuple[Any] | None = None
        self._clips = False

    @property
    def handles(self) -> list[Any]:
        """The handles of the overlapped optimizers, in the order of ``configure_optimizers``."""
        return [one.handle for one in self._attached if one.handle is not None]

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Called by Lightning: check what can be checked before training."""
        if stage != "fit":
            return
        self._attached, self._loaded = [], None
        if sum(isinstance(one, Offbeat) for one in trainer.callbacks) > 1:
            raise ValueError("the Trainer has several Offbeat callbacks; give all features to one of them")
        features = Features(**self._wanted)
        _check_strategy(trainer, features)
        for one in trainer.callbacks if features.replicates else ():
            if isinstance(one, (StochasticWeightAveraging, WeightAveraging)):
                raise ValueError(
                    f"{type(one).__name__} keeps an average of the weights of each replica, so that ranks would end "
                    "with different models; leave it out, or train without replicas"
                )
        if features.overlap is not None:
            self._check_clipping(trainer, pl_module)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Called by Lightning when optimizers exist and checkpoints have been loaded: turn the features on."""
        features = Features(**self._wanted)
        if features.overlap is not None and trainer.gradient_clip_val:
            features.clip_by_overlap(float(trainer.gradient_clip_val), "gradient_clip_val")
            # Lightning would clip gradients that have been used.
            self._clip, trainer.gradient_clip_val = (trainer.gradient_clip_val,), None
        automatic = features.overlap is not None and pl_module.automatic_optimization
        self._attached = [
            features.attach(
                optimizer,
                trainer.strategy.model,
                scaler=getattr(trainer.precision_plugin, "scaler", None),
                # Not announced by no_sync() on a single device.
                accumulate=trainer.fit_loop._should_accumulate if automatic else None,
            )
            for optimizer in trainer.strategy.optimizers
        ]
        if features.replicates:
            trainer.strategy.optimizers = [one.optimizer for one in self._attached]
            self._clips = bool(trainer.gradient_clip_val) or is_overridden("configure_gradient_clipping", pl_module)
        if self._loaded is not None:
            for one, part in zip(self._attached, self._loaded[rank_to_load(len(self._loaded))], strict=True):
                one.load_part(part)
            self._loaded = None

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Called by Lightning before it clips gradients: in warm-up, replicas without DDP average them first."""
        if self._clips:
            for one in self._attached:
                if one.optimizer is inner_optimizer(optimizer):
                    one.average_gradients()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Called by Lightning: let replicas agree one last time."""
        for one in self._attached:
            one.finish()

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Called by Lightning on every rank: add every rank's part to the checkpoint of the first."""
        if not any(one.has_part for one in self._attached):
            return
        if any(one.replica is not None and one.is_sharded for one in self._attached):
            _check_saves_one_file(trainer.strategy)
        parts = gather_parts([one.part() for one in self._attached])
        if parts is not None:
            checkpoint[_KEY] = parts
        for i, one in enumerate(self._attached):
            if one.replica is not None and not one.is_sharded:  # else Lightning has made it of the inner one's state
                checkpoint["optimizer_states"][i] = one.inner.state_dict()

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Called by Lightning before the optimizers exist: keep the parts for :meth:`on_train_start`."""
        if trainer.state.fn != TrainerFn.FITTING:
            return
        self._loaded = checkpoint.get(_KEY)
        if self._loaded is None and Features(**self._wanted).replicates:
            warn_of_plain_checkpoint()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Called by Lightning after training: let optimizers step after backward again."""
        self._detach(trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Called by Lightning in place of :meth:`teardown` when training has failed."""
        self._detach(trainer)

    def _detach(self, trainer: Any) -> None:
        for one in self._attached:
            one.remove_overlap()
        if self._clip is not None:
            (trainer.gradient_clip_val,) = self._clip
            self._clip = None

    def _check_clipping(self, trainer: Any, pl_module: Any) -> None:
        if is_overridden("configure_gradient_clipping", pl_module):
            raise ValueError(
                f"{type(pl_module).__name__}.configure_gradient_clipping is called after backward, when overlap has "
                "used the gradients; remove it and use Trainer(gradient_clip_val=), or "
                "Offbeat(overlap={'clip_norm': ...})"
            )
        algorithm = trainer.gradient_clip_algorithm
        if trainer.gradient_clip_val and algorithm is not None and algorithm.value != "norm":
            raise ValueError(
                f"gradient_clip_algorithm={algorithm.value!r} cannot be used with overlap, which "
                "clips by norm; use 'norm', or clip with hooks on tensors"
            )
        if trainer.gradient_clip_val:
            Features(**self._wanted).clip_by_overlap(float(trainer.gradient_clip_val), "gradient_clip_val")


def _check_strategy(trainer: Any, features: Features) -> None:
    strategy = trainer.strategy
    if not isinstance(strategy, (SingleDeviceStrategy, DDPStrategy, ModelParallelStrategy)):
        raise ValueError(
            f"offbeat does not know {type(strategy).__name__}, which wraps optimizers or gradients in its own way; use "
            "'ddp', ModelParallelStrategy or a single device"
        )
    if features.replicates and getattr(strategy, "_model_averaging_period", None) is not None:
        raise ValueError(
            "DDPStrategy(model_averaging_period=) averages parameters as well; leave it and ddp_comm_state out"
        )
    if features.replicates and isinstance(strategy, ModelParallelStrategy) and trainer.checkpoint_callbacks:
        _check_saves_one_file(strategy)


def _check_saves_one_file(strategy: Any) -> None:
    """Raise if a checkpoint of sharded replicas would be a mixture of them."""
    if strategy._save_distributed_checkpoint:
        raise ValueError(
            "ModelParallelStrategy saves each tensor from whichever replica, so that a checkpoint would be a mixture "
            "of replicas; pass ModelParallelStrategy(save_distributed_checkpoint=False), or "
            "Trainer(enable_checkpointing=False)"
        )
