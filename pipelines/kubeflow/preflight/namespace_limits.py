"""Checks of pod requests against the namespace's LimitRanges and ResourceQuotas."""

from __future__ import annotations

from collections.abc import Iterator

from components.common.launch import JsonObject
from components.common.reporting.check_findings import CheckResult, check_result
from pipelines.kubeflow.preflight.check_context import CheckContext, PodDemand, collect_demands, parse_amount

LimitProblem = tuple[str, str]  # the finding and a hint
Rules = list[tuple[str, JsonObject]]  # rules of LimitRanges, each with the name of its LimitRange


def check_limits(context: CheckContext) -> Iterator[CheckResult]:
    """Check that the limits admit every pod; one result per kind of limit."""
    ranges = context.api.list_items(context.build_path("limitranges"))
    # A quota with scopes applies to some pods only; the dry run of the pods covers it.
    quotas = [
        quota
        for quota in context.api.list_items(context.build_path("resourcequotas"))
        if not (quota["spec"].get("scopes") or quota["spec"].get("scopeSelector"))
    ]
    rules = [(item["metadata"]["name"], rule) for item in ranges for rule in item["spec"]["limits"]]
    demands = collect_demands(context.platform)
    range_problems = [problem for demand in demands for problem in _find_range_problems(context, rules, demand)]
    quota_problems = [problem for demand in demands for problem in _find_quota_problems(context, quotas, rules, demand)]
    for title, limits, problems in (
        ("limit ranges", ranges, range_problems),
        ("resource quotas", quotas, quota_problems),
    ):
        within = f"{len(limits)} defined; each pod is within the limits" if limits else "none defined"
        found, hint = problems[0] if problems else (within, "")
        yield check_result(title, not problems, found, hint)


def _find_range_problems(context: CheckContext, rules: Rules, demand: PodDemand) -> Iterator[LimitProblem]:
    for range_name, rule in rules:
        if rule["type"] not in ("Container", "Pod"):
            continue
        kind, describe = rule["type"].lower(), context.format_kubectl(f"describe limitrange {range_name}")
        for name, amount in demand.amounts.items():
            key = demand.format_key(name)
            maximum, minimum = rule.get("max", {}).get(name), rule.get("min", {}).get(name)
            if maximum is not None and parse_amount(amount) > parse_amount(maximum):
                allowed = f"allows a {kind} at most {maximum} of {name}"
                found = f"LimitRange {range_name} {allowed}, but {amount} is requested by {demand.title}"
                yield found, f"Lower {key} in platform.yaml to {maximum}, or raise the limit: {describe}"
            if minimum is not None and parse_amount(amount) < parse_amount(minimum):
                required = f"requires at least {minimum} of {name} in a {kind}"
                found = f"LimitRange {range_name} {required}, but {amount} is requested by {demand.title}"
                yield found, f"Raise {key} in platform.yaml to {minimum}, or lower the limit: {describe}"


def _find_quota_problems(
    context: CheckContext, quotas: list[JsonObject], rules: Rules, demand: PodDemand
) -> Iterator[LimitProblem]:
    """Find requests above the namespace's total, and pods without a request for a resource that a quota counts."""
    defaults = {name for _, rule in rules if rule["type"] == "Container" for name in rule.get("default", {})}
    for quota in quotas:
        quota_name, hard = quota["metadata"]["name"], quota["spec"].get("hard", {})
        describe = context.format_kubectl(f"describe resourcequota {quota_name}")
        for name in filter(None, ("cpu", "memory", demand.resources.accelerator)):
            amount, key = demand.amounts.get(name), demand.format_key(name)
            for limit in (hard[field] for field in (f"requests.{name}", f"limits.{name}", name) if field in hard):
                if amount is None and name not in defaults:
                    found = f"ResourceQuota {quota_name} limits {name} and requires a request in every pod"
                    yield f"{found}, but the pods of {demand.title} have no request", f"Set {key} in platform.yaml."
                if amount is not None and parse_amount(amount) > parse_amount(limit):
                    found = f"ResourceQuota {quota_name} grants {limit} of {name} to the whole namespace"
                    hint = f"Lower {key} in platform.yaml, or raise the quota: {describe}"
                    yield f"{found}, but {amount} is requested by {demand.title}", hint
