"""A real server: twenty promotions at once, and one that is away, busy, slow or read-only."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from components.common import tracking
from components.common.errors import EngineMissingError, NotWritableError, TunelineError
from components.common.progress import Silent
from components.model_registry import history
from components.model_registry.audit import audit
from components.model_registry.config import ModelRegistryConfig
from components.model_registry.stage import Registration, champion, promote, register
from tests.mlflow_server import mlflow_server
from tests.model_registry import proxy
from tests.model_registry.conftest import Customization, Made
from tests.model_registry.proxy import BUSY, GONE, LOST, PASS, SLOW, Proxy
from tests.pipelines.command import ROOT, environment

pytestmark = pytest.mark.mlflow
PROCESSES = 20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with mlflow_server(tmp_path_factory.mktemp("server")) as address:
        yield address


@pytest.fixture
def between(server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy before the server, which this process talks to from now on."""
    with proxy.before(server) as made:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", made.url)
        monkeypatch.setenv("TUNELINE_REGISTRY_PATIENCE", "2")
        yield made


def registered(made: Made, name: str) -> Registration:
    return register(made.model, made.evaluation, made.repository, ModelRegistryConfig(name=name), reporter=Silent())


def crowd(name: str, versions: list[str], *, force: bool, uri: str) -> list[dict[str, Any]]:
    """What processes were answered that promoted these versions at the same moment."""
    command = [sys.executable, "-P", "-m", "tests.model_registry.crowd", name, "force" if force else "checked", *versions]
    given = environment(MLFLOW_TRACKING_URI=uri, PYTHONPATH=str(ROOT))
    done = subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def bare_versions(client: Any, name: str, count: int) -> list[str]:
    """Versions that have a digest and nothing else: only force promotes them."""
    client.create_registered_model(name)
    tags = [{"tuneline.model_sha256": f"{number:064x}"} for number in range(1, count + 1)]
    return [str(client.create_model_version(name, "elsewhere:/x", tags=tag).version) for tag in tags]


def check_twenty_at_once(uri: str, name: str) -> None:
    """Twenty processes promote twenty versions: all of them take place, one after the other."""
    client = tracking.connect().MlflowClient()
    versions = bare_versions(client, name, PROCESSES)
    answers = crowd(name, versions, force=True, uri=uri)
    assert [answer for answer in answers if "to" not in answer] == []
    assert sorted(int(answer["to"]) for answer in answers) == list(range(1, PROCESSES + 1)), answers
    entries = history.read(client, name)
    assert [entry.number for entry in entries] == list(range(1, PROCESSES + 1))
    moves = history.moves(entries, "champion")
    assert [move.from_ for move in moves] == [None, *(move.to for move in moves[:-1])]
    assert str(client.get_registered_model(name).aliases["champion"]) == moves[-1].to
    assert [one for one in audit(name, reporter=Silent()).findings if one.kind != "digest"] == []


def test_twenty_promotions_at_once_leave_one_champion_and_a_history_without_a_gap(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    check_twenty_at_once(server, "twenty")


def test_of_candidates_that_were_all_compared_with_no_champion_only_one_becomes_it(
    server: str, customize: Customization, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    versions = [registered(customize(content), "rivals").version for content in ("one", "two", "three", "four")]
    answers = crowd("rivals", versions, force=False, uri=server)
    assert sum("to" in answer for answer in answers) == 1, answers
    assert all("champion" in answer["message"] for answer in answers if "to" not in answer), answers
    assert audit("rivals", reporter=Silent()).clean


def nth(number: int, what: str, part: str = "/api/") -> Callable[[str, str], str]:
    """A rule for the n-th request, counted from 0, that is not a mere question."""
    left = [number]

    def rule(method: str, path: str) -> str:
        if method == "GET" or part not in path or "search" in path:
            return PASS
        left[0] -= 1
        return what if left[0] == -1 else PASS

    return rule


@pytest.mark.parametrize("what", [LOST, BUSY])
def test_whichever_answer_is_lost_or_refused_once_nothing_is_registered_or_written_twice(
    between: Proxy, customize: Customization, what: str
) -> None:
    name = f"once-{what}"
    hits = 0
    for number in (0, 1, 2, 3, 5, 8, 12):
        made = customize(f"{what} {number}")
        between.rule = nth(number, what)
        version = registered(made, name).version
        hits += between.count("", what)
        between.seen.clear()
        client = tracking.connect().MlflowClient()
        same = [v for v in client.search_model_versions(f"name = '{name}'") if v.tags["tuneline.model_sha256"] == made.model.sha256]
        assert [str(v.version) for v in same] == [version]
    assert hits >= 6
    between.rule = nth(0, what)
    promote(name, version, reporter=Silent(), force=True, reason="the test")
    entries = history.read(client, name)
    assert [entry.to for entry in history.moves(entries, "champion")] == [version]
    assert len(history.moves(entries, "candidate")) == 7
    assert audit(name, reporter=Silent()).clean


@pytest.mark.parametrize(
    ("what", "why"), [(BUSY, "it answers 503"), (SLOW, "it does not answer in time"), (GONE, "it breaks the connection off")]
)
def test_a_server_that_stays_away_is_told_after_a_limit_and_leaves_nothing_half(
    between: Proxy, customize: Customization, what: str, why: str
) -> None:
    made, name = customize(what), f"away-{what}"
    for number in (3,) if what == SLOW else (0, 3, 6):
        rule = nth(number, what)
        fallen: list[bool] = []

        def and_from_then_on(method: str, path: str, rule: Any = rule, fallen: list[bool] = fallen) -> str:
            if not fallen and rule(method, path) != PASS:
                fallen.append(True)
            return what if fallen else PASS

        between.rule = and_from_then_on
        began = time.monotonic()
        with pytest.raises(EngineMissingError, match=f"stopped answering, also after 2 seconds of trying: {why}"):
            registered(made, name)
        assert time.monotonic() - began < 60
        between.rule = lambda method, path: PASS
        client = tracking.connect().MlflowClient()
        assert all("tuneline.repository_sha256" in v.tags for v in client.search_model_versions(f"name = '{name}'"))
    assert registered(made, name).version == "1"


def test_a_server_that_answers_and_keeps_nothing_is_told_as_such(between: Proxy, customize: Customization) -> None:
    made = customize("one")
    between.rule = lambda method, path: BUSY if method != "GET" and "search" not in path else PASS
    with pytest.raises(EngineMissingError, match="answers and keeps nothing"):
        registered(made, "kept-nothing")


@pytest.mark.parametrize("step", [0, 3, 5])
def test_a_server_that_goes_away_in_a_promotion_leaves_the_old_or_the_new_champion(
    between: Proxy, customize: Customization, step: int
) -> None:
    name = f"promoted-{step}"
    version = registered(customize(name), name).version
    rule = nth(step, GONE)
    gone: list[bool] = []

    def and_stays_away(method: str, path: str) -> str:
        gone.extend([True] if rule(method, path) == GONE else [])
        return GONE if gone else PASS

    between.rule = and_stays_away
    with pytest.raises(EngineMissingError):
        promote(name, version, reporter=Silent())
    between.rule = lambda method, path: PASS
    assert audit(name, reporter=Silent()).clean
    assert promote(name, version, reporter=Silent()).to == version
    assert champion(name).version == version
    assert audit(name, reporter=Silent()).notes == []


def test_a_read_only_database_is_told_at_once_and_nothing_is_registered(
    registry: Any, customize: Customization, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = customize("one")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///file:{tmp_path / 'mlflow.db'}?mode=ro&uri=true")
    began = time.monotonic()
    with pytest.raises(NotWritableError, match="its database is read-only"):
        registered(made, "helper")
    assert time.monotonic() - began < 20
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    assert registry.search_registered_models() == []


def test_patience_that_is_no_number_is_refused(registry: Any, customize: Customization, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNELINE_REGISTRY_PATIENCE", "long")
    with pytest.raises(TunelineError, match="TUNELINE_REGISTRY_PATIENCE is 'long'"):
        registered(customize("one"), "helper")
