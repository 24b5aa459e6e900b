"""Hooks of the documentation site (mkdocs.yml): pages from outside `docs/`, and links that leave the site.

CONTRIBUTING.md and CHANGELOG.md become pages. A link to any other file of the repository becomes its path as code:
the site is also read where there is no repository.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent.parent
OUTSIDE = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#\s:]+)(#[^)\s]*)?\)")
_FENCE = re.compile(r"^(```|~~~)", flags=re.MULTILINE)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that lie outside of the folder."""
    for source, name in OUTSIDE.items():
        files.append(File.generated(config, name, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point links at pages of the site, or name the file."""
    uri = page.file.src_uri
    here = {name: source for source, name in OUTSIDE.items()}.get(uri, posixpath.join("docs", uri))
    folder = posixpath.dirname(here)

    def changed(found: re.Match[str]) -> str:
        text, link, anchor = found.group(1), found.group(2), found.group(3) or ""
        path = posixpath.normpath(posixpath.join(folder, link))
        target = OUTSIDE.get(path, path.removeprefix("docs/") if path.startswith("docs/") else "")
        if path == "README.md":
            target = "index.md"
        if not target or (ROOT / path).is_dir():
            return text if path in text else f"{text} (`{path}`)"
        return f"[{text}]({posixpath.relpath(target, posixpath.dirname(uri) or '.')}{anchor})"

    pieces = _FENCE.split(markdown)  # links within fenced code stay
    text, is_code = [], False
    for piece in pieces:
        if piece in ("```", "~~~"):
            is_code = not is_code
            text.append(piece)
        else:
            text.append(piece if is_code else _LINK.sub(changed, piece))
    return "".join(text)
