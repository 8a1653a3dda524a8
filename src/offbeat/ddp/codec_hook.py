"""``codec_hook``: a communication hook of ``DistributedDataParallel`` that encodes gradients.

Buckets are exchanged in stages while backward goes on: when a bucket is full, it is encoded and sent, the bucket
before it is added up and sent back, and the one before that is decoded. All of it happens in the thread that runs
backward and in the same order on all ranks, so that no two ranks can wait for different collectives.
"""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.futures import Future

from offbeat._types import Group
from offbeat.ddp.bucket_numbers import BucketNumbers
from offbeat.ddp.coded_buckets import BucketPass, CodedBucket, Losses
from offbeat.wire.codecs.codec import Codec
from offbeat.wire.codecs.registry import CodecName, make_codec
from offbeat.wire.groups import members, whole
from offbeat.wire.peers import GroupPeers
from offbeat.wire.sums import CodedMean

if TYPE_CHECKING:
    from offbeat._torch import GradBucket

__all__ = ["CodecState", "codec_hook"]


class CodecState:
    """The state of :func:`codec_hook`: one for each DDP module.

    Args:
        codec: how gradients are encoded: ``"bf16"``, ``"fp16"``, ``"int8"``, ``"int4"``, ``"int2"``, another registered
            name, or a codec such as ``TopK(0.03)``.
        process_group: the group of the DDP module; the default group by default.
        error_feedback: the decay of what encoding loses, which is added to the next gradient. 1 keeps it whole, and
            None drops it. Takes as much memory as the gradients in float32, and during backward twice as much: what was
            lost before is replaced only when all buckets of the pass have been averaged and all were finite.
        not_finite: what to do about NaN and infinity. ``"raise"`` raises :class:`NotFinite` at the end of backward on
            every rank (without :func:`offbeat.overlap`, DDP makes it a RuntimeError whose message contains this one).
            ``"nan"`` fills the bucket with NaN on every rank, for :class:`torch.amp.GradScaler` to skip the step
            on all.
        scaler: the :class:`torch.amp.GradScaler` that scales the loss. What encoding loses is scaled as the loss is,
            and is scaled anew when the scaler changes its scale. Needed for ``error_feedback`` with
            ``not_finite="nan"``; pass ``GradScaler(enabled=False)`` if the loss is not scaled.

    Raises:
        ValueError: an argument is not one of those above, or ``error_feedback`` needs ``scaler``.

    Example:
        >>> import offbeat
        >>> offbeat.CodecState("int4", error_feedback=1.0).codec
        <codec int4>

    A deep copy, as :class:`torch.optim.swa_utils.AveragedModel` makes one of a DDP module, has the same options and has
    lost nothing yet. So has one that was saved and loaded; it has no process group.

    Limits: with ``error_feedback``, residuals belong to the layout of DDP's buckets. DDP changes it once, after the
    first backward pass, and residuals start again from zero then. They are not part of a checkpoint. Gradients are
    encoded as float32: those in float64 that are beyond its range count as infinite. Sparse gradients raise ValueError.
    """

    def __init__(
        self,
        codec: CodecName | Codec = "int8",
        process_group: Group | None = None,
        error_feedback: float | None = None,
        not_finite: Literal["raise", "nan"] = "raise",
        scaler: GradScaler | None = None,
    ) -> None:
        resolved = make_codec(codec)
        if resolved is None:
            raise ValueError("codec=None leaves nothing for codec_hook to do; register no hook, or name a codec")
        if not_finite not in ("raise", "nan"):
            raise ValueError(f"not_finite={not_finite!r} must be 'raise' or 'nan'")
        if scaler is not None and not hasattr(scaler, "get_scale"):
            raise ValueError(f"scaler={scaler!r} must be a torch.amp.GradScaler")
        if error_feedback is not None and not_finite == "nan" and scaler is None:
            raise ValueError(
                "error_feedback with not_finite='nan' needs scaler=: what encoding loses is scaled as the loss is, and "
                "must be scaled anew when the scale changes; pass the GradScaler that scales the loss, or "
                "GradScaler(enabled=False) if none does"
            )
        self.codec, self.process_group, self.not_finite, self.scaler = resolved, process_group, not_finite, scaler
        self.error_feedback, decay = error_feedback, 1.0 if error_feedback is None else error_feedback
        self._mean = CodedMean(resolved, return_sum_error=error_feedback is not None, decay=decay)
        self._residuals: Losses = {}
        self._scale = 1.0  # of the residuals
        self._pass: BucketPass | None = None
        self._numbers = BucketNumbers()

    def run(self, bucket: GradBucket) -> Future[Tensor]:
        """Called by DDP when a bucket is full."""
        number = self._numbers.number(bucket)
        if number == 0:
            self._begin_pass()
        current = self._pass
        assert current is not None, "DDP begins with bucket 0"
        try:
            current.watch()
            current.advance()
            future = current.start(self._encodable(bucket, number, current.scale))
            if self._numbers.extra:
                current.drain()  # another bucket may follow, so the next pass takes over the residuals
            elif bucket.is_last():
                current.drain()
                self._keep_residuals(current)
        except BaseException as error:
            current.abort(error)
            raise
        return future

    def abort(self) -> None:
        """Give up the buckets in flight, after a backward pass that failed: their futures fail."""
        if self._pass is not None:
            self._pass.abort()

    def residual(self, bucket: GradBucket) -> Tensor | None:
        """What encoding lost of this bucket in the last backward pass."""
        return self._residual(bucket.index(), _layout(bucket))

    def _residual(self, number: int, layout: tuple[int, ...]) -> Tensor | None:
        residual_layout, residual = self._residuals.get(number, ((), None))
        return residual if residual_layout == layout else None

    def _begin_pass(self) -> None:
        if self._pass is not None:
            self._pass.abort()  # if its backward pass has failed
            self._keep_residuals(self._pass)
        scale = 1.0 if self.scaler is None else float(self.scaler.get_scale())
        self._pass = BucketPass(self._mean, self.not_finite, scale)

    def _encodable(self, bucket: GradBucket, number: int, scale: float) -> CodedBucket:
        """Return the bucket with its values divided by the number of ranks, in float32, and with error feedback."""
        buffer: Tensor = bucket.buffer()
        if buffer.layout != torch.strided:
            raise ValueError(
                "codec_hook cannot encode sparse gradients; make the layer with sparse=False, or use another "
                "communication hook"
            )
        group, layout = whole(self.process_group), _layout(bucket)
        peers = GroupPeers(group, members(group))
        values = buffer if buffer.dtype == torch.float32 else buffer.to(torch.float32)
        values.div_(peers.size)
        corrected = None
        if self.error_feedback is not None:
            residual = self._residual(number, layout)
            if residual is not None and scale != self._scale:
                change = scale / self._scale if self._scale else math.inf
                residual = residual * change if math.isfinite(change) else None
            decay = self.error_feedback
            corrected = values.clone() if residual is None else torch.add(values, residual, alpha=decay)
        return CodedBucket(buffer, number, layout, peers, values, corrected)

    def _keep_residuals(self, ended: BucketPass) -> None:
        """Take over the residuals of a pass: of all of its buckets, or of none if any gradient is thrown away."""
        if self.error_feedback is not None and ended.is_complete and ended.is_sound:
            self._residuals, self._scale = dict(ended.losses), ended.scale

    def __deepcopy__(self, memo: dict[int, Any]) -> CodecState:
        # A process group, a scaler and a codec are not copied.
        return type(self)(self.codec, self.process_group, self.error_feedback, self.not_finite, self.scaler)

    def __reduce__(self) -> Any:
        if self.process_group is not None:
            warnings.warn(
                "a process group cannot be saved, and a CodecState that is loaded has none, which means all ranks; set "
                "its process_group",
                stacklevel=2,
            )
        return type(self), (self.codec, None, self.error_feedback, self.not_finite, self.scaler)


def _layout(bucket: GradBucket) -> tuple[int, ...]:
    return tuple(id(p) for p in bucket.parameters())


def codec_hook(state: CodecState, bucket: GradBucket) -> Future[Tensor]:
    """DDP communication hook: averages gradients over ranks in encoded form, with the same bits on every rank.

    Register it with DDP, or pass it to :func:`offbeat.overlap` as ``comm_hook``, with ``comm_state``.

    Args:
        state: the codec, its options and residuals; one for each DDP module.
        bucket: the bucket of gradients that DDP has filled, a :class:`torch.distributed.GradBucket`.

    Returns:
        A future of the averaged bucket.

    Example:
        >>> import torch, torch.distributed as dist, offbeat
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
        >>> ddp.register_comm_hook(offbeat.CodecState("int8"), offbeat.codec_hook)
        >>> ddp(torch.ones(3, 4)).sum().backward()
        >>> dist.destroy_process_group()
    """
    return state.run(bucket)


codec_hook.__annotations__ = {}  # DDP compares annotations with types, and these are strings
