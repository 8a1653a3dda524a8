"""Formulas as MathML when the pages are built: browsers show it by themselves, without scripts from elsewhere.

Markdown sees a word in place of each formula, which holds the formula's characters as hexadecimal digits. It would take
MathML at the beginning of a line for a block, and the bars in a formula for the borders of a table's cells.
"""

from __future__ import annotations

import re
from typing import Any

from latex2mathml.converter import convert

__all__ = ["hide_formulas", "on_page_content", "on_page_markdown"]


def _word(formula: str, display: bool) -> str:
    return f"formula{'block' if display else 'inline'}{formula.strip().encode().hex()}end"


def hide_formulas(markdown: str) -> str:
    """Put a word in place of every ``$...$`` and ``$$...$$`` outside of blocks of code."""
    parts = re.split(r"(```.*?```)", markdown, flags=re.DOTALL)
    for i, part in enumerate(parts):
        if not part.startswith("```"):
            part = re.sub(r"\$\$(.+?)\$\$", lambda m: f"\n{_word(m[1], True)}\n", part, flags=re.DOTALL)
            parts[i] = re.sub(r"(?<![\w`$])\$([^$`\n]+)\$(?![\w`])", lambda m: _word(m[1], False), part)
    return "".join(parts)


def _mathml(match: re.Match[str]) -> str:
    formula = bytes.fromhex(match[2]).decode()
    if match[1] == "inline":
        return convert(formula)
    # The converter knows the environment by its older name, and writes attributes that browsers ignore: see extra.css.
    mathml = convert(formula.replace("{aligned}", "{align*}"), display="block")
    if "{aligned}" in formula:
        mathml = mathml.replace("<mtable", '<mtable class="aligned"', 1)
    return f'<span class="formula">{mathml}</span>'


def on_page_markdown(markdown: str, **_: Any) -> str:
    """mkdocs calls this with each page's text."""
    return hide_formulas(markdown)


def on_page_content(html: str, **_: Any) -> str:
    """And this with the HTML that became of it."""
    return re.sub(r"formula(block|inline)([0-9a-f]+)end", _mathml, html)
