"""Base models brought into the artifact store, as the command does it; the hub is a stand-in."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from components.common import artifacts, hashing, importing, models, places
from components.common.artifacts import Artifact
from components.common.errors import ConfigurationError
from components.common.importing import Acceptance
from components.common.places import Workdir
from components.common.progress import Silent
from tests import hub
from tests.hub import COMMIT, Repository
from tests.pipelines.command import answer, refusal
from tests.tiny import tiny_model

LICENCE = "You may look at this model on Sundays.\n"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as it lies on a hub: with weights in a format that is never read, and a file in a folder."""
    folder = tiny_model(tmp_path_factory.mktemp("hub") / "tiny")
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    (folder / "original").mkdir()
    (folder / "original" / "params.json").write_text("{}")
    (folder / "LICENSE.txt").write_text(LICENCE)
    return folder


@pytest.fixture
def repository(tiny: Path) -> Iterator[Repository]:
    with hub.serving(Repository(tiny, card={"license": "apache-2.0"})) as found:
        yield found


def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The work folder in which the commands and this process look for the store."""
    monkeypatch.setenv("TUNELINE_WORKDIR", str(tmp_path / ".tuneline"))
    return tmp_path


def imported(folder: Path, *arguments: str, repository: Repository, **extra: str) -> dict[str, Any]:
    return answer("models", "import", *arguments, cwd=folder, **{**repository.environment(folder / "hf"), **extra})


def refused(folder: Path, *arguments: str, repository: Repository, **extra: str) -> dict[str, str]:
    return refusal(2, "models", "import", *arguments, cwd=folder, **{**repository.environment(folder / "hf"), **extra})


def test_a_model_of_the_hub_has_the_digest_of_its_folder_and_a_run_reads_it_without_a_network(
    repository: Repository, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = place(tmp_path, monkeypatch)
    done = imported(folder, "hf://org/tiny@main", repository=repository)
    there = models.base_model(str(tiny))
    assert done["base_model"] == f"store:{there.sha256}"
    assert done["source"] == f"hf://org/tiny@{COMMIT}", "a branch moves, a commit does not"
    assert done["left_out"] == ["original/params.json", "pytorch_model.bin"]
    base = models.base_model(done["base_model"])
    assert (base.sha256, base.name, str(base.path)) == (there.sha256, "org/tiny", done["model"])
    assert models.base_model_here(done["base_model"]) == base
    assert models.tokenizer_here(done["base_model"]) == base.path
    assert (base.path / "LICENSE.txt").read_text() == LICENCE
    assert not (base.path / "pytorch_model.bin").exists()
    assert not list((tmp_path / ".tuneline" / "state").rglob("*.safetensors")), "the weights lie once"


def test_what_is_in_the_store_is_not_fetched_again(repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = place(tmp_path, monkeypatch)
    first = imported(folder, "hf://org/tiny@main", repository=repository)
    assert "model.safetensors" in repository.given
    repository.given.clear()
    again = imported(folder, f"hf://org/tiny@{COMMIT}", repository=repository)
    assert (first["cached"], again["cached"], repository.given) == (False, True, [])
    assert again["base_model"] == first["base_model"]


def test_a_dry_run_says_what_there_is_and_fetches_nothing(repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = place(tmp_path, monkeypatch)
    told = imported(folder, "hf://org/tiny@main", "--dry-run", repository=repository)
    assert (told["base_model"], told["cached"], told["licence"]["id"]) == (None, False, "apache-2.0")
    taken = {name: path.stat().st_size for name, path in repository.files().items() if name not in told["left_out"]}
    assert (told["files"], told["bytes"]) == (len(taken), sum(taken.values()))
    assert repository.given == []
    assert places.listed(tmp_path / ".tuneline" / "store") == []


def test_an_import_that_was_broken_off_goes_on_where_it_was(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = place(tmp_path, monkeypatch)
    repository.withheld = {"tokenizer.json"}
    error = refused(folder, "hf://org/tiny@main", repository=repository)
    assert error["message"].startswith(f"fine_tuning.base_model: hf://org/tiny@{COMMIT} cannot be fetched")
    assert places.listed(tmp_path / ".tuneline" / "store") == [], "nothing that looks finished"
    came = set(repository.given)
    assert "model.safetensors" in came
    repository.withheld, repository.given = set(), []
    done = imported(folder, "hf://org/tiny@main", repository=repository)
    assert set(repository.given) & came == set()
    assert models.base_model(done["base_model"]).sha256 == done["sha256"]


def test_a_file_that_came_with_another_digest_than_the_hub_says_is_refused_and_fetched_again(
    repository: Repository, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = place(tmp_path, monkeypatch)
    repository.garbled = {"model.safetensors"}
    error = refusal(1, "models", "import", "hf://org/tiny@main", cwd=folder, **repository.environment(folder / "hf"))
    promised = hashing.sha256_file(tiny / "model.safetensors")
    assert error["message"].startswith(f"model.safetensors of hf://org/tiny@{COMMIT} came with the digest ")
    assert error["message"].endswith(f"but the hub says {promised[:12]}")
    repository.garbled = set()
    assert imported(folder, "hf://org/tiny@main", repository=repository)["sha256"] == models.base_model(str(tiny)).sha256


@pytest.mark.parametrize(
    ("card", "gated", "told"),
    [
        ({"license": "llama3.1"}, False, "llama3.1"),
        ({"license": "other", "license_name": "sundays-only", "license_link": "https://example.com/sundays"}, False, "sundays-only"),
        ({}, False, "no licence that its card names"),
        ({"license": "apache-2.0"}, "manual", "apache-2.0, gated"),
    ],
)
def test_a_licence_that_asks_for_it_is_accepted_by_somebody_before_anything_is_fetched(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, card: dict[str, str], gated: str | bool, told: str
) -> None:
    folder = place(tmp_path, monkeypatch)
    repository.card, repository.gated, repository.token = card, gated, "hf_opens"
    error = refused(folder, "hf://org/tiny@main", repository=repository)
    assert error["kind"] == "usage"
    assert error["message"] == f"hf://org/tiny@{COMMIT} is under {told}, which somebody has to accept before it is used"
    assert "--accept-license" in error["hint"]
    assert repository.given == []


def test_who_accepted_which_text_when_is_kept_with_the_model(
    repository: Repository, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = place(tmp_path, monkeypatch)
    repository.card, repository.gated, repository.token = {"license": "llama3.1"}, "manual", "hf_opens"
    accepting = ("hf://org/tiny@main", "--accept-license", "--by", "Ada")
    without = refused(folder, *accepting, repository=repository)
    assert "HF_TOKEN" in without["hint"]
    done = imported(folder, *accepting, repository=repository, HF_TOKEN="hf_opens")
    kept = artifacts.read(Path(done["model"]), "base_model").manifest.summary["licence"]
    assert (kept["id"], kept["gated"], kept["accepted"]["by"]) == ("llama3.1", True, "Ada")
    assert kept["texts"] == {"LICENSE.txt": hashing.sha256_file(tiny / "LICENSE.txt")}
    assert kept["accepted"]["at"].endswith("+00:00")
    assert "hf_opens" not in json.dumps(done)
    again = imported(folder, "hf://org/tiny@main", repository=repository, HF_TOKEN="hf_opens")
    assert again["cached"], "it was accepted once"


def copied(tiny: Path, folder: Path, card: str = "") -> str:
    """The tiny model in a folder of the user's own, with a card."""
    shutil.copytree(tiny, folder)
    if card:
        (folder / "README.md").write_text(f"---\n{card}\n---\n")
    return str(folder)


def brought(source: str, *, by: str = "", gated: bool = False) -> Artifact:
    """What the command does, in this process. `gated`: the model's owner has put a gate before it since."""
    work, offer = Workdir.from_environment(), importing.look(source, Silent())
    offer = replace(offer, licence=offer.licence.model_copy(update={"gated": gated}))
    return importing.bring(offer, work, Acceptance(by) if by else None, Silent())[0]


def test_a_licence_that_does_not_ask_is_not_accepted_and_a_known_model_is_not_brought_again_for_it(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place(tmp_path, monkeypatch)
    source = copied(tiny, tmp_path / "mine", "license: mit")
    first = brought(source, by="Ada")
    monkeypatch.setattr(artifacts, "publish", lambda *_, **__: pytest.fail("it is there already"))
    assert brought(source, by="Ada") == first
    assert first.manifest.summary["licence"]["accepted"] is None


def test_a_known_model_that_is_accepted_later_is_taken_from_the_store(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place(tmp_path, monkeypatch)
    source = copied(tiny, tmp_path / "mine", "license: mit")
    brought(source)
    weights = Workdir.from_environment().store / brought(source).sha256 / "model.safetensors"
    inode = weights.stat().st_ino
    later = brought(source, by="Ada", gated=True)
    assert later.manifest.summary["licence"]["accepted"]["by"] == "Ada"
    assert (later.path / "model.safetensors").stat().st_ino == inode
    assert artifacts.read(later.path, "base_model").sha256 == later.sha256


def test_the_same_files_from_elsewhere_keep_their_name_and_an_acceptance_is_added_but_never_dropped(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place(tmp_path, monkeypatch)
    free, asking, other = (copied(tiny, tmp_path / name, f"license: {name}") for name in ("mit", "llama3.1", "apache-2.0"))
    first = brought(free)
    accepted = brought(asking, by="Ada").manifest.summary
    assert (accepted["source"], accepted["licence"]["id"], accepted["licence"]["accepted"]["by"]) == (free, "llama3.1", "Ada")
    last = brought(other)
    assert last.sha256 == first.sha256
    assert last.manifest.summary == accepted
    assert models.base_model(f"store:{first.sha256}").name == "mit"
    assert artifacts.read(last.path, "base_model").manifest.summary == accepted


def test_a_dry_run_reads_a_folder_once_and_of_the_store_what_it_says_only(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place(tmp_path, monkeypatch)
    source = copied(tiny, tmp_path / "mine", "license: mit")
    made = brought(source)
    offer, read = importing.look(source, Silent()), hashing.sha256_file
    opened: list[Path] = []
    monkeypatch.setattr(hashing, "sha256_file", lambda path: opened.append(path) or read(path))
    for _ in range(2):
        assert importing.noted(offer, Workdir.from_environment()) == made.manifest
    assert sorted(opened) == sorted(Path(source) / name for name in offer.files)


def test_who_accepts_is_not_named_where_nothing_is_accepted(tiny: Path, tmp_path: Path) -> None:
    error = refusal(2, "models", "import", tiny, "--by", "Ada", "--dry-run", cwd=tmp_path)
    assert (error["kind"], "--accept-license" in error["hint"]) == ("usage", True)


def test_what_is_written_into_the_users_own_files_later_does_not_change_the_store(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place(tmp_path, monkeypatch)
    source = copied(tiny, tmp_path / "mine", "license: mit")
    first = brought(source)
    with (Path(source) / "model.safetensors").open("r+b") as weights:
        weights.write(b"other bytes")
    assert artifacts.read(first.path, "base_model").sha256 == first.sha256


def test_a_folder_is_brought_too_and_keeps_its_name(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place(tmp_path, monkeypatch)
    done = answer("models", "import", tiny, "--accept-license", cwd=tmp_path)
    base, there = models.base_model(done["base_model"]), models.base_model(str(tiny))
    assert (base.sha256, base.name) == (there.sha256, there.name)


@pytest.mark.parametrize(
    ("source", "message"),
    [("store:abc", "store:abc names no digest"), (f"store:{'0' * 64}", f"store:{'0' * 64} is not in the artifact store ")],
)
def test_what_is_not_in_the_store_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, message: str) -> None:
    place(tmp_path, monkeypatch)
    with pytest.raises(ConfigurationError) as error:
        models.base_model(source)
    with pytest.raises(ConfigurationError) as of_outline:
        models.outline(source)
    assert error.value.message.startswith(f"fine_tuning.base_model: {message}")
    assert of_outline.value.message == error.value.message
    assert error.value.hint


def test_a_model_without_safe_weights_is_not_brought(repository: Repository, tmp_path: Path) -> None:
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "config.json").write_text('{"model_type": "llama"}')
    (pickled / "pytorch_model.bin").write_bytes(b"a pickle")
    repository.folder = pickled
    error = refused(tmp_path, "hf://org/tiny@main", repository=repository)
    assert "holds no safetensors" in error["message"]
    assert repository.given == []
