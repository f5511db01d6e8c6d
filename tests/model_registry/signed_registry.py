"""A registry with a signed history and a policy that requires signatures: two versions, version 2 is the champion."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from components.common.artifacts import artifact_folder
from components.common.artifacts.artifact_folder import Artifact
from components.common.runtime.reporters import SilentReporter
from components.common.workspace import artifact_store
from components.model_registry import promotion_policy, provenance_bundle, signature_checks, signing_keys, trust_root
from components.model_registry.config import ModelRegistryConfig
from components.model_registry.provenance_bundle import Verification
from components.model_registry.release_policy import Policy
from components.model_registry.stage import promote, register
from tests.model_registry.conftest import NAME, customization_factory, open_registry

QUIET = SilentReporter()
REQUIRED = Policy(signatures="required")


@dataclass(frozen=True)
class SignedRegistry:
    """A copy of the registry: its folder with workdir and keys, and an MLflow client."""

    folder: Path
    client: Any

    @property
    def store(self) -> Path:
        return self.folder / "workdir" / "store"

    @property
    def public_key(self) -> Path:
        return self.folder / "keys" / "signing.pub"

    def get_digest(self, kind: str, version: str = "2") -> str:
        return str(self.client.get_model_version(NAME, version).tags[f"tuneline.{kind}_sha256"])

    def find_record(self, kind: str, version: str = "2") -> Path:
        """Return the only signature record of an artifact."""
        [record] = (self.store / "signatures" / self.get_digest(kind, version)).iterdir()
        return record

    def verify(self, which: str = "champion") -> Verification:
        """Verify a version with the pinned key."""
        pinned = trust_root.load_trust([self.public_key])
        bundle = provenance_bundle.collect(NAME, which)
        return provenance_bundle.verify(bundle, pinned, signature_checks.find_artifact)


def set_signing(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Configure this process to sign with the key in `folder`, and to trust it."""
    patch.setenv("TUNELINE_WORKDIR", str(folder / "workdir"))
    patch.setenv("TUNELINE_SIGNING_KEY_FILE", str(folder / "keys" / "signing.key"))
    patch.setenv("TUNELINE_TRUST", str(folder / "keys" / "signing.pub"))


def build_signed_registry(
    empty_store: Path, folder: Path, configure: Callable[[Path, pytest.MonkeyPatch], None] = set_signing
) -> Path:
    """Build the registry, and return the folder of its workdir and keys.

    Args:
        configure: sets the variables with which this process signs, and trusts its signatures.

    The folder is moved after the build: a copy of it reads its own store, because the recorded paths lead nowhere.
    """
    built = folder / "built"
    (folder / "mlflow").mkdir()
    signing_keys.generate_key_pair(built / "keys")
    customize = customization_factory(folder / "customizations")

    def store(artifact: Artifact) -> Artifact:
        return artifact_store.add_artifact(built / "workdir" / "store", artifact)

    with pytest.MonkeyPatch.context() as patch:
        client = open_registry(empty_store, folder / "mlflow", patch)
        configure(built, patch)
        first = customize("one")
        second = customize("two", incumbent=first.model.sha256)
        for version, made in (("1", first), ("2", second)):
            assert made.repository is not None
            artifacts = [store(made.model), store(made.evaluation), store(made.repository)]
            register(*artifacts, ModelRegistryConfig(name=NAME), reporter=QUIET)
            if version == "1":
                promotion_policy.set_policy(client, NAME, REQUIRED, "ann")
            promote(NAME, version, by="ann", reporter=QUIET)
        store(artifact_folder.read(folder / "customizations" / "dataset"))
    return built.rename(folder / "kept")


def copy_signed_registry(kept: Path, folder: Path, patch: pytest.MonkeyPatch) -> SignedRegistry:
    """Copy the registry into `folder`, and configure this process to sign in it."""
    copy = folder / "signed"
    shutil.copytree(kept, copy)
    client = open_registry(kept.parent / "mlflow" / "mlflow.db", folder, patch)
    set_signing(copy, patch)
    return SignedRegistry(copy, client)
