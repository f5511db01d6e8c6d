"""Detection of names of people and places by presidio, with a spaCy model in a local folder. No downloads."""

from __future__ import annotations

import logging
from functools import lru_cache
from pathlib import Path
from typing import Any

from components.common.artifacts import hashing
from components.common.personal_data.names_config import NamesConfig
from components.common.runtime.errors import ConfigurationError, get_first_line

PLACEHOLDERS = {"person": "<PERSON>", "location": "<LOCATION>"}
ENTITIES = {"PERSON": "person", "LOCATION": "location"}
# Presidio's entity of each label of spaCy's models (OntoNotes and WikiNER).
LABELS = {"PER": "PERSON", "PERSON": "PERSON", "GPE": "LOCATION", "LOC": "LOCATION", "FAC": "LOCATION"}
INSTALL_HINT = "Run: pip install presidio-analyzer spacy, or set data_curation.personal_data.names.model to ''."
MODEL_HINT = (
    "Set a local folder that contains config.cfg and meta.json of a spaCy model, for example the folder"
    " en_core_web_sm/en_core_web_sm-3.8.0 of the unpacked wheel of en_core_web_sm."
)


def find_names(text: str, config: NamesConfig) -> list[tuple[str, int, int]]:
    """Return (kind, start, end) of the names in a text, except in placeholders; positions are in characters.

    Raises:
        ConfigurationError: presidio is not installed, or the spaCy model cannot be loaded.
    """
    engine = load_analyzer(config.model, config.language)
    return [
        (ENTITIES[result.entity_type], result.start, result.end)
        for result in engine.analyze(text, language=config.language, entities=list(ENTITIES))
        if not set("<>") & set(text[result.start : result.end])
    ]


@lru_cache(maxsize=1)
def load_analyzer(model: str, language: str) -> Any:
    """Return presidio's AnalyzerEngine with a spaCy model, loaded once per process.

    Args:
        model: folder of the spaCy model.
        language: two-letter code.

    Raises:
        ConfigurationError: presidio is not installed, or the spaCy model cannot be loaded.
    """
    folder = resolve_model_folder(model)
    try:
        from presidio_analyzer import AnalyzerEngine, RecognizerRegistry  # type: ignore[import-not-found,unused-ignore]
        from presidio_analyzer.nlp_engine import NerModelConfiguration, SpacyNlpEngine  # type: ignore[import-not-found,unused-ignore]
        from presidio_analyzer.predefined_recognizers import SpacyRecognizer  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise ConfigurationError(
            f"data_curation.personal_data.names.model requires presidio-analyzer and spaCy: {error}", hint=INSTALL_HINT
        ) from error
    logging.getLogger("presidio-analyzer").setLevel(logging.ERROR)  # presidio warns about labels that are not requested
    # Only spaCy's recognizer: presidio's recognizers of e-mail addresses and URLs download a list of domains.
    registry = RecognizerRegistry(
        recognizers=[SpacyRecognizer(supported_language=language, supported_entities=list(ENTITIES))],
        supported_languages=[language],
    )
    labels = NerModelConfiguration(model_to_presidio_entity_mapping=LABELS)
    nlp = SpacyNlpEngine(models=[{"lang_code": language, "model_name": str(folder)}], ner_model_configuration=labels)
    try:
        nlp.load()
    except (OSError, ValueError, ImportError) as error:
        message = f"the spaCy model at {folder} cannot be loaded: {get_first_line(error)}"
        raise ConfigurationError(message, hint=MODEL_HINT) from error
    return AnalyzerEngine(registry=registry, nlp_engine=nlp, supported_languages=[language])


def resolve_model_folder(model: str) -> Path:
    """Return the absolute folder of a spaCy model.

    Raises:
        ConfigurationError: the folder does not exist or contains no spaCy model.
    """
    folder = Path(model).expanduser().absolute()
    if not (folder / "config.cfg").is_file() or not (folder / "meta.json").is_file():
        problem = "is not a folder" if folder.exists() else "does not exist"
        problem = "contains no spaCy model" if folder.is_dir() else problem
        raise ConfigurationError(f"data_curation.personal_data.names.model: {folder} {problem}", hint=MODEL_HINT)
    return folder


def compute_model_digest(config: NamesConfig) -> str:
    """Return the hexadecimal digest of the spaCy model's files; "" if no model is set.

    Raises:
        ConfigurationError: the folder does not exist or contains no spaCy model.
    """
    if not config.model:
        return ""
    folder = resolve_model_folder(config.model)
    files = sorted(path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return hashing.digest([[path.relative_to(folder).as_posix(), hashing.sha256_file(path)] for path in files])
