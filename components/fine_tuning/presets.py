"""Size presets: what the settings that a recipe leaves open (null) mean. Settings of the recipe have precedence.

To add a preset, add its name to `PresetName` and its entry to `PRESETS`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from components.common.models.row_lengths import LENGTH_QUANTILE

PresetName = Literal["quick", "balanced", "thorough"]


@dataclass(frozen=True)
class Preset:
    """Automatic settings of a training run's size.

    Attributes:
        summary: What the preset changes; shown in the configuration reference and at the start of a training run.
        epochs_factor: Factor on the objective's epochs.
        max_epochs: Maximum number of epochs. None: no maximum.
        length_quantile: Share of the rows that max_length covers.
        longest: Maximum of max_length in tokens. None: the model's context.
        early_stopping: Validations without a lower loss that end the training. None: all epochs are trained.
    """

    summary: str
    epochs_factor: float = 1.0
    max_epochs: float | None = None
    length_quantile: float = LENGTH_QUANTILE
    longest: int | None = None
    early_stopping: int | None = None


PRESETS: dict[PresetName, Preset] = {
    # Time is proportional to the tokens. The loss falls most in the first epoch.
    "quick": Preset("at most 1 epoch, and a max_length of at most 512 tokens", max_epochs=1.0, longest=512),
    "balanced": Preset("the defaults"),
    # Validation ends the training and selects the best checkpoint. The schedule spans all epochs, so a training run that
    # stops early ends at a higher learning rate than one planned for that number of epochs.
    "thorough": Preset(
        "twice the epochs, early stopping after 3 validations without a lower loss, and a max_length that covers 99% "
        "of the rows",
        epochs_factor=2.0,
        length_quantile=0.99,
        early_stopping=3,
    ),
}
