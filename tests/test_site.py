"""The documentation site builds without a warning, and what it promises is on it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import offbeat

pytest.importorskip("mkdocstrings")
pytest.importorskip("material")

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site as ``make docs`` builds it: any broken link, anchor or reference is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def pages(site):
    return sorted(path for path in site.rglob("index.html") if "assets" not in path.parts)


@pytest.mark.xdist_group("site")
def test_every_result_and_example_is_on_the_site(site):
    for path in (ROOT / "benchmarks" / "results").glob("*.md"):
        assert (site / "results" / path.stem / "index.html").exists(), path
    for path in (ROOT / "examples").glob("*.py"):
        assert (site / "examples" / path.stem / "index.html").exists(), path
    assert "Unreleased" in (site / "changelog" / "index.html").read_text()


@pytest.mark.xdist_group("site")
def test_every_public_name_is_in_the_reference(site):
    reference = "".join(path.read_text() for path in (site / "reference").rglob("index.html"))
    same = {"post_localSGD_hook"}  # torch's spelling of post_local_sgd_hook
    for name in set(offbeat.__all__) - same - {"__version__"}:
        # The package offbeat.overlap has a function of the same name.
        documented = (
            re.search(rf'id="offbeat\.({name}\.)?{name}"', reference)
            or (site / "rules" / name.lower() / "index.html").exists()
        )
        assert documented, f"{name} is not in docs/reference"


@pytest.mark.xdist_group("site")
def test_a_search_finds_features_and_leaves_results_and_scripts_out(site):
    found = {
        entry["location"].split("#")[0] for entry in json.loads((site / "search/search_index.json").read_text())["docs"]
    }
    assert {"replicas/", "overlap/", "guides/across-sites/"} <= found
    assert not any(location.startswith(("results/", "examples/", "changelog/")) for location in found)


@pytest.mark.xdist_group("site")
def test_formulas_are_mathml_and_nothing_comes_from_elsewhere(site):
    assert "<math" in (site / "rules" / "adam" / "index.html").read_text()
    for page in pages(site):
        text = page.read_text()
        assert not re.search(r"formula(block|inline)[0-9a-f]+end", text), page
        if "reference" in page.parts:
            assert ":math:" not in text, page
            assert ":class:" not in text, page
        assert not re.search(r'<(script|link|img)[^>]+(src|href)="https?:', text), page
