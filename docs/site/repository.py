"""What the site shows of the repository beside docs/: pages of other folders, and the files that pages link to.

A link is written once, as it leads somewhere in the repository. For the site it is led to the same file's place there:
a page of docs/, one of OUTSIDE, or a page under `source/` that shows the file. So the site links to no forge, and a
copy of it on a disk is whole. Read by mkdocs as a hook (mkdocs.yml).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from mkdocs.structure.files import File, Files

ROOT: Final = Path(__file__).parents[2]
DOCS: Final = ROOT / "docs"
OUTSIDE: Final = (
    "CHANGELOG.md",
    "CODE_OF_CONDUCT.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "benchmarks/**/*.md",
    "examples/*/README.md",
    "examples/*.ipynb",
)
SOURCE: Final = "source"
"""Folder of the pages that show files."""
FENCED: Final = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)
LINK: Final = re.compile(r"\]\((?![a-z]+:|#)([^)#\s]+)(#[^)\s]+)?\)")
NAMELESS: Final = re.compile(r"\[([^\]]+\.(?:md|ipynb))\]\(\1\)")
"""A link that a reader of the repository sees as a path; one of the site sees the page's title."""
TITLE: Final = re.compile(r"^# (.+)$", re.MULTILINE)
TWO_WORDS: Final = re.compile(r"^```sh cluster$", re.MULTILINE)
"""A block that the tests run on a cluster; to a highlighter it is a shell's like any other."""


def outside() -> list[Path]:
    """Pages that are not under docs/, as they lie."""
    return sorted(path for pattern in OUTSIDE for path in ROOT.glob(pattern))


def shown(target: Path) -> Path:
    """What a link shows: the file itself; of a folder its README, or what its package says of itself."""
    if not target.is_dir():
        return target
    return next(path for name in ("README.md", "__init__.py", "") if (path := target / name).exists())


def place(target: Path) -> str:
    """Where the site has a file of the repository."""
    target = shown(target)
    if target.is_relative_to(DOCS):
        return str(target.relative_to(DOCS))
    name = str(target.relative_to(ROOT))
    if target in outside():
        return str(Path(name).with_suffix(".md"))
    return "README.md" if name == "README.md" else f"{SOURCE}/{name}.md"


def text_of(path: Path) -> str:
    """A page as Markdown; of a notebook its texts and its code."""
    if path.suffix != ".ipynb":
        return path.read_text()
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(path.read_text())["cells"]]
    return "\n\n".join(text if kind == "markdown" else f"```python\n{text}\n```" for kind, text in cells)


def linked(folder: Path, markdown: str) -> Iterator[Path]:
    """Files and folders that a page in this folder links to."""
    for text in FENCED.split(markdown)[::2]:
        yield from ((folder / match[1]).resolve() for match in LINK.finditer(text))


def page_of(target: Path) -> str:
    """A page that shows a file, which searches pass by."""
    name = target.relative_to(ROOT)
    listed = f"title: {name}\nsearch:\n  exclude: true"
    return f"---\n{listed}\n---\n\n# {name}\n\n````{target.suffix.lstrip('.')}\n{target.read_text()}\n````\n"


def on_files(files: Files, *, config: Any) -> Files:
    """Adds the pages outside docs/, what they show, and the files that any page links to."""
    for path in outside():
        files.append(File.generated(config, place(path), content=text_of(path)))
    pages = {path: text_of(path) for path in [*outside(), *DOCS.rglob("*.md")]}
    targets = {shown(target) for path, text in pages.items() for target in linked(path.parent, text)}
    for target in sorted(targets):
        if place(target).startswith(f"{SOURCE}/"):
            files.append(File.generated(config, place(target), content=page_of(target)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Leads each link from where its page lies on the site to where the site has its target."""
    here = Path(page.file.src_uri)
    origin = (ROOT if page.file.generated_by else DOCS) / here

    def lead(match: re.Match[str]) -> str:
        target = (origin.parent / match[1]).resolve()
        return f"]({os.path.relpath(place(target), here.parent)}{match[2] or ''})"

    def name(match: re.Match[str]) -> str:
        title = TITLE.search(text_of((origin.parent / match[1]).resolve()))
        return f"[{title[1]}]({match[1]})" if title else match[0]

    parts = FENCED.split(markdown)
    parts[::2] = [LINK.sub(lead, NAMELESS.sub(name, text)) for text in parts[::2]]
    return TWO_WORDS.sub("```sh", "".join(parts))
