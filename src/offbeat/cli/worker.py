"""A worker process of the demo: ``python -m offbeat.cli.worker MODULE RANK OPTIONS``; see :mod:`offbeat.cli.processes`.

It calls ``MODULE.run(rank, options, say)``.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
import traceback
from importlib import import_module
from typing import Any

from offbeat.cli import link

__all__: list[str] = []


def main(module: str, rank: int, options: dict[str, Any]) -> None:
    """Do the work, and leave without a shutdown of the interpreter, which could wait for processes that are gone."""
    messages = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else is printed is no message
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1)

    def say(**message: Any) -> None:
        messages.write(json.dumps(message) + "\n")

    code = 1
    try:
        link.enter(options["link"])
        work = import_module(module).run
        say(ready=True)
        sys.stdin.readline()
        threading.Thread(target=_leave_with_parent, daemon=True).start()
        say(result=work(rank, options, say))
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _leave_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]))
