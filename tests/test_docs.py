"""The documentation tells the truth: generated pages are fresh, examples run, every public name is documented."""

from __future__ import annotations

import importlib.util
import itertools
import re
from pathlib import Path

import pytest
import torch

import offbeat
from offbeat.wire import elastic
from tests.blocks import blocks, names, run_page, run_pages
from tests.fake_lighthouse import FakeLighthouse
from tests.ranks import run_ranks

ROOT = Path(__file__).parent.parent

#: Pages whose programs are replicas of their own.
ELASTIC = ("elastic.md", "across-sites.md")

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
    # The recipes for frameworks have a test of their own, test_integrations_page.py, and elastic replicas one below.
    elsewhere = ("integrations.md", *ELASTIC)
    pages = [page for page in PAGES if blocks(page) and page.name not in elsewhere]
    for rank, problems in enumerate(run_ranks(run_pages, 2, pages)):
        assert not problems, f"rank {rank}:\n" + "\n".join(problems)


@pytest.mark.parametrize("name", ["docs/elastic.md", "docs/guides/across-sites.md"])
def test_pages_about_elastic_replicas_run(name, monkeypatch):
    """As one replica, with a lighthouse in this process: their programs have no process group."""
    monkeypatch.setattr(elastic, "TorchftLighthouse", FakeLighthouse())
    monkeypatch.setenv("LIGHTHOUSE", "127.0.0.1:1")
    problem = run_page(ROOT / name)
    assert problem is None, problem


class _Watched:
    """A loss that notes which parameters its backward pass has moved."""

    def __init__(self, loss, params, moved):
        self.loss, self.params, self.moved = loss, params, moved

    def backward(self):
        before = [p.detach().clone() for p in self.params]
        self.loss.backward()
        self.moved.append([not torch.equal(p.detach(), old) for p, old in zip(self.params, before, strict=True)])


def _run_front_page(rank, world):
    ((_, _, code),) = blocks(ROOT / "README.md")
    namespace, moved = names(), []
    loss, params = namespace["loss"], list(namespace["model"].parameters())
    namespace["loss"] = lambda model, batch: _Watched(loss(model, batch), params, moved)
    exec(compile(code, "README.md", "exec"), namespace)
    return moved, namespace["optimizer"].syncs, namespace["optimizer"].agreed, [p.detach() for p in params]


@pytest.mark.ranks
def test_the_example_of_the_front_page_does_what_its_comments_say():
    """All parameters move during backward, and ranks that have trained by themselves end with the same."""
    (moved, syncs, agreed, params), (_, _, _, others) = run_ranks(_run_front_page, 2)
    assert len(moved) == 4
    assert all(all(at_step) for at_step in moved)
    assert syncs >= 2  # after the first step, and at the end
    assert agreed
    assert all(torch.equal(a, b) for a, b in zip(params, others, strict=True))


def words(page):
    """The number of words of a page, without its blocks of code."""
    text = re.sub(r"(?ms)^ *```.*?^ *```$", "", (ROOT / page).read_text())
    return sum(bool(re.search("[A-Za-z]", word)) for word in text.split())


FEATURES = [
    "replicas.md",
    "diloco.md",
    "levels.md",
    "elastic.md",
    "quality.md",
    "reports.md",
    "simulation.md",
    "averagers.md",
    "guarantees.md",
    "compared.md",
    "optimizers.md",
    "precision.md",
    "chain.md",
    "functional.md",
    "checkpoints.md",
    "codecs.md",
    "custom_codec.md",
    "guides/across-sites.md",
]


@pytest.mark.parametrize(("page", "most"), [("README.md", 600), *((f"docs/{name}", 1200) for name in FEATURES)])
def test_pages_are_short_enough_to_be_read(page, most):
    assert words(page) <= most


def test_a_diff_is_run_as_what_it_leads_to(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```diff\n+import math\n x = 1\n-y = x\n+y = math.sin(\n+    x)\n```\n")
    ((line, language, code),) = blocks(page)
    assert (line, language, code) == (2, "python", "import math\nx = 1\n\ny = math.sin(\n    x)\n")


def test_the_files_that_the_page_on_the_inside_names_exist():
    """And each walk goes through at most eight of them, which have what the page says they have."""
    text = (ROOT / "docs" / "inside.md").read_text()
    source = ROOT / "src" / "offbeat"
    for name in re.findall(r"`([a-z_]+/[a-z_]+\.py)`", text):
        assert (source / name).exists(), f"docs/inside.md names {name}"
    walks = re.findall(r"(?m)^(\d)\. \*\*`([^`]+)`\*\*((?:.*\n)(?:   .*\n)*)", text)
    assert max(int(number) for number, _, _ in walks) <= 8
    for _, name, said in walks:
        code = (source / name).read_text()
        # What is called in that file, by its last part; names that the next sentence finds elsewhere have a path.
        for called in re.findall(r"`(?:\w+\.)?(\w+)(?:\(\))?`", said):
            assert re.search(rf"\b{called}\b", code), f"{name} has no {called}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_blocks_say_what_they_are(page):
    """Only what is marked as Python is run: nothing escapes by a missing or a misspelt mark."""
    opening = re.findall(r"(?m)^ *```(\S*)(?:.*)\n(?:.*\n)*?^ *```$", page.read_text())
    assert set(opening) <= {"python", "pycon", "bash", "text", "diff"}, set(opening)


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
