"""`tuneline verify` on a machine with the public key and the bundle alone, and `tuneline signing keygen`.

The test with an environment of its own is long: it copies the packages, and starts Python without cached byte code.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from components.model_registry import provenance_bundle, trust_root
from tests import kubernetes_schemas, pod_security
from tests.image_packages import copy_packages, create_environment, image_variables
from tests.model_registry.conftest import NAME
from tests.model_registry.signed_registry import SignedRegistry
from tests.pipelines.command import ROOT, answer_in_process, refusal, run_in_process

pytestmark = pytest.mark.mlflow


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python environment with the packages of the extra `verification` alone: no MLflow, no pyarrow, no torch."""
    folder = tmp_path_factory.mktemp("machine")
    return create_environment(folder / "venv", copy_packages(folder / "tuneline"), ["verification"])


def verify_on(machine: Path, folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run `tuneline verify` in `folder` with an empty environment, and without network where namespaces are allowed."""
    isolate = ["unshare", "--net", "--map-root-user"]
    allowed = (
        shutil.which("unshare") and subprocess.run([*isolate, "true"], check=False, capture_output=True).returncode == 0
    )
    command = [machine / "bin" / "python", "-P", "-m", "pipelines.cli", "verify", *arguments, "--json"]
    return subprocess.run(
        [*(isolate if allowed else []), *map(str, command)],
        cwd=folder,
        env=image_variables(machine, folder),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def export(signed: SignedRegistry, folder: Path) -> Path:
    """Export the champion's bundle, and remove everything but the bundle and the public key."""
    provenance_bundle.write(provenance_bundle.collect(NAME, "champion"), folder / "bundle")
    shutil.copyfile(signed.public_key, folder / "site.pub")
    shutil.rmtree(signed.folder)
    (folder / "mlflow.db").unlink()
    return folder


@pytest.mark.long
def test_bundle_verifies_with_the_public_key_alone(signed: SignedRegistry, machine: Path, tmp_path: Path) -> None:
    folder = export(signed, tmp_path)
    assert not [path for path in (folder / "bundle").rglob("*") if path.suffix in (".bin", ".parquet", ".safetensors")]
    process = verify_on(machine, folder, "bundle", "--trust", "site.pub")
    assert process.returncode == 0, process.stderr
    result = json.loads(process.stdout)
    assert (result["verified"], result["name"], result["version"], result["alias"]) == (True, NAME, "2", "champion")
    assert {one["kind"] for one in result["artifacts"]} == {"model", "evaluation", "repository", "dataset"}
    assert not any(one["hashed"] for one in result["artifacts"])
    assert result["notes"] == [
        "the files of these artifacts are not on this machine and were not hashed: model, evaluation, repository, dataset"
    ]
    history = folder / "bundle" / "history.json"
    entries = json.loads(history.read_text())
    history.write_text(json.dumps(entries[:-1]))
    process = verify_on(machine, folder, "bundle", "--trust", "site.pub")
    assert process.returncode == 1
    assert any("truncated" in objection for objection in json.loads(process.stdout)["objections"])


def edit_bundle(folder: Path, name: str, edit: Any) -> None:
    path = folder / "bundle" / name
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


BUNDLE_ATTACKS = {
    "another version": ("bundle.json", lambda index: index.update(version="1"), "the bundle is about version 1"),
    "renamed model": ("bundle.json", lambda index: index.update(name="other"), "its signature is for other content"),
    "edited promotion": (
        "history.json",
        lambda entries: entries[-1].update(by="eve"),
        "entry .* of the history was edited",
    ),
    "removed evaluation": (
        "bundle.json",
        lambda index: index["artifacts"].pop("evaluation"),
        "has no model or no evaluation",
    ),
}


@pytest.mark.parametrize("attack", BUNDLE_ATTACKS)
def test_edited_bundle_is_refused(signed: SignedRegistry, tmp_path: Path, attack: str) -> None:
    folder = export(signed, tmp_path)
    name, edit, reason = BUNDLE_ATTACKS[attack]
    edit_bundle(folder, name, edit)
    process = run_in_process("verify", "bundle", "--trust", "site.pub", "--json", cwd=folder)
    assert process.returncode == 1
    assert re.search(reason, " and ".join(json.loads(process.stdout)["objections"]))


def test_command_verifies_and_exports_a_registered_version(signed: SignedRegistry, tmp_path: Path) -> None:
    locations = ("--workdir", signed.folder / "workdir", "--tracking-uri", f"sqlite:///{tmp_path / 'mlflow.db'}")
    arguments = ("verify", f"{NAME}@champion", "--trust", signed.public_key, "--export", "out", *locations)
    result = answer_in_process(*arguments, cwd=tmp_path)
    assert result["verified"]
    assert all(one["hashed"] for one in result["artifacts"])
    assert result["bundle"] == "out"
    error = refusal(2, *arguments, cwd=tmp_path)
    assert error["message"] == "out is not empty"


def test_serve_refuses_a_repository_without_a_trusted_signature(signed: SignedRegistry, tmp_path: Path) -> None:
    repository = signed.store / signed.get_digest("repository")
    error = refusal(1, "serve", repository, "--trust", signed.public_key, cwd=tmp_path)
    assert error["kind"] == "signature"
    assert error["message"] == f"the repository in {repository} does not verify: it has no signature"


def test_verify_requires_a_trusted_key(tmp_path: Path) -> None:
    error = refusal(2, "verify", "helper@champion", cwd=tmp_path)
    assert error["message"] == "verify requires a trusted key"
    (tmp_path / "trust.yaml").write_text("public_key: [a.pub]\n")
    error = refusal(2, "verify", "helper@champion", "--trust", "trust.yaml", cwd=tmp_path)
    assert "public_key" in error["message"]
    (tmp_path / "trust.yaml").write_text(f"revoked: [{'ab' * 32}]\npublic_keys: [a.pub]\nrevoked: []\n")
    error = refusal(2, "verify", "helper@champion", "--trust", "trust.yaml", cwd=tmp_path)
    assert error["message"] == "trust.yaml cannot be read: line 3, column 1: duplicate key revoked"


def test_keygen_writes_a_pair_once(tmp_path: Path) -> None:
    result = answer_in_process("signing", "keygen", "-o", "keys", cwd=tmp_path)
    assert len(result["key_id"]) == 64
    assert (tmp_path / "keys" / "signing.key").stat().st_mode & 0o777 == 0o600
    error = refusal(2, "signing", "keygen", "-o", "keys", cwd=tmp_path)
    assert error["message"] == "keys/signing.key already exists"


def _nest(path: Path) -> None:
    path.write_text("[" * 100_000)


def _fill(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(provenance_bundle.MAX_BUNDLE_BYTES)


def _replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


BUNDLE_DAMAGES = {
    "truncated index": ("bundle.json", lambda path: path.write_text('{"sch'), "bundle.json: Invalid JSON: EOF"),
    "index without fields": ("bundle.json", lambda path: path.write_text("{}"), "bundle.json: name: Field required"),
    "binary record": ("records/{}.0.json", lambda path: path.write_bytes(b"\xff"), ".0.json: Invalid JSON"),
    "nested history": ("history.json", _nest, "history.json: Invalid JSON: recursion limit exceeded"),
    "nested checkpoint": ("checkpoint.json", _nest, "checkpoint.json: Invalid JSON: recursion limit exceeded"),
    "missing history": ("history.json", lambda path: path.unlink(), "history.json is missing or not a regular file"),
    "large record": ("records/{}.0.json", _fill, "it has more than 64 MiB"),
    "endless checkpoint": ("checkpoint.json", _replace_by_pipe, "checkpoint.json is missing or not a regular file"),
}


def test_damaged_bundle_is_an_error(signed: SignedRegistry, tmp_path: Path) -> None:
    sha256 = signed.get_digest("model")
    folder = export(signed, tmp_path)
    for number, (name, damage, reason) in enumerate(BUNDLE_DAMAGES.values()):
        bundle = shutil.copytree(folder / "bundle", folder / f"bundle-{number}")
        damage(bundle / name.format(sha256))
        error = refusal(1, "verify", bundle.name, "--trust", "site.pub", cwd=folder)
        assert error["kind"] == "artifact_damaged"
        assert error["message"].startswith(f"the bundle in {bundle.name} is unreadable: ")
        assert reason in error["message"]


def test_record_with_other_content_is_refused(signed: SignedRegistry) -> None:
    bundle = provenance_bundle.collect(NAME, "champion")
    trust = trust_root.load_trust([signed.public_key])
    sha256 = bundle.index.artifacts["model"]
    [record] = bundle.records[sha256]
    for content in ("[]", "1", "null", "{}", '{"a": ' * 5000):
        envelope = {"signatures": [content], "dsseEnvelope": content}
        for field, value in (("manifest", content), ("attestation", envelope), ("signature", envelope)):
            bundle.records[sha256] = [record.model_copy(update={field: value})]
            assert any("its model" in one for one in provenance_bundle.verify(bundle, trust).objections)


def test_folder_without_a_bundle_is_an_error(signed: SignedRegistry, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for reference in ("empty", "./empty"):
        error = refusal(2, "verify", reference, "--trust", signed.public_key, cwd=tmp_path)
        assert error["message"] == f"{reference} has no bundle.json"


def test_output_names_the_alias(signed: SignedRegistry, tmp_path: Path) -> None:
    folder = export(signed, tmp_path)
    process = run_in_process("verify", "bundle", "--trust", "site.pub", cwd=folder)
    assert "helper@champion, version 2: verified 4 artifacts" in process.stdout
    edit_bundle(folder, "bundle.json", lambda index: index.update(alias="candidate"))
    process = run_in_process("verify", "bundle", "--trust", "site.pub", cwd=folder)
    assert "helper@candidate, version 2" in process.stdout


def test_example_job_is_valid_and_allowed_in_a_restricted_namespace() -> None:
    """`make test-installation` runs it on a cluster: tests/engines/test_verification_pod.py."""
    policy, job = yaml.safe_load_all((ROOT / "docs" / "examples" / "verify-bundle.yaml").read_text(encoding="utf-8"))
    assert pod_security.violations(job["spec"]["template"]) == []
    for manifest in (policy, job):
        assert kubernetes_schemas.problems(manifest) == []
    assert policy["spec"]["podSelector"]["matchLabels"] == job["spec"]["template"]["metadata"]["labels"]
