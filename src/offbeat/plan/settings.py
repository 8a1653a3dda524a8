"""``Settings``: one way to train replicas, checked, with its name and its line of Python."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

from offbeat.wire.codecs import CodecSpec, make_codec

__all__ = ["CodecSpec", "Settings", "Strategy", "codec_bytes"]

Strategy: TypeAlias = Literal["ddp", "local_sgd", "slowmo", "diloco"]

#: The class and the period it has by default.
_CLASSES: dict[Strategy, tuple[str, int]] = {
    "ddp": ("DistributedDataParallel", 1),
    "local_sgd": ("offbeat.LocalSGD", 8),
    "slowmo": ("offbeat.SlowMo", 12),
    "diloco": ("offbeat.DiLoCo", 32),
}


def codec_bytes(codec: CodecSpec, numbers: int) -> int:
    """The bytes that so many float32 values take on the link."""
    made = make_codec(codec)
    return 4 * numbers if made is None else made.encoded_bytes(numbers)


@dataclass(frozen=True)
class Settings:
    """One way to train replicas.

    Args:
        strategy: ``"ddp"`` averages gradients at every step; ``"local_sgd"``, ``"slowmo"`` and ``"diloco"`` average
            parameters every ``every`` steps.
        every: steps between rounds; None is the default of the strategy's class: 8, 12 and 32.
        fragments: parts of the parameters that take turns within a period.
        delay: steps that a round may take in the background; 0 waits for it.
        codec: how values are encoded, as :class:`offbeat.DiLoCo` takes it. With ``"ddp"`` it is that of
            :func:`offbeat.codec_hook`.
        options: further arguments that the line of Python has, such as ``outer_lr``. They change no estimate.
    """

    strategy: Strategy = "diloco"
    every: int | None = None
    fragments: int = 1
    delay: int = 0
    codec: CodecSpec = None
    options: tuple[tuple[str, Any], ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        if self.strategy not in get_args(Strategy):
            raise ValueError(f"strategy={self.strategy!r} is not known; use {', '.join(map(repr, get_args(Strategy)))}")
        if self.every is None:
            object.__setattr__(self, "every", _CLASSES[self.strategy][1])
        for name, least in (("every", 1), ("fragments", 1), ("delay", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be a whole number of at least {least}, but got {value!r}")
        if self.strategy == "ddp" and (self.every, self.fragments, self.delay) != (1, 1, 0):
            raise ValueError(
                f"every={self.every}, fragments={self.fragments}, delay={self.delay} mean nothing for strategy='ddp', "
                "which averages gradients at every step; leave them out"
            )
        for name in ("fragments", "delay"):
            if getattr(self, name) > self.period:
                raise ValueError(
                    f"{name}={getattr(self, name)} must be at most every={self.every}: a round of each fragment ends "
                    "before its next one begins"
                )
        if make_codec(self.codec) is not None and self.strategy == "local_sgd":
            raise ValueError(
                f"codec={self.codec!r} needs an outer optimizer, which strategy='local_sgd' does not have: parameters "
                "themselves are never encoded; use strategy='diloco', or codec=None"
            )

    @property
    def period(self) -> int:
        """Steps between rounds of the same fragment."""
        assert self.every is not None
        return self.every

    @property
    def name(self) -> str:
        """A short name, as tables show it: the class and its arguments."""
        if self.strategy == "ddp":
            return "DDP" if self.codec is None else f"DDP, {_codec_name(self.codec)}"
        words = [f"every={self.every}"]
        words += [f"fragments={self.fragments}"] * (self.fragments > 1) + [f"delay={self.delay}"] * (self.delay > 0)
        words += [] if self.codec is None else [f"codec={_codec_code(self.codec)}"]
        return f"{_CLASSES[self.strategy][0].removeprefix('offbeat.')}({', '.join(words)})"

    @property
    def code(self) -> str:
        """The line of Python to paste; it takes ``inner`` (an optimizer) and ``model``."""
        if self.strategy == "ddp":
            hook = f"\nmodel.register_comm_hook(offbeat.CodecState({_codec_code(self.codec)}), offbeat.codec_hook)"
            line = "model = torch.nn.parallel.DistributedDataParallel(model)"
            return line + (hook if self.codec is not None else "")
        words = [f"every={self.every}", *(f"{name}={value!r}" for name, value in self.options)]
        words += [f"fragments={self.fragments}"] * (self.fragments > 1) + [f"delay={self.delay}"] * (self.delay > 0)
        words += [] if self.codec is None else [f"codec={_codec_code(self.codec)}"]
        return f"optimizer = {_CLASSES[self.strategy][0]}(inner, model, {', '.join(words)})"

    def as_dict(self) -> dict[str, Any]:
        """The settings as JSON has them. A codec that is not known by name has the name it shows."""
        codec = None if self.codec is None else _codec_name(self.codec)
        whole = {"strategy": self.strategy, "every": self.every, "fragments": self.fragments, "delay": self.delay}
        return {**whole, "codec": codec}


def _codec_name(codec: CodecSpec) -> str:
    return codec if isinstance(codec, str) else str(getattr(codec, "name", type(codec).__name__))


def _codec_code(codec: CodecSpec) -> str:
    return f'"{codec}"' if isinstance(codec, str) else f"offbeat.{codec!r}"
