"""Typed results of runs and single stages. `as_dict` is the object that the command prints with --json."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from html import escape
from pathlib import Path
from typing import Any, ClassVar, Literal, Self
from urllib.parse import quote

from components.common.artifacts.artifact_folder import Artifact
from components.common.reporting import html_report
from components.common.runtime.relative_paths import shorten_paths

FIGURE_PATTERN = re.compile(r"<figure\b.*?</figure>", re.DOTALL)
Verdict = Literal["accepted", "refused", "unchanged"]


def _shorten(path: Path) -> str:
    """Return the path with shortened digests; a path in the current folder or next to it is relative."""
    return re.sub(r"([0-9a-f]{12})[0-9a-f]{52}", r"\1…", shorten_paths(str(path)))


def _format_cell(value: object) -> object:
    """Return a value of a result as a cell of its table: mappings and lists as text."""
    if isinstance(value, Path):
        return _shorten(value)
    if isinstance(value, Mapping):
        parts = (f"{name}: {_format_nested(one)}" for name, one in value.items())
        return ", ".join(parts) or "none"
    return "\n".join(map(str, value)) if isinstance(value, list) else value


def _format_nested(value: object) -> str:
    if isinstance(value, Mapping):
        return f"({_format_cell(value)})"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _render_link(report: Path) -> str:
    """Return a link to a report, relative if possible: from a notebook's page, browsers do not open file: URLs."""
    address = shorten_paths(str(report))
    address = report.as_uri() if Path(address).is_absolute() else quote(address)
    return f'<p><a href="{escape(address)}" target="_blank">report</a></p>'


class _Shown:
    """Representations of a result: one line in a terminal, a table with the plots of its report in a notebook."""

    shown: ClassVar[tuple[str, ...]]

    def as_dict(self) -> dict[str, Any]:
        """Return the object that the command prints with --json."""
        return asdict(self)  # type: ignore[call-overload, no-any-return]

    def _find_report(self) -> Path | None:
        return None

    def __repr__(self) -> str:
        values = {name: getattr(self, name) for name in self.shown}
        parts = (f"{name}={_shorten(v) if isinstance(v, Path) else repr(v)}" for name, v in values.items())
        return f"{type(self).__name__}({', '.join(parts)})"

    def _repr_html_(self) -> str:
        rows = [[name, _format_cell(getattr(self, name))] for name in self.shown]
        report, plots, link = self._find_report(), "", ""
        if report and report.exists():
            plots = "".join(FIGURE_PATTERN.findall(report.read_text(encoding="utf-8")))
            link = _render_link(report)
        title = f"<b>{escape(type(self).__name__)}</b>"
        html = title + html_report.render_table(["", ""], rows) + link + plots
        return html.replace(html_report.SCROLL_HINT, "")  # a notebook lacks the page's style sheet


class _StageResult(_Shown):
    """The result of a stage: its first two fields are the folder and the content digest of the artifact."""

    @classmethod
    def from_artifact(cls, output: Path, artifact: Artifact) -> Self:
        """Return the result for an artifact in the folder `output`; the other fields are from its summary."""
        summary = artifact.manifest.summary
        names = [one.name for one in fields(cls)[2:] if one.name != "sweep"]  # type: ignore[arg-type]
        return cls(output, artifact.sha256, **{name: summary[name] for name in names})  # type: ignore[call-arg]

    def _find_report(self) -> Path:
        folder: Path = getattr(self, fields(self)[0].name)  # type: ignore[arg-type]
        return folder.absolute() / "report.html"


@dataclass(frozen=True, repr=False)
class DatasetResult(_StageResult):
    """A curated dataset.

    Attributes:
        dataset: folder of the dataset.
        sha256: content digest.
        rows: row counts: in, kept, quarantined, and rejected by reason.
        splits: row counts of train, validation and test.
        evaluation_sets: decontamination counts by evaluation set.
    """

    shown = ("dataset", "rows", "splits")
    dataset: Path
    sha256: str
    rows: dict[str, Any]
    splits: dict[str, int]
    evaluation_sets: dict[str, Any]


@dataclass(frozen=True, repr=False)
class ModelResult(_StageResult):
    """A tuned model.

    Attributes:
        model: folder of the model.
        sha256: content digest.
        steps: optimizer steps.
        tokens: tokens trained on.
        train_loss: loss at the last step, in nats per token.
        validation_loss: loss on the validation split, in nats per token; None without validation rows.
        tokens_per_second: training throughput.
        resumed_from: step from which an interrupted training run resumed; None without an interruption.
        sweep: compared recipes with their losses, best first; None without a sweep.
    """

    shown = ("model", "steps", "tokens", "train_loss", "validation_loss")
    model: Path
    sha256: str
    steps: int
    tokens: int
    train_loss: float
    validation_loss: float | None
    tokens_per_second: float
    resumed_from: int | None
    sweep: list[dict[str, Any]] | None = None

    @classmethod
    def from_artifact(cls, output: Path, artifact: Artifact) -> Self:
        """Return the result for a model in the folder `output`."""
        sweep = artifact.manifest.summary.get("sweep")
        recipes = sweep["recipes"] if sweep else None
        return replace(super().from_artifact(output, artifact), sweep=recipes)

    def as_dict(self) -> dict[str, Any]:
        """Return the object that `tuneline finetune --json` prints."""
        return {name: value for name, value in super().as_dict().items() if (name, value) != ("sweep", None)}


@dataclass(frozen=True, repr=False)
class EvaluationResult(_StageResult):
    """Scores of a model, and the decision of the promotion gate.

    Attributes:
        evaluation: folder of the evaluation.
        sha256: content digest.
        verdict: accepted, refused or unchanged.
        reasons: one sentence per rule.
        metrics: {task: {metric: {"candidate", "base", "incumbent", "ci95", "n"}}}.
    """

    shown = ("evaluation", "verdict", "reasons")
    evaluation: Path
    sha256: str
    verdict: Verdict
    reasons: list[str]
    metrics: dict[str, dict[str, dict[str, Any]]]


@dataclass(frozen=True, repr=False)
class PackageResult(_StageResult):
    """A Triton model repository.

    Attributes:
        repository: folder of the repository.
        sha256: content digest.
        model_name: name of the model in Triton.
        backend: python or vllm.
        proof: answers of a Triton server to the golden prompts; None if no server tested the package.
    """

    shown = ("repository", "model_name", "backend", "proof")
    repository: Path
    sha256: str
    model_name: str
    backend: str
    proof: dict[str, Any] | None


@dataclass(frozen=True)
class StageTime:
    """Wall time of a stage in seconds; 0 if its result was cached."""

    name: str
    seconds: float
    cached: bool


@dataclass(frozen=True)
class RunArtifacts:
    """Folders of a run's artifacts; `repository` is None if the gate refused the candidate."""

    dataset: Path
    model: Path
    evaluation: Path
    repository: Path | None


@dataclass(frozen=True)
class RegisteredVersion:
    """The MLflow run and the registered version of a run."""

    tracking_uri: str
    run_id: str
    model_name: str | None
    model_version: str | None
    aliases: list[str] = field(default_factory=list)


@dataclass(frozen=True, repr=False)
class RunResult(_Shown):
    """A finished run of the whole pipeline.

    Attributes:
        verdict: accepted, refused or unchanged.
        workdir: folder with the artifact store, state, tracking data and runs.
        artifacts: folders of the artifacts.
        mlflow: MLflow run and registered version.
        stages: wall time of each stage.
        seconds: wall time of the run.
        report: HTML report.
        run: name of the run, for `tuneline status`, `logs` and `compare`.
        cost: time, energy and cost; see docs/how-to/costs.md.
    """

    shown = ("run", "verdict", "model", "seconds", "report")
    verdict: Verdict
    workdir: Path
    artifacts: RunArtifacts
    mlflow: RegisteredVersion
    stages: list[StageTime]
    seconds: float
    report: Path
    run: str
    cost: dict[str, Any] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """Folder of the run in the workdir."""
        return self.workdir / "runs" / self.run

    @property
    def model(self) -> str:
        """The registered version, NAME/VERSION."""
        return f"{self.mlflow.model_name}/{self.mlflow.model_version}"

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> RunResult:
        """Return the result for the object that `tuneline run --json` prints."""
        return RunResult(
            verdict=values["verdict"],
            workdir=Path(values["workdir"]),
            artifacts=RunArtifacts(**{kind: Path(p) if p else None for kind, p in values["artifacts"].items()}),  # type: ignore[arg-type]
            mlflow=RegisteredVersion(**values["mlflow"]),
            stages=[StageTime(**stage) for stage in values["stages"]],
            seconds=values["seconds"],
            report=Path(values["report"]),
            run=values["run"],
            cost=values.get("cost", {}),
        )

    def _find_report(self) -> Path:
        return self.report
