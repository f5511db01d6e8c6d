"""`tuneline models import`: downloads, licenses, deduplication and errors, against a fake Hugging Face hub."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from components.common.artifacts import artifact_folder, hashing
from components.common.artifacts.artifact_folder import Artifact
from components.common.models import model_import, model_loading
from components.common.runtime.errors import ConfigurationError
from components.common.runtime.reporters import SilentReporter
from components.common.workspace import artifact_store
from components.common.workspace.artifact_store import Workdir
from tests import hub
from tests.hub import COMMIT, Repository
from tests.pipelines.command import answer, refusal
from tests.tiny import tiny_model

LICENSE_TEXT = "You may look at this model on Sundays.\n"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a model as hubs publish them: with pickled weights, which are never read, and a subfolder."""
    folder = tiny_model(tmp_path_factory.mktemp("hub") / "tiny")
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    (folder / "original").mkdir()
    (folder / "original" / "params.json").write_text("{}")
    (folder / "LICENSE.txt").write_text(LICENSE_TEXT)
    return folder


@pytest.fixture
def repository(tiny: Path) -> Iterator[Repository]:
    with hub.serving(Repository(tiny, card={"license": "apache-2.0"})) as served:
        yield served


def use_workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set the workdir of this process and of the commands."""
    monkeypatch.setenv("TUNELINE_WORKDIR", str(tmp_path / ".tuneline"))
    return tmp_path


def import_model(folder: Path, *arguments: str, repository: Repository, **extra: str) -> dict[str, Any]:
    return answer("models", "import", *arguments, cwd=folder, **{**repository.environment(folder / "hf"), **extra})


def import_error(folder: Path, *arguments: str, repository: Repository, **extra: str) -> dict[str, str]:
    return refusal(2, "models", "import", *arguments, cwd=folder, **{**repository.environment(folder / "hf"), **extra})


def test_imported_hub_model_resolves_from_store_offline(
    repository: Repository, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = use_workdir(tmp_path, monkeypatch)
    result = import_model(folder, "hf://org/tiny@main", repository=repository)
    source_model = model_loading.resolve_base_model(str(tiny))
    assert result["base_model"] == f"store:{source_model.sha256}"
    assert result["source"] == f"hf://org/tiny@{COMMIT}", "the source names the commit, since branches move"
    assert result["left_out"] == ["original/params.json", "pytorch_model.bin"]
    base = model_loading.resolve_base_model(result["base_model"])
    assert (base.sha256, base.name, str(base.path)) == (source_model.sha256, "org/tiny", result["model"])
    assert model_loading.find_local_base_model(result["base_model"]) == base
    assert model_loading.find_local_tokenizer(result["base_model"]) == base.path
    assert (base.path / "LICENSE.txt").read_text() == LICENSE_TEXT
    assert not (base.path / "pytorch_model.bin").exists()
    assert not list((tmp_path / ".tuneline" / "state").rglob("*.safetensors")), "the weights are stored once"


def test_stored_model_is_not_downloaded_again(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = use_workdir(tmp_path, monkeypatch)
    first = import_model(folder, "hf://org/tiny@main", repository=repository)
    assert "model.safetensors" in repository.downloads
    repository.downloads.clear()
    repeated = import_model(folder, f"hf://org/tiny@{COMMIT}", repository=repository)
    assert (first["cached"], repeated["cached"], repository.downloads) == (False, True, [])
    assert repeated["base_model"] == first["base_model"]


def test_dry_run_lists_files_and_downloads_nothing(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = use_workdir(tmp_path, monkeypatch)
    plan = import_model(folder, "hf://org/tiny@main", "--dry-run", repository=repository)
    assert (plan["base_model"], plan["cached"], plan["licence"]["id"]) == (None, False, "apache-2.0")
    expected_sizes = {
        name: path.stat().st_size for name, path in repository.files().items() if name not in plan["left_out"]
    }
    assert (plan["files"], plan["bytes"]) == (len(expected_sizes), sum(expected_sizes.values()))
    assert repository.downloads == []
    assert artifact_store.list_artifacts(tmp_path / ".tuneline" / "store") == []


def test_interrupted_import_resumes_without_second_download(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = use_workdir(tmp_path, monkeypatch)
    repository.missing_files = {"tokenizer.json"}
    error = import_error(folder, "hf://org/tiny@main", repository=repository)
    assert error["message"].startswith(f"source: hf://org/tiny@{COMMIT} cannot be fetched")
    assert artifact_store.list_artifacts(tmp_path / ".tuneline" / "store") == [], "no artifact is published"
    downloaded = set(repository.downloads)
    assert "model.safetensors" in downloaded
    repository.missing_files, repository.downloads = set(), []
    result = import_model(folder, "hf://org/tiny@main", repository=repository)
    assert set(repository.downloads) & downloaded == set()
    assert model_loading.resolve_base_model(result["base_model"]).sha256 == result["sha256"]


def test_file_with_wrong_digest_is_refused_and_refetched(
    repository: Repository, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = use_workdir(tmp_path, monkeypatch)
    repository.corrupt_files = {"model.safetensors"}
    error = refusal(1, "models", "import", "hf://org/tiny@main", cwd=folder, **repository.environment(folder / "hf"))
    listed_digest = hashing.sha256_file(tiny / "model.safetensors")
    assert error["message"].startswith(
        f"the downloaded file model.safetensors of hf://org/tiny@{COMMIT} has the digest "
    )
    assert error["message"].endswith(f"; expected {listed_digest[:12]}")
    repository.corrupt_files = set()
    assert (
        import_model(folder, "hf://org/tiny@main", repository=repository)["sha256"]
        == model_loading.resolve_base_model(str(tiny)).sha256
    )


@pytest.mark.parametrize(
    ("card", "gated", "license_name"),
    [
        ({"license": "llama3.1"}, False, "llama3.1"),
        (
            {"license": "other", "license_name": "sundays-only", "license_link": "https://example.com/sundays"},
            False,
            "sundays-only",
        ),
        ({}, False, "not stated in the model card"),
        ({"license": "apache-2.0"}, "manual", "apache-2.0, gated"),
    ],
)
def test_license_must_be_accepted_before_download(
    repository: Repository,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    card: dict[str, str],
    gated: str | bool,
    license_name: str,
) -> None:
    folder = use_workdir(tmp_path, monkeypatch)
    repository.card, repository.gated, repository.token = card, gated, "hf_opens"
    error = import_error(folder, "hf://org/tiny@main", repository=repository)
    assert error["kind"] == "usage"
    assert error["message"] == f"cannot import hf://org/tiny@{COMMIT}: its licence ({license_name}) requires acceptance"
    assert "--accept-license" in error["hint"]
    assert repository.downloads == []


def test_license_acceptance_is_recorded_with_the_model(
    repository: Repository, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = use_workdir(tmp_path, monkeypatch)
    repository.card, repository.gated, repository.token = {"license": "llama3.1"}, "manual", "hf_opens"
    arguments = ("hf://org/tiny@main", "--accept-license", "--by", "Ada")
    error = import_error(folder, *arguments, repository=repository)
    assert "HF_TOKEN" in error["hint"]
    result = import_model(folder, *arguments, repository=repository, HF_TOKEN="hf_opens")
    recorded = artifact_folder.read(Path(result["model"]), "base_model").manifest.summary["licence"]
    assert (recorded["id"], recorded["gated"], recorded["accepted"]["by"]) == ("llama3.1", True, "Ada")
    assert recorded["texts"] == {"LICENSE.txt": hashing.sha256_file(tiny / "LICENSE.txt")}
    assert recorded["accepted"]["at"].endswith("+00:00")
    assert "hf_opens" not in json.dumps(result)
    repeated = import_model(folder, "hf://org/tiny@main", repository=repository, HF_TOKEN="hf_opens")
    assert repeated["cached"], "one acceptance is enough"


def copy_model(tiny: Path, folder: Path, card: str = "") -> str:
    """Copy the tiny model into a user's folder and write a card."""
    shutil.copytree(tiny, folder)
    if card:
        (folder / "README.md").write_text(f"---\n{card}\n---\n")
    return str(folder)


def import_in_process(source: str, *, by: str = "", gated: bool = False) -> Artifact:
    """Import in this process. `gated`: the owner has gated the model since."""
    workdir, offer = Workdir.from_environment(), model_import.inspect_source(source, SilentReporter())
    offer = replace(offer, licence=offer.licence.model_copy(update={"gated": gated}))
    return model_import.import_model(offer, workdir, by, SilentReporter())[0]


def test_free_license_needs_no_acceptance_and_no_second_import(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_workdir(tmp_path, monkeypatch)
    source = copy_model(tiny, tmp_path / "mine", "license: mit")
    first = import_in_process(source, by="Ada")
    monkeypatch.setattr(artifact_folder, "publish", lambda *_, **__: pytest.fail("the model is already stored"))
    assert import_in_process(source, by="Ada") == first
    assert first.manifest.summary["licence"]["accepted"] is None


@pytest.mark.parametrize(("size", "message"), [(100, "renders a short conversation"), (10**6, "expected at most")])
def test_hostile_chat_template_is_not_imported(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, message: str
) -> None:
    use_workdir(tmp_path, monkeypatch)
    source = copy_model(tiny, tmp_path / "mine", "license: mit")
    (tmp_path / "mine" / "chat_template.jinja").write_text("{{ 'a' * 10**7 }}" + " " * size)
    with pytest.raises(ConfigurationError, match=message):
        import_in_process(source)


def test_later_acceptance_reuses_stored_weights(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_workdir(tmp_path, monkeypatch)
    source = copy_model(tiny, tmp_path / "mine", "license: mit")
    import_in_process(source)
    weights = Workdir.from_environment().store / import_in_process(source).sha256 / "model.safetensors"
    inode = weights.stat().st_ino
    later = import_in_process(source, by="Ada", gated=True)
    assert later.manifest.summary["licence"]["accepted"]["by"] == "Ada"
    assert (later.path / "model.safetensors").stat().st_ino == inode
    assert artifact_folder.read(later.path, "base_model").sha256 == later.sha256


def test_equal_files_keep_name_and_recorded_acceptance(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_workdir(tmp_path, monkeypatch)
    mit_copy, llama_copy, apache_copy = (
        copy_model(tiny, tmp_path / name, f"license: {name}") for name in ("mit", "llama3.1", "apache-2.0")
    )
    first = import_in_process(mit_copy)
    accepted = import_in_process(llama_copy, by="Ada").manifest.summary
    assert (accepted["source"], accepted["licence"]["id"], accepted["licence"]["accepted"]["by"]) == (
        mit_copy,
        "llama3.1",
        "Ada",
    )
    last = import_in_process(apache_copy)
    assert last.sha256 == first.sha256
    assert last.manifest.summary == accepted
    assert model_loading.resolve_base_model(f"store:{first.sha256}").name == "mit"
    assert artifact_folder.read(last.path, "base_model").manifest.summary == accepted


def test_dry_run_hashes_each_file_once(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_workdir(tmp_path, monkeypatch)
    source = copy_model(tiny, tmp_path / "mine", "license: mit")
    artifact = import_in_process(source)
    offer, original_hash = model_import.inspect_source(source, SilentReporter()), hashing.sha256_file
    hashed: list[Path] = []
    monkeypatch.setattr(hashing, "sha256_file", lambda path: hashed.append(path) or original_hash(path))
    for _ in range(2):
        assert model_import.read_imported_manifest(offer, Workdir.from_environment()) == artifact.manifest
    assert sorted(hashed) == sorted(Path(source) / name for name in offer.files)


def test_by_option_requires_accept_license(tiny: Path, tmp_path: Path) -> None:
    error = refusal(2, "models", "import", tiny, "--by", "Ada", "--dry-run", cwd=tmp_path)
    assert (error["kind"], "--accept-license" in error["hint"]) == ("usage", True)


def test_later_writes_to_source_do_not_change_the_store(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_workdir(tmp_path, monkeypatch)
    source = copy_model(tiny, tmp_path / "mine", "license: mit")
    first = import_in_process(source)
    with (Path(source) / "model.safetensors").open("r+b") as weights:
        weights.write(b"other bytes")
    assert artifact_folder.read(first.path, "base_model").sha256 == first.sha256


def test_folder_import_keeps_digest_and_name(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_workdir(tmp_path, monkeypatch)
    result = answer("models", "import", tiny, "--accept-license", cwd=tmp_path)
    base, source_model = (
        model_loading.resolve_base_model(result["base_model"]),
        model_loading.resolve_base_model(str(tiny)),
    )
    assert (base.sha256, base.name) == (source_model.sha256, source_model.name)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("store:abc", "store:abc does not contain a valid digest"),
        (f"store:{'0' * 64}", f"store:{'0' * 64} is not in the artifact store "),
    ],
)
def test_unknown_store_digest_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, message: str
) -> None:
    use_workdir(tmp_path, monkeypatch)
    with pytest.raises(ConfigurationError) as error:
        model_loading.resolve_base_model(source)
    with pytest.raises(ConfigurationError) as outline_error:
        model_loading.load_outline(source)
    assert error.value.message.startswith(f"fine_tuning.base_model: {message}")
    assert outline_error.value.message == error.value.message
    assert error.value.hint


def test_model_without_safetensors_is_refused(repository: Repository, tmp_path: Path) -> None:
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "config.json").write_text('{"model_type": "llama"}')
    (pickled / "pytorch_model.bin").write_bytes(b"a pickle")
    repository.folder = pickled
    error = import_error(tmp_path, "hf://org/tiny@main", repository=repository)
    assert "contains no safetensors files" in error["message"]
    assert repository.downloads == []
