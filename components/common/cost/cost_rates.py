"""Prices and power of the environment, and the energy and money that a measured cost amounts to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from components.common.cost.stage_cost import JOULES_PER_KWH

# Power of a node at full load ÷ design power of its GPUs, from MLPerf power logs: 868 W per H100 of 700 W, 1,197 W per
# B200 of 1,000 W. As in `tuneline size`.
NODE_POWER_RATIO = 1.2
GIB = 2**30
SECONDS_PER_MONTH = 30 * 24 * 3600
Figures = dict[str, Any]


def _refuse_boolean(value: object) -> object:
    if isinstance(value, bool):  # which Pydantic reads as 0 or 1
        raise ValueError("expected a number, not a boolean")
    return value


Amount = Annotated[float, BeforeValidator(_refuse_boolean)]


class Prices(BaseModel):
    """Prices per unit. An unset price leaves its part of the cost out; it does not count as zero."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    currency: str = Field("", max_length=8, description="Currency of all prices, for display, such as EUR.")
    gpu_hour: Amount | None = Field(None, ge=0, description="Price of a GPU-hour. null: not known.")
    cpu_hour: Amount | None = Field(
        None, ge=0, description="Price of a CPU-hour (one busy core for an hour). null: not known."
    )
    kwh: Amount | None = Field(None, ge=0, description="Price of a kWh. null: not known.")
    gib_month: Amount | None = Field(
        None, ge=0, description="Price of a GiB (2^30 bytes) in the artifact store for 30 days. null: not known."
    )


class Power(BaseModel):
    """Power of the machines and their data center."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    gpu_watts: Amount | None = Field(
        None,
        gt=0,
        description="Design power of a GPU in watts. null: the value in the accelerator table of `tuneline size`.",
    )
    cpu_core_watts: Amount | None = Field(
        None,
        gt=0,
        description="Power of one busy CPU core in watts. null: estimated energy is 1.2 × that of the GPUs, and measured "
        "energy excludes CPUs.",
    )


class CostRates(BaseModel):
    """Rates that convert a measured cost to energy and money."""

    prices: Prices = Prices()
    power: Power = Power()
    pue: float = 1.0

    def convert(self, cost: Mapping[str, float]) -> Figures:
        """Return the figures of a cost, as described in docs/how-to/costs.md.

        Args:
            cost: values of TIMES and ENERGIES of `stage_cost`.

        Returns:
            "hours", "cpu_hours", "gpu_hours", "kwh", "energy" (measured, estimated or None), "cost", "currency", and
            "unpriced": the amounts that "cost" leaves out. A figure is None if no part of it is known.
        """
        amounts = {"gpu_hours": cost["gpu_seconds"] / 3600, "cpu_hours": cost["cpu_seconds"] / 3600}
        kwh, basis = self._estimate_energy(cost)
        known_prices = {"gpu_hours": self.prices.gpu_hour, "cpu_hours": self.prices.cpu_hour, "kwh": self.prices.kwh}
        parts, unpriced = [], []
        for name, amount in {**amounts, "kwh": kwh}.items():
            price = known_prices[name]
            if price is not None and amount is not None:
                parts.append(price * amount)
            elif amount != 0:
                unpriced.append(name)
        return {
            "hours": round(cost["seconds"] / 3600, 6),
            **{name: round(amount, 6) for name, amount in amounts.items()},
            "kwh": None if kwh is None else round(kwh, 6),
            "energy": basis,
            "cost": round(sum(parts), 6) if parts else None,
            "currency": self.prices.currency,
            "unpriced": unpriced,
        }

    def _estimate_energy(self, cost: Mapping[str, float]) -> tuple[float | None, str | None]:
        """Return the energy in kWh with the PUE, and its basis.

        Counted energy is that of the GPUs alone. Estimated energy is design power × time × NODE_POWER_RATIO.
        """
        gpu_watts, core_watts = self.power.gpu_watts, self.power.cpu_core_watts
        counted, rated = cost.get("counted_kwh"), cost.get("rated_kwh")
        if gpu_watts:
            uncounted = cost["gpu_seconds"] - cost.get("counted_gpu_seconds", 0.0)
            rated = gpu_watts * uncounted / JOULES_PER_KWH if uncounted > 0 else None
        estimates = [rated * (1 if core_watts else NODE_POWER_RATIO)] if rated else []
        if core_watts:
            estimates.append(core_watts * cost["cpu_seconds"] / JOULES_PER_KWH)
        if counted is None and not estimates:
            return None, None
        return ((counted or 0.0) + sum(estimates)) * self.pue, "estimated" if estimates else "measured"

    def price_storage(self, byte_seconds: float) -> float | None:
        """Return the price of stored bytes × seconds; None without a price."""
        price = self.prices.gib_month
        return None if price is None else byte_seconds / GIB / SECONDS_PER_MONTH * price


def format_figures(figures: Figures) -> str:
    """Return the known figures as text, such as "0.52 GPU-hours, 4.1 CPU-hours, 0.44 kWh (estimated), 1.8 EUR"."""
    parts = [f"{figures['gpu_hours']:.4g} GPU-hours"] if figures["gpu_hours"] else []
    parts.append(f"{figures['cpu_hours']:.3g} CPU-hours")
    if figures["kwh"] is not None:
        parts.append(f"{figures['kwh']:.3g} kWh ({figures['energy']})")
    if figures["cost"] is not None:
        left_out = f" without {', '.join(figures['unpriced'])}" if figures["unpriced"] else ""
        parts.append(f"{figures['cost']:.4g} {figures['currency']}".rstrip() + left_out)
    return ", ".join(parts)
