"""Budgets: limits of the cost of a run or of a team, checked before a stage and after each training step."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from components.common.cost import stage_cost
from components.common.cost.cost_rates import Amount, CostRates
from components.common.cost.stage_cost import Cost, CostClock
from components.common.runtime.errors import InterruptedRunError

COSTS_VARIABLE = "TUNELINE_COSTS"  # passes a SpendingMeter to the steps of a run


class BudgetReachedError(InterruptedRunError):
    """A budget is used up; a larger budget resumes the work."""

    kind = "budget"


class Budget(BaseModel):
    """Limits of a cost. Without a limit, the cost is recorded but not limited."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    gpu_hours: Amount | None = Field(None, gt=0, description="Limit in GPU-hours. null: no limit.")
    kwh: Amount | None = Field(None, gt=0, description="Limit in kWh, measured or estimated. null: no limit.")
    cost: Amount | None = Field(
        None, gt=0, description="Limit in the currency of `prices` in platform.yaml. null: no limit."
    )
    hours: Amount | None = Field(None, gt=0, description="Limit in hours of wall time of all stages. null: no limit.")

    @property
    def limits(self) -> dict[str, float]:
        """The limits that are set, by name."""
        return {name: value for name, value in self.model_dump().items() if value is not None}


class BudgetAccount(BaseModel):
    """A budget and the cost that counts against it so far.

    Attributes:
        name: its key, `budget` or `team_budgets.NAME`.
        budget: the limits.
        spent: cost before the current work.
    """

    name: str
    budget: Budget
    spent: Cost = Field(default_factory=lambda: dict.fromkeys(stage_cost.TIMES, 0.0))


class SpendingMeter(BaseModel):
    """Rates, and the budgets that the cost of the current work counts against."""

    rates: CostRates = CostRates()
    accounts: list[BudgetAccount] = []

    def charge(self, cost: Cost) -> SpendingMeter:
        """Return a meter whose accounts also contain this cost."""
        charged = [
            account.model_copy(update={"spent": stage_cost.add_costs([account.spent, cost])})
            for account in self.accounts
        ]
        return self.model_copy(update={"accounts": charged})

    def describe_exhausted(self, cost: Cost) -> tuple[str, str] | None:
        """Return the key of the first limit that is reached with this cost, and a sentence with the figures.

        A limit on an amount that is not known, such as `cost` without prices, is never reached;
        `list_unmeasurable` finds such limits.
        """
        for account in self.accounts:
            figures = self.rates.convert(stage_cost.add_costs([account.spent, cost]))
            for name, limit in account.budget.limits.items():
                if figures[name] is not None and figures[name] >= limit:
                    key = f"{account.name}.{name}"
                    return key, f"{key} is used up: {figures[name]:.4g} of {limit:g}{self._get_unit(name)}"
        return None

    def _get_unit(self, name: str) -> str:
        return f" {self.rates.prices.currency}".rstrip() if name == "cost" else ""

    def check(self, cost: Cost) -> None:
        """Raise BudgetReachedError if a limit is reached with this cost."""
        if reached := self.describe_exhausted(cost):
            raise BudgetReachedError(f"{reached[1]}; no further stage starts", hint=describe_remedy(reached[0]))

    def list_exceeded(self, estimate: Cost) -> list[str]:
        """Return a sentence for each limit that an estimated cost exceeds."""
        sentences = []
        for account in self.accounts:
            figures = self.rates.convert(stage_cost.add_costs([account.spent, estimate]))
            spent = self.rates.convert(account.spent)
            for name, limit in account.budget.limits.items():
                if figures[name] is not None and figures[name] > limit:
                    used = f", including {spent[name]:.4g} already used" if spent[name] else ""
                    sentences.append(
                        f"{account.name}.{name} is {limit:g}{self._get_unit(name)}; "
                        f"the estimate is {figures[name]:.4g}{used}"
                    )
        return sentences

    def list_unmeasurable(self) -> list[str]:
        """Return a sentence for each limit that cannot be reached because prices or power are not set."""
        prices, power = self.rates.prices, self.rates.power
        sentences = []
        for account in self.accounts:
            if account.budget.cost is not None and not (prices.gpu_hour or prices.cpu_hour or prices.kwh):
                sentences.append(
                    f"{account.name}.cost has no effect: platform.yaml sets no price above 0 under `prices`"
                )
            if account.budget.kwh is not None and not (power.gpu_watts or power.cpu_core_watts):
                sentences.append(
                    f"{account.name}.kwh counts only GPUs of known power: platform.yaml sets no `power.cpu_core_watts`"
                )
        return sentences


def describe_remedy(key: str) -> str:
    """Return the hint of an error about a budget that is used up."""
    where = "the configuration" if key.startswith("budget.") else "platform.yaml"
    return f"Raise {key} in {where} and run the same command again to resume."


def load_meter() -> SpendingMeter:
    """Return the meter of the run that started this step; without one, a meter without prices and budgets."""
    text = os.environ.get(COSTS_VARIABLE)
    return SpendingMeter.model_validate_json(text) if text else SpendingMeter()


def to_environment(meter: SpendingMeter) -> dict[str, str]:
    """Return the environment variable that passes a meter to the steps; {} for a meter without effect."""
    return {} if meter == SpendingMeter() else {COSTS_VARIABLE: meter.model_dump_json(exclude_defaults=True)}


@dataclass
class BudgetClock:
    """A meter with a clock that runs since its creation.

    Attributes:
        meter: rates and budgets, with the cost before the creation.
        processes: number of equal processes of a job, one of which is this one.
        peers: number of jobs that run at the same time; each is assumed to cost as much as this one.
    """

    meter: SpendingMeter
    processes: int = 1
    peers: int = 1
    clock: CostClock = field(default_factory=CostClock)

    def read(self) -> Cost:
        """Return the cost since the creation."""
        return stage_cost.multiply(self.clock.read(), self.processes * self.peers)

    def describe_exhausted(self) -> tuple[str, str] | None:
        """As `SpendingMeter.describe_exhausted`, with the cost so far."""
        return self.meter.describe_exhausted(self.read()) if self.meter.accounts else None

    def check(self) -> None:
        """As `SpendingMeter.check`, with the cost so far."""
        self.meter.check(self.read())

    def dump(self, peers: int = 1) -> dict[str, Any]:
        """Return the meter, charged with the cost so far, and `peers` as JSON values for a training run in another process."""
        charged = self.meter.charge(self.read())
        return {"meter": charged.model_dump(mode="json"), "peers": peers} if self.meter.accounts else {}

    @staticmethod
    def charge_dumped(dumped: dict[str, Any], cost: Cost) -> dict[str, Any]:
        """Return the result of `dump` with another cost charged, such as that of a job's earlier attempts."""
        if not dumped:
            return dumped
        charged = SpendingMeter.model_validate(dumped["meter"]).charge(cost)
        return {**dumped, "meter": charged.model_dump(mode="json")}

    @staticmethod
    def load(dumped: dict[str, Any], processes: int) -> BudgetClock:
        """Start a clock from the result of `dump`; without budgets for {}."""
        meter = SpendingMeter.model_validate(dumped["meter"]) if dumped else SpendingMeter()
        return BudgetClock(meter, processes, dumped.get("peers", 1))
