"""Names of people and places, found by presidio with a spaCy model from a local path. Nothing is downloaded."""

from __future__ import annotations

import logging
from functools import lru_cache
from pathlib import Path
from typing import Any

from components.common import hashing
from components.common.errors import ConfigurationError
from components.common.personal_data.config import NamesConfig

PLACEHOLDERS = {"person": "<PERSON>", "location": "<LOCATION>"}
ENTITIES = {"PERSON": "person", "LOCATION": "location"}
# What spaCy's models call what presidio calls PERSON and LOCATION (OntoNotes and WikiNER labels).
LABELS = {"PER": "PERSON", "PERSON": "PERSON", "GPE": "LOCATION", "LOC": "LOCATION", "FAC": "LOCATION"}
MISSING = "Install it beside tuneline: pip install presidio-analyzer spacy. Or leave data_curation.personal_data.names.model empty."
MODEL = (
    "Name the folder of a spaCy model that lies on this machine, the one with config.cfg and meta.json in it: unpack the wheel of"
    " en_core_web_sm, for example, and name en_core_web_sm/en_core_web_sm-3.8.0 in it."
)


def find(text: str, config: NamesConfig) -> list[tuple[str, int, int]]:
    """Kind, start and end of the names in a text; none in placeholders. Raises ConfigurationError when the model cannot be used."""
    engine = analyzer(config.model, config.language)
    found = engine.analyze(text, language=config.language, entities=list(ENTITIES))
    return [(ENTITIES[one.entity_type], one.start, one.end) for one in found if not set("<>") & set(text[one.start : one.end])]


@lru_cache(maxsize=1)
def analyzer(model: str, language: str) -> Any:
    """Presidio's engine with the model at a path, loaded once a process.

    Raises ConfigurationError when presidio is not installed, when there is no model at the path, or when it cannot be loaded.
    """
    folder = model_folder(model)
    try:
        from presidio_analyzer import AnalyzerEngine, RecognizerRegistry  # type: ignore[import-not-found,unused-ignore]
        from presidio_analyzer.nlp_engine import NerModelConfiguration, SpacyNlpEngine  # type: ignore[import-not-found,unused-ignore]
        from presidio_analyzer.predefined_recognizers import SpacyRecognizer  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise ConfigurationError(f"data_curation.personal_data.names needs presidio-analyzer and spaCy: {error}", hint=MISSING) from error
    logging.getLogger("presidio-analyzer").setLevel(logging.ERROR)  # it warns of labels nobody asked for
    # A registry with one recognizer: presidio's own ones for e-mail and URLs load a list of domains from the internet.
    registry = RecognizerRegistry(
        recognizers=[SpacyRecognizer(supported_language=language, supported_entities=list(ENTITIES))], supported_languages=[language]
    )
    labels = NerModelConfiguration(model_to_presidio_entity_mapping=LABELS)
    nlp = SpacyNlpEngine(models=[{"lang_code": language, "model_name": str(folder)}], ner_model_configuration=labels)
    try:
        nlp.load()
    except (OSError, ValueError, ImportError) as error:
        raise ConfigurationError(f"the spaCy model at {folder} cannot be loaded: {_first_line(error)}", hint=MODEL) from error
    return AnalyzerEngine(registry=registry, nlp_engine=nlp, supported_languages=[language])


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


def model_folder(model: str) -> Path:
    """The folder of the model. Raises ConfigurationError where there is none: a name alone would make spaCy download one."""
    folder = Path(model).expanduser().absolute()
    if not (folder / "config.cfg").is_file() or not (folder / "meta.json").is_file():
        what = "holds no spaCy model" if folder.is_dir() else "is not there" if not folder.exists() else "is not a folder"
        raise ConfigurationError(f"data_curation.personal_data.names.model: {folder} {what}", hint=MODEL)
    return folder


def identity(config: NamesConfig) -> str:
    """Digest (hex) of the model's files, which what is redacted depends on; "" without a model. Raises ConfigurationError as find does."""
    if not config.model:
        return ""
    folder = model_folder(config.model)
    files = sorted(path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return hashing.digest([[path.relative_to(folder).as_posix(), hashing.sha256_file(path)] for path in files])
