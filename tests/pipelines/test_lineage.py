"""Where a model came from: a chain made by the real stages is traced, and every way to break it is named."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import shutil
import struct
import subprocess
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from components.common import models, places, tracking
from components.common.artifacts import Artifact
from components.common.errors import TunelineError
from components.common.places import Workdir
from components.common.progress import Silent
from components.data_curation.stage import curate, list_sources
from components.data_versioning.stage import Version, publish
from components.evaluation.stage import evaluate
from components.fine_tuning.stage import finetune
from components.model_registry.stage import Registration, promote, register
from components.triton_packaging.stage import package
from pipelines.config import Customization, parse
from pipelines.lineage import Lineage, LineageError, Link, sentence, trace
from tests.pipelines.command import COMMAND, ROOT, answer, environment, refusal, tuneline
from tests.pipelines.test_pipeline import flip, write_rows
from tests.tiny import tiny_model

pytestmark = [pytest.mark.daft, pytest.mark.dvc, pytest.mark.mlflow]
NAME = "traced"
ORDER = ["version", "repository", "evaluation", "model", "base_model", "dataset", "revision", "raw"]


@dataclass(frozen=True)
class Chain:
    """A customization made stage by stage in a workdir, registered and promoted."""

    work: Workdir
    config: Customization
    dataset: Artifact
    revision: Version
    model: Artifact
    evaluation: Artifact
    repository: Artifact
    registered: Registration

    @property
    def raw(self) -> Path:
        return self.work.root.parent / "raw.jsonl"

    def trace(self, reference: str = f"{NAME}@champion") -> Lineage:
        return trace(reference, self.work, self.config.data_versioning, Silent())

    def broken(self) -> tuple[Link, LineageError]:
        """The one link where the chain is broken, and the error that tells it."""
        found = self.trace()
        [link] = found.broken
        with pytest.raises(LineageError) as error:
            found.check()
        assert error.value.kind == "lineage"
        assert error.value.exit_code == 1
        assert error.value.hint
        return link, error.value


def settings(folder: Path) -> Customization:
    values: dict[str, Any] = {
        "data_curation": {
            "sources": [str(folder / "raw.jsonl")],
            "near_duplicate_threshold": 0.95,
            "answer_min_words": 1000,
            "fractions": {"train": 0.6, "validation": 0.1, "test": 0.3},
        },
        "fine_tuning": {"base_model": str(folder / "tiny"), "max_steps": 12, "batch_size": 4, "learning_rate": 5e-3, "validation_rows": 0},
        "evaluation": {"generations": 0, "bootstrap_samples": 1000},
        "triton_packaging": {"prove": False},
        "model_registry": {"name": NAME},
    }
    return parse(values, "the test")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    """The stages one after the other, as a run calls them."""
    folder = tmp_path_factory.mktemp("traced")
    work, draft, say = Workdir(folder / "workdir"), folder / "draft", Silent()
    tiny_model(folder / "tiny")
    write_rows(folder / "raw.jsonl")
    config = settings(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", work.tracking_uri)
        patch.delenv("TUNELINE_STORE", raising=False)
        work.store.mkdir(parents=True)
        sources = list_sources(config.data_curation.sources, folder)
        dataset = places.adopt(work.store, curate(sources, draft, config.data_curation, seed=1, reporter=say))
        revision = publish(dataset, config.data_versioning, workdir=work.root, reporter=say)
        tuned = finetune(dataset, draft, config.fine_tuning, seed=1, state=work.state, reporter=say, dataset_uri=revision.uri)
        model = places.adopt(work.store, tuned)
        opened, options = models.from_artifact(model), {"seed": 1, "reporter": say}
        judged = evaluate(opened, dataset, draft, config.evaluation, incumbent=None, state=work.state, **options)
        evaluation = places.adopt(work.store, judged)
        repository = places.adopt(work.store, package(opened, draft, config.triton_packaging, **options))
        named = revision.model_dump()
        done = register(model, evaluation, repository, config.model_registry, reporter=say, dataset_version=named)
        promote(NAME, done.version, force=True, reason="the test", reporter=say)
    return Chain(work, config, dataset, revision, model, evaluation, repository, done)


@pytest.fixture
def chain(made: Chain, monkeypatch: pytest.MonkeyPatch) -> Chain:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", made.work.tracking_uri)
    return made


@contextmanager
def moved(path: Path) -> Iterator[None]:
    """A file or folder that is gone for a while."""
    aside = path.with_name(f"{path.name}.aside")
    path.rename(aside)
    try:
        yield
    finally:
        shutil.rmtree(path, ignore_errors=True)
        aside.rename(path)


@contextmanager
def flipped(path: Path) -> Iterator[None]:
    """A file with one bit turned for a while; objects of a DVC remote are read-only."""
    mode = path.stat().st_mode
    path.chmod(0o644)
    flip(path)
    try:
        yield
    finally:
        flip(path)
        path.chmod(mode)


@contextmanager
def tagged(chain: Chain, **values: str) -> Iterator[None]:
    """Other values of the version's tags for a while."""
    client = tracking.connect().MlflowClient()
    before = chain.registered.tags
    for name, value in values.items():
        client.set_model_version_tag(NAME, "1", f"tuneline.{name}", value)
    try:
        yield
    finally:
        for name in values:
            client.set_model_version_tag(NAME, "1", f"tuneline.{name}", before[f"tuneline.{name}"])


def statuses(found: Lineage) -> dict[str, str]:
    return {link.kind: link.status for link in found.chain}


def test_an_intact_chain_goes_from_the_version_to_the_raw_file(chain: Chain) -> None:
    found = chain.trace()
    found.check()
    assert [link.kind for link in found.chain] == ORDER
    assert set(statuses(found).values()) == {"intact"}
    by_kind = {link.kind: link for link in found.chain}
    for kind in ("repository", "evaluation", "model", "dataset"):
        artifact: Artifact = getattr(chain, kind)
        assert by_kind[kind].sha256 == artifact.sha256
        assert by_kind[kind].uri == artifact.path.as_uri()
    assert by_kind["revision"].sha256 == chain.dataset.sha256
    assert by_kind["revision"].uri == chain.revision.uri
    assert by_kind["revision"].uri.startswith("dvc://")
    assert by_kind["raw"].sha256 == list_sources([str(chain.raw)], Path.cwd())[0].sha256
    assert by_kind["raw"].uri == chain.raw.as_uri()
    assert sentence(found) == "Every digest agrees, from the package back to the revision and the raw files."


def test_the_tree_can_be_rebuilt_from_the_inputs(chain: Chain) -> None:
    found = chain.trace()
    known = {link.sha256 for link in found.chain}
    inputs = {link.kind: link.inputs for link in found.chain}
    assert all(set(some) <= known for some in inputs.values()), "every input is a link of the chain"
    assert inputs["version"] == [chain.repository.sha256, chain.evaluation.sha256, chain.model.sha256]
    base = found.of("base_model")[0].sha256
    assert set(inputs["repository"]) == {chain.model.sha256, base}
    assert set(inputs["evaluation"]) == {chain.model.sha256, chain.dataset.sha256, base}
    assert set(inputs["model"]) == {chain.dataset.sha256, base}
    assert inputs["dataset"] == inputs["revision"] == [found.of("raw")[0].sha256]
    assert inputs["raw"] == inputs["base_model"] == []


@pytest.mark.parametrize("reference", [NAME, f"{NAME}@champion", f"{NAME}@1", f"{NAME}/1", f"{NAME}@candidate", f"models:/{NAME}@champion"])
def test_a_version_is_named_by_alias_or_number(chain: Chain, reference: str) -> None:
    found = chain.trace(reference)
    assert (found.name, found.version) == (NAME, "1")
    assert found.alias == (None if reference.endswith("1") else "candidate" if "candidate" in reference else "champion")


def first_payload(artifact: Artifact) -> Path:
    return artifact.path / max((f for f in artifact.manifest.files if f.payload), key=lambda f: f.bytes).path


@pytest.mark.parametrize("kind", ["repository", "evaluation", "model", "dataset"])
def test_a_changed_byte_in_an_artifact_is_named_with_its_file(chain: Chain, kind: str) -> None:
    path = first_payload(getattr(chain, kind))
    with flipped(path):
        link, error = chain.broken()
    assert (link.kind, link.status) == (kind, "damaged")
    assert error.message.startswith(f"the lineage of {NAME} version 1 is broken in 1 link: {kind} {link.sha256[:12]}: ")
    relative = path.relative_to(getattr(chain, kind).path)
    assert f"{relative} of the {kind} in {getattr(chain, kind).path} has changed since it was published" in error.message
    assert "Restore the file" in error.hint


def test_a_changed_byte_of_the_base_model_is_told_by_its_digests(chain: Chain) -> None:
    with flipped(chain.raw.parent / "tiny" / "model.safetensors"):
        link, error = chain.broken()
    assert (link.kind, link.status) == ("base_model", "damaged")
    assert re.search(r"the files of .*/tiny are now the base model [0-9a-f]{12}, the version names [0-9a-f]{12}", error.message)


def test_a_base_model_that_is_not_on_this_machine_is_not_checked_and_breaks_nothing(chain: Chain) -> None:
    with moved(chain.raw.parent / "tiny"):
        found = chain.trace()
    found.check()
    [base] = found.of("base_model")
    assert base.status == "unchecked"
    assert "is not on this machine" in sentence(found)
    assert found.as_dict()["intact"] is False


@pytest.mark.parametrize("kind", ["repository", "evaluation"])
def test_a_missing_artifact_is_named_with_the_places_looked_in(chain: Chain, kind: str) -> None:
    path = getattr(chain, kind).path
    with moved(path):
        link, error = chain.broken()
    assert (link.kind, link.status) == (kind, "missing")
    assert f"the {kind} is not there any more; looked in {path.as_uri()}, {chain.work.store}" in error.message
    assert "restore it from a backup" in error.hint


def copied(chain: Chain, kind: str, place: Path) -> str:
    """Another copy of an artifact, as its URI."""
    shutil.copytree(getattr(chain, kind).path, place)
    return place.as_uri()


def test_behind_a_damaged_copy_at_the_recorded_place_the_good_one_in_the_store_is_found(chain: Chain, tmp_path: Path) -> None:
    uri = copied(chain, "evaluation", tmp_path / "copy")
    for damage in ("{", '{"schema": "broken"}', None):
        manifest = tmp_path / "copy" / "manifest.json"
        if damage is None:  # a manifest that is whole, with a payload that is not
            shutil.copyfile(chain.evaluation.path / "manifest.json", manifest)
            flip(tmp_path / "copy" / "evaluation.json")
        else:
            manifest.write_text(damage)
        with tagged(chain, evaluation_store_uri=uri):
            found = chain.trace()
        found.check()
        assert found.of("evaluation")[0].uri == chain.evaluation.path.as_uri()


def test_of_two_damaged_copies_the_one_at_the_recorded_place_is_told(chain: Chain, tmp_path: Path) -> None:
    uri = copied(chain, "evaluation", tmp_path / "copy")
    (tmp_path / "copy" / "manifest.json").write_text("{")
    with tagged(chain, evaluation_store_uri=uri), flipped(chain.evaluation.path / "evaluation.json"):
        link, error = chain.broken()
    assert (link.kind, link.status) == ("evaluation", "damaged")
    assert f"{tmp_path / 'copy' / 'manifest.json'} is unreadable" in error.message


@pytest.mark.parametrize("kind", ["repository", "evaluation", "model", "dataset"])
def test_a_file_that_the_system_does_not_give_is_the_failure_of_its_link_and_the_walk_goes_on(chain: Chain, kind: str) -> None:
    manifest = getattr(chain, kind).path / "manifest.json"
    with moved(manifest):
        manifest.mkdir()  # to open it is refused also where the tests run as root, whom no permission stops
        link, error = chain.broken()
    assert (link.kind, link.status) == (kind, "damaged")
    assert f"{manifest} cannot be read: Is a directory" in error.message
    assert "permissions" in error.hint


def test_a_base_model_that_the_system_does_not_give_breaks_its_link_only(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: str) -> None:
        raise PermissionError(13, "Permission denied", f"{source}/model.safetensors")

    monkeypatch.setattr(models, "base_model_here", refuse)
    link, error = chain.broken()
    assert (link.kind, link.status) == ("base_model", "damaged")
    assert "tiny/model.safetensors cannot be read: Permission denied" in error.message


def test_a_model_that_left_the_store_is_read_from_what_mlflow_keeps(chain: Chain) -> None:
    with moved(chain.model.path):
        found = chain.trace()
    found.check()
    assert found.of("model")[0].uri == f"models:/{NAME}/1"
    assert set(statuses(found).values()) == {"intact"}


def test_a_dataset_that_left_the_store_is_read_from_its_revision(chain: Chain) -> None:
    with moved(chain.dataset.path):
        found = chain.trace()
    found.check()
    assert found.of("dataset")[0].uri == chain.revision.uri
    assert set(statuses(found).values()) == {"intact"}
    assert found.of("raw")[0].uri == chain.raw.as_uri()


def test_a_model_that_is_nowhere_any_more_breaks_the_chain(chain: Chain) -> None:
    with moved(chain.model.path), moved(chain.work.root / "mlflow-artifacts"):
        found = chain.trace()
    assert {link.kind for link in found.broken} == {"version", "model"}
    with pytest.raises(LineageError, match="broken in 2 links") as error:
        found.check()
    assert f"MLflow does not give the files of {NAME} version 1" in error.value.message
    assert "the model is not there any more; looked in" in error.value.message
    assert {link.status for link in found.of("dataset") + found.of("revision") + found.of("raw")} == {"intact"}, "the walk goes on"


def test_the_evaluation_of_another_model_is_found_out(chain: Chain, tmp_path: Path) -> None:
    shutil.copytree(chain.evaluation.path, tmp_path / "other")
    text = (tmp_path / "other" / "manifest.json").read_text().replace(chain.model.sha256, "ab" * 32)
    (tmp_path / "other" / "manifest.json").write_text(text)
    with tagged(chain, evaluation_store_uri=(tmp_path / "other").as_uri()):
        link, error = chain.broken()
    assert link.kind == "evaluation"
    assert f"was made from the model {'ab' * 6}, the version names {chain.model.sha256[:12]}" in error.message
    assert "exchanged" in error.hint


def test_a_verdict_that_the_evaluation_did_not_give_is_found_out(chain: Chain) -> None:
    given = chain.registered.tags["tuneline.verdict"]
    with tagged(chain, verdict="splendid"):
        link, error = chain.broken()
    assert link.kind == "evaluation"
    assert f"evaluation.json says {given}, the version says splendid" in error.message


def test_a_version_whose_tags_name_another_dataset_disagrees_with_its_package_and_its_model(chain: Chain) -> None:
    with tagged(chain, dataset_sha256="cd" * 32):
        found = chain.trace()
    told = {link.kind: link.detail for link in found.broken}
    assert set(told) == {"repository", "evaluation", "model", "dataset", "revision"}
    assert told["repository"].startswith(f"config.pbtxt of the repository names the dataset {chain.dataset.sha256[:12]}")
    assert told["revision"] == f"the revision dataset-v1 holds the dataset {chain.dataset.sha256[:12]}, the version names {'cd' * 6}"


def test_a_version_whose_tags_name_another_model_than_mlflow_holds_is_found_out(chain: Chain) -> None:
    with tagged(chain, model_sha256="ef" * 32):
        found = chain.trace()
    version = found.of("version")[0]
    assert version.detail == f"the version's files in MLflow are the model {chain.model.sha256[:12]}, the version names {'ef' * 6}"
    assert {"version", "repository", "evaluation", "model"} <= {link.kind for link in found.broken}


def an_object(chain: Chain) -> Path:
    """An object of the DVC remote that is a file of the dataset."""
    return next(p for p in sorted((chain.work.root / "dvc-remote").rglob("*")) if p.is_file() and p.suffix != ".dir")


def test_an_object_that_the_remote_lost_breaks_the_revision_only(chain: Chain) -> None:
    lost = an_object(chain)
    with moved(lost):
        link, error = chain.broken()
    assert (link.kind, link.status) == ("revision", "damaged")
    assert f"the DVC remote {chain.work.root / 'dvc-remote'} lacks objects or holds them damaged: datasets/dataset/" in error.message
    assert f"object {lost.parent.name}/{lost.name}" in error.message
    assert "publish the same dataset again" in error.hint


def test_a_changed_object_of_the_remote_breaks_the_revision(chain: Chain) -> None:
    kept = chain.work.root / "dvc-remote.aside"
    shutil.copytree(chain.work.root / "dvc-remote", kept)
    try:
        changed = an_object(chain)
        changed.chmod(0o644)
        flip(changed)
        link, error = chain.broken()
    finally:
        shutil.rmtree(chain.work.root / "dvc-remote")
        kept.rename(chain.work.root / "dvc-remote")
    assert link.kind == "revision"
    assert f"object {changed.parent.name}/{changed.name}" in error.message


def test_a_revision_that_the_repository_does_not_have_is_named_with_those_it_has(chain: Chain) -> None:
    other = chain.revision.uri.replace(chain.revision.rev, "0" * 40)
    with tagged(chain, dataset_uri=other):
        link, error = chain.broken()
    assert link.kind == "revision"
    assert f"{chain.work.root / 'data-repository'} has no published revision 000000000000 of dataset" in error.message
    assert f"dataset-v1 ({chain.revision.rev[:12]})" in error.hint


def test_another_md5_than_the_revision_has_is_found_out(chain: Chain) -> None:
    with tagged(chain, dataset_md5="0" * 32 + ".dir"):
        link, error = chain.broken()
    assert link.kind == "revision"
    assert f"has the md5 {chain.revision.md5}, the version names {'0' * 32}.dir" in error.message


def test_a_data_repository_that_moved_with_its_workdir_is_found_by_the_configuration(chain: Chain) -> None:
    elsewhere = chain.revision.uri.replace(str(chain.work.root), "/nowhere/any/more")
    with tagged(chain, dataset_uri=elsewhere):
        found = chain.trace()
    found.check()
    assert found.of("revision")[0].status == "intact"


def test_a_raw_file_that_changed_since_is_told_and_breaks_nothing(chain: Chain) -> None:
    with flipped(chain.raw):
        found = chain.trace()
    found.check()
    [raw] = found.of("raw")
    assert raw.status == "changed"
    assert re.fullmatch(r"raw.jsonl has changed since it was read: it is [0-9a-f]{12} now", raw.detail)
    assert "the digest it had stands in the dataset" in sentence(found)
    assert found.as_dict()["intact"] is False


def test_a_raw_file_that_is_gone_is_told_and_breaks_nothing(chain: Chain) -> None:
    with moved(chain.raw):
        found = chain.trace()
    found.check()
    [raw] = found.of("raw")
    assert (raw.status, raw.uri) == ("missing", "raw.jsonl")
    assert "raw.jsonl is no longer where it was read" in sentence(found)


def refused(chain: Chain, reference: str) -> TunelineError:
    with pytest.raises(TunelineError) as error:
        chain.trace(reference)
    return error.value


def test_unknown_names_aliases_and_versions_are_told_with_what_exists(chain: Chain) -> None:
    unknown = refused(chain, "nobody@champion")
    assert (unknown.kind, unknown.message, unknown.hint) == (
        "registry",
        "there is no registered model nobody",
        f"Registered models: {NAME}.",
    )
    alias = refused(chain, f"{NAME}@best")
    assert alias.message == f"{NAME} has no alias best"
    assert alias.hint == f"Aliases of {NAME}: candidate (version 1), challenger (version 1), champion (version 1); versions: 1."
    version = refused(chain, f"{NAME}/9")
    assert (version.message, version.hint) == (f"{NAME} has no version 9", f"Versions of {NAME}: 1.")
    wrong = refused(chain, "a@b@c")
    assert (wrong.kind, wrong.exit_code) == ("usage", 2)
    assert "NAME@ALIAS" in wrong.hint


def test_a_version_that_tuneline_did_not_register_is_refused(chain: Chain) -> None:
    client = tracking.connect().MlflowClient()
    client.create_registered_model("foreign")
    try:
        client.create_model_version("foreign", "/somewhere/model")
        error = refused(chain, "foreign/1")
    finally:
        client.delete_registered_model("foreign")
    assert error.kind == "registry"
    assert error.message == "foreign version 1 was not registered by tuneline, so nothing is known of where it came from"
    assert "tuneline register" in error.hint


def test_a_dataset_that_was_registered_by_its_folder_is_found_in_the_store_and_by_its_revision(chain: Chain) -> None:
    with tagged(chain, dataset_uri="dataset"):
        found = chain.trace()
        unpublished = chain.config.data_versioning.model_copy(update={"name": "other"})
        without = trace(NAME, chain.work, unpublished, Silent())
    found.check()
    assert found.of("revision")[0].uri == chain.revision.uri
    without.check()
    assert (without.of("revision")[0].status, without.of("dataset")[0].status) == ("unchecked", "intact")
    assert sentence(without).endswith("not checked: the dataset was not published as a revision.")


def test_a_version_without_a_package_is_traced_also_from_another_workdir(chain: Chain, tmp_path: Path) -> None:
    config = chain.config.model_registry.model_copy(update={"name": "refused"})
    register(chain.model, chain.evaluation, None, config, reporter=Silent())
    try:
        found = trace("refused@candidate", Workdir(tmp_path / "empty"), chain.config.data_versioning, Silent())
    finally:
        tracking.connect().MlflowClient().delete_registered_model("refused")
    found.check()
    assert [link.kind for link in found.chain] == [kind for kind in ORDER if kind != "repository"]
    assert sentence(found) == "Every digest agrees, from the model back to the revision and the raw files."


@pytest.fixture
def told(chain: Chain) -> Callable[..., Any]:
    """Call the command in the workdir's parent, as a user does."""
    return lambda call, *arguments: call(*arguments, "--workdir", "workdir", cwd=chain.work.root.parent)


def test_the_command_prints_the_object_of_the_contract(chain: Chain, told: Callable[..., Any]) -> None:
    found = told(answer, "lineage", NAME)
    assert set(found) == {"name", "version", "alias", "intact", "chain"}
    assert (found["name"], found["version"], found["alias"], found["intact"]) == (NAME, "1", "champion", True)
    assert [link["kind"] for link in found["chain"]] == ORDER
    assert all(set(link) == {"kind", "sha256", "uri", "inputs", "status", "detail"} for link in found["chain"])


def tree(chain: Chain, alias: str) -> list[str]:
    """What the command prints of an intact chain."""
    found = chain.trace(f"{NAME}@{alias}")
    version, base, raw = (found.of(kind)[0] for kind in ("version", "base_model", "raw"))
    short = {kind: getattr(chain, kind).sha256[:12] for kind in ("repository", "evaluation", "model", "dataset")}
    verdict = chain.registered.tags["tuneline.verdict"]
    return [
        f"✔ {NAME} version 1 @{alias}  {version.sha256[:12]}  models:/{NAME}/1",
        f"├── ✔ repository  {short['repository']}  store/{short['repository']}",
        f"├── ✔ evaluation  {short['evaluation']}  verdict: {verdict}  store/{short['evaluation']}",
        f"└── ✔ model  {short['model']}  store/{short['model']}",
        f"    ├── ✔ base model  {base.sha256[:12]}  {base.uri}",
        f"    └── ✔ dataset  {short['dataset']}  store/{short['dataset']}",
        f"        ├── ✔ revision  {short['dataset']}  dataset-v1  {chain.revision.uri}",
        f"        └── ✔ raw  {raw.sha256[:12]}  {chain.raw.as_uri()}",
    ]


def test_a_pipe_gets_one_line_a_link_with_its_mark_digest_detail_and_place(chain: Chain, told: Callable[..., Any]) -> None:
    done = told(tuneline, "lineage", NAME)
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    assert lines == tree(chain, "champion")
    assert last == "Every digest agrees, from the package back to the revision and the raw files."


def on_a_terminal(columns: int, *arguments: str, cwd: Path) -> list[str]:
    """The lines that a command prints on a terminal of so many columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    plain = environment(NO_COLOR="1", TERM="dumb")
    plain.pop("COLUMNS", None)
    process = subprocess.Popen([*COMMAND, *arguments], cwd=cwd, env=plain, stdin=theirs, stdout=theirs, stderr=subprocess.DEVNULL)
    os.close(theirs)
    printed = b""
    with contextlib.suppress(OSError):  # the terminal is gone with its last user
        while some := os.read(ours, 65536):
            printed += some
    os.close(ours)
    assert process.wait(60) == 0
    return re.sub(r"\x1b\[[0-9;]*m", "", printed.decode()).splitlines()


def test_a_terminal_of_80_columns_shows_all_of_it_folded(chain: Chain, told: Callable[..., Any]) -> None:
    *lines, _ = told(partial(on_a_terminal, 80), "lineage", NAME)
    assert max(map(len, lines)) <= 80
    guides = re.compile(r"[\s│├└─]+")
    assert guides.sub("", "".join(lines)) == guides.sub("", "".join(tree(chain, "champion")))
    assert any("revision" in line and "dataset-v1" in line for line in lines), "the detail stands beside the name"


def test_the_page_shows_what_the_command_prints(chain: Chain, told: Callable[..., Any]) -> None:
    page = (ROOT / "docs" / "lineage.md").read_text(encoding="utf-8")

    def same(text: str) -> str:
        """Without what differs from model to model: its name and verdict, digests, places."""
        return re.sub(r"(  )[0-9a-f]{12}(  .+)?  \S+$", r"\1#\2", text.strip(), flags=re.MULTILINE)

    shown = same(page.split("```\n")[2].replace("my-model", NAME))
    assert shown.count("#") == len(ORDER)
    assert shown == same(told(tuneline, "lineage", NAME).stdout.replace(chain.registered.tags["tuneline.verdict"], "accepted"))


def test_the_command_shows_a_broken_chain_to_people_and_exits_1(chain: Chain, told: Callable[..., Any]) -> None:
    with moved(chain.repository.path), flipped(chain.raw):
        done = told(tuneline, "lineage", NAME)
        error = told(lambda *a, **k: refusal(1, *a, **k), "lineage", NAME)
    assert done.returncode == 1
    place = chain.repository.path
    reason = f"the repository is not there any more; looked in {place.as_uri()}, {place.parent}"
    lines = done.stdout.splitlines()
    assert lines[1] == f"├── ✘ repository  {place.name[:12]}  {reason}  store/{place.name[:12]}"
    assert re.search(r"! raw  [0-9a-f]{12}  raw.jsonl has changed since it was read: it is [0-9a-f]{12} now  file:", lines[-1])
    assert f"the lineage of {NAME} version 1 is broken in 1 link: repository {place.name[:12]}: {reason}" in done.stderr
    assert "Mount the artifact store it lies in, or restore it from a backup." in done.stderr
    assert (error["stage"], error["kind"]) == ("lineage", "lineage")
    assert "the repository is not there any more" in error["message"]
    assert error["hint"]


def test_without_a_registry_the_command_says_so_and_makes_none(tmp_path: Path) -> None:
    error = refusal(1, "lineage", NAME, cwd=tmp_path)
    assert error["kind"] == "registry"
    assert error["message"] == f"there is no registry yet, so no model {NAME}"
    assert "--tracking-uri" in error["hint"]
    assert os.listdir(tmp_path) == []  # noqa: PTH208


def documented(command: str) -> dict[str, Any]:
    """The object that docs/cli.md gives for a command; a key without a value is null."""
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    found = re.search(rf"^{command} +(\{{.*?\}})$(?=\n\S)", page, re.MULTILINE | re.DOTALL)
    assert found, f"docs/cli.md says nothing of the object of {command}"
    given: dict[str, Any] = json.loads(re.sub(r'("\w+")(?=[,}])', r"\1: null", re.sub(r"\b(split|reason):", r'"\1":', found[1])))
    return given


def test_the_objects_of_data_show_and_data_diff_are_those_of_the_page(chain: Chain, told: Callable[..., Any]) -> None:
    shown, compared = told(answer, "data", "show", "dataset-v1"), told(answer, "data", "diff", "dataset-v1", "dataset-v1")
    on_show, on_diff = documented("data show"), documented("data diff")
    assert list(on_show) == list(shown)
    for name in ("inputs", "files"):
        assert list(on_show[name][0]) == list(shown[name][0])
    assert list(on_diff) == list(compared)
    assert set(compared["splits"]) == {"train", "validation", "test"}
    for found in compared["splits"].values():
        assert list(on_diff["splits"]["split"]) == list(found)
        assert list(on_diff["splits"]["split"]["examples"]) == list(found["examples"])
