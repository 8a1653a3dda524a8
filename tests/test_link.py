"""A link that is really cut: two hosts in network namespaces. Needs root and iproute2; skipped elsewhere."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest

from benchmarks.link import hosts

pytestmark = [pytest.mark.ranks, pytest.mark.xdist_group("link"), pytest.mark.timeout(170)]

STEPS, CUT = 60, 12


def namespaces_work() -> bool:
    """Whether this user may make hosts; a container may forbid it even to root."""
    if not hasattr(os, "geteuid") or os.geteuid() or not (shutil.which("ip") and shutil.which("tc")):
        return False
    try:
        with hosts("100mbit"):
            return True
    except (subprocess.CalledProcessError, OSError):
        return False


def main(rank: int, address: str, folder: Path) -> None:
    """Trains through the cut; prints how many rounds failed, and the parameters at the end."""
    import torch
    import torch.distributed as dist

    import offbeat
    from tests.harness import adamw, batch, flat, loss, make

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://{address}:29517", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    model, other = make(), make()
    local = offbeat.LocalSGD(adamw(model.parameters()), model, every=4, subgroup=None, deadline=2.0)
    diloco = offbeat.DiLoCo(
        adamw(other.parameters()), other, every=4, delay=2, subgroup=None, codec="int8", level={"deadline": 2.0}
    )
    failed = [0, 0]
    for step in range(STEPS):
        if step == CUT:
            (folder / f"ready{rank}").touch()
            while not (folder / "cut").exists():
                time.sleep(0.05)
        for i, (module, optimizer) in enumerate(((model, local), (other, diloco))):
            loss(module, batch(step, rank)).backward()
            try:
                optimizer.step()
            except offbeat.ExchangeError:
                failed[i] += 1
            optimizer.zero_grad()
        if failed[0]:
            time.sleep(0.1)  # steps take a while
    local.sync()
    diloco.sync()
    print(json.dumps([failed, flat(model).tolist(), flat(other).tolist()]), flush=True)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.skipif(not namespaces_work(), reason="needs root, iproute2 and network namespaces")
def test_a_link_that_is_cut_and_comes_back(tmp_path):
    with hosts("100mbit") as ends:
        workers = []
        for rank, host in enumerate(ends):
            command = host.command(sys.executable, "-m", "tests.test_link", str(rank), ends[0].address, str(tmp_path))
            settings = {**os.environ, "GLOO_SOCKET_IFNAME": host.interface, "OMP_NUM_THREADS": "1"}
            workers.append(subprocess.Popen(command, env=settings, stdout=subprocess.PIPE, text=True))
        try:
            end = time.monotonic() + 60
            while not all((tmp_path / f"ready{rank}").exists() for rank in range(2)):
                assert time.monotonic() < end, "the processes did not start"
                assert all(worker.poll() is None for worker in workers)
                time.sleep(0.05)
            link = ["ip", "-n", ends[1].namespace, "link", "set", ends[1].interface]
            subprocess.run([*link, "down"], check=True)
            (tmp_path / "cut").touch()
            time.sleep(5)
            subprocess.run([*link, "up"], check=True)
            answers = [json.loads(worker.communicate(timeout=90)[0].splitlines()[-1]) for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
    for failed, *_ in answers:
        assert min(failed) >= 1, failed  # the cut was seen
        assert max(failed) <= 8, failed  # and overcome
    assert answers[0][1:] == answers[1][1:]


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
