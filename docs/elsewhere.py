"""Pages of the site that live elsewhere in the repository: the changelog, results of benchmarks, examples.

Links are written as they work in the repository, ``../benchmarks/results/step-cpu.md``; here they become links
that work on the site.
"""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

__all__ = ["example_page", "on_files", "on_page_markdown", "site_path"]

ROOT = Path(__file__).parent.parent
PAGES = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}


def example_page(path: Path) -> str:
    """A script as a page: its docstring, how to start it, and all of its text."""
    text = path.read_text()
    title, _, rest = (ast.get_docstring(ast.parse(text)) or "").partition("\n")
    rest = re.sub(r"(?m)^(    .+\n?)+", lambda m: f"```bash\n{re.sub('(?m)^    ', '', m[0]).rstrip()}\n```\n", rest)
    code = text.split('"""', 2)[2].strip()
    return f"# {path.name}\n\n{title}\n{rest}\n\n```python\n{code}\n```\n"


def site_path(path: str) -> str | None:
    """Where a file of the repository is on the site; None if it is not there."""
    if path in PAGES:
        return PAGES[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path.startswith("benchmarks/results/"):
        return path.removeprefix("benchmarks/")
    if path.startswith("examples/") and path.endswith(".py"):
        return path.removesuffix(".py") + ".md"
    return None


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """mkdocs calls this with the files of docs/."""
    found = [*(ROOT / name for name in PAGES), *sorted((ROOT / "benchmarks" / "results").iterdir())]
    for path in found:
        uri = site_path(path.relative_to(ROOT).as_posix())
        assert uri is not None
        files.append(File.generated(config, uri, abs_src_path=str(path)))
    for path in sorted((ROOT / "examples").glob("*.py")):
        files.append(File.generated(config, f"examples/{path.stem}.md", content=example_page(path)))
    return files


def _origin(uri: str) -> str:
    """The other way: which file of the repository a page of the site is made from."""
    for path, name in PAGES.items():
        if name == uri:
            return path
    return f"benchmarks/{uri}" if uri.startswith("results/") else f"docs/{uri}"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links to files of the repository into links to pages of the site."""
    here = _origin(page.file.src_uri)
    if page.file.src_uri.startswith(("results/", "examples/", "changelog")):
        page.meta["search"] = {"exclude": True}  # a search finds features and guides

    def relink(match: re.Match[str]) -> str:
        target, anchor = match[1], match[2] or ""
        to = site_path(posixpath.normpath(posixpath.join(posixpath.dirname(here), target)))
        if to is None:
            raise ValueError(f"{here} links to {target}, which is not on the site")
        return f"]({posixpath.relpath(to, posixpath.dirname(page.file.src_uri))}{anchor})"

    parts = re.split(r"(```.*?```)", markdown, flags=re.DOTALL)
    return "".join(
        part if part.startswith("```") else re.sub(r"\]\(([^)#:]+)(#[^)]*)?\)", relink, part) for part in parts
    )
