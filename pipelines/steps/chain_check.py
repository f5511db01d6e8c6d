"""Checks of a chain before its first customization runs."""

from __future__ import annotations

from collections.abc import Sequence

from components.common.models import model_loading
from components.common.runtime.errors import ConfigurationError
from components.common.runtime.reporters import Reporter
from components.common.workspace.artifact_store import Workdir
from pipelines.config.customization_chain import ChainedCustomization
from pipelines.steps import input_resolution


def check_later_customizations(chain: Sequence[ChainedCustomization], work: Workdir, reporter: Reporter) -> None:
    """Check what would otherwise be checked after the first training run; a run itself checks the first customization.

    Raises:
        ConfigurationError, InputError: a source, a model, a reward or an evaluation task of a later customization is
            invalid, its model and the champion are of different kinds, the release policy refuses its model, or a
            reward model would read other tokens than the model that it scores.
    """
    for link in chain[1:]:
        input_resolution.check_customization(link.customization, work, reporter)
    check_tokenizers(chain)


def check_tokenizers(chain: Sequence[ChainedCustomization]) -> None:
    """Raise ConfigurationError if a reward model of the chain and the model that it scores would read other tokens."""
    for link in chain:
        if link.rewarded_by is None:
            continue
        sources = [each.fine_tuning.base_model for each in (chain[link.rewarded_by].customization, link.customization)]
        tokenizers = [model_loading.load_outline(source).tokenizer for source in sources]
        if not model_loading.tokenize_equally(*tokenizers):
            raise ConfigurationError(
                f"fine_tuning.grpo.rewards: the reward model is trained from {sources[0]}, whose tokenizer or chat template "
                f"differs from that of {sources[1]}",
                hint="Train both from base models with the same tokenizer.",
            )
