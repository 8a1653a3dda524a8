"""Formulas as MathML when the pages are built: browsers show it by themselves, without scripts from elsewhere."""

from __future__ import annotations

import re
from typing import Any

from latex2mathml.converter import convert

__all__ = ["on_page_markdown"]


def _display(match: re.Match[str]) -> str:
    # The converter knows the environment by its older name.
    formula = match.group(1).strip().replace("{aligned}", "{align*}")
    return "\n" + convert(formula, display="block") + "\n"


def _inline(match: re.Match[str]) -> str:
    return convert(match.group(1))


def on_page_markdown(markdown: str, **_: Any) -> str:
    """mkdocs calls this with each page's text."""
    parts = re.split(r"(```.*?```)", markdown, flags=re.DOTALL)
    for i, part in enumerate(parts):
        if not part.startswith("```"):
            part = re.sub(r"\$\$(.+?)\$\$", _display, part, flags=re.DOTALL)
            parts[i] = re.sub(r"(?<![\w`$])\$([^$`\n]+)\$(?![\w`])", _inline, part)
    return "".join(parts)
