"""``BucketNumbers``: numbers the buckets of a backward pass of a ``DistributedDataParallel`` module."""

from __future__ import annotations

from typing import Any

from offbeat.passes import current_pass

__all__ = ["BucketNumbers"]


class BucketNumbers:
    """Numbers the buckets of each backward pass from 0.

    In the first pass of a static graph DDP reduces all buckets (one for each dtype) at the end of backward, calls each
    of them number 0, and none of them the last; then it waits for all.

    Attributes:
        extra: how many buckets after the first DDP has called number 0 in this pass.
    """

    def __init__(self) -> None:
        self._pass, self.extra = -1, 0

    def number(self, bucket: Any) -> int:
        """Return the number of the bucket that DDP has just filled."""
        now, index = current_pass(), int(bucket.index())
        if index == 0 and now != -1 and now == self._pass:
            self.extra += 1
            return self.extra
        if index == 0:
            self._pass, self.extra = now, 0
        return index
