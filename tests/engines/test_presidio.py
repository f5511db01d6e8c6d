"""Names by presidio and a real spaCy model, without the network."""

import json
import socket

import pytest

from components.common.errors import ConfigurationError
from components.common.personal_data import find, names, redact
from components.common.personal_data.config import NamesConfig
from components.data_curation.config import PersonalDataConfig
from components.data_curation.rows import Row
from components.data_curation.scrubbing import scrub

pytestmark = pytest.mark.presidio


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A real spaCy model of a few words, made here, so that none has to be downloaded."""
    import spacy

    nlp = spacy.blank("en")
    ruler = nlp.add_pipe("entity_ruler")
    ruler.add_patterns([{"label": "PERSON", "pattern": "Ada Lovelace"}, {"label": "GPE", "pattern": "London"}])
    folder = tmp_path_factory.mktemp("spacy") / "model"
    nlp.to_disk(folder)
    return folder


@pytest.fixture(autouse=True)
def _no_network(monkeypatch):
    def refuse(*_):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    names.analyzer.cache_clear()


TEXT = "Ada Lovelace (ada@example.com) lives in London."


def test_names_are_found_beside_the_other_kinds_and_only_counted_by_default(model):
    assert [(one.kind, TEXT[one.start : one.end]) for one in find(TEXT, NamesConfig(model=str(model)))] == [
        ("person", "Ada Lovelace"),
        ("email", "ada@example.com"),
        ("location", "London"),
    ]
    row = Row("text", {"text": TEXT}, "", "", {}, "f", 1)
    counts, why = scrub(row, PersonalDataConfig(names=NamesConfig(model=str(model))))
    assert (counts, why) == ({"email": 1, "person": 1, "location": 1}, None)
    assert row.content["text"] == "Ada Lovelace (<EMAIL>) lives in London."


def test_names_are_redacted_once_and_for_all_and_can_drop_a_row(model):
    config = NamesConfig(model=str(model), person="redact", location="drop")
    row = Row("text", {"text": TEXT}, "", "", {"author": "Ada Lovelace"}, "f", 1)
    counts, why = scrub(row, PersonalDataConfig(names=config))
    assert row.content["text"] == "<PERSON> (<EMAIL>) lives in <LOCATION>."
    assert row.meta == {"author": "<PERSON>"}
    assert counts == {"email": 1, "person": 2, "location": 1}
    assert why is not None
    assert why.detail == "location"
    assert redact(row.content["text"], ["person", "location"], config) == (row.content["text"], {})


def test_a_damaged_model_is_told(model, tmp_path):
    (tmp_path / "config.cfg").write_text("[nlp]\nlang = nonsense\n")
    (tmp_path / "meta.json").write_text(json.dumps({"lang": "en", "name": "x"}))
    with pytest.raises(ConfigurationError) as refused:
        find(TEXT, NamesConfig(model=str(tmp_path)))
    assert f"the spaCy model at {tmp_path} cannot be loaded" in refused.value.message
    assert "Name the folder of a spaCy model" in refused.value.hint


def test_a_models_identity_is_that_of_its_files_wherever_it_lies(model, tmp_path):
    import shutil

    shutil.copytree(model, tmp_path / "moved")
    first = names.identity(NamesConfig(model=str(model)))
    assert first == names.identity(NamesConfig(model=str(tmp_path / "moved")))
    (tmp_path / "moved" / "meta.json").write_text("{}")
    assert first != names.identity(NamesConfig(model=str(tmp_path / "moved")))
    assert names.identity(NamesConfig()) == ""
