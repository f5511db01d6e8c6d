"""Distillation: the teacher's source, checks and digest. Its trainer is in `rollout_trainer`, which needs TRL."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from components.common.models import model_loading
from components.common.models.model_loading import LocalBaseModel
from components.common.runtime.errors import ConfigurationError
from components.common.runtime.reporters import Reporter
from components.fine_tuning import model_support
from components.fine_tuning.config import FineTuningConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

C = TypeVar("C", bound=FineTuningConfig)
TEACHER_INPUT = "teacher"  # kind of the input in the manifest of a distilled model
TEACHER_KEY = "fine_tuning.distillation.teacher"


def resolve_teacher(config: FineTuningConfig, student: Path, reporter: Reporter) -> LocalBaseModel | None:
    """Return the teacher on this machine, with its digest verified; None for other objectives.

    Args:
        config: The recipe.
        student: Folder of the base model.
        reporter: Receives progress.

    Raises:
        ConfigurationError: the teacher is not available, has another vocabulary than the base model, or has too short a context.
        ArtifactDamagedError: its digest is not the one that the recipe requires.
    """
    settings = config.distillation
    if settings.teacher is None:
        return None
    with model_loading.replace_error_key(TEACHER_KEY):
        teacher = model_loading.resolve_base_model(settings.teacher, reporter, settings.teacher_sha256)
        model_loading.check_base_model(teacher)
    models = [
        (model_loading.load_tokenizer(path), model_loading.load_configuration(path)) for path in (teacher.path, student)
    ]
    check_vocabulary(settings.teacher, *models[0], *models[1])
    model_support.check_context(config, models[0][1], TEACHER_KEY, settings.teacher)
    return teacher


def check_vocabulary(
    source: str,
    teacher_tokenizer: PreTrainedTokenizerBase,
    teacher_config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    model_config: PretrainedConfig,
) -> None:
    """Check that a teacher predicts the tokens of the model that it teaches.

    Args:
        source: Source of the teacher, for the message.
        teacher_tokenizer: Its tokenizer.
        teacher_config: Its configuration.
        tokenizer: The base model's tokenizer.
        model_config: The base model's configuration.

    Raises:
        ConfigurationError: the tokens, or the sizes of the output layers, differ.
    """
    sizes = [each.get_text_config(decoder=True).vocab_size for each in (teacher_config, model_config)]
    if teacher_tokenizer.get_vocab() != tokenizer.get_vocab():
        difference = "other tokens than the base model"
    elif sizes[0] != sizes[1]:
        difference = f"an output layer of {sizes[0]:,} tokens, and the base model one of {sizes[1]:,}"
    else:
        return
    raise ConfigurationError(
        f"{TEACHER_KEY}: {source} has {difference}; the loss compares the probabilities of equal tokens",
        hint="Choose a teacher of the same model family, or generate its answers with `tuneline synthesize` and use sft.",
    )


def pin_teacher(config: C, teacher: LocalBaseModel | None) -> C:
    """Return the recipe with the digest of its teacher."""
    return _change_settings(config, {"teacher_sha256": teacher.sha256} if teacher else {})


def locate_teacher(config: C, teacher: LocalBaseModel | None) -> C:
    """Return the recipe with the folder of its teacher as the source."""
    return _change_settings(config, {"teacher": str(teacher.path)} if teacher else {})


def _change_settings(config: C, changes: dict[str, str]) -> C:
    if not changes:
        return config
    return config.model_copy(update={"distillation": config.distillation.model_copy(update=changes)})
