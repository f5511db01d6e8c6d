"""What Kubeflow is given."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import yaml


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    from kfp import compiler

    from pipelines.config import Customization
    from pipelines.customization import build

    path: Path = tmp_path_factory.mktemp("compiled") / "pipeline.yaml"
    logging.getLogger("kfp").setLevel(logging.ERROR)
    compiler.Compiler().compile(build(Customization()), str(path))
    documents: list[dict[str, Any]] = list(yaml.safe_load_all(path.read_text()))
    return documents[0]


def test_no_step_installs_anything_when_its_pod_starts(compiled: dict[str, Any]) -> None:
    executors = compiled["deploymentSpec"]["executors"]
    assert len(executors) == 10, "nine steps, registration among them for accepted and for refused candidates"
    for executor in executors.values():
        assert "pip install" not in " ".join(executor["container"]["command"])
        assert executor["container"]["image"].startswith("tuneline/")


def tasks(dag: dict[str, Any], components: dict[str, Any]) -> dict[str, Any]:
    """Every task by name, those behind conditions too."""
    found = {}
    for name, task in dag["tasks"].items():
        inner = components[task["componentRef"]["name"]].get("dag")
        found.update(tasks(inner, components) if inner else {name: task})
    return found


def test_what_must_look_at_the_world_is_never_cached_and_the_rest_is(compiled: dict[str, Any]) -> None:
    found = tasks(compiled["root"]["dag"], compiled["components"])
    cached = {name for name, task in found.items() if task["cachingOptions"].get("enableCache")}
    assert cached == {"data-curation", "fine-tuning", "evaluation", "triton-packaging"}
    assert set(found) - cached == {"resolve", "data-versioning", "registration", "registration-2", "promotion"}
