"""``offbeat lighthouse``: the server at which replicas that come and go find each other."""

from __future__ import annotations

import signal
import threading
from typing import Annotated, Any

import typer

from offbeat.cli.output import fail, make_console
from offbeat.wire.lighthouse import serve

__all__ = ["EPILOG", "lighthouse"]

EPILOG = """Examples:

\b
    offbeat lighthouse --bind 0.0.0.0:29510
    offbeat lighthouse --bind 10.0.0.1:29510 --min-replicas 2 --join-seconds 30
"""


def lighthouse(
    *,
    bind: Annotated[str, typer.Option(help="The address to listen on, host:port.")] = "127.0.0.1:29510",
    min_replicas: Annotated[int, typer.Option(min=1, help="How many replicas must ask before any round begins.")] = 1,
    join_seconds: Annotated[
        float, typer.Option(min=0.1, help="How long a round waits for replicas that are alive and have not asked.")
    ] = 60.0,
    heartbeat_seconds: Annotated[
        float, typer.Option(min=0.5, help="After how long without a heartbeat a replica counts as gone.")
    ] = 5.0,
) -> None:
    """Serve the replicas of one run, until Ctrl-C. Needs torchft.

    Everybody who reaches this port can take part, and the page that it serves has a button that ends replicas: bind it
    to an address that only your machines reach. Restarting it loses nothing.
    """
    host, _, port = bind.rpartition(":")
    if not host or not port.isdigit():
        fail(f"--bind is {bind!r}, and must be host:port, such as 0.0.0.0:29510", code=2)
    try:
        server: Any = serve(
            bind, min_replicas=min_replicas, join_seconds=join_seconds, heartbeat_seconds=heartbeat_seconds
        )
    except ImportError as error:
        fail(str(error))
    except Exception as error:  # torchft raises RuntimeError for a port in use, and others
        fail(f"the lighthouse cannot listen on {bind}: {error}; choose another port or address")
    console = make_console()
    console.print(f"lighthouse at {server.address()}; replicas use offbeat.Elastic('HOST:{port}')", soft_wrap=True)
    over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    try:
        while not over.wait(0.5):
            pass
    except KeyboardInterrupt:
        pass
    server.shutdown()
