"""The alarm: an e-process over the p-values of successive windows, which may be checked after every window.

Each window's p-value becomes an e-value, a bet against "no drift" whose expected value is at most 1. Products of these
bets from each possible start of a drift are mixed. Without drift, the probability that the mixture ever reaches 20 is at
most 1/20 (Ville 1939; Ramdas et al., Statistical Science 38, 2023).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

ALPHA = 0.05  # probability of a false alarm over all windows
THRESHOLD = 1 / ALPHA
HORIZON_WINDOWS = 60  # within which half of the starts are expected
MAX_E_VALUE = 1e300  # JSON has no infinity; a lower e-value is still valid


def calibrate(p: float) -> float:
    """Return the e-value of a p-value: the integral of κ·p^(κ−1) over κ from 0 to 1.

    Source: Vovk and Wang, Annals of Statistics 49, 2021, equation 2.
    """
    if p >= 1:
        return 0.5
    logarithm = math.log(p)
    return (1 - p + p * logarithm) / (p * logarithm * logarithm)


def compute_e_process(p_values: Sequence[float]) -> list[float]:
    """Return the e-value after each window.

    A drift that starts at window s (from 1) has the weight H / ((s + H − 1)(s + H)) with H = HORIZON_WINDOWS. The
    weights of all starts sum to 1; that of the starts after the present window is kept as cash.
    """
    values, invested = [], 0.0
    for start, p in enumerate(p_values, 1):
        weight = HORIZON_WINDOWS / ((start + HORIZON_WINDOWS - 1) * (start + HORIZON_WINDOWS))
        invested = min((invested + weight) * calibrate(p), MAX_E_VALUE)
        cash = HORIZON_WINDOWS / (start + HORIZON_WINDOWS)
        values.append(invested + cash)
    return values
