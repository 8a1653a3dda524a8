"""offbeat in the ``Trainer`` of Transformers: one call before ``trainer.train()``."""

from __future__ import annotations

import functools
import math
import os
from typing import Any

try:
    from transformers import TrainerCallback
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint
except ImportError as error:
    raise ImportError(
        'offbeat.integrations.transformers needs Transformers; install it with pip install "transformers>=5.22,<6"'
    ) from error

from offbeat._warn import warn
from offbeat.integrations.accelerate import (
    attach_prepared,
    check_saves_one_file,
    check_type,
    load_parts,
    save_parts,
    sharded_inside_replicas,
)
from offbeat.integrations.attached import Attached
from offbeat.integrations.features import Features, Options

__all__ = ["Offbeat", "attach"]


def attach(
    trainer: Any,
    *,
    overlap: Options = None,
    local_sgd: Options = None,
    slowmo: Options = None,
    diloco: Options = None,
    replica: Options = None,
) -> Offbeat:
    """Turn on features of offbeat for a ``Trainer``. Call it once, before ``trainer.train()``.

    Args:
        trainer: the ``transformers.Trainer``, with its own optimizer or one given as ``optimizers=``.
        overlap: step during backward; True, or options of :func:`offbeat.overlap`. ``max_grad_norm`` becomes its
            ``clip_norm``, and accumulation and loss scaling are taken from the Trainer. With ``max_grad_norm=0`` norms
            are measured for the log and gradients are freed at once; with ``max_grad_norm`` above 0 updates wait for
            the norm of all gradients, unless ``clip`` says otherwise.
        local_sgd: average replicas every few steps; True, or options of :class:`offbeat.LocalSGD`.
        slowmo: options of :class:`offbeat.SlowMo`.
        diloco: True, or options of :class:`offbeat.DiLoCo`.
        replica: options of :class:`offbeat.Replica`, for several levels.

    Returns:
        The callback that was added to the Trainer.

    Example::

        trainer = Trainer(model, args, train_dataset=data)
        offbeat.integrations.transformers.attach(trainer, local_sgd={"every": 8, "warmup": 100})
        trainer.train()

    At the end of training replicas agree one last time. In a checkpoint each rank writes its own part beside the
    Trainer's files (``offbeat_0.pt``, ...); ``optimizer.pt`` is that of the plain optimizer of the first rank.

    Limits: DDP, FSDP2 and a single process. Between averages every rank evaluates its own replica, and the model in a
    checkpoint is the first rank's.
    """
    check_type(trainer.accelerator)
    if any(isinstance(one, Offbeat) for one in trainer.callback_handler.callbacks):
        raise ValueError("offbeat was attached to this Trainer already; give all features to one call of attach()")
    if trainer.args.n_gpu > 1:
        raise ValueError(
            "this process has several GPUs, so that the Trainer uses DataParallel; start one process for each GPU with "
            "torchrun"
        )
    features = Features(overlap=overlap, local_sgd=local_sgd, slowmo=slowmo, diloco=diloco, replica=replica)
    _take_over_clipping(trainer, features)
    callback = Offbeat(trainer, features)
    trainer.add_callback(callback)
    return callback


def _take_over_clipping(trainer: Any, features: Features) -> None:
    if features.overlap is None:
        return
    if trainer.args.max_grad_norm:
        features.clip_by_overlap(float(trainer.args.max_grad_norm), "max_grad_norm")
        scaler = trainer.accelerator.scaler
        if features.warns_of_clipping and (scaler is None or not scaler.is_enabled()):  # for which updates wait too
            features.warns_of_clipping = False
            warn(
                f"max_grad_norm={trainer.args.max_grad_norm} clips by the norm of all gradients, for which every "
                "update waits: overlap then hides nothing and frees nothing during backward. Set max_grad_norm=0, or "
                "overlap={'clip': 'previous'}, which clips by the norm of the step before"
            )
    elif "clip_norm" not in features.overlap:
        # The Trainer reads the norm at every step. Measured bucket by bucket it does not delay updates.
        if "clip" in features.overlap:
            raise ValueError("max_grad_norm is 0, so that clip= has no effect; give max_grad_norm or clip_norm")
        features.overlap.update(clip_norm=math.inf, clip="bucket")


class Offbeat(TrainerCallback):
    """The callback that :func:`attach` adds to a ``Trainer``."""

    def __init__(self, trainer: Any, features: Features) -> None:
        self._trainer, self._features = trainer, features
        self._attached: list[Attached] = []
        self._optimizer: Any = None
        self._finished = False
        self._resume_from: str | None = None
        original, prepare = trainer.train, trainer.accelerator.prepare

        @functools.wraps(original)
        def train(resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
            """No callback is told which checkpoint training goes on from."""
            self._resume_from = resume_from_checkpoint or None
            if self._resume_from is True:
                self._resume_from = get_last_checkpoint(trainer.args.output_dir)
            return original(resume_from_checkpoint, *args, **kwargs)

        @functools.wraps(prepare)
        def prepare_inside(*args: Any, **kwargs: Any) -> Any:
            with sharded_inside_replicas(trainer.accelerator, features):
                return prepare(*args, **kwargs)

        trainer.train, trainer.accelerator.prepare = train, prepare_inside

    @property
    def handles(self) -> list[Any]:
        """The handle of the overlapped optimizer in a list, or an empty list."""
        return [one.handle for one in self._attached if one.handle is not None]

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called when model and optimizer are prepared and a checkpoint has been loaded: turn the features on."""
        trainer = self._trainer
        self._finished = False
        if trainer.hp_search_backend is not None:
            raise ValueError("offbeat cannot be used in a hyperparameter search; train each trial by itself")
        if self._optimizer is not trainer.optimizer:
            pairs = [(trainer.optimizer, trainer.model_wrapped)]
            self._attached = attach_prepared(trainer.accelerator, pairs, self._features, checkpoints=False)
            self._optimizer = trainer.optimizer
        if args.save_strategy != "no":
            check_saves_one_file(trainer.accelerator, self._attached)
        if self._resume_from is not None and any(one.has_part for one in self._attached):
            load_parts(self._resume_from, self._attached)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called on every rank after a checkpoint was saved: write this rank's part into its folder."""
        if any(one.has_part for one in self._attached):
            folder = os.path.join(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
            os.makedirs(folder, exist_ok=True)
            save_parts(folder, self._attached)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called at the end of an epoch: after the last, replicas agree before the model is evaluated and saved."""
        if control.should_training_stop or state.global_step >= state.max_steps:
            self._finish()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called at the end of training."""
        if not (args.load_best_model_at_end and state.best_model_checkpoint is not None):
            self._finish()  # else the model has been replaced by the best one, on all ranks

    def _finish(self) -> None:
        if not self._finished:
            self._finished = True
            for one in self._attached:
                one.finish()
