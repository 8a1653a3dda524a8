"""Writes docs/rules/*.md from the rules themselves. A test holds that the pages are up to date."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

from offbeat.optim import optimizers
from offbeat.rules.rule import FLAGS, Rule, Values

RULES = [getattr(optimizers, name).rule for name in optimizers.__all__]
FOLDER = Path(__file__).parent / "rules"


def formula_to_markdown(doc: str) -> str:
    """reStructuredText's ``.. math::`` block and roles as Markdown."""
    lines, result, inside = inspect.cleandoc(doc).splitlines(), [], False
    for line in lines:
        if line.startswith(".. math::"):
            result += ["$$", r"\begin{aligned}"]
            inside = True
            continue
        if inside and line and not line.startswith(" "):
            while result and not result[-1]:
                result.pop()
            result += [r"\end{aligned}", "$$", ""]
            inside = False
        result.append(line.removeprefix("    ") if inside else line)
    if inside:
        result += [r"\end{aligned}", "$$"]
    text = "\n".join(result).replace("``", "`")
    while ":math:`" in text:
        before, after = text.split(":math:`", 1)
        formula, rest = after.split("`", 1)
        text = f"{before}${formula}${rest}"
    return text.replace(":meth:`", "`")


def page(rule: Rule) -> str:
    """One rule's page."""
    cls = getattr(optimizers, rule.name)
    module = sys.modules[rule.update.__module__]
    title, _, body = formula_to_markdown(module.__doc__ or "").partition("\n")
    options = {**FLAGS, **{h.name: h.default for h in rule.hyper}, **rule.surface.fixed}
    everything = {**options, **{h.name: True for h in rule.hyper if h.default is False}, "momentum": 0.9}
    state = {slot.key: slot for slot in rule.slots(Values(**everything))}
    always = {slot.key for slot in rule.slots(Values(**options))}
    lines = [f"# {rule.name}", "", title, body, "", "```python"]
    lines += [
        f"offbeat.{rule.name}{inspect.signature(cls)}",
        "```",
        "",
        "| argument | default | meaning |",
        "|---|---|---|",
    ]
    lines += [f"| `{h.name}` | `{h.default}` | {h.doc} |" for h in rule.hyper]
    lines += ["", "## State", "", "| key | what it holds |", "|---|---|"]
    for key, slot in state.items():
        kind = "a number (0-d tensor)" if slot.scalar else "a tensor like the parameter"
        lines.append(f"| `{key}` | {kind}{'' if key in always else ', only with the option that needs it'} |")
    lines += ["", "## Limitations", ""]
    meaning = rule.sparse(Values(**options))
    momentum = any(h.name == "momentum" for h in rule.hyper)
    rows = "- Sparse gradients update the rows they touch, without weight decay"
    rows += "; with momentum they count as dense ones." if momentum else "."
    lines.append(rows if meaning == "rows" else "- Sparse gradients raise.")
    if "capturable" not in rule.surface.flags:
        lines.append("- No `capturable`, as in torch.optim.")
    return "\n".join(lines) + "\n"


def pages() -> dict[str, str]:
    """File names and texts."""
    return {f"{rule.name.lower()}.md": page(rule) for rule in RULES}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text)
