"""Docstrings of the public names: all parameters with their meaning, an example that runs, in one style.

The API reference shows them. CONTRIBUTING.md says how they are written.
"""

from __future__ import annotations

import inspect
import re

import pytest
import torch
from torch.distributed.algorithms.join import Joinable

import offbeat

NAMES = [name for name in offbeat.__all__ if not name.startswith("__")]
#: Made by other functions, so that nobody calls their constructor.
HANDLES = {"FunctionalOptimizer", "Overlap", "PureOptimizer"}
RESULTS = {"Choice", "RoundReport", "Split"}  # the function that makes them has the example
HEADINGS = ("Args", "Attributes", "Example", "Raises", "Returns", "Yields")


def is_error(thing):
    return isinstance(thing, type) and issubclass(thing, BaseException)


def sections(doc):
    """The text of each section by its heading, without the indentation."""
    found, heading = {"": []}, ""
    for line in inspect.cleandoc(doc).splitlines():
        if (match := re.fullmatch(r"(\w+):", line)) is not None:
            heading = match[1]
            assert heading not in found, f"two sections {heading!r}"
            found[heading] = []
        else:
            heading = heading if line.startswith(" ") or not line else ""
            found[heading].append(line.removeprefix("    ") if heading else line)
    return {name: "\n".join(lines).strip() for name, lines in found.items()}


def entries(section):
    """The names in a section, with their text; further lines of an entry are indented."""
    found = {}
    for entry in re.split(r"\n(?=\S)", section):
        match = re.match(r"(\w+): (?=\S)", entry)
        assert match is not None, f"not 'name: meaning': {entry!r}"
        found[match[1]] = entry[match.end() :]
    return found


def parameters(thing):
    kept = [p for p in inspect.signature(thing).parameters.values() if p.name not in ("self", "cls")]
    return {p.name for p in kept if not p.name.startswith("_")}


def public_methods():
    for name in NAMES:
        thing = getattr(offbeat, name)
        if isinstance(thing, type):
            for key, value in vars(thing).items():
                function = getattr(value, "__func__", value)
                inherited = hasattr(torch.optim.Optimizer, key) or hasattr(
                    Joinable, key
                )  # torch documents the arguments
                own = inspect.isfunction(function) and function.__name__ == key  # no default of a dataclass
                if own and not inherited and not key.startswith("_"):
                    yield pytest.param(function, id=f"{name}.{key}")


def check(thing, doc):
    found = sections(doc)
    unknown = {heading for heading in found if heading} - set(HEADINGS)
    assert not unknown, f"headings {unknown}"
    summary = found[""].split("\n\n")[0]
    assert summary.endswith((".", ":")), f"the first paragraph is not a sentence: {summary!r}"
    described = set(entries(found["Args"])) if "Args" in found else set()
    assert described == parameters(thing)
    for heading in ("Attributes", "Raises"):
        if heading in found:
            entries(found[heading])


@pytest.mark.parametrize("name", [name for name in NAMES if not is_error(getattr(offbeat, name))])
def test_a_public_name_has_its_parameters_and_an_example(name):
    thing = getattr(offbeat, name)
    if name in RESULTS:
        assert len(thing.__doc__.split()) > 5
        return
    if name not in HANDLES:
        check(thing, thing.__doc__)
    assert ">>>" in sections(thing.__doc__).get("Example", ""), "there is no example that runs"


@pytest.mark.parametrize("name", [name for name in NAMES if is_error(getattr(offbeat, name))])
def test_an_error_says_what_it_means(name):
    assert len(getattr(offbeat, name).__doc__.split()) > 5


@pytest.mark.parametrize("function", public_methods())
def test_a_public_method_has_its_parameters(function):
    doc = inspect.getdoc(function)
    assert doc
    described = set(entries(sections(doc)["Args"])) if "Args" in sections(doc) else set()
    missing = {name for name in parameters(function) - described if name not in re.findall(r"\w+", doc)}
    assert not missing or re.search(r"[Ss]ee :(class|meth|func):", doc)  # where they are described
    assert described <= parameters(function)
