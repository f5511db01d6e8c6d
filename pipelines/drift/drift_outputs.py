"""Outputs of a drift check for schedulers and dashboards: a Prometheus text file, and an MLflow run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from components.common.reporting import mlflow_tracking
from components.common.runtime.errors import EngineMissingError

METRICS_MODE = 0o644  # node_exporter reads it as another user; the file has no text of captured rows
RUN_NAME = "traffic_drift"


def write_metrics(path: Path, result: Mapping[str, Any], time: float) -> None:
    """Write the result for the textfile collector of node_exporter, atomically.

    Args:
        path: the file; the collector reads names that end with .prom.
        result: the JSON result of the check.
        time: Unix time of the check, so that an alert can report a check that no longer runs.

    Raises:
        EngineMissingError: prometheus_client is not installed.
    """
    try:
        from prometheus_client import CollectorRegistry, Gauge, write_to_textfile
    except ImportError:
        raise EngineMissingError(
            "--metrics requires prometheus_client, which is not installed", hint="Run: pip install 'tuneline[gateway]'."
        ) from None
    registry = CollectorRegistry()
    values = {
        "e_value": (result["windows"][-1]["e_value"], "Evidence that prompts have changed; an alarm is raised at 20"),
        "alarm": (float(result["alarm"]), "1 after the e-value has reached 20"),
        "windows": (len(result["windows"]), "Windows of prompts that were tested"),
        "pending_prompts": (result["pending"], "Prompts that are not in a complete window yet"),
        "check_time_seconds": (time, "Unix time of the check"),
    }
    for name, (value, description) in values.items():
        gauge = Gauge(f"tuneline_traffic_drift_{name}", description, ["model"], registry=registry)
        gauge.labels(result["model"]).set(value)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_to_textfile(str(path), registry)
    path.chmod(METRICS_MODE)


def log_to_mlflow(result: Mapping[str, Any]) -> str:
    """Log e-values and p-values by window to a separate MLflow run, and return its ID.

    The run names the model, its versions and its digest, as the runs of the stages do.

    Raises:
        EngineMissingError: the server does not answer.
    """
    with mlflow_tracking.stage_run(RUN_NAME) as run:
        versions = sorted({version for each in result["windows"] for version in each["versions"]})
        run.log_params(
            {
                "model": result["model"],
                "versions": ", ".join(versions),
                "model_sha256": result["model_sha256"],
                "reference": result["reference"]["name"],
                "embeddings": result["embeddings"],
            }
        )
        for number, window in enumerate(result["windows"], 1):
            p_values = {f"p.{name}": test["p"] for name, test in window["tests"].items()}
            run.metrics({"e_value": window["e_value"], "prompts": window["n"], **p_values}, number)
        run.note("alarm: prompts have changed" if result["alarm"] else "no alarm")
        return run.run_id
