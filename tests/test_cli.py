"""The command ``offbeat``, what holds its worker processes together, and the link between them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import torch

import offbeat
from offbeat.cli import link
from offbeat.cli.processes import WorkersFailed, run_workers

SOURCE = Path(__file__).parent.parent / "src"
READY = "import sys, time; print('{\"ready\": true}', flush=True); sys.stdin.readline();"
RESULT = "print('{\"result\": 5}', flush=True);"


def offbeat_command(*words: str, first: Path = SOURCE) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (first, SOURCE))), "COLUMNS": "200"}
    command = [sys.executable, "-m", "offbeat", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_the_version_is_shown() -> None:
    pytest.importorskip("typer")
    done = offbeat_command("--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"offbeat {offbeat.__version__} (torch {torch.__version__})\n"


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_extra_it_says_what_to_install(missing: str, tmp_path: Path) -> None:
    (tmp_path / f"{missing}.py").write_text(f"raise ModuleNotFoundError('no {missing}', name={missing!r})")
    done = offbeat_command("demo", first=tmp_path)
    assert done.returncode == 1
    assert done.stdout == ""
    told = f"the command line needs {missing}, which is not installed; run: pip install typer rich"
    assert done.stderr == f"offbeat: {told}\n"


def test_the_library_does_not_need_the_command_line() -> None:
    check = "import sys, offbeat; sys.exit(bool({'typer', 'rich', 'offbeat.cli'} & set(sys.modules)))"
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    assert subprocess.run([sys.executable, "-c", check], env=environment, timeout=120).returncode == 0


def workers(*programs: str, patience: float = 20, seconds: float = 60, **options: Any) -> list[Any]:
    commands = [[sys.executable, "-c", program] for program in programs]
    return run_workers(commands, options.pop("hear", lambda *_: None), patience=patience, seconds=seconds, **options)


def test_workers_begin_together_and_are_heard() -> None:
    heard: list[Any] = []
    joined: list[int] = []
    talks = READY + 'print(\'{"doing": "sums"}\', flush=True);' + RESULT
    results = workers(talks, talks, hear=lambda *message: heard.append(message), join=joined.extend)
    assert results == [5, 5]
    assert sorted(number for number, _ in heard) == [0, 1]
    assert all(message == {"doing": "sums"} for _, message in heard)
    assert len(set(joined)) == 2


def test_a_worker_that_has_its_result_is_not_waited_for() -> None:
    """It leaves behind what would keep an interpreter from shutting down."""
    stays = "import threading, atexit; threading.Thread(target=time.sleep, args=(100,)).start();"
    stays += "atexit.register(time.sleep, 100);"
    began = monotonic()
    assert workers(READY + stays + RESULT) == [5]
    assert monotonic() - began < 60


def test_a_worker_that_raises_shows_its_traceback() -> None:
    with pytest.raises(WorkersFailed, match="process 1 ended with exit code 1 while: starting") as caught:
        workers(READY + "time.sleep(50)", READY + "1 / 0")
    assert "process 1: Traceback" in caught.value.log
    assert "process 1: ZeroDivisionError: division by zero" in caught.value.log


def test_a_worker_that_was_killed_is_named_before_one_that_raised_for_it() -> None:
    killed = READY + "import os; time.sleep(0.5); os.kill(os.getpid(), 9)"
    with pytest.raises(WorkersFailed, match="process 1 was killed by SIGKILL"):
        workers(READY + "raise RuntimeError('connection lost')", killed)


def test_a_worker_that_hangs_is_named_with_where_it_is() -> None:
    hangs = "import faulthandler, signal; faulthandler.register(signal.SIGUSR1);" + READY
    hangs += 'print(\'{"doing": "step 3"}\', flush=True); time.sleep(100)'
    with pytest.raises(WorkersFailed, match=r"no progress for 2 s; process 1: step 3$") as caught:
        workers(READY + RESULT, hangs, patience=2)
    assert 'File "<string>", line 1 in <module>' in caught.value.log


def test_everything_has_a_time_limit() -> None:
    chatters = READY + '[(print(\'{"doing": "more"}\', flush=True), time.sleep(0.1)) for _ in range(1000)]'
    with pytest.raises(WorkersFailed, match="not done in 3 s; process 0: more"):
        workers(chatters, seconds=3)


def test_what_is_not_a_message_is_an_error() -> None:
    with pytest.raises(WorkersFailed, match="process 0 wrote something that is not a message"):
        workers(READY + "print('hello', flush=True); time.sleep(100)")


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's TCP pacing")
def test_the_rate_of_connections_is_limited_and_their_bytes_are_counted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
        other, _ = server.accept()
        with other:
            before = link.sent_bytes()
            link.limit_rate("pacing", 100)
            for end in (one, other):
                assert end.getsockopt(socket.SOL_SOCKET, 47) == 12_500_000
            sender = threading.Thread(target=one.sendall, args=(bytes(1_000_000),))
            sender.start()
            left = 1_000_000
            while left:
                left -= len(other.recv(1 << 16))
            sender.join()
            assert before is not None
            assert link.sent_bytes() == before + 1_000_000
    assert len(os.listdir("/proc/self/fd")) < 500  # looking at connections leaves no copies of them open
