"""Names of the compiled pipelines, and of the parameter of a chain."""

from __future__ import annotations

CUSTOMIZATION_PIPELINE = "tuneline-customization"
CHAIN_PIPELINE = "tuneline-chain"
CHAIN_PARAMETER = "configurations"
