"""Name detection with presidio and a real spaCy model, without network access."""

import json
import socket

import pytest

from components.common.personal_data import find, named_entities, redact
from components.common.personal_data.names_config import NamesConfig
from components.common.runtime.errors import ConfigurationError
from components.data_curation.config import PersonalDataConfig
from components.data_curation.filters.redaction import redact_row
from components.data_curation.rows import Row

pytestmark = pytest.mark.presidio


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A small spaCy model built on the spot, so that no download is needed."""
    import spacy

    nlp = spacy.blank("en")
    ruler = nlp.add_pipe("entity_ruler")
    ruler.add_patterns([{"label": "PERSON", "pattern": "Ada Lovelace"}, {"label": "GPE", "pattern": "London"}])
    folder = tmp_path_factory.mktemp("spacy") / "model"
    nlp.to_disk(folder)
    return folder


@pytest.fixture(autouse=True)
def block_network(monkeypatch):
    def fail_on_network_access(*_):
        raise AssertionError("the network was accessed")

    monkeypatch.setattr(socket.socket, "connect", fail_on_network_access)
    monkeypatch.setattr(socket, "getaddrinfo", fail_on_network_access)
    named_entities.load_analyzer.cache_clear()


TEXT = "Ada Lovelace (ada@example.com) lives in London."


def test_names_are_detected_and_only_counted_by_default(model):
    assert [(match.kind, TEXT[match.start : match.end]) for match in find(TEXT, NamesConfig(model=str(model)))] == [
        ("person", "Ada Lovelace"),
        ("email", "ada@example.com"),
        ("location", "London"),
    ]
    row = Row("text", {"text": TEXT}, "", "", {}, "f", 1)
    counts, reason = redact_row(row, PersonalDataConfig(names=NamesConfig(model=str(model))))
    assert (counts, reason) == ({"email": 1, "person": 1, "location": 1}, None)
    assert row.content["text"] == "Ada Lovelace (<EMAIL>) lives in London."


def test_name_redaction_is_idempotent_and_can_drop_a_row(model):
    config = NamesConfig(model=str(model), person="redact", location="drop")
    row = Row("text", {"text": TEXT}, "", "", {"author": "Ada Lovelace"}, "f", 1)
    counts, reason = redact_row(row, PersonalDataConfig(names=config))
    assert row.content["text"] == "<PERSON> (<EMAIL>) lives in <LOCATION>."
    assert row.meta == {"author": "<PERSON>"}
    assert counts == {"email": 1, "person": 2, "location": 1}
    assert reason is not None
    assert reason.detail == "location"
    assert redact(row.content["text"], ["person", "location"], config) == (row.content["text"], {})


def test_damaged_model_is_reported(model, tmp_path):
    (tmp_path / "config.cfg").write_text("[nlp]\nlang = nonsense\n")
    (tmp_path / "meta.json").write_text(json.dumps({"lang": "en", "name": "x"}))
    with pytest.raises(ConfigurationError) as error:
        find(TEXT, NamesConfig(model=str(tmp_path)))
    assert f"the spaCy model at {tmp_path} cannot be loaded" in error.value.message
    assert "Set a local folder that contains config.cfg and meta.json" in error.value.hint


def test_model_digest_depends_on_files_not_on_location(model, tmp_path):
    import shutil

    shutil.copytree(model, tmp_path / "moved")
    first = named_entities.compute_model_digest(NamesConfig(model=str(model)))
    assert first == named_entities.compute_model_digest(NamesConfig(model=str(tmp_path / "moved")))
    (tmp_path / "moved" / "meta.json").write_text("{}")
    assert first != named_entities.compute_model_digest(NamesConfig(model=str(tmp_path / "moved")))
    assert named_entities.compute_model_digest(NamesConfig()) == ""
