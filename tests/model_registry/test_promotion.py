"""Promotion, its objections, and rollback."""

from __future__ import annotations

import shutil
from datetime import datetime
from typing import Any

import pytest

from components.common.runtime.errors import RegistryError
from components.common.runtime.reporters import SilentReporter
from components.common.runtime.user_name import get_user_name
from components.model_registry.config import ModelRegistryConfig
from components.model_registry.stage import Promotion, find_champion, promote, register, rollback
from tests.model_registry.conftest import NAME, Customization, CustomizationArtifacts

pytestmark = pytest.mark.mlflow


def as_dict(promotion: Promotion) -> dict[str, Any]:
    return promotion.model_dump(by_alias=True)


def test_promotion_records_user_time_and_previous_version(versions: Any) -> None:
    assert as_dict(promote(NAME, "1", by="ann", reporter=SilentReporter())) == {
        "name": NAME,
        "alias": "champion",
        "from": None,
        "to": "1",
    }
    assert as_dict(promote(NAME, 2, by="bob", reason="better", reporter=SilentReporter())) == {
        "name": NAME, "alias": "champion", "from": "1", "to": "2"
    }  # fmt: skip
    tags = versions.get_model_version(NAME, "2").tags
    assert (tags["tuneline.champion.by"], tags["tuneline.champion.from"], tags["tuneline.champion.reason"]) == (
        "bob",
        "1",
        "better",
    )
    assert datetime.fromisoformat(tags["tuneline.champion.at"]).tzinfo is not None
    assert "tuneline.champion.forced" not in tags
    assert find_champion(NAME).version == "2"


def test_promoting_the_champion_again_changes_nothing(versions: Any) -> None:
    promote(NAME, "1", reporter=SilentReporter())
    promote(NAME, "2", by="ann", reporter=SilentReporter())
    assert as_dict(promote(NAME, "2", by="bob", reporter=SilentReporter())) == {
        "name": NAME,
        "alias": "champion",
        "from": "2",
        "to": "2",
    }
    assert versions.get_model_version(NAME, "2").tags["tuneline.champion.by"] == "ann"
    assert rollback(NAME, reporter=SilentReporter()).to == "1"


@pytest.mark.parametrize(
    ("version", "objection"), [("4", "verdict is refused"), ("5", "unproven"), ("6", "no Triton package")]
)
def test_refused_unproven_or_unpackaged_version_is_not_promoted(versions: Any, version: str, objection: str) -> None:
    promote(NAME, "1", reporter=SilentReporter())
    with pytest.raises(RegistryError, match=objection):
        promote(NAME, version, reporter=SilentReporter())
    assert find_champion(NAME).version == "1"
    assert "tuneline.champion.by" not in versions.get_model_version(NAME, version).tags


def test_force_needs_a_reason_and_is_recorded(versions: Any) -> None:
    for reason in ("", "  "):
        with pytest.raises(RegistryError, match="requires a reason"):
            promote(NAME, "4", force=True, reason=reason, reporter=SilentReporter())
    assert find_champion(NAME) is None
    assert promote(NAME, "4", force=True, reason="the gate's data is wrong", reporter=SilentReporter()).to == "4"
    tags = versions.get_model_version(NAME, "4").tags
    assert tags["tuneline.champion.reason"] == "the gate's data is wrong"
    assert tags["tuneline.champion.forced"] == "its evaluation's verdict is refused and it has no Triton package"


def test_rollback_returns_to_each_previous_champion(versions: Any) -> None:
    for version in ("1", "2", "3"):
        promote(NAME, version, reporter=SilentReporter())
    assert as_dict(rollback(NAME, by="ann", reporter=SilentReporter())) == {
        "name": NAME,
        "alias": "champion",
        "from": "3",
        "to": "2",
    }
    assert versions.get_model_version(NAME, "2").tags["tuneline.champion.reason"] == "rollback from version 3"
    assert rollback(NAME, reporter=SilentReporter()).to == "1"
    with pytest.raises(RegistryError, match=r"no existing version had the alias champion before version 1"):
        rollback(NAME, reporter=SilentReporter())
    assert find_champion(NAME).version == "1"


def test_rollback_skips_versions_already_rolled_back(versions: Any) -> None:
    promote(NAME, "1", reporter=SilentReporter())
    promote(NAME, "2", reporter=SilentReporter())
    rollback(NAME, reporter=SilentReporter())
    promote(NAME, "3", force=True, reason="it was compared with version 2", reporter=SilentReporter())
    assert rollback(NAME, reporter=SilentReporter()).to == "1"


def test_rollback_skips_deleted_versions(versions: Any) -> None:
    for version in ("1", "2", "3"):
        promote(NAME, version, reporter=SilentReporter())
    versions.delete_model_version(NAME, "2")
    assert rollback(NAME, reporter=SilentReporter()).to == "1"


def test_version_not_compared_with_current_champion_is_not_promoted(versions: Any) -> None:
    promote(NAME, "1", reporter=SilentReporter())
    promote(NAME, "2", reporter=SilentReporter())
    rollback(NAME, reporter=SilentReporter())
    with pytest.raises(
        RegistryError, match=r"compared it with model \w{12}, and the champion is model \w{12}"
    ) as error:
        promote(NAME, "3", reporter=SilentReporter())
    assert "against the current champion" in error.value.hint
    assert find_champion(NAME).version == "1"


@pytest.fixture
def artifacts(registry: Any, customize: Customization) -> CustomizationArtifacts:
    """The artifacts of version 1, the only version; a test may damage them."""
    artifacts = customize("one")
    register(
        artifacts.model,
        artifacts.evaluation,
        artifacts.repository,
        ModelRegistryConfig(name=NAME),
        reporter=SilentReporter(),
    )
    return artifacts


@pytest.mark.parametrize("kind", ["model", "evaluation", "repository"])
def test_artifact_changed_after_registration_is_not_promoted(artifacts: CustomizationArtifacts, kind: str) -> None:
    (getattr(artifacts, kind).path / "weights" / "payload.bin").write_text("something else")
    with pytest.raises(
        RegistryError, match=rf"its {kind} cannot be verified \(weights/payload.bin of the {kind} in .* has changed"
    ):
        promote(NAME, "1", reporter=SilentReporter())
    assert find_champion(NAME) is None


def test_promotion_verifies_mlflow_copies_when_store_is_absent(artifacts: CustomizationArtifacts) -> None:
    for artifact in (artifacts.model, artifacts.evaluation):
        shutil.rmtree(artifact.path)
    assert promote(NAME, "1", reporter=SilentReporter()).to == "1"


def test_version_with_missing_package_is_not_promoted(artifacts: CustomizationArtifacts) -> None:
    shutil.rmtree(artifacts.repository.path)
    with pytest.raises(RegistryError, match=r"its repository cannot be verified .* is not on this machine"):
        promote(NAME, "1", reporter=SilentReporter())


def test_edited_verdict_tag_does_not_make_a_version_promotable(versions: Any, customize: Customization) -> None:
    artifacts = customize("seven", "refused")
    register(
        artifacts.model,
        artifacts.evaluation,
        artifacts.repository,
        ModelRegistryConfig(name=NAME),
        reporter=SilentReporter(),
    )
    versions.set_model_version_tag(NAME, "7", "tuneline.verdict", "accepted")
    with pytest.raises(RegistryError, match="its evaluation's verdict is refused"):
        promote(NAME, "7", reporter=SilentReporter())


def test_unknown_version_or_model_error_lists_existing_ones(versions: Any) -> None:
    with pytest.raises(RegistryError, match="no version 9") as error:
        promote(NAME, "9", reporter=SilentReporter())
    assert "1, 2, 3, 4, 5, 6" in error.value.hint
    for request in (
        lambda: promote("nobody", "1", reporter=SilentReporter()),
        lambda: rollback("nobody", reporter=SilentReporter()),
    ):
        with pytest.raises(RegistryError, match="the registered model nobody does not exist") as error:
            request()
        assert NAME in error.value.hint
    with pytest.raises(RegistryError, match="no version of helper has the alias champion"):
        rollback(NAME, reporter=SilentReporter())


def test_custom_alias_is_promoted_and_reserved_alias_is_rejected(versions: Any) -> None:
    assert as_dict(promote(NAME, "1", alias="staging", reporter=SilentReporter()))["alias"] == "staging"
    assert find_champion(NAME) is None
    with pytest.raises(RegistryError, match="MLflow rejected the request"):
        promote(NAME, "2", alias="latest", reporter=SilentReporter())


def test_promoter_defaults_to_the_system_user(versions: Any) -> None:
    promote(NAME, "1", reporter=SilentReporter())
    assert versions.get_model_version(NAME, "1").tags["tuneline.champion.by"] == get_user_name()
