"""Docstrings for the API reference: what Sphinx writes as roles becomes Markdown when mkdocstrings reads the source."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import griffe

__all__ = ["Roles", "to_markdown"]

HERE = Path(__file__).parent


def _load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_hide_formulas = _load("mathml").hide_formulas
# The names that have an entry in the reference, and so can be linked to.
_documented = {name for page in HERE.glob("reference/*.md") for name in re.findall(r"(?m)^::: (\S+)", page.read_text())}


def _reference(match: re.Match[str]) -> str:
    name = match[1].lstrip("~")
    full = name if name.startswith("offbeat.") else f"offbeat.{name}"
    full = {"offbeat.overlap": "offbeat.overlap.overlap"}.get(full, full)  # a package and a function of one name
    return f"[`{name}`][{full}]" if full in _documented else f"`{name}`"


def to_markdown(text: str) -> str:
    """One docstring."""
    text = re.sub(r"\.\. math::(.*\n(?:[ \t]+.*\n?|\n)*)", lambda m: f"$$\n{_aligned(m[1])}\n$$\n\n", text)
    text = re.sub(r":math:`([^`]+)`", lambda m: f"${' '.join(m[1].split())}$", text)
    text = re.sub(r":(?:class|func|meth|mod|attr|data|exc):`([^`]+)`", _reference, text)
    text = re.sub(r"(?m)^Examples?::?[ \t]*\n+((?:[ \t]+.*\n?|\n)+)", _example, text)
    text = re.sub(r"(?m)^Limits: ", "**Limits.** ", text)
    return str(_hide_formulas(text))


def _example(match: re.Match[str]) -> str:
    """A block of code, or lines that an interpreter shows, as a section of Google's style."""
    lines = match[1].rstrip().splitlines()
    if ">>>" not in match[1]:
        lines = ["    ```python", *lines, "    ```"]
    return "\n".join(["Examples:", *lines, "", ""])


def _aligned(block: str) -> str:
    lines = "\n".join(line.strip() for line in block.strip().splitlines())
    return f"\\begin{{aligned}}\n{lines}\n\\end{{aligned}}" if "&" in lines else lines


class Roles(griffe.Extension):
    """griffe calls this for everything that it reads."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Convert the docstring, if there is one."""
        if obj.docstring is not None:
            obj.docstring.value = to_markdown(obj.docstring.value)
