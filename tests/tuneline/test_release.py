"""Release engineering: the bill of materials, the GitHub workflows and the citation. Fast tier: no process starts."""

from __future__ import annotations

import json
import re
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from images import sbom
from tests.pipelines.command import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yaml"))


def test_bill_of_materials_is_valid_and_lists_direct_and_indirect_packages() -> None:
    required = sbom.resolve_packages("tuneline[gateway]")
    assert "starlette" in required["tuneline"]
    assert "anyio" in required["starlette"]
    assert "mkdocs" not in required
    text = JsonV1Dot6(sbom.build_bom(required)).output_as_string()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    versions = {component["name"]: component["version"] for component in json.loads(text)["components"]}
    assert versions["anyio"] == version("anyio")


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflow_runs_existing_targets_with_pinned_actions(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert workflow["permissions"] == {"contents": "read"}
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 150
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step)
            if "uses" in step:
                assert re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|[0-9a-f]{40})", step["uses"])
            for target in re.findall(r"\bmake ([a-z-]+)", step.get("run", "")):
                assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_citation_has_the_required_fields() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= set(citation)  # required by the schema of CFF 1.2.0
    assert citation["license"] == "Apache-2.0"
