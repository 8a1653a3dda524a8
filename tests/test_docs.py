"""The documentation tells the truth: generated pages are fresh, examples run, every public name is documented."""

from __future__ import annotations

import importlib.util
import itertools
import re
from pathlib import Path

import pytest
import torch

import offbeat
from tests.blocks import blocks, run_pages
from tests.ranks import run_ranks

ROOT = Path(__file__).parent.parent

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def load_generator(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_rules_pages_are_what_the_generator_writes():
    pages = load_generator("make_rules").pages()
    assert {path.name for path in (ROOT / "docs" / "rules").glob("*.md")} == set(pages)
    for name, text in pages.items():
        assert (ROOT / "docs" / "rules" / name).read_text() == text, f"run python docs/make_rules.py ({name})"


def test_the_compatibility_table_is_made_from_the_tests():
    generator = load_generator("make_overlap")
    assert (ROOT / "docs" / "overlap.md").read_text() == generator.page(), "run python docs/make_overlap.py"


@pytest.mark.parametrize("name", [n for n in offbeat.__all__ if not n.startswith("__")])
def test_public_names_have_a_docstring(name):
    assert len((getattr(offbeat, name).__doc__ or "").strip()) > 20


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_range_of_torch_is_the_same_everywhere():
    """What the package asks for, what ``make compat`` tries, and what is promised."""
    low, end = re.search(r'"torch>=2\.(\d+),<2\.(\d+)"', (ROOT / "pyproject.toml").read_text()).groups()
    high = int(end) - 1
    assert f"TORCHES ?= 2.{low}.0 2.{high}." in (ROOT / "Makefile").read_text()
    for page in ("README.md", "docs/optimizers.md"):
        assert f"torch 2.{low} to 2.{high}" in (ROOT / page).read_text(), page


@pytest.mark.ranks
def test_every_block_of_code_runs():
    """In a program of two ranks, as most pages describe one; each page in a namespace of its own."""
    # The recipes for frameworks have a test of their own, test_integrations_page.py.
    pages = [page for page in PAGES if blocks(page) and page.name != "integrations.md"]
    for rank, problems in enumerate(run_ranks(run_pages, 2, pages)):
        assert not problems, f"rank {rank}:\n" + "\n".join(problems)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_blocks_say_what_they_are(page):
    """Only what is marked as Python is run: nothing escapes by a missing or a misspelt mark."""
    opening = re.findall(r"(?m)^ *```(\S*)(?:.*)\n(?:.*\n)*?^ *```$", page.read_text())
    assert set(opening) <= {"python", "pycon", "bash", "text"}, set(opening)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_columns_of_tables_have_headings(page):
    lines = page.read_text().splitlines()
    for above, line in itertools.pairwise(lines):
        if re.fullmatch(r"\|[-|: ]+\|", line):
            assert all(cell.strip() for cell in above.strip().strip("|").split("|")), above


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the page speaks of torch 2.13")
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adamax", "Adadelta", "RMSprop", "Rprop"])
def test_the_foreach_tier_has_the_bits_of_torch_that_the_page_promises(name):
    def train(optim_class, **options):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(37, 53), torch.nn.Tanh(), torch.nn.Linear(53, 19))
        momentum = {"momentum": 0.9} if name == "SGD" else {}
        optimizer = optim_class(model.parameters(), lr=1e-2, **momentum, **options)
        for _ in range(20):
            model(torch.randn(8, 37)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert torch.equal(train(getattr(torch.optim, name)), train(getattr(offbeat, name), foreach=True))
