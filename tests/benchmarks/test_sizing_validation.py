"""The formulas of `tuneline size` against published runs, and the files generated from them."""

from __future__ import annotations

import statistics

import pytest

from benchmarks import sizing_validation as validation
from benchmarks.sizing_validation import PublishedRun
from components.fine_tuning.recipe_defaults import MAX_ESTIMATE_RATIO
from pipelines.planning import throughput

ROUNDED_RUN = "bridge-qwen3-30b-a3b-16xh100"  # published as 121 TFLOP/s
MAX_MEMORY_MISSES, MAX_SPEED_MISSES = 13, 9  # raise neither; the page has the reasons


@pytest.fixture(scope="module")
def runs() -> list[PublishedRun]:
    return validation.load_runs()


def test_every_run_has_a_source_and_a_published_figure(runs: list[PublishedRun]) -> None:
    assert len(runs) >= 60
    assert len({run.id for run in runs}) == len(runs)
    for run in runs:
        assert run.source, run.id
        assert run.flops_per_token or run.memory_gib or run.tokens_per_second, run.id


def test_bands_and_page_are_current(runs: list[PublishedRun]) -> None:
    regenerate = "run `python -m benchmarks.sizing_validation`"
    assert validation.BANDS.read_text(encoding="utf-8") == validation.render_bands(runs), regenerate
    assert validation.PAGE.read_text(encoding="utf-8") == validation.render_page(runs), regenerate


def test_flops_are_within_half_a_percent(runs: list[PublishedRun]) -> None:
    errors = {run.id: abs(error) for run, _, error in validation.check_flops(runs)}
    assert len(errors) > 200
    assert errors.pop(ROUNDED_RUN) <= 0.0065
    assert max(errors.values()) <= validation.FLOPS_GOAL


def test_memory_median_meets_the_goal_and_few_runs_miss(runs: list[PublishedRun]) -> None:
    errors = {run.id: abs(error) for run, _, error in validation.check_memory(runs)}
    assert len(errors) > 100
    assert statistics.median(errors.values()) <= validation.MEMORY_MEDIAN_GOAL
    assert sum(error > validation.MEMORY_WORST_GOAL for error in errors.values()) <= MAX_MEMORY_MISSES
    assert all(error <= 0.02 for name, error in errors.items() if name.startswith("tuneline-"))


def test_no_published_run_on_several_gpus_would_be_refused(runs: list[PublishedRun]) -> None:
    errors = {run.id: error for run, _, error in validation.check_memory(runs) if run.gpus > 1}
    assert len(errors) > 15
    assert {name: error for name, error in errors.items() if 1 + error > MAX_ESTIMATE_RATIO} == {}


def test_speeds_are_inside_the_band_of_the_other_runs(runs: list[PublishedRun]) -> None:
    checked = [(run, rates, inside) for run, rates, inside in validation.check_speed(runs) if rates]
    assert sum(not inside for _, _, inside in checked) <= MAX_SPEED_MISSES
    for run, rates, _ in checked:
        assert rates is not None
        assert rates["low"] <= rates["typical"] <= rates["best"], run.id


def test_one_source_is_not_a_band() -> None:
    groups = throughput.load_efficiencies()
    assert groups["h200 bf16 standard"].sources == 1
    band = throughput.select_band(groups, "h200", "bf16", "standard")
    assert band is not None
    assert "too few" in band.basis
    assert band.runs > 100
