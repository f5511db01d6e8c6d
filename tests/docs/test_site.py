"""The documentation site: navigation, links and anchors of its pages. Fast tier: the pages are read, not rendered.

The build of the site is in the long tier.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from markdown.extensions.toc import slugify

from tests.pipelines.command import ROOT

DOCS = ROOT / "docs"
SECTIONS = ("tutorials", "how-to", "reference", "explanation")
PAGES = sorted(DOCS.rglob("*.md"))
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)\s]+)\)")


def load_configuration() -> dict[str, Any]:
    """Return mkdocs.yml; the settings have no tags of Python."""
    settings: dict[str, Any] = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    return settings


def list_navigation(entry: Any) -> Iterator[str]:
    """Yield the pages of an entry of the navigation."""
    if isinstance(entry, str):
        yield entry
    for child in entry if isinstance(entry, list) else entry.values() if isinstance(entry, dict) else ():
        yield from list_navigation(child)


def list_anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, numbered as in the site if two are equal."""
    anchors: set[str] = set()
    for heading in re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        anchor = slug = slugify(text, "-")
        number = 0
        while anchor in anchors:
            number += 1
            anchor = f"{slug}_{number}"
        anchors.add(anchor)
    return anchors


def test_every_page_is_in_the_navigation_once() -> None:
    listed = list(list_navigation(load_configuration()["nav"]))
    assert sorted(listed) == sorted(page.relative_to(DOCS).as_posix() for page in PAGES)
    assert {page.parent.relative_to(DOCS).as_posix() for page in PAGES} == {".", *SECTIONS}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_links_and_anchors_of_a_page_exist(page: Path) -> None:
    broken = []
    for link in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        target, _, anchor = link.partition("#")
        path = (page.parent / target) if target else page
        if not path.is_file() or (anchor and anchor not in list_anchors(path)):
            broken.append(link)
    assert broken == []


@pytest.mark.long
def test_site_builds_without_warnings_and_loads_nothing_from_the_network(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    process = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert process.returncode == 0, process.stderr
    loaded = re.compile(r'(?:\bsrc="|<link[^>]*rel="(?:stylesheet|icon|preconnect)"[^>]*href=")https?://')
    assert [path.name for path in tmp_path.rglob("*.html") if loaded.search(path.read_text(encoding="utf-8"))] == []
    assert (tmp_path / "search" / "search_index.json").stat().st_size > 100_000
    assert (tmp_path / "repository" / "CONTRIBUTING.html").exists()
    configuration = (tmp_path / "reference" / "configuration.html").read_text(encoding="utf-8")
    assert "<td><code>data_<wbr>curation.<wbr>sources</code></td>" in configuration, "long keys may break between parts"
    index = (tmp_path / "search" / "search_index.json").read_text(encoding="utf-8")
    assert "data_curation.max_other_kind_share" in index, "the search finds whole keys"
