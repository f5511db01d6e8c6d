"""`tuneline.compare`: runs side by side."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.common.artifacts import output_paths
from components.common.reporting import html_report
from components.common.workspace.artifact_store import DEFAULT_WORKDIR, Workdir
from pipelines.runs.results import RunResult
from tuneline.call_context import PathLike

NOTEBOOK_SECTIONS = ("Limits", "Runs", "Parameters", "Training", "Metrics")


@dataclass(frozen=True, repr=False)
class Comparison:
    """Runs side by side; the first run is the reference for differences.

    Attributes:
        values: the object that `tuneline compare --json` prints, without `page`.
    """

    values: dict[str, Any]

    @property
    def metrics(self) -> dict[str, dict[str, list[dict[str, Any] | None]]]:
        """For each task and metric, a list with the scores and the `difference` from the first run, one entry per run."""
        return dict(self.values["metrics"])

    @property
    def warnings(self) -> list[str]:
        """The limits of the comparison, as sentences."""
        return list(self.values["warnings"])

    def as_dict(self) -> dict[str, Any]:
        """Return the object that `tuneline compare --json` prints, without `page`."""
        return self.values

    def write_page(self, path: PathLike) -> Path:
        """Write the HTML page that `tuneline compare --html` writes, and return its path.

        Raises:
            TunelineError: the path cannot be written.
        """
        from pipelines.runs import comparison_page

        output_paths.check_file(Path(path), inputs=(), example="comparison.html")
        output_paths.write_file(Path(path), comparison_page.render_comparison(self.values))
        return Path(path)

    def __repr__(self) -> str:
        return f"Comparison({', '.join(run['run'] for run in self.values['runs'])})"

    def _repr_html_(self) -> str:
        from pipelines.runs import comparison_page

        sections = comparison_page.render_sections(self.values)
        return html_report.render_fragment("Comparison", {name: sections[name] for name in NOTEBOOK_SECTIONS})


def compare(
    *runs: PathLike | RunResult,
    workdir: PathLike = DEFAULT_WORKDIR,
    include_equal: bool = False,
    answers: int = 6,
    seed: int = 42,
) -> Comparison:
    """Compare runs side by side: parameters, data, losses, metrics with intervals, gate, durations and answers.

        comparison = compare(first, second)
        print(comparison.metrics["held_out"]["loss"][1]["difference"])

    Args:
        runs: two or more results of `run`, names of runs, or folders of runs; the first is the reference.
        workdir: workdir that contains the named runs.
        include_equal: list parameters that are equal in all runs.
        answers: number of prompts for which answers are compared.
        seed: seed of the sample of prompts.

    Raises:
        TunelineError: a run does not exist or is given twice, or its evaluation has changed.
    """
    from pipelines.runs import run_comparison

    names = [str(one.folder if isinstance(one, RunResult) else one) for one in runs]
    found = run_comparison.find_runs(Workdir(Path(workdir).absolute()), names)
    return Comparison(run_comparison.compare_runs(found, include_equal=include_equal, answers=answers, seed=seed))
