"""Comparison of the arguments of function calls with those of the expected calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Arguments = Mapping[str, Any]  # JSON values
Call = tuple[str, Arguments]


def match_arguments(found: Sequence[Call], expected: Sequence[Call]) -> float:
    """Return the mean share of equal arguments over the calls.

    Calls of the same function are paired for the highest mean. An argument that only one call of a pair has is
    unequal. A missing or an additional call scores 0. Without calls and without expected calls, the mean is 1.
    """
    import numpy
    from scipy import optimize

    if not found or not expected:
        return float(not found and not expected)
    shares = numpy.array([[_compute_share(one, other) for other in expected] for one in found])
    pairs = optimize.linear_sum_assignment(shares, maximize=True)
    return float(shares[pairs].sum() / max(len(found), len(expected)))


def is_equal(first: object, second: object) -> bool:
    """Return whether two JSON values are equal: keys in any order, 7 equal to 7.0, and "7" or true to no number."""
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(is_equal(first[key], second[key]) for key in first)
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(is_equal, first, second))
    return isinstance(first, bool) == isinstance(second, bool) and first == second


def _compute_share(found: Call, expected: Call) -> float:
    """Return the share of equal arguments; 0 for different functions, 1 for two calls without arguments."""
    if found[0] != expected[0]:
        return 0.0
    names = found[1].keys() | expected[1].keys()
    common = found[1].keys() & expected[1].keys()
    equal = sum(is_equal(found[1][name], expected[1][name]) for name in common)
    return equal / len(names) if names else 1.0
