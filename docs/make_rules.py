"""Writes docs/rules/*.md from the rules themselves. A test holds that the pages are up to date."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

from offbeat.optim import LBFGS, optimizers
from offbeat.optim.signature import FLAG_DOCS
from offbeat.rules.rule import FLAGS, Rule, Slot, Values

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
    return text.replace(":meth:`", "`").replace(":class:`", "`")


def page(rule: Rule) -> str:
    """One rule's page."""
    cls = getattr(optimizers, rule.name)
    module = sys.modules[rule.update.__module__]
    title, _, body = formula_to_markdown(module.__doc__ or "").partition("\n")
    options = {**FLAGS, **{h.name: h.default for h in rule.hyper}, **rule.surface.fixed}
    everything = {**options, **{h.name: True for h in rule.hyper if h.default is False}, "momentum": 0.9}
    state = {slot.key: slot for slot in rule.slots(Values(**everything))}
    always = {slot.key for slot in rule.slots(Values(**options))}
    lines = [f"# {rule.name}", "", title, body, "", *_signature(cls), ""]
    lines += ["| argument | default | meaning |", "|---|---|---|"]
    docs = {h.name: h.doc for h in rule.hyper} | {"params": "parameters, named parameters, or groups of them"}
    for p in inspect.signature(cls).parameters.values():
        default = "" if p.default is p.empty else f"`{p.default}`"
        lines.append(f"| `{p.name}` | {default} | {docs.get(p.name) or FLAG_DOCS[p.name]} |")
    lines += ["", "## State", "", "| key | what it holds |", "|---|---|"]
    for key, slot in state.items():
        kind = "a number (0-d tensor)" if slot.scalar else "a tensor like the parameter"
        if slot.shape is not None:
            kind = "; ".join(_shapes(slot))
        lines.append(f"| `{key}` | {kind}{'' if key in always else ', only with the option that needs it'} |")
    lines += ["", "## Limitations", ""]
    if rule.matrix is not None:
        lines += _matrix_limits(rule)
    if rule.dense:
        return "\n".join([*lines, "- Dense gradients raise, as in torch.optim; use Adam for them."]) + "\n"
    meaning = rule.sparse(Values(**options))
    momentum = any(h.name == "momentum" for h in rule.hyper)
    rows = "- Sparse gradients update the rows they touch, without weight decay"
    rows += "; with momentum they count as dense ones." if momentum else "."
    lines.append(rows if meaning == "rows" else "- Sparse gradients raise.")
    if "capturable" not in rule.surface.flags:
        lines.append("- No `capturable`, as in torch.optim.")
    return "\n".join(lines) + "\n"


def _shapes(slot: Slot) -> list[str]:
    """The shapes of an entry, for parameters of one to three dimensions."""
    found = []
    for shape, word in (((5,), "vector of 5"), ((5, 7), "matrix of 5 × 7"), ((3, 5, 7), "stack of 3 × 5 × 7")):
        entry = slot.shape_for(shape)
        if entry is not None:
            found.append(f"{' × '.join(map(str, entry))} for a {word}")
    return found


def _matrix_limits(rule: Rule) -> list[str]:
    cut = "- Works on whole parameters: DTensors that are cut over ranks raise."
    if rule.matrix.cut:
        cut = "- Works on whole matrices: how several ranks share them is [a page of its own](../matrices.md)."
    if rule.matrix.pieces:
        cut = "- Parameters may be cut over ranks along one dimension (FSDP2, HSDP): [how](../matrices.md#adafactor)."
    return [
        cut,
        "- Complex parameters raise, as in torch.optim. No `differentiable` and no pure form.",
    ]


def _signature(cls: type) -> list[str]:
    """A block with the signature, without annotations, an argument a line. It is not code that runs."""
    lines, keyword_only = [], False
    for p in inspect.signature(cls).parameters.values():
        if p.kind is p.KEYWORD_ONLY and not keyword_only:
            lines.append("    *,")
            keyword_only = True
        lines.append(f"    {p.replace(annotation=p.empty)},")
    return ["```text", f"offbeat.{cls.__name__}(", *lines, ")", "```"]


def page_of_class(cls: type) -> str:
    """The page of an optimizer that is not made from a rule, from its docstrings."""
    module = sys.modules[cls.__module__]
    title, _, body = formula_to_markdown(module.__doc__ or "").partition("\n")
    doc = inspect.cleandoc(cls.__doc__ or "")
    text, _, rest = doc.partition("Args:\n")
    arguments, _, rest = rest.partition("Example:\n")
    example, _, limits = rest.partition("Limits: ")
    lines = [f"# {cls.__name__}", "", title, body, "", *_signature(cls), ""]
    lines += [formula_to_markdown(text).strip(), "", "| argument | meaning |", "|---|---|"]
    for entry in inspect.cleandoc("\n" + arguments).split("\n"):
        name, _, meaning = entry.partition(": ")
        lines.append(f"| `{name}` | {formula_to_markdown(meaning).removesuffix('.')} |")
    lines += ["", "```pycon", inspect.cleandoc("\n" + example).strip(), "```", "", "## Limitations", ""]
    sentences = [one.strip().removesuffix(".") for one in " ".join(limits.split()).split(". ")]
    lines += [f"- {one[0].upper()}{one[1:]}." for one in sentences]
    return "\n".join(lines) + "\n"


def pages() -> dict[str, str]:
    """File names and texts."""
    found = {f"{rule.name.lower()}.md": page(rule) for rule in RULES}
    return found | {"lbfgs.md": page_of_class(LBFGS)}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text)
