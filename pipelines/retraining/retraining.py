"""The loop: export captured traffic, build a candidate, compare it with the champion, and promote it.

The comparison uses held-back traffic. With a shadow period, it only admits the candidate to a second comparison, which
uses live shadow answers alone and decides.

The state is one file. Each step is recorded when it has finished, so that an interrupted loop resumes with the next one.
"""

from __future__ import annotations

import json
import secrets
import shutil
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from pathlib import Path
from statistics import fmean
from typing import Any

from components.common.artifacts import artifact_folder, hashing
from components.common.reporting import mlflow_tracking
from components.common.runtime import filesystem
from components.common.runtime.counts import format_count
from components.common.runtime.errors import InputError, RegistryError
from components.common.runtime.reporters import SilentReporter
from components.evaluation.tasks.generation import Generation
from components.model_registry import stage as registry
from pipelines.capture import tombstones, traffic_export, traffic_files
from pipelines.capture.exported_rows import HELD_BACK_FILENAME
from pipelines.capture.settings import CaptureSettings
from pipelines.capture.traffic_export import ExportOptions
from pipelines.capture.training_rows import SAMPLED
from pipelines.config.customization_config import Customization
from pipelines.retraining import pairwise_test, shadow_pairs
from pipelines.retraining.pairwise_test import Comparison
from pipelines.retraining.shadow_pairs import ShadowPair
from pipelines.retraining.triggers import TriggerCheck

STATE_FILENAME = "retraining.json"
TASK, METRIC, METRIC_MAXIMUM = "held_back_traffic", "chrf", 100.0
RUN_NAME = "retraining"
PROMOTED, REFUSED, UNCHANGED, NOT_BETTER, NOT_PROMOTED = (
    "promoted",
    "refused",
    "unchanged",
    "not_better",
    "not_promoted",
)
SHADOW = "shadow"  # not a decision: the retraining waits for pairs
Json = dict[str, Any]
ReadPairs = Callable[[], Sequence[ShadowPair]]


class _NoteRecorder(SilentReporter):
    """Keeps the notes, in which the registry states why it does not promote a version."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


@dataclass
class State:
    """The retrainings of a folder, oldest first. The last one is unfinished if its `decision` is None."""

    folder: Path
    cycles: list[Json]

    @property
    def last(self) -> Json | None:
        """The last retraining."""
        return self.cycles[-1] if self.cycles else None

    @property
    def unfinished(self) -> Json | None:
        """The interrupted retraining."""
        return self.last if self.last and self.last["decision"] is None else None

    def save(self) -> None:
        """Write the state, atomically."""
        text = json.dumps({"retrainings": self.cycles}, indent=2) + "\n"
        artifact_folder.write_atomically(self.folder / STATE_FILENAME, text)


def load_state(folder: Path) -> State:
    """Return the state of a folder, which is empty before the first retraining.

    Raises:
        InputError: the file is damaged.
    """
    path = folder / STATE_FILENAME
    if not path.exists():
        return State(folder, [])
    try:
        return State(folder, list(json.loads(filesystem.read_text(path))["retrainings"]))
    except (ValueError, KeyError, TypeError):
        raise InputError(f"{path} is damaged", hint="Restore the file, or choose another --folder.") from None


def begin(state: State, check: TriggerCheck, now: datetime) -> Json:
    """Return a new retraining with its trigger. It is saved with the exported rows, so that a failed export starts none."""
    cycle: Json = {
        "number": len(state.cycles) + 1,
        "time": now.isoformat(timespec="seconds"),
        **asdict(check),
        "rows": None,
        "exported": None,
        "sampled": False,
        "run": None,
        "comparison": None,
        "shadow": None,
        "decision": None,
        "reason": "",
        "mlflow_run_id": None,
    }
    state.cycles.append(cycle)
    return cycle


def export_rows(
    state: State,
    cycle: Json,
    settings: CaptureSettings,
    feedback: Mapping[str, Any],
    options: ExportOptions,
    *,
    only_sampled: bool = False,
) -> None:
    """Export the rows of a retraining, unless they were exported before. Call it under the lock of the traffic.

    If a subject of the exported rows was erased since, the rows are exported and the candidate is built again.

    Raises:
        InputError: no captured answer gives a row, no subject is held back, or with `only_sampled`, no held-back request
            was drawn at random and corrected.
    """
    folder = (state.folder / f"{cycle['number']:04}" / "rows").absolute()
    now = traffic_files.now()
    if cycle["exported"] and folder.exists() and not _has_erased_rows(folder, cycle["exported"], settings):
        return
    if cycle["exported"]:  # before the rows change: a kill must not leave the run with other rows
        cycle.update(exported=None, run=None, comparison=None, shadow=None)
        state.save()
    shutil.rmtree(folder, ignore_errors=True)
    exported = traffic_export.export(settings, feedback, folder, options)
    if not exported.held_back:
        filesystem.remove_tree(folder)
        answers = format_count(exported.conversations, "answer goes", "answers go")
        raise InputError(
            f"no subject is held back: {answers} into the training rows",
            hint="Increase --held-back, or wait for feedback from more subjects.",
        )
    held = map(json.loads, (folder / HELD_BACK_FILENAME).read_text(encoding="utf-8").splitlines())
    if only_sampled and not any(row["meta"].get(SAMPLED) for row in held):
        filesystem.remove_tree(folder)
        raise InputError(
            "none of the requests from `tuneline traffic sample` is both held back and corrected",
            hint="Correct more sampled requests, pass their file with --feedback, or increase --held-back.",
        )
    cycle.update(rows=str(folder), exported=now.isoformat(), sampled=only_sampled)
    state.save()


def _has_erased_rows(folder: Path, exported: str, settings: CaptureSettings) -> bool:
    """Return whether the rows contain, or contained, a subject that was erased after their export."""
    if traffic_export.has_lost_rows(folder):
        return True
    exported_seconds = int(datetime.fromisoformat(exported).timestamp())
    found = tombstones.read_tombstones(settings.folder).values()
    erased = [each.subject.encode() for each in found if each.requested >= exported_seconds]
    files = [path.read_bytes() for path in folder.glob("*.jsonl")] if erased else []
    return any(subject in content for subject in erased for content in files)


def build_candidate(
    state: State, cycle: Json, customization: Customization, run: Callable[[Customization], Json]
) -> None:
    """Run the customization with the exported rows, unless it has run. It does not promote the candidate."""
    if cycle["run"]:
        return
    rows = Path(cycle["rows"])
    extended = customization.model_copy(deep=True)
    traffic_export.add_exported_rows(extended, rows)
    # An erasure does not rewrite evaluations, so they contain no texts of captured traffic.
    task = Generation(name=TASK, data=str(rows / HELD_BACK_FILENAME), metrics=[METRIC], store_texts=False)
    # The clients received no longer answers. A request without a limit has that of the task.
    held_back = map(json.loads, (rows / HELD_BACK_FILENAME).read_text(encoding="utf-8").splitlines())
    longest = max(row["meta"].get("max_tokens") or task.max_new_tokens for row in held_back)
    task.max_new_tokens = min(task.max_new_tokens, longest)
    extended.evaluation = extended.evaluation.model_copy(update={"tasks": [*extended.evaluation.tasks, task]})
    extended.model_registry = extended.model_registry.model_copy(update={"auto_promote": False})
    result = run(extended)
    cycle["run"] = {name: result[name] for name in ("run", "verdict", "artifacts", "mlflow", "report")}
    state.save()


def compare_answers(evaluation: Path, held_back: Path, max_loss: float, *, only_sampled: bool = False) -> Comparison:
    """Compare candidate and champion on the held-back requests, or on those drawn at random, one pair per subject.

    The answers of a subject resemble each other: their mean is one pair. The order of the pairs is that of the subjects'
    hashes, which do not depend on the scores. Without a champion, the candidate is compared with its base model.

    Raises:
        InputError: rows were erased during the run.
    """
    import pyarrow.parquet as parquet

    rows = parquet.read_table(evaluation / "predictions.parquet", filters=[("task", "=", TASK)]).to_pylist()
    lines = held_back.read_text(encoding="utf-8").splitlines() if held_back.exists() else []
    held = {row["id"]: row for row in map(json.loads, lines)}
    other = "incumbent_scores" if rows and rows[0].get("incumbent_scores") else "base_scores"
    by_group: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if row["id"] not in held:
            raise InputError(f"rows were erased from {held_back} during the run", hint="Run the same command again.")
        if only_sampled and not held[row["id"]]["meta"].get(SAMPLED):
            continue
        candidate, champion = (json.loads(row[name])[METRIC] for name in ("candidate_scores", other))
        by_group[held[row["id"]][traffic_export.GROUP]].append((candidate - champion) / METRIC_MAXIMUM)
    differences = [fmean(values) for _, values in sorted(by_group.items())]
    return pairwise_test.compare(differences, max_loss=max_loss)


def decide(
    state: State,
    cycle: Json,
    customization: Customization,
    max_loss: float,
    *,
    now: datetime,
    shadow_days: float = 0.0,
    read_pairs: ReadPairs = tuple,
) -> None:
    """Compare the candidate with the champion, and promote it by the registry's policy if it is better.

    Args:
        state: the retrainings.
        cycle: the retraining, with a candidate.
        customization: the settings of the registry.
        max_loss: tolerated loss of the candidate.
        now: the current time (UTC).
        shadow_days: days in which a candidate that is not worse on held-back traffic is compared by live shadow answers;
            the retraining then remains unfinished. 0: held-back traffic decides.
        read_pairs: returns the pairs of the captured traffic in the order of their corrections.
    """
    verdict, version = cycle["run"]["verdict"], cycle["run"]["mlflow"]["model_version"]
    outcome: tuple[str, str] | None
    if verdict != "accepted":
        outcome = REFUSED if verdict == "refused" else UNCHANGED, f"the verdict of the evaluation is {verdict}"
    elif cycle.get("shadow"):
        outcome = _decide_by_shadow(state, cycle, customization, now, read_pairs())
    else:
        evaluation, held_back = Path(cycle["run"]["artifacts"]["evaluation"]), Path(cycle["rows"]) / HELD_BACK_FILENAME
        comparison = compare_answers(evaluation, held_back, max_loss, only_sampled=cycle.get("sampled", False))
        cycle["comparison"] = asdict(comparison)
        has_shadow = shadow_days > 0 and comparison.decision != "worse"
        champion = registry.get_registered(customization.model_registry.name, version) if has_shadow else None
        outcome = NOT_BETTER, f"the comparison of {format_count(comparison.pairs, 'pair')} is {comparison.decision}"
        if champion is not None and champion.incumbent_sha256:
            until = now + timedelta(days=shadow_days)
            cycle["shadow"] = {
                "since": now.isoformat(timespec="seconds"),
                "until": until.isoformat(timespec="seconds"),
                "max_loss": max_loss,
                "salt": secrets.token_hex(16),
                "pairs": [],
                "comparison": None,
            }
            outcome = _decide_by_shadow(state, cycle, customization, now, [])
        elif comparison.decision == "better":
            outcome = _promote(customization, version)
    if outcome is None:
        state.save()
        _tag(cycle, customization, {"retraining": f"{'; '.join(cycle['reasons'])}. {SHADOW}: {cycle['reason']}"})
        return
    decision, reason = outcome
    if shadow := cycle.get("shadow"):  # from now on, the pairs belong to nobody
        shadow.update(salt=None, pairs=[{"difference": pair["difference"]} for pair in shadow["pairs"]])
    cycle["mlflow_run_id"] = _log_to_mlflow(cycle, decision, reason)
    text = f"{'; '.join(cycle['reasons'])}. {decision}: {reason}"
    _tag(cycle, customization, {"retraining": text, "retraining_run_id": cycle["mlflow_run_id"]})
    cycle.update(decision=decision, reason=reason)
    state.save()


def _tag(cycle: Json, customization: Customization, tags: Mapping[str, str]) -> None:
    if version := cycle["run"]["mlflow"]["model_version"]:
        registry.tag_version(customization.model_registry.name, version, tags)


def _decide_by_shadow(
    state: State, cycle: Json, customization: Customization, now: datetime, pairs: Sequence[ShadowPair]
) -> tuple[str, str] | None:
    """Add the new pairs to the recorded ones, test them, and return decision and reason; None: more pairs are needed.

    Recorded pairs keep their values and their order. A correction of an earlier request, an erasure or the end of a
    retention would otherwise change the sequence between two evaluations, for which the test's guarantee does not hold.
    """
    shadow, name = cycle["shadow"], customization.model_registry.name
    version = cycle["run"]["mlflow"]["model_version"]
    candidate, champion = registry.get_registered(name, version), registry.find_champion(name)
    since = int(datetime.fromisoformat(shadow["since"]).timestamp())
    fresh = [
        pair
        for pair in pairs
        if pair.timestamp >= since
        and (pair.shadow.version, pair.shadow.model_sha256) == (version, candidate.model_sha256)
        and pair.client.model_sha256 == candidate.incumbent_sha256
    ]
    known = {each["subject"] for each in shadow["pairs"]}
    for group, pair in shadow_pairs.select_first_of_group(fresh).items():
        # Not the subject's hash, which an erasure removes from all files.
        subject = hashing.digest([shadow["salt"], group])
        if subject not in known:
            shadow["pairs"].append({"subject": subject, "difference": pair.difference})
    test = "undecided"
    if differences := [each["difference"] for each in shadow["pairs"]]:
        comparison = pairwise_test.compare(differences, max_loss=shadow["max_loss"])
        shadow["comparison"], test = asdict(comparison), comparison.decision
    cycle["reason"] = f"the comparison of {format_count(len(differences), 'shadow pair')} is {test}"
    state.save()
    if test == "better":
        return _promote(customization, version)
    if test == "worse":
        return NOT_BETTER, cycle["reason"]
    if champion is None or champion.model_sha256 != candidate.incumbent_sha256:
        return NOT_PROMOTED, "the champion changed during the shadow period"
    if now >= datetime.fromisoformat(shadow["until"]):
        return NOT_BETTER, f"{cycle['reason']} at the end of the shadow period"
    cycle["reason"] += f"; it ends at {shadow['until']}"
    return None


def _promote(customization: Customization, version: str) -> tuple[str, str]:
    config = customization.model_registry
    if not config.auto_promote:
        return (
            NOT_PROMOTED,
            f"model_registry.auto_promote is false; promote with: tuneline promote {config.name} --version {version}",
        )
    registered = registry.get_registered(config.name, version)
    if (proof := registered.tags.get("tuneline.proof")) != "proven":
        return NOT_PROMOTED, f"the package is {proof}"
    recorder = _NoteRecorder()
    try:
        moved = registry.auto_promote(config, version, incumbent_sha256=registered.incumbent_sha256, reporter=recorder)
    except RegistryError as error:  # a check failed, or the champion changed during the run: a decision, not a failure
        return NOT_PROMOTED, error.message
    if moved is None:
        return NOT_PROMOTED, " ".join(recorder.notes)
    return PROMOTED, f"version {version} is the champion"


def _log_to_mlflow(cycle: Json, decision: str, reason: str) -> str:
    """Log trigger, tests and decision to a separate MLflow run, and return its ID."""
    result, live = cycle["run"], (cycle.get("shadow") or {}).get("comparison") or {}
    with mlflow_tracking.stage_run(RUN_NAME) as run:
        run.log_params(
            {
                "number": cycle["number"],
                "trigger": "; ".join(cycle["reasons"]),
                "rows": cycle["rows"],
                "pipeline_run_id": result["mlflow"]["run_id"],
                "model_name": result["mlflow"]["model_name"],
                "model_version": result["mlflow"]["model_version"],
                "verdict": result["verdict"],
                "decision": decision,
                "test": (cycle["comparison"] or {}).get("decision", "not made"),
                "shadow_test": live.get("decision", "not made"),
            }
        )
        values = {**(cycle["comparison"] or {}), **{f"shadow_{name}": value for name, value in live.items()}}
        numbers = {
            name: float(value)
            for name, value in values.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
        run.metrics({**numbers, "feedback": float(cycle["feedback"])}, cycle["number"])
        run.note(f"{decision}: {reason}")
        return run.run_id


def describe(check: TriggerCheck, cycle: Json | None) -> Json:
    """Return the object that `tuneline retrain --json` prints."""
    if cycle is None:
        return {"triggered": bool(check.reasons), **asdict(check), "retraining": None}
    return {
        "triggered": True,
        **{name: cycle[name] for name in ("reasons", "feedback", "alarm")},
        "retraining": cycle,
    }
