"""What is written of every move, what is left by a kill, and what an audit finds."""

from __future__ import annotations

from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest

from components.common.errors import RegistryError, UsageError
from components.common.progress import Silent
from components.model_registry import history, moving
from components.model_registry.audit import Audit, audit
from components.model_registry.config import ModelRegistryConfig
from components.model_registry.history import Entry
from components.model_registry.stage import champion, promote, register, rollback
from tests.model_registry.conftest import NAME, Customization, killed_before

pytestmark = pytest.mark.mlflow
HISTORY = "helper.history"


def audited(**options: Any) -> Audit:
    return audit(NAME, reporter=Silent(), **options)


def moves(client: Any, alias: str = "champion") -> list[tuple[str, str | None, str | None]]:
    return [(entry.kind, entry.from_, entry.to) for entry in history.moves(history.read(client, NAME), alias)]


def test_every_move_is_written_with_who_when_from_to_and_why(versions: Any) -> None:
    promote(NAME, "1", by="ann", reason="the first", reporter=Silent())
    promote(NAME, "2", by="bob", reporter=Silent())
    rollback(NAME, by="ann", reason="it answers in French", reporter=Silent())
    assert moves(versions) == [("promote", None, "1"), ("promote", "1", "2"), ("rollback", "2", "1")]
    last = history.read(versions, NAME)[-1]
    assert (last.by, last.reason, last.state) == ("ann", "it answers in French", "done")
    assert last.digest == champion(NAME).model_sha256
    assert last.at > "2020"
    assert moves(versions, "candidate")[:3] == [("register", None, "1"), ("register", "1", "2"), ("register", "2", "3")]
    assert [entry.number for entry in history.read(versions, NAME)] == list(range(1, 15))
    aliases = {"candidate": "6", "challenger": "6", "champion": "1"}
    assert audited() == Audit(name=NAME, clean=True, entries=14, aliases=aliases, findings=[], notes=[])


def test_a_forced_promotion_is_written_as_one(versions: Any) -> None:
    promote(NAME, "2", force=True, reason="the gate's data is wrong", reporter=Silent())
    assert history.read(versions, NAME)[-1].forced.startswith("its evaluation compared it with model ")


def test_a_kill_between_any_two_steps_leaves_the_old_or_the_new_champion_and_a_clean_audit(
    versions: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    promote(NAME, "1", reporter=Silent())
    seen = set()
    for write in count():
        with killed_before(monkeypatch, write) as died:
            promote(NAME, "2", reporter=Silent())
        if not died:
            break
        seen.add(champion(NAME).version)
        assert champion(NAME).version in ("1", "2")
        found = audited()
        assert (found.clean, found.findings) == (True, [])
        assert len(found.notes) == (1 if history.read(versions, NAME)[-1].state == "pending" else 0)
        promote(NAME, "2", reporter=Silent())
        assert rollback(NAME, reporter=Silent()).model_dump() == {"name": NAME, "alias": "champion", "from_": "2", "to": "1"}
        assert audited().notes == []
    assert write >= 5
    assert seen == {"1", "2"}
    done = moves(versions)
    assert all(after[1] == before[2] for before, after in pairwise(done))


def test_a_kill_of_a_rollback_is_mended_by_the_next_without_going_too_far(versions: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("1", "2", "3"):
        promote(NAME, version, reporter=Silent())
    for write in count():
        with killed_before(monkeypatch, write) as died:
            rollback(NAME, reporter=Silent())
        assert champion(NAME).version in ("3", "2")
        assert audited().clean
        if not died:
            break
        if champion(NAME).version == "2":
            assert rollback(NAME, reporter=Silent()).to == "1"
            promote(NAME, "2", reporter=Silent())
            promote(NAME, "3", reporter=Silent())
    assert write > 4


def test_a_repair_closes_what_a_kill_left(versions: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with killed_before(monkeypatch, 1) as died:
        promote(NAME, "1", reporter=Silent())
    assert died
    assert "did not move yet" in audited().notes[0]
    assert audited(repair=True).notes == []
    assert history.read(versions, NAME)[-1].state == "void"


def test_a_killed_registration_is_completed_by_the_next_one(
    registry: Any, customize: Customization, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ModelRegistryConfig(name=NAME)
    for write in count():
        made = customize(f"model {write}")
        with killed_before(monkeypatch, write) as died:
            register(made.model, made.evaluation, made.repository, config, reporter=Silent())
        half = [v for v in registry.search_model_versions(f"name = '{NAME}'") if v.tags["tuneline.model_sha256"] == made.model.sha256]
        assert all(v.tags["tuneline.repository_sha256"] == made.repository.sha256 for v in half), "a version appears whole, or not at all"
        done = register(made.model, made.evaluation, made.repository, config, reporter=Silent())
        assert done.aliases == ["candidate", "challenger"]
        same = [v for v in registry.search_model_versions(f"name = '{NAME}'") if v.tags["tuneline.model_sha256"] == made.model.sha256]
        assert [str(v.version) for v in same] == [done.version]
        assert audited().clean
        if not died:
            break
    assert write > 8


def test_an_alias_moved_in_the_ui_is_found_and_a_repair_writes_it_down(versions: Any) -> None:
    promote(NAME, "1", reporter=Silent())
    versions.set_registered_model_alias(NAME, "champion", "3")
    [finding] = audited().findings
    assert (finding.kind, finding.alias) == ("moved", "champion")
    assert finding.what == "champion is at version 3, and by the history it is at version 1"
    assert audited(repair=True, by="ann").clean
    assert moves(versions)[-1] == ("foreign", "1", "3")
    assert champion(NAME).version == "3", "a repair moves nothing"
    assert rollback(NAME, reporter=Silent()).to == "1"


def test_a_move_made_by_hand_is_still_told_after_the_next_promotion(versions: Any) -> None:
    promote(NAME, "1", reporter=Silent())
    versions.set_registered_model_alias(NAME, "champion", "3")
    promote(NAME, "2", force=True, reason="in a hurry", reporter=Silent())
    assert moves(versions) == [("promote", None, "1"), ("foreign", "1", "3"), ("promote", "3", "2")]
    [finding] = audited().findings
    assert finding.what.startswith("champion was moved from 1 to 3 outside tuneline")
    found = audited(repair=True, by="ann")
    assert (found.clean, found.notes) == (True, [f"acknowledged: {finding.what}"])


def test_a_move_that_ends_while_the_audit_reads_is_no_finding(versions: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    promote(NAME, "1", reporter=Silent())
    real, reads = history.read, list[int]()

    def read(client: Any, model: str) -> list[Entry]:
        found = real(client, model)
        reads.append(len(found))
        if len(reads) == 1:
            with monkeypatch.context() as patch:
                patch.setattr(history, "read", real)
                promote(NAME, "2", reporter=Silent())
        return found

    monkeypatch.setattr(history, "read", read)
    done = audited()
    assert (done.clean, done.aliases["champion"]) == (True, "2")
    assert len(reads) == 3
    assert reads[0] < reads[1] == reads[2] == done.entries


def test_an_alias_removed_in_the_ui_is_found(versions: Any) -> None:
    promote(NAME, "1", reporter=Silent())
    versions.delete_registered_model_alias(NAME, "champion")
    assert [finding.what for finding in audited().findings] == ["champion is at no version, and by the history it is at version 1"]


def test_an_alias_that_was_only_ever_given_in_the_ui_is_found(versions: Any) -> None:
    versions.set_registered_model_alias(NAME, "production", "2")
    assert [finding.what for finding in audited().findings] == ["production is at version 2, and by the history it is at no version"]
    assert audited(repair=True).clean


def test_a_deleted_champion_is_found(versions: Any) -> None:
    promote(NAME, "1", reporter=Silent())
    versions.delete_model_version(NAME, "1")
    assert {finding.kind for finding in audited().findings} == {"moved", "deleted"}
    assert audited(repair=True).clean


def test_a_digest_edited_in_the_ui_is_found(versions: Any) -> None:
    promote(NAME, "1", reporter=Silent())
    versions.set_model_version_tag(NAME, "1", "tuneline.model_sha256", "0" * 64)
    assert {finding.kind for finding in audited().findings} == {"digest"}
    assert any("MLflow keeps the files of" in finding.what for finding in audited().findings)


def test_a_deleted_and_an_edited_entry_of_the_history_are_found(versions: Any) -> None:
    promote(NAME, "1", by="ann", reporter=Silent())
    promote(NAME, "2", by="bob", reporter=Silent())
    number = str(len(history.read(versions, NAME)))
    versions.set_model_version_tag(HISTORY, number, "tuneline.by", "mallory")
    assert [finding.kind for finding in audited().findings] == ["edited"]
    versions.set_model_version_tag(HISTORY, number, "tuneline.by", "bob")
    assert audited().clean
    versions.delete_model_version(HISTORY, "2")
    assert "gap" in {finding.kind for finding in audited().findings}


def test_a_version_that_tuneline_did_not_write_into_the_history_is_found(versions: Any) -> None:
    versions.create_model_version(HISTORY, "elsewhere:/x")
    assert [finding.kind for finding in audited().findings] == ["edited"]


def test_an_entry_of_another_machine_is_waited_for_and_then_taken_for_dead(versions: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = history.begin(versions, NAME, Entry(kind="promote", alias="champion", to="1"))
    versions.set_model_version_tag(HISTORY, str(lost.number), "tuneline.owner", "another-machine/17-1")
    monkeypatch.setattr(moving, "SILENT_AFTER", 0.3)
    assert promote(NAME, "1", reporter=Silent()).to == "1"
    assert [entry.state for entry in history.read(versions, NAME)][-2:] == ["void", "done"]


def test_an_entry_that_was_written_twice_counts_once(versions: Any) -> None:
    promote(NAME, "1", reporter=Silent())
    token = history.read(versions, NAME)[-1].token
    history.begin(versions, NAME, Entry(kind="promote", alias="champion", to="1", token=token))
    promote(NAME, "2", reporter=Silent())
    assert moves(versions) == [("promote", None, "1"), ("promote", "1", "2")]
    assert audited().clean


def test_champions_of_before_the_history_can_be_rolled_back_to(versions: Any) -> None:
    versions.set_registered_model_alias(NAME, "champion", "2")
    versions.set_registered_model_tag(NAME, "tuneline.champion.earlier", '["1"]')
    promote(NAME, "3", reporter=Silent())
    assert moves(versions) == [("promote", "2", "3")]
    assert [rollback(NAME, reporter=Silent()).to for _ in range(2)] == ["2", "1"]


def test_an_audit_of_what_is_unknown_says_so_and_makes_no_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'none.db'}")
    with pytest.raises(RegistryError, match="there is no registry yet"):
        audited()
    assert not (tmp_path / "none.db").exists()


def test_a_name_that_ends_as_a_history_is_not_registered(registry: Any, customize: Customization) -> None:
    made = customize("one")
    with pytest.raises(UsageError, match="is the name of a history"):
        register(made.model, made.evaluation, made.repository, ModelRegistryConfig(name="x.history"), reporter=Silent())
