"""Types that several rooms share. They need torch alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.futures import Future

    from offbeat._torch import GradBucket

__all__ = ["CommHook", "Group", "Params"]

#: Parameters, named parameters, or groups. As torch's ``ParamsT``, but a list of dictionaries with different keys is
#: inferred to be one by mypy too.
Params: TypeAlias = Iterable[Tensor | tuple[str, Tensor] | dict[str, Any]]

#: A communication hook of DDP, called with its state and a bucket.
CommHook: TypeAlias = "Callable[[Any, GradBucket], Future[Tensor]]"

#: A process group. To type checkers ``torch.distributed.new_group`` may also return a number, which stands for "this
#: rank is not in it" and raises where a group is needed.
Group: TypeAlias = "ProcessGroup | int"
