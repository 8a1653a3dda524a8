"""The communication hook of a ``DistributedDataParallel`` module, shared by all who need it.

DDP accepts one communication hook and cannot forget it. :class:`CommHook` is that hook. It reduces buckets, with DDP's
own mean or with a :class:`Reducer`, and then hands them to its :class:`Listener` objects.
"""

from offbeat.ddp.codec_hook import CodecState, codec_hook
from offbeat.ddp.comm_hook import CommHook, Listener, Reducer, UserHook
from offbeat.ddp.mean import as_it_is, mean_of_bucket
from offbeat.ddp.modules import is_inside_ddp

__all__ = [
    "CodecState",
    "CommHook",
    "Listener",
    "Reducer",
    "UserHook",
    "as_it_is",
    "codec_hook",
    "is_inside_ddp",
    "mean_of_bucket",
]
