"""Who reads deploy/ is told what each file is for, and what they are told to apply is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.deploy.rendering import DEPLOY, OVERLAYS

ROOT = DEPLOY.parent
PAGES = [DEPLOY / "README.md", ROOT / "docs" / "install.md", ROOT / "docs" / "reference-layout.md"]


def rows() -> set[Path]:
    """The files and folders of the table that says what each is for."""
    section = (DEPLOY / "README.md").read_text(encoding="utf-8").partition("## What each file is for")[2].partition("\n## ")[0]
    found: set[Path] = set()
    for row in re.findall(r"^\| (`.*?`) \| .+ \|$", section, re.MULTILINE):
        first, *others = re.findall(r"`([^`]+)`", row)
        beside = (DEPLOY / first).parent
        found |= {DEPLOY / first, *(beside / other for other in others)}
    return found


def test_the_readme_says_of_each_file_what_it_is_for_and_of_none_that_is_not_there() -> None:
    named = rows()
    assert [path for path in named if not path.exists()] == []
    files = [path for part in ("base", "components") for path in (DEPLOY / part).rglob("*") if path.is_file()]
    told = [path for path in files if path in named or path.parent in named or path.name == "kustomization.yaml"]
    assert len(files) > 30
    assert [path for path in files if path not in told] == []
    alone = [path.parent for path in files if path.name == "kustomization.yaml" and len(list(path.parent.iterdir())) == 1]
    assert [folder for folder in alone if folder not in named] == []


def test_every_folder_says_in_its_kustomization_what_it_is() -> None:
    written = [path for part in ("base", "components", "secrets") for path in (DEPLOY / part).rglob("kustomization.yaml")]
    written += [path for name in OVERLAYS for path in (DEPLOY / "overlays" / name).rglob("kustomization.yaml")]
    assert [path for path in written if not path.read_text(encoding="utf-8").startswith("# ")] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_tells_to_apply_or_links_to_is_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    folders = re.findall(r"(?:-k|kubectl kustomize) (deploy/\S+)", text)
    assert [folder for folder in folders if not (ROOT / folder / "kustomization.yaml").exists()] == []
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", text)
    assert [link for link in links if not (page.parent / link).exists()] == []
    named = re.findall(r"`((?:components|overlays|base)/[a-z0-9/.-]+)`", text)
    assert [name for name in named if not (DEPLOY / name).exists()] == []
