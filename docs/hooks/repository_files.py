"""MkDocs hook: adds the files outside docs/ that pages link to, so that the site is complete without the repository."""

from __future__ import annotations

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)#\s]+)")
FOLDER = "repository/"  # of the added files in the site


def get_source(uri: str) -> str:
    """Return the path of a file of the site, relative to docs/."""
    return "../" + uri.removeprefix(FOLDER) if uri.startswith(FOLDER) else uri


def resolve_link(uri: str, target: str) -> str:
    """Return the path in the site of the target of a page's link."""
    source = os.path.relpath(Path(get_source(uri)).parent / target, ".").removeprefix("../docs/")
    return FOLDER + source.removeprefix("../") if source.startswith("../") else source


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the linked files, and those that their pages link to."""
    docs = Path(config.docs_dir)
    pending = [file.src_uri for file in files.documentation_pages()]
    while pending:
        page = pending.pop()
        for target in LINK.findall((docs / get_source(page)).read_text(encoding="utf-8")):
            uri = resolve_link(page, target)
            path = (docs / get_source(uri)).resolve()
            if uri.startswith(FOLDER) and files.get_file_from_path(uri) is None and path.is_file():
                files.append(File.generated(config, uri, abs_src_path=str(path)))
                if uri.endswith(".md"):
                    pending.append(uri)
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Point the links of a page at the added files."""
    uri = page.file.src_uri
    return LINK.sub(lambda match: os.path.relpath(resolve_link(uri, match[1]), Path(uri).parent), markdown)
