"""Hands a replica's state to one that joins, over a connection of its own, while training goes on.

A message is a header (JSON, of bounded length) and raw tensors in chunks, each with a time limit. Nothing is unpickled.
What crosses the network is neither encrypted nor authenticated.
"""

from __future__ import annotations

import ctypes
import json
import socket
import struct
import threading
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from offbeat.wire.peers import ExchangeError
from offbeat.wire.tree import pack, shapes_of, unpack

__all__ = ["StateServer", "fetch", "own_host"]

#: The longest header. The state of a model of 100,000 parameters has about 20 MB of it.
LONGEST_HEADER = 256 << 20
CHUNK = 1 << 20
#: How long a chunk may take.
SECONDS = 30.0
#: How long somebody that joins waits for the next step of the one that it asks.
SECONDS_OF_A_STEP = 600.0


def own_host(peer: str) -> str:
    """The address of this machine, as a machine at ``host:port`` sees it."""
    host, _, port = peer.rpartition("://")[2].rpartition(":")
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))  # sends nothing
        return str(probe.getsockname()[0])
    return socket.gethostname()


class StateServer:
    """Answers replicas that ask for this one's state.

    The training thread looks at :attr:`is_wanted` after each step and calls :meth:`publish` with a copy, which the
    thread here sends.

    Args:
        host: the address to listen on.
        run: the name of the run; whoever asks for another one is refused.
    """

    def __init__(self, host: str, run: str) -> None:
        self._socket = socket.create_server((host, 0))
        self.address = f"{host}:{self._socket.getsockname()[1]}"
        self._run = run
        self._lock = threading.Condition()
        self._wanted, self._serial = 0, 0
        self._published: tuple[Any, list[Tensor]] | None = None
        threading.Thread(target=self._serve, name="offbeat-state", daemon=True).start()

    @property
    def is_wanted(self) -> bool:
        """Whether somebody waits for the state."""
        return self._wanted > 0

    def publish(self, state: Any) -> None:
        """Hand in a copy of the state, for everybody who waits for it."""
        tensors: list[Tensor] = []
        header = pack(state, tensors)
        with self._lock:
            self._published, self._serial = (header, tensors), self._serial + 1
            self._wanted = 0
            self._lock.notify_all()

    def close(self) -> None:
        """Answer nobody any more."""
        with suppress(OSError):
            self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, suppress(OSError, ValueError, ExchangeError):
            connection.settimeout(SECONDS)
            request = _receive_header(connection, 4096)
            if request != {"run": self._run}:
                _send_header(connection, {"refused": f"this is run {self._run!r}"})
                return
            with self._lock:
                version = self._serial
                self._wanted += 1
                self._lock.wait_for(lambda: self._serial > version, SECONDS_OF_A_STEP)
                if self._published is None or self._serial == version:
                    return
                header, tensors = self._published
            _send_header(connection, {"state": header})
            for tensor in tensors:
                _send_tensor(connection, tensor)


def fetch(address: str, run: str) -> Any:
    """The state of the replica at an address.

    Raises:
        ExchangeError: it did not answer, was refused, or sent something else.
    """
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=SECONDS) as connection:
            _send_header(connection, {"run": run})
            connection.settimeout(SECONDS_OF_A_STEP)
            answer = _receive_header(connection, LONGEST_HEADER)
            connection.settimeout(SECONDS)
            if not isinstance(answer, dict) or "state" not in answer:
                raise ExchangeError(f"the replica at {address} did not send its state: {answer!r:.200}")
            tensors = [_receive_tensor(connection, dtype, shape) for dtype, shape in shapes_of(answer["state"])]
    except (OSError, ValueError) as error:
        raise ExchangeError(f"the state of the replica at {address} did not arrive: {error}") from error
    return unpack(answer["state"], tensors)


def _send_header(connection: socket.socket, value: Any) -> None:
    data = json.dumps(value).encode()
    connection.sendall(struct.pack("<Q", len(data)) + data)


def _receive_header(connection: socket.socket, longest: int) -> Any:
    (length,) = struct.unpack("<Q", _receive(connection, 8))
    if length > longest:
        raise ValueError(f"a header of {length} bytes, of which at most {longest} are read")
    return json.loads(_receive(connection, length))


def _receive(connection: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        chunk = connection.recv(min(CHUNK, length - len(data)))
        if not chunk:
            raise ValueError("the connection was closed in the middle of a message")
        data += chunk
    return bytes(data)


def _bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor in CPU memory, which must outlive them."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _send_tensor(connection: socket.socket, tensor: Tensor) -> None:
    part = tensor.detach().cpu().contiguous()
    data = _bytes_of(part) if part.nbytes else memoryview(b"")
    for start in range(0, len(data), CHUNK):
        connection.sendall(data[start : start + CHUNK])


def _receive_tensor(connection: socket.socket, dtype: torch.dtype, shape: list[int]) -> Tensor:
    if any(size < 0 for size in shape):
        raise ValueError(f"a tensor of shape {shape}")
    tensor = torch.empty(shape, dtype=dtype)
    data = _bytes_of(tensor) if tensor.nbytes else memoryview(b"")
    start = 0
    while start < len(data):
        count = connection.recv_into(data[start : start + CHUNK])
        if count == 0:
            raise ValueError("the connection was closed in the middle of a tensor")
        start += count
    return tensor
