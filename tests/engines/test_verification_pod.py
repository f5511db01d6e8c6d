"""`tuneline verify` of a whole run in pods that have the bundle and the public key alone.

The pods are those of docs/examples/verify-bundle.yaml, in a namespace that enforces the restricted Pod Security level. Their
image has Python and the packages of the extra `verification`, and no shell.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.engines.cluster import REQUIRED, Cluster
from tests.image_packages import copy_packages, create_environment
from tests.pipelines.command import ROOT, answer_in_process

pytestmark = [pytest.mark.cluster, pytest.mark.pipeline, REQUIRED]
IMAGE = "tuneline.test/verification:1"
EXAMPLE = ROOT / "docs" / "examples" / "verify-bundle.yaml"
LIBRARY = f"lib/python{sys.version_info.major}.{sys.version_info.minor}"
UNUSED_MODULES = (
    "test",
    "idlelib",
    "*tkinter*",
    "turtledemo",
    "lib2to3",
    "ensurepip",
    "config-*",
    "site-packages",
    "_test*",
)
CASES = {  # exit code and text of the log by name of the Job: its bundle and its key
    "verify-bundle": (0, "release@champion, version 1: verified 4 artifacts"),
    "edited-bundle": (1, "✘ entry 3 of the history was edited"),
    "other-key": (1, "which is not trusted"),
}


def build_image_root(folder: Path) -> Path:
    """Return a folder with Python, its shared libraries, tuneline and the packages of the extra `verification`."""
    environment = create_environment(folder / "venv", copy_packages(folder / "tuneline"), ["verification"])
    root = folder / "root"
    prefix = root / sys.base_prefix.lstrip("/")
    ignore = shutil.ignore_patterns("__pycache__")
    library = Path(sys.base_prefix) / LIBRARY
    shutil.copytree(library, prefix / LIBRARY, ignore=shutil.ignore_patterns(*UNUSED_MODULES, "__pycache__"))
    shutil.copytree(environment / LIBRARY / "site-packages", prefix / LIBRARY / "site-packages", ignore=ignore)
    (prefix / "bin").mkdir()
    shutil.copy2(Path(sys.executable).resolve(), prefix / "bin" / "python3")
    binaries = [prefix / "bin" / "python3", *prefix.rglob("*.so")]
    linked = subprocess.run(["ldd", *binaries], capture_output=True, text=True, check=False).stdout
    for name in {*re.findall(r"(/\S+) \(0x", linked)} - {*map(str, binaries)}:
        if not name.startswith(str(root)):
            (root / name[1:]).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(name, root / name[1:])
    return root


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
    text = json.dumps(job).replace("registry.example/tuneline/python-verification:1", IMAGE)
    text = text.replace(
        '"tuneline", "verify"', f'"{sys.base_prefix}/bin/python3", "-P", "-m", "pipelines.cli", "verify"'
    )
    edited = text.replace("/verify/signed-bundle", "/verify/edited").replace('"verify-bundle"', '"edited-bundle"')
    other = text.replace("/trust/site.pub", "/trust/other.pub").replace('"verify-bundle"', '"other-key"')
    return [policy, *map(json.loads, (text, edited, other))]


@pytest.mark.stress
def test_bundle_of_a_run_verifies_in_a_pod(cluster: Cluster, volume: Path, tmp_path: Path) -> None:
    cluster.add_image(build_image_root(tmp_path), IMAGE)
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
