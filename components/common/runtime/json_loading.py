"""Strict JSON: Python's parser also reads NaN and Infinity, and reads a number beyond the range of floats as infinity."""

from __future__ import annotations

import json
import math
from typing import NoReturn


def reject_constant(constant: str) -> NoReturn:
    """Raise ValueError for NaN or Infinity, as `parse_constant` of a JSON parser."""
    raise ValueError(f"{constant} is not a JSON value")


def parse_finite(text: str) -> float:
    """Return a number; raise ValueError if it is too large for a float, as `parse_float` of a JSON parser."""
    value = float(text)
    return value if math.isfinite(value) else reject_constant(text)


DECODER = json.JSONDecoder(parse_constant=reject_constant, parse_float=parse_finite)
