r"""The cost model: :func:`estimate`.

A step of training takes :math:`C` seconds without communication. A period has :math:`F` rounds, one for each fragment,
which begin every :math:`s = H / F` steps. A round moves :math:`b` bytes in :math:`k` collectives, so that its exchange
takes

.. math:: e = b / B + k L

seconds with the bandwidth :math:`B` and the latency :math:`L`. Training can hide it behind :math:`\min(D, s)` steps:
with a delay above :math:`s` rounds queue for the link, and none waits only if each round is done before the next one
begins. The time from one round to the next is

.. math:: T = s\,C + l + \max(p\,b,\; e - \min(D, s)\,C)

where :math:`l` is this replica's own work for the round (copying, encoding, the outer step) and :math:`p` the seconds
of training that the processor loses for each byte it sends meanwhile. DDP has :math:`s = 1`; it hides buckets behind
the rest of the backward pass, which is two thirds of a step, and the last bucket behind nothing.

The four numbers of a machine that stand beside the bandwidth (:class:`Machine`) are 0 unless ``offbeat bench`` has
measured them, so that an estimate by hand is that of an ideal machine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from offbeat.plan.settings import CodecSpec, Settings, Strategy, codec_bytes

__all__ = ["BACKWARD", "Estimate", "Machine", "bytes_sent", "estimate", "estimate_settings"]

#: The part of a step that is the backward pass: twice the arithmetic of the forward pass.
BACKWARD = 2 / 3
#: Bytes of gradients in the first bucket of torch's DDP, and in each further one.
_FIRST_BUCKET, _BUCKET = 1 << 20, 25 << 20
#: Bytes before the codes of a message.
_HEADER = 8


@dataclass(frozen=True)
class Machine:
    """What a round costs on a machine beside the time of its bytes. Everything is 0 on an ideal one.

    Attributes:
        busy: seconds of training that are lost for each byte sent in the background.
        round: seconds of a round of hardly any bytes: comparing, voting, and their latency. None is three collectives.
        local: seconds a parameter of this replica's own work for a round, by :meth:`key`.
    """

    busy: float = 0.0
    round: float | None = None
    local: Mapping[str, float] = field(default_factory=dict)

    @staticmethod
    def key(settings: Settings) -> str:
        """The name under which the local work of such rounds is kept."""
        return f"{settings.strategy}/{settings.as_dict()['codec'] or 'float32'}"

    def local_seconds(self, settings: Settings) -> float:
        """Seconds a parameter of local work; the same strategy without a codec stands in for a codec not measured."""
        dense = Machine.key(Settings(settings.strategy))
        return self.local.get(self.key(settings), self.local.get(dense, 0.0))

    def as_dict(self) -> dict[str, Any]:
        """The machine as JSON has it."""
        return asdict(self)


@dataclass(frozen=True)
class Estimate:
    """What :func:`estimate` returns.

    Attributes:
        step_seconds: the mean time of a step, communication included.
        utilisation: the part of it that training takes, from 0 to 1.
        bytes_per_step: bytes that one replica sends in a step, on average.
        peak_bytes: bytes that one replica sends in one round, all at once.
        extra_memory: bytes beside parameters, gradients and the inner optimizer's state, at the peak.
    """

    step_seconds: float
    utilisation: float
    bytes_per_step: float
    peak_bytes: int
    extra_memory: int

    def as_dict(self) -> dict[str, float]:
        """The numbers as JSON has them."""
        return asdict(self)


def estimate(
    *,
    params: float,
    step_seconds: float,
    replicas: int,
    bandwidth: float,
    latency: float = 0.0,
    strategy: Strategy = "diloco",
    every: int | None = None,
    fragments: int = 1,
    delay: int = 0,
    codec: CodecSpec = None,
    machine: Machine | None = None,
) -> Estimate:
    """Estimate what one way to train replicas costs on one link.

    Args:
        params: the number of parameters, taken as float32.
        step_seconds: the time of a step without communication.
        replicas: how many replicas there are.
        bandwidth: of each replica's link, in bytes a second in each direction.
        latency: of a collective among the replicas, in seconds.
        strategy: ``"ddp"``, ``"local_sgd"``, ``"slowmo"`` or ``"diloco"``.
        every: steps between rounds; None is the class's default.
        fragments: parts of the parameters that take turns.
        delay: steps that a round may take in the background.
        codec: how values are encoded: None, ``"bf16"``, ``"fp16"``, ``"int8"``, ``"int4"``, ``"int2"``, or a codec.
        machine: what ``offbeat bench`` has measured; None is a machine on which only the link costs time.

    Returns:
        The :class:`Estimate`.

    Example:
        >>> from offbeat.plan import estimate
        >>> link = dict(params=1e9, step_seconds=0.1, replicas=2, bandwidth=125e6)
        >>> round(estimate(**link, strategy="ddp").utilisation, 4)
        0.0031
        >>> round(estimate(**link, every=32, codec="int4").utilisation, 2)
        0.43
        >>> round(estimate(**link, every=64, fragments=8, delay=8, codec="int4").utilisation, 2)
        1.0

    Limits: replicas are equally fast and the link is as fast as it was measured. Nothing is known of loss: see
    :func:`offbeat.plan.recommend`.
    """
    settings = Settings(strategy, every, fragments, delay, codec)
    return estimate_settings(
        settings, Setting(params, step_seconds, replicas, bandwidth, latency, machine or Machine())
    )


@dataclass(frozen=True)
class Setting:
    """A model, replicas and a link, checked: what all ways to train are compared on. See :func:`estimate`."""

    params: float
    step_seconds: float
    replicas: int
    bandwidth: float
    latency: float = 0.0
    machine: Machine = field(default_factory=Machine)

    def __post_init__(self) -> None:
        for name in ("params", "step_seconds", "bandwidth"):
            _check(name, getattr(self, name), "above 0", lambda value: 0 < value < math.inf)
        _check("latency", self.latency, "at least 0", lambda value: 0 <= value < math.inf)
        if self.params != int(self.params):
            raise ValueError(f"params={self.params!r} must be a whole number of parameters")
        if isinstance(self.replicas, bool) or not isinstance(self.replicas, int) or self.replicas < 1:
            raise ValueError(f"replicas={self.replicas!r} must be a whole number of at least 1")


def _check(name: str, value: Any, rule: str, holds: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not holds(value):
        raise ValueError(f"{name}={value!r} must be a finite number {rule}")


def estimate_settings(settings: Settings, on: Setting) -> Estimate:
    """Do what :func:`estimate` does, for arguments that are already together."""
    compute, machine = on.step_seconds, on.machine
    part = -(-int(on.params) // settings.fragments)  # parameters of the largest fragment
    sent, spacing = bytes_sent(settings.codec, part, on.replicas), settings.period / settings.fragments
    exchange = 0.0 if on.replicas == 1 else sent / on.bandwidth + _fixed_seconds(settings, on)
    if settings.strategy == "ddp":
        exposed = _after_backward(exchange, BACKWARD * compute, 4 * part)
    else:
        exposed = exchange - min(settings.delay, spacing) * compute
    local = machine.local_seconds(settings) * part
    interval = spacing * compute + local + max(machine.busy * sent, exposed)
    step = interval / spacing
    return Estimate(
        step_seconds=step,
        utilisation=compute / step,
        bytes_per_step=sent / spacing,
        peak_bytes=sent,
        extra_memory=_extra_memory(settings, int(on.params), part),
    )


def bytes_sent(codec: CodecSpec, numbers: int, replicas: int) -> int:
    """Bytes that one replica sends in one round over so many float32 values."""
    if replicas == 1:
        return 0
    if codec is None:  # a ring: each part goes around twice
        return math.ceil(2 * (replicas - 1) / replicas * 4 * numbers)
    if replicas == 2:
        return _HEADER + codec_bytes(codec, numbers)
    return 2 * (replicas - 1) * (_HEADER + codec_bytes(codec, -(-numbers // replicas)))


def _after_backward(exchange: float, backward: float, size: int) -> float:
    """Seconds from the end of a backward pass until the last bucket has been reduced.

    A bucket is ready when its gradients are, and buckets are reduced one after the other. Full buckets are alike
    in a row, so that one of the first two or the last two decides.
    """
    first = min(_FIRST_BUCKET, size)
    second = min(first + _BUCKET, size)
    last = (size - first) % _BUCKET or min(_BUCKET, size - first) or first
    full = max(size - last - _BUCKET, 0)
    # For each of these buckets the bytes of those before it, without and with its own.
    buckets = ((0, first), (first, second), (full, size - last), (size - last, size))
    return max(backward * (ready / size - 1) + exchange * (1 - done / size) for done, ready in buckets)


def _fixed_seconds(settings: Settings, on: Setting) -> float:
    """Seconds of a round that do not depend on its bytes."""
    collectives = 2 if settings.codec is not None and on.replicas > 2 else 1
    if settings.strategy == "ddp":
        return collectives * on.latency
    if on.machine.round is not None:
        return on.machine.round + (collectives - 1) * on.latency
    return (2 + collectives) * on.latency  # replicas compare, exchange and vote


def _extra_memory(settings: Settings, params: int, part: int) -> int:
    if settings.strategy == "ddp":
        return 4 * params + (0 if settings.codec is None else codec_bytes(settings.codec, params))
    lasting = 0 if settings.strategy == "local_sgd" else 2 * 4 * params  # anchor and outer momentum
    copies = 1 if settings.delay == 0 else 2  # the result; with a delay also a copy of what travels
    codes = 0 if settings.codec is None else 3 * codec_bytes(settings.codec, part)  # one's own, and both as received
    return lasting + copies * 4 * part + codes
