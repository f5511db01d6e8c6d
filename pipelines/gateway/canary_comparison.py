"""A sequential test that compares a canary with the stable target of its route, and may be evaluated after each request.

Requests of both targets that end next to each other form pairs, so that a common outage or a busy hour affects both.
In each pair, the canary is worse, better, or equal. If it is worse in at most half of the unequal pairs, the product of
bets on "worse" is a nonnegative supermartingale: an e-process, which exceeds 1/alpha at any time with probability alpha
at most (Ville 1939; Ramdas et al. 2023, "Game-theoretic statistics and safe anytime-valid inference"; bets as in
Waudby-Smith and Ramdas 2024, "Estimating means of bounded random variables by betting"). The pairs with one failed
request are those of McNemar's test (1947).
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

from pipelines.gateway.traffic_routes import AbortLimits

BETS = [(2 * number + 1) / 24 for number in range(12)]  # a mixture: no single bet suits every difference
MAX_PAIR_SECONDS = 300.0  # between the ends of the requests of a pair
ERRORS, FIRST_TOKEN, DURATION = "error rate", "time to first token", "duration"


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished request. The times in seconds are None if the request failed; a request without text has no first."""

    is_error: bool
    first_seconds: float | None = None
    seconds: float | None = None


@dataclass
class CanaryComparison:
    """The pairs of one version of a canary and one version of the stable target.

    Attributes:
        requests: finished requests of the canary.
        pairs: for each quantity, the pairs in which the canary is worse and in which it is not.
        versions: the compared versions; True: of the canary.
    """

    requests: int = 0
    pairs: dict[str, list[int]] = field(
        default_factory=lambda: {name: [0, 0] for name in (ERRORS, FIRST_TOKEN, DURATION)}
    )
    versions: dict[bool, str] = field(default_factory=dict)
    _waiting: dict[bool, tuple[float, Outcome]] = field(default_factory=dict)

    def record(self, outcome: Outcome, limits: AbortLimits, *, is_canary: bool) -> None:
        """Add a finished request; it forms a pair with the last unpaired request of the other target."""
        now = time.monotonic()
        self.requests += is_canary
        ended, other = self._waiting.pop(not is_canary, (now, None))
        if other is None or now - ended > MAX_PAIR_SECONDS:
            self._waiting[is_canary] = (now, outcome)
            return
        canary, stable = (outcome, other) if is_canary else (other, outcome)
        if canary.is_error != stable.is_error:
            self.pairs[ERRORS][0 if canary.is_error else 1] += 1
        for name, mine, theirs in (
            (FIRST_TOKEN, canary.first_seconds, stable.first_seconds),
            (DURATION, canary.seconds, stable.seconds),
        ):
            if mine is not None and theirs is not None:
                self.pairs[name][0 if mine > limits.max_slowdown * theirs else 1] += 1

    def find_reason(self, limits: AbortLimits) -> str:
        """Return the quantity in which the canary is worse, or "" without sufficient evidence."""
        if not limits.enabled or self.requests < limits.min_requests:
            return ""
        # The e-processes share the rate of false aborts.
        threshold = math.log(len(self.pairs) / limits.false_abort_rate)
        for name, (worse, better) in self.pairs.items():
            if worse > better and log_evidence(worse, better) > threshold:
                return name
        return ""


def log_evidence(worse: int, better: int) -> float:
    """Return the logarithm of the e-value: the mean over the bets L of (1+L)^worse (1-L)^better."""
    logs = [worse * math.log1p(bet) + better * math.log1p(-bet) for bet in BETS]
    highest = max(logs)
    return highest + math.log(sum(math.exp(each - highest) for each in logs) / len(logs))
