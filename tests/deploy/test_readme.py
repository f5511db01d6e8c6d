"""The pages about deploy/ list every file, and the folders and links that they name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.deploy.rendering import DEPLOY, OVERLAYS

ROOT = DEPLOY.parent
PAGES = [
    DEPLOY / "README.md",
    ROOT / "docs" / "how-to" / "install.md",
    ROOT / "docs" / "explanation" / "reference-layout.md",
]


def read_file_table() -> set[Path]:
    """Return the files and folders of the table in deploy/README.md."""
    section = (DEPLOY / "README.md").read_text(encoding="utf-8").partition("## Files")[2].partition("\n## ")[0]
    paths: set[Path] = set()
    for row in re.findall(r"^\| (`.*?`) \| .+ \|$", section, re.MULTILINE):
        first, *others = re.findall(r"`([^`]+)`", row)
        folder = (DEPLOY / first).parent
        paths |= {DEPLOY / first, *(folder / other for other in others)}
    return paths


def test_readme_table_lists_every_file_and_no_missing_one() -> None:
    listed = read_file_table()
    assert [path for path in listed if not path.exists()] == []
    files = [path for part in ("base", "components") for path in (DEPLOY / part).rglob("*") if path.is_file()]
    covered = [path for path in files if path in listed or path.parent in listed or path.name == "kustomization.yaml"]
    assert len(files) > 30
    assert [path for path in files if path not in covered] == []
    single_file_folders = [
        path.parent for path in files if path.name == "kustomization.yaml" and len(list(path.parent.iterdir())) == 1
    ]
    assert [folder for folder in single_file_folders if folder not in listed] == []


def test_kustomizations_start_with_a_comment() -> None:
    kustomizations = [
        path for part in ("base", "components", "secrets") for path in (DEPLOY / part).rglob("kustomization.yaml")
    ]
    kustomizations += [path for name in OVERLAYS for path in (DEPLOY / "overlays" / name).rglob("kustomization.yaml")]
    assert [path for path in kustomizations if not path.read_text(encoding="utf-8").startswith("# ")] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_applied_folders_and_links_of_a_page_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    folders = re.findall(r"(?:-k|kubectl kustomize) (deploy/\S+)", text)
    assert [folder for folder in folders if not (ROOT / folder / "kustomization.yaml").exists()] == []
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", text)
    assert [link for link in links if not (page.parent / link).exists()] == []
    names = re.findall(r"`((?:components|overlays|base)/[a-z0-9/.-]+)`", text)
    assert [name for name in names if not (DEPLOY / name).exists()] == []
