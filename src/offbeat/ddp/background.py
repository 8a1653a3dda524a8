"""Work on reduced buckets while backward goes on: in one thread on the CPU, on one stream on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

__all__ = ["Background"]


class Background:
    """Runs the work of one DDP module, in the order in which its buckets are reduced."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._streams: dict[torch.device, Any] = {}

    def after(
        self,
        reduced: Future[Any],
        buffer: Tensor,
        work: Callable[[Tensor], Tensor],
        failed: Callable[[BaseException], None],
    ) -> Future[Any]:
        """Run ``work`` on a bucket once it is reduced.

        Args:
            reduced: the future of the reduced bucket, a tensor or a list of one.
            buffer: the bucket's buffer.
            work: takes the reduced bucket, and returns the tensor that DDP copies into ``.grad``.
            failed: called with an error of the reduction or of ``work``. The returned future never fails: DDP would
                wrap the error, and could not be used afterwards.
        """
        then = self._in_thread if buffer.device.type == "cpu" else self._on_stream
        return then(reduced, buffer, work, failed)

    def settle(self) -> None:
        """Wait until the thread has nothing left to do. Work on a stream comes before all that is launched later."""
        if self._thread is not None:
            self._thread.submit(lambda: None).result()

    def stop(self) -> None:
        """End the thread; it starts again when there is work."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def _in_thread(self, reduced: Future[Any], buffer: Tensor, work: Any, failed: Any) -> Future[Any]:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="offbeat-ddp")
        thread, finished, threads = self._thread, Future[Any](), torch.get_num_threads()

        def run() -> None:
            result = buffer
            try:
                # In the order of the buckets, which is the same on all ranks: the work may be collective.
                result = _flat(reduced.wait())
                if torch.get_num_threads() != threads:  # the order of sums depends on it
                    torch.set_num_threads(threads)
                result = work(result)
            except BaseException as error:
                failed(error)
            finished.set_result(result)

        thread.submit(run)
        return finished

    def _on_stream(self, reduced: Future[Any], buffer: Tensor, work: Any, failed: Any) -> Future[Any]:
        device = buffer.device
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        ours = self._streams[device]
        # Kernels of backward that read these parameters are queued already; they must have run first.
        read = torch.cuda.current_stream(device).record_event()

        def run(done: Future[Any]) -> Tensor:
            result = buffer
            try:
                result = _flat(done.value())
                with torch.cuda.device(device):
                    theirs = torch.cuda.current_stream(device)
                    ours.wait_event(read)
                    ours.wait_stream(theirs)
                    with torch.cuda.stream(ours):
                        result.record_stream(ours)
                        result = work(result)
                    theirs.wait_stream(ours)
            except BaseException as error:
                failed(error)
            return result

        return reduced.then(run)


def _flat(value: Any) -> Tensor:
    """A hook's result, which may be a tensor or a list of one."""
    flat: Tensor = value if isinstance(value, Tensor) else value[0]
    return flat
