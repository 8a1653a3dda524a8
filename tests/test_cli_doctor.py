"""``offbeat doctor``: what it finds, what it says to do, and its exit code."""

from __future__ import annotations

import json
import shutil
import socket
from collections import namedtuple
from pathlib import Path

import pytest
import torch

import offbeat

pytest.importorskip("typer")
from typer.testing import CliRunner

from offbeat.cli import doctor_checks
from offbeat.cli.app import app
from offbeat.cli.doctor_checks import CHECKS, Finding, run_checks

PARTS = [
    "Python", "torch", "compiler", "kernels' cache", "address reader", "Triton", "gloo", "interface", "NCCL",
    "lighthouse", "disk", "frameworks",
]  # fmt: skip


def run(*words):
    return CliRunner().invoke(app, ["doctor", *words], prog_name="offbeat")


@pytest.fixture
def findings(monkeypatch):
    """Replaces the checks by some with these results."""

    def use(*found):
        monkeypatch.setattr("offbeat.cli.doctor.run_checks", lambda: list(found))

    return use


def test_every_part_has_a_line():
    done = run("--json")
    found = json.loads(done.stdout)
    assert [check["name"] for check in found["checks"]] == PARTS == list(CHECKS)
    assert found["offbeat"] == offbeat.__version__
    failed = [check for check in found["checks"] if check["status"] == "FAIL"]
    assert (done.exit_code, found["ok"]) == (int(bool(failed)), not failed)
    by_name = {check["name"]: check for check in found["checks"]}
    assert by_name["torch"]["said"].startswith(torch.__version__)
    assert by_name["gloo"]["status"] == "OK"
    for check in found["checks"]:
        assert check["fix"] or check["status"] == "OK", check


def test_lines_are_plain_and_have_the_fix(findings):
    findings(Finding("one", "OK", "there"), Finding("longer", "WARN", "slow [x]", "install y"))
    done = run()
    assert done.exit_code == 0
    assert done.stdout == "OK    one     there\nWARN  longer  slow [x] -> install y\n"


def test_a_failure_is_an_exit_code(findings):
    findings(Finding("one", "FAIL", "gone", "mend it"))
    assert run().exit_code == 1
    done = run("--json")
    assert done.exit_code == 1
    assert json.loads(done.stdout)["ok"] is False


def test_a_check_that_raises_is_a_line_and_stops_no_other():
    def breaks():
        raise OSError("no such thing\nand more")

    broken, fine = run_checks({"a": breaks, "b": lambda: Finding("b", "OK", "")})
    assert (broken.name, broken.status, broken.said) == ("a", "FAIL", "OSError: no such thing")
    assert fine.status == "OK"


def test_an_interface_that_is_not_here_fails(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth77")
    found = doctor_checks.check_interface()
    assert found.status == "FAIL"
    assert "eth77" in found.said
    assert "lo" in found.fix
    assert doctor_checks.check_gloo().status == "FAIL"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert doctor_checks.check_interface() == Finding("interface", "OK", "lo (127.0.0.1)")


@pytest.mark.parametrize(
    ("address", "here", "status", "words"),
    [
        ("10.0.0.5", {"lo": "127.0.0.1", "eth0": "10.0.0.5"}, "OK", "eth0 (10.0.0.5)"),
        ("127.0.0.1", {"lo": "127.0.0.1", "eth0": "10.0.0.5"}, "WARN", "GLOO_SOCKET_IFNAME to one of: eth0"),
        ("127.0.1.1", {"lo": "127.0.0.1"}, "OK", "lo (127.0.1.1)"),
        ("10.9.9.9", {"lo": "127.0.0.1", "eth0": "10.0.0.5"}, "WARN", "10.9.9.9, which no interface here has"),
        (None, {"lo": "127.0.0.1"}, "WARN", "has no address"),
    ],
)
def test_the_interface_is_the_one_of_the_hosts_name(address, here, status, words, monkeypatch):
    def resolve(name):
        if address is None:
            raise socket.gaierror("unknown")
        return address

    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(socket, "gethostbyname", resolve)
    monkeypatch.setattr(doctor_checks, "_addresses", lambda: here)
    found = doctor_checks.check_interface()
    assert found.status == status
    assert words in f"{found.said} -> {found.fix}"


@pytest.mark.parametrize(("free", "status"), [(5e9, "OK"), (5e8, "WARN"), (5e7, "FAIL")])
def test_a_full_disk_is_told(free, status, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(1, 1, int(free)))
    found = doctor_checks.check_disk()
    assert found.status == status
    assert bool(found.fix) == (status != "OK")


def test_without_a_compiler_steps_are_slower(monkeypatch):
    monkeypatch.setenv("OFFBEAT_NO_COMPILER", "1")
    for check in (doctor_checks.check_compiler, doctor_checks.check_reader):
        found = check()
        assert (found.status, found.said) == ("WARN", "OFFBEAT_NO_COMPILER is set")
        assert "unset OFFBEAT_NO_COMPILER" in found.fix


def test_a_cache_that_others_can_write_to_is_told(monkeypatch, tmp_path):
    monkeypatch.setenv("OFFBEAT_CACHE_DIR", str(tmp_path))
    tmp_path.chmod(0o700)
    (tmp_path / "kernel.so").write_bytes(bytes(2_000_000))
    assert doctor_checks.check_cache().said == f"{tmp_path}, 1 libraries, 2.0 MB"
    tmp_path.chmod(0o777)
    with pytest.warns(UserWarning, match="not trusted"):
        found = doctor_checks.check_cache()
    assert found.status == "WARN"
    assert "OFFBEAT_CACHE_DIR" in found.fix


def test_versions_outside_the_range_are_told(monkeypatch):
    asked = ["torch<2.16,>=2.11", "lightning<2.7,>=2.6.6 ; extra == 'integrations'"]
    monkeypatch.setattr(doctor_checks.importlib.metadata, "requires", lambda name: asked)
    versions = {"lightning": "2.5.0"}

    def version(name):
        if name not in versions:
            raise doctor_checks.importlib.metadata.PackageNotFoundError
        return versions[name]

    monkeypatch.setattr(doctor_checks.importlib.metadata, "version", version)
    found = doctor_checks.check_frameworks()
    assert found.status == "WARN"
    assert "lightning 2.5.0: supported is" in found.said
    versions["lightning"] = "2.6.7"
    assert doctor_checks.check_frameworks() == Finding("frameworks", "OK", "lightning 2.6.7")
    monkeypatch.setattr(torch, "__version__", "2.17.0+cpu")
    assert doctor_checks.check_torch().status == "WARN"


def test_doctor_runs_where_there_is_nothing_but_the_package():
    """No check imports what may not be installed when the command line is imported."""
    source = Path(doctor_checks.__file__).read_text()
    for name in ("torchft", "lightning", "accelerate", "transformers", "triton", "packaging"):
        assert f"\nimport {name}" not in source
        assert f"\nfrom {name}" not in source
