"""`tuneline verify` of a whole run, in pods with the image that `make images` builds, the bundle and the public key.

The pods are those of docs/examples/verify-bundle.yaml, in a namespace that enforces the restricted Pod Security level. In the `stress` tier and
the target `test-installation`, because building the image takes a minute and downloads its packages.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.engines.built_image import build_image
from tests.engines.cluster import REQUIRED, Cluster
from tests.pipelines.command import ROOT, answer_in_process

pytestmark = [pytest.mark.cluster, pytest.mark.pipeline, pytest.mark.registry, REQUIRED]
IMAGE = "registry.example/tuneline/python-verification:1"
EXAMPLE = ROOT / "docs" / "examples" / "verify-bundle.yaml"
CASES = {  # exit code and text of the log by name of the Job: its bundle and its key
    "verify-bundle": (0, "release@champion, version 1: verified 4 artifacts"),
    "edited-bundle": (1, "✘ entry 3 of the history was edited"),
    "other-key": (1, "which is not trusted"),
}


@pytest.fixture(scope="module")
def volume(project: Path, first: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the pods' volume: the bundle of a whole run, an edited copy, and the public keys."""
    folder = tmp_path_factory.mktemp("verification")
    for name in ("site", "other"):
        answer_in_process("signing", "keygen", "-o", name, cwd=folder)
    signing = {"TUNELINE_SIGNING_KEY_FILE": str(folder / "site" / "signing.key")}
    artifacts = {kind: project / first["artifacts"][kind] for kind in ("model", "evaluation", "repository")}
    options = [part for kind, path in artifacts.items() for part in (f"--{kind}", path)]
    answer_in_process("register", *options, "--name", "release", cwd=folder, **signing)
    answer_in_process("promote", "release", "--version", "1", "--by", "ann", cwd=folder, **signing)
    kept = folder / "volume"
    kept.mkdir()
    key = folder / "site" / "signing.pub"
    exported = kept / "signed-bundle"
    assert answer_in_process("verify", "release@champion", "--trust", key, "--export", exported, cwd=folder)["verified"]
    shutil.copytree(exported, kept / "edited")
    history = json.loads((exported / "history.json").read_text())
    history[-1]["by"] = "eve"
    (kept / "edited" / "history.json").write_text(json.dumps(history))
    for path in kept.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return folder


def build_jobs() -> list[dict[str, Any]]:
    """Return the objects of the example, and its Job with the edited bundle and with the other key."""
    policy, job = yaml.safe_load_all(EXAMPLE.read_text(encoding="utf-8"))
    text = json.dumps(job)
    assert IMAGE in text
    edited = text.replace("/verify/signed-bundle", "/verify/edited").replace('"verify-bundle"', '"edited-bundle"')
    other = text.replace("/trust/site.pub", "/trust/other.pub").replace('"verify-bundle"', '"other-key"')
    return [policy, *map(json.loads, (text, edited, other))]


@pytest.mark.stress
def test_bundle_of_a_run_verifies_in_a_pod(cluster: Cluster, volume: Path, tmp_path: Path) -> None:
    cluster.load_image(build_image("verification", IMAGE, tmp_path), IMAGE)
    labels = {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "warn")}
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "team-a", "labels": labels}}
    size = {"storage": "1Mi"}
    claim: dict[str, Any] = {"accessModes": ["ReadOnlyMany"], "storageClassName": "", "volumeName": "bundles"}
    objects = [
        namespace,
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": "bundles"},
            "spec": {
                "capacity": size,
                "accessModes": ["ReadOnlyMany"],
                "hostPath": {"path": str(volume / "volume")},
            },
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": "tuneline", "namespace": "team-a"},
            "spec": {**claim, "resources": {"requests": size}},
        },
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "site-keys", "namespace": "team-a"},
            "data": {f"{name}.pub": (volume / name / "signing.pub").read_text() for name in ("site", "other")},
        },
        *build_jobs(),
    ]
    for value in objects:
        cluster.kubectl("apply", "--validate=strict", "-f", "-", text=json.dumps(value))
    for name, (code, text) in CASES.items():
        condition = "failed" if code else "complete"
        cluster.kubectl("-n", "team-a", "wait", f"--for=condition={condition}", "--timeout=120s", f"job/{name}")
        pods = json.loads(cluster.kubectl("-n", "team-a", "get", "pods", "-l", f"job-name={name}", "-o", "json"))
        [pod] = pods["items"]
        log = cluster.kubectl("-n", "team-a", "logs", f"job/{name}")
        assert pod["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"] == code, log
        assert text in log
