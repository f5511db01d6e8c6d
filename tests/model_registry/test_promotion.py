"""Promoting, refusing, and finding the way back."""

from __future__ import annotations

import shutil
from datetime import datetime
from typing import Any

import pytest

from components.common.errors import RegistryError
from components.common.people import user
from components.common.progress import Silent
from components.model_registry.config import ModelRegistryConfig
from components.model_registry.stage import Promotion, champion, promote, register, rollback
from tests.model_registry.conftest import NAME, Customization, Made

pytestmark = pytest.mark.mlflow


def moved(done: Promotion) -> dict[str, Any]:
    return done.model_dump(by_alias=True)


def test_a_promotion_says_who_when_and_from_where(versions: Any) -> None:
    assert moved(promote(NAME, "1", by="ann", reporter=Silent())) == {"name": NAME, "alias": "champion", "from": None, "to": "1"}
    assert moved(promote(NAME, 2, by="bob", reason="better", reporter=Silent())) == {
        "name": NAME, "alias": "champion", "from": "1", "to": "2"
    }  # fmt: skip
    tags = versions.get_model_version(NAME, "2").tags
    assert (tags["tuneline.champion.by"], tags["tuneline.champion.from"], tags["tuneline.champion.reason"]) == ("bob", "1", "better")
    assert datetime.fromisoformat(tags["tuneline.champion.at"]).tzinfo is not None
    assert "tuneline.champion.forced" not in tags
    assert champion(NAME).version == "2"


def test_the_champion_stays_when_it_is_promoted_again(versions: Any) -> None:
    promote(NAME, "1", reporter=Silent())
    promote(NAME, "2", by="ann", reporter=Silent())
    assert moved(promote(NAME, "2", by="bob", reporter=Silent())) == {"name": NAME, "alias": "champion", "from": "2", "to": "2"}
    assert versions.get_model_version(NAME, "2").tags["tuneline.champion.by"] == "ann"
    assert rollback(NAME, reporter=Silent()).to == "1"


@pytest.mark.parametrize(("version", "why"), [("4", "verdict is refused"), ("5", "unproven"), ("6", "no Triton package")])
def test_what_was_not_accepted_or_not_proven_is_not_promoted(versions: Any, version: str, why: str) -> None:
    promote(NAME, "1", reporter=Silent())
    with pytest.raises(RegistryError, match=why):
        promote(NAME, version, reporter=Silent())
    assert champion(NAME).version == "1"
    assert "tuneline.champion.by" not in versions.get_model_version(NAME, version).tags


def test_force_needs_a_reason_and_is_recorded(versions: Any) -> None:
    for reason in ("", "  "):
        with pytest.raises(RegistryError, match="needs a reason"):
            promote(NAME, "4", force=True, reason=reason, reporter=Silent())
    assert champion(NAME) is None
    assert promote(NAME, "4", force=True, reason="the gate's data is wrong", reporter=Silent()).to == "4"
    tags = versions.get_model_version(NAME, "4").tags
    assert tags["tuneline.champion.reason"] == "the gate's data is wrong"
    assert tags["tuneline.champion.forced"] == "its evaluation's verdict is refused and it has no Triton package"


def test_rollback_goes_back_champion_by_champion(versions: Any) -> None:
    for version in ("1", "2", "3"):
        promote(NAME, version, reporter=Silent())
    assert moved(rollback(NAME, by="ann", reporter=Silent())) == {"name": NAME, "alias": "champion", "from": "3", "to": "2"}
    assert versions.get_model_version(NAME, "2").tags["tuneline.champion.reason"] == "rollback from version 3"
    assert rollback(NAME, reporter=Silent()).to == "1"
    with pytest.raises(RegistryError, match="had no champion before version 1"):
        rollback(NAME, reporter=Silent())
    assert champion(NAME).version == "1"


def test_rollback_after_a_rollback_and_a_new_promotion_goes_to_what_was_in_service(versions: Any) -> None:
    promote(NAME, "1", reporter=Silent())
    promote(NAME, "2", reporter=Silent())
    rollback(NAME, reporter=Silent())
    promote(NAME, "3", force=True, reason="it was compared with version 2", reporter=Silent())
    assert rollback(NAME, reporter=Silent()).to == "1"


def test_rollback_passes_over_a_version_that_was_deleted(versions: Any) -> None:
    for version in ("1", "2", "3"):
        promote(NAME, version, reporter=Silent())
    versions.delete_model_version(NAME, "2")
    assert rollback(NAME, reporter=Silent()).to == "1"


def test_a_version_that_was_not_compared_with_the_present_champion_is_not_promoted(versions: Any) -> None:
    promote(NAME, "1", reporter=Silent())
    promote(NAME, "2", reporter=Silent())
    rollback(NAME, reporter=Silent())
    with pytest.raises(RegistryError, match=r"compared it with model \w{12}, and the champion is model \w{12}") as refused:
        promote(NAME, "3", reporter=Silent())
    assert "against the present champion" in refused.value.hint
    assert champion(NAME).version == "1"


@pytest.fixture
def made(registry: Any, customize: Customization) -> Made:
    """The files of version 1, the only one, which a test may damage."""
    one = customize("one")
    register(one.model, one.evaluation, one.repository, ModelRegistryConfig(name=NAME), reporter=Silent())
    return one


@pytest.mark.parametrize("kind", ["model", "evaluation", "repository"])
def test_what_changed_since_it_was_registered_is_not_promoted(made: Made, kind: str) -> None:
    (getattr(made, kind).path / "weights" / "payload.bin").write_text("something else")
    with pytest.raises(RegistryError, match=rf"its {kind} does not verify \(weights/payload.bin of the {kind} in .* has changed"):
        promote(NAME, "1", reporter=Silent())
    assert champion(NAME) is None


def test_model_and_evaluation_are_looked_at_in_mlflow_where_the_store_is_not_here(made: Made) -> None:
    for artifact in (made.model, made.evaluation):
        shutil.rmtree(artifact.path)
    assert promote(NAME, "1", reporter=Silent()).to == "1"


def test_a_package_that_is_not_on_this_machine_is_not_promoted(made: Made) -> None:
    shutil.rmtree(made.repository.path)
    with pytest.raises(RegistryError, match=r"its repository does not verify .* is not on this machine"):
        promote(NAME, "1", reporter=Silent())


def test_tags_that_were_edited_do_not_make_a_refused_version_an_accepted_one(versions: Any, customize: Customization) -> None:
    made = customize("seven", "refused")
    register(made.model, made.evaluation, made.repository, ModelRegistryConfig(name=NAME), reporter=Silent())
    versions.set_model_version_tag(NAME, "7", "tuneline.verdict", "accepted")
    with pytest.raises(RegistryError, match="its evaluation's verdict is refused"):
        promote(NAME, "7", reporter=Silent())


def test_what_is_unknown_is_answered_with_what_exists(versions: Any) -> None:
    with pytest.raises(RegistryError, match="no version 9") as version:
        promote(NAME, "9", reporter=Silent())
    assert "1, 2, 3, 4, 5, 6" in version.value.hint
    for ask in (lambda: promote("nobody", "1", reporter=Silent()), lambda: rollback("nobody", reporter=Silent())):
        with pytest.raises(RegistryError, match="no registered model nobody") as unknown:
            ask()
        assert NAME in unknown.value.hint
    with pytest.raises(RegistryError, match="no version of helper is its champion"):
        rollback(NAME, reporter=Silent())


def test_another_alias_can_be_promoted_and_one_that_mlflow_reserves_is_refused(versions: Any) -> None:
    assert moved(promote(NAME, "1", alias="staging", reporter=Silent()))["alias"] == "staging"
    assert champion(NAME) is None
    with pytest.raises(RegistryError, match="MLflow refused"):
        promote(NAME, "2", alias="latest", reporter=Silent())


def test_the_promoter_is_the_user_of_the_system_unless_named(versions: Any) -> None:
    promote(NAME, "1", reporter=Silent())
    assert versions.get_model_version(NAME, "1").tags["tuneline.champion.by"] == user()
