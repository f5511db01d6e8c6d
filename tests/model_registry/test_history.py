"""The alias history, its state after a kill, and the audit.

Tests marked `long` repeat an operation with a kill before each of its writes.
"""

from __future__ import annotations

from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest

from components.common.runtime.errors import RegistryError, UsageError
from components.common.runtime.reporters import SilentReporter
from components.model_registry import alias_moves, registry_history
from components.model_registry.config import ModelRegistryConfig
from components.model_registry.history_audit import Audit, audit
from components.model_registry.registry_history import Entry
from components.model_registry.stage import find_champion, promote, register, rollback
from tests.model_registry.conftest import NAME, Customization, kill_before_write

pytestmark = pytest.mark.mlflow
HISTORY = "helper.history"


def run_audit(**options: Any) -> Audit:
    return audit(NAME, reporter=SilentReporter(), **options)


def list_moves(client: Any, alias: str = "champion") -> list[tuple[str, str | None, str | None]]:
    return [
        (entry.kind, entry.from_, entry.to)
        for entry in registry_history.list_completed_moves(registry_history.read(client, NAME), alias)
    ]


def test_history_records_user_time_versions_and_reason(versions: Any) -> None:
    promote(NAME, "1", by="ann", reason="the first", reporter=SilentReporter())
    promote(NAME, "2", by="bob", reporter=SilentReporter())
    rollback(NAME, by="ann", reason="it answers in French", reporter=SilentReporter())
    assert list_moves(versions) == [("promote", None, "1"), ("promote", "1", "2"), ("rollback", "2", "1")]
    last = registry_history.read(versions, NAME)[-1]
    assert (last.by, last.reason, last.state) == ("ann", "it answers in French", "done")
    assert last.digest == find_champion(NAME).model_sha256
    assert last.at > "2020"
    assert list_moves(versions, "candidate")[:3] == [
        ("register", None, "1"),
        ("register", "1", "2"),
        ("register", "2", "3"),
    ]
    assert [entry.number for entry in registry_history.read(versions, NAME)] == list(range(1, 15))
    aliases = {"candidate": "6", "challenger": "6", "champion": "1"}
    assert run_audit() == Audit(name=NAME, clean=True, entries=14, aliases=aliases, findings=[], notes=[])


def test_history_marks_forced_promotions(versions: Any) -> None:
    promote(NAME, "2", force=True, reason="the gate's data is wrong", reporter=SilentReporter())
    assert registry_history.read(versions, NAME)[-1].forced.startswith("its evaluation compared it with model ")


@pytest.mark.long
def test_killed_promotion_leaves_a_valid_champion_and_clean_audit(
    versions: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    promote(NAME, "1", reporter=SilentReporter())
    champions = set()
    for write in count():
        with kill_before_write(monkeypatch, write) as kills:
            promote(NAME, "2", reporter=SilentReporter())
        if not kills:
            break
        champions.add(find_champion(NAME).version)
        assert find_champion(NAME).version in ("1", "2")
        result = run_audit()
        assert (result.clean, result.findings) == (True, [])
        assert len(result.notes) == (1 if registry_history.read(versions, NAME)[-1].state == "pending" else 0)
        promote(NAME, "2", reporter=SilentReporter())
        assert rollback(NAME, reporter=SilentReporter()).model_dump() == {
            "name": NAME,
            "alias": "champion",
            "from_": "2",
            "to": "1",
        }
        assert run_audit().notes == []
    assert write >= 5
    assert champions == {"1", "2"}
    completed = list_moves(versions)
    assert all(after[1] == before[2] for before, after in pairwise(completed))


@pytest.mark.long
def test_next_rollback_completes_a_killed_one(versions: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("1", "2", "3"):
        promote(NAME, version, reporter=SilentReporter())
    for write in count():
        with kill_before_write(monkeypatch, write) as kills:
            rollback(NAME, reporter=SilentReporter())
        assert find_champion(NAME).version in ("3", "2")
        assert run_audit().clean
        if not kills:
            break
        if find_champion(NAME).version == "2":
            assert rollback(NAME, reporter=SilentReporter()).to == "1"
            promote(NAME, "2", reporter=SilentReporter())
            promote(NAME, "3", reporter=SilentReporter())
    assert write > 4


def test_repair_closes_a_killed_promotion(versions: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with kill_before_write(monkeypatch, 1) as kills:
        promote(NAME, "1", reporter=SilentReporter())
    assert kills
    assert "has not moved yet" in run_audit().notes[0]
    assert run_audit(repair=True).notes == []
    assert registry_history.read(versions, NAME)[-1].state == "void"


@pytest.mark.long
def test_next_registration_completes_a_killed_one(
    registry: Any, customize: Customization, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ModelRegistryConfig(name=NAME)
    for write in count():
        artifacts = customize(f"model {write}")
        with kill_before_write(monkeypatch, write) as kills:
            register(artifacts.model, artifacts.evaluation, artifacts.repository, config, reporter=SilentReporter())
        partial = [
            v
            for v in registry.search_model_versions(f"name = '{NAME}'")
            if v.tags["tuneline.model_sha256"] == artifacts.model.sha256
        ]
        assert all(v.tags["tuneline.repository_sha256"] == artifacts.repository.sha256 for v in partial), (
            "a version appears whole, or not at all"
        )
        registration = register(
            artifacts.model, artifacts.evaluation, artifacts.repository, config, reporter=SilentReporter()
        )
        assert registration.aliases == ["candidate", "challenger"]
        matching = [
            v
            for v in registry.search_model_versions(f"name = '{NAME}'")
            if v.tags["tuneline.model_sha256"] == artifacts.model.sha256
        ]
        assert [str(v.version) for v in matching] == [registration.version]
        assert run_audit().clean
        if not kills:
            break
    assert write > 8


def test_audit_reports_alias_moved_in_ui_and_repair_records_it(versions: Any) -> None:
    promote(NAME, "1", reporter=SilentReporter())
    versions.set_registered_model_alias(NAME, "champion", "3")
    [finding] = run_audit().findings
    assert (finding.kind, finding.alias) == ("moved", "champion")
    assert finding.what == "champion is at version 3; the history records version 1"
    assert run_audit(repair=True, by="ann").clean
    assert list_moves(versions)[-1] == ("foreign", "1", "3")
    assert find_champion(NAME).version == "3", "a repair moves nothing"
    assert rollback(NAME, reporter=SilentReporter()).to == "1"


def test_audit_reports_manual_move_after_later_promotion(versions: Any) -> None:
    promote(NAME, "1", reporter=SilentReporter())
    versions.set_registered_model_alias(NAME, "champion", "3")
    promote(NAME, "2", force=True, reason="in a hurry", reporter=SilentReporter())
    assert list_moves(versions) == [("promote", None, "1"), ("foreign", "1", "3"), ("promote", "3", "2")]
    [finding] = run_audit().findings
    assert finding.what.startswith("champion was moved from 1 to 3 outside tuneline")
    result = run_audit(repair=True, by="ann")
    assert (result.clean, result.notes) == (True, [f"acknowledged: {finding.what}"])


def test_audit_ignores_move_completed_while_it_reads(versions: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    promote(NAME, "1", reporter=SilentReporter())
    read_history, reads = registry_history.read, list[int]()

    def promote_after_first_read(client: Any, model: str) -> list[Entry]:
        entries = read_history(client, model)
        reads.append(len(entries))
        if len(reads) == 1:
            with monkeypatch.context() as patch:
                patch.setattr(registry_history, "read", read_history)
                promote(NAME, "2", reporter=SilentReporter())
        return entries

    monkeypatch.setattr(registry_history, "read", promote_after_first_read)
    result = run_audit()
    assert (result.clean, result.aliases["champion"]) == (True, "2")
    assert len(reads) == 3
    assert reads[0] < reads[1] == reads[2] == result.entries


def test_audit_reports_alias_removed_in_ui(versions: Any) -> None:
    promote(NAME, "1", reporter=SilentReporter())
    versions.delete_registered_model_alias(NAME, "champion")
    assert [finding.what for finding in run_audit().findings] == [
        "champion is at no version; the history records version 1"
    ]


def test_audit_reports_alias_created_in_ui(versions: Any) -> None:
    versions.set_registered_model_alias(NAME, "production", "2")
    assert [finding.what for finding in run_audit().findings] == [
        "production is at version 2; the history records no version"
    ]
    assert run_audit(repair=True).clean


def test_audit_reports_deleted_champion(versions: Any) -> None:
    promote(NAME, "1", reporter=SilentReporter())
    versions.delete_model_version(NAME, "1")
    assert {finding.kind for finding in run_audit().findings} == {"moved", "deleted"}
    assert run_audit(repair=True).clean


def test_audit_reports_digest_edited_in_ui(versions: Any) -> None:
    promote(NAME, "1", reporter=SilentReporter())
    versions.set_model_version_tag(NAME, "1", "tuneline.model_sha256", "0" * 64)
    assert {finding.kind for finding in run_audit().findings} == {"digest"}
    assert any("MLflow stores model" in finding.what for finding in run_audit().findings)


def test_audit_reports_deleted_and_edited_history_entries(versions: Any) -> None:
    promote(NAME, "1", by="ann", reporter=SilentReporter())
    promote(NAME, "2", by="bob", reporter=SilentReporter())
    number = str(len(registry_history.read(versions, NAME)))
    versions.set_model_version_tag(HISTORY, number, "tuneline.by", "mallory")
    assert [finding.kind for finding in run_audit().findings] == ["edited"]
    versions.set_model_version_tag(HISTORY, number, "tuneline.by", "bob")
    assert run_audit().clean
    versions.delete_model_version(HISTORY, "2")
    assert "gap" in {finding.kind for finding in run_audit().findings}


def test_audit_reports_foreign_version_in_history(versions: Any) -> None:
    versions.create_model_version(HISTORY, "elsewhere:/x")
    assert [finding.kind for finding in run_audit().findings] == ["edited"]


def test_pending_entry_of_another_machine_times_out(versions: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pending = registry_history.append(versions, NAME, Entry(kind="promote", alias="champion", to="1"))
    versions.set_model_version_tag(HISTORY, str(pending.number), "tuneline.owner", "another-machine/17-1")
    monkeypatch.setattr(alias_moves, "OWNER_TIMEOUT_SECONDS", 0.3)
    assert promote(NAME, "1", reporter=SilentReporter()).to == "1"
    assert [entry.state for entry in registry_history.read(versions, NAME)][-2:] == ["void", "done"]


def test_duplicate_history_entry_counts_once(versions: Any) -> None:
    promote(NAME, "1", reporter=SilentReporter())
    token = registry_history.read(versions, NAME)[-1].token
    registry_history.append(versions, NAME, Entry(kind="promote", alias="champion", to="1", token=token))
    promote(NAME, "2", reporter=SilentReporter())
    assert list_moves(versions) == [("promote", None, "1"), ("promote", "1", "2")]
    assert run_audit().clean


def test_rollback_reaches_champions_older_than_the_history(versions: Any) -> None:
    versions.set_registered_model_alias(NAME, "champion", "2")
    versions.set_registered_model_tag(NAME, "tuneline.champion.earlier", '["1"]')
    promote(NAME, "3", reporter=SilentReporter())
    assert list_moves(versions) == [("promote", "2", "3")]
    assert [rollback(NAME, reporter=SilentReporter()).to for _ in range(2)] == ["2", "1"]


def test_audit_without_registry_fails_and_creates_no_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'none.db'}")
    with pytest.raises(RegistryError, match="no registry exists yet"):
        run_audit()
    assert not (tmp_path / "none.db").exists()


def test_model_name_with_history_suffix_is_rejected(registry: Any, customize: Customization) -> None:
    artifacts = customize("one")
    with pytest.raises(UsageError, match="is reserved for a history"):
        register(
            artifacts.model,
            artifacts.evaluation,
            artifacts.repository,
            ModelRegistryConfig(name="x.history"),
            reporter=SilentReporter(),
        )
