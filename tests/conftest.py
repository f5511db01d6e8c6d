"""Settings of all tests: no network, a separate workdir for each test, and the order of the files."""

from __future__ import annotations

import gc
import inspect
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling

from components.common.runtime import process_control

# A busy machine fails no test, and every run generates the same examples; `--hypothesis-profile explore` generates others.
UNTIMED: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("repeatable", derandomize=True, **UNTIMED)
settings.register_profile("explore", **UNTIMED)
settings.load_profile("repeatable")
process_control.relax_garbage_collector()
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
os.environ.pop("MLFLOW_RUN_ID", None)


MAX_FAILURE_LINES = 30

# Files that take longest start first, so that no worker is left with one of them at the end.
START_FIRST = (
    "docs/test_commands.py",
    "engines/test_s3_store.py",
    "pipelines/test_pipeline.py",
    "engines/test_trainjob_cluster.py",  # of the files with a cluster, the one that leaves the processors to others
    "engines/test_slurm.py",
    "pipelines/test_dry_run.py",
    "pipelines/test_report.py",
    "pipelines/test_pods.py",
    "engines/test_s3_versions.py",
    "pipelines/test_formats.py",
    "engines/test_backup_restore.py",
    "pipelines/test_invalid_input.py",
    "pipelines/test_deployment.py",
    "engines/test_zero3.py",
    "engines/test_ray_launcher.py",
    "engines/test_mlflow_postgresql.py",
    "pipelines/test_erasure_search.py",
    "fine_tuning/test_recipes.py",
    "fine_tuning/test_resume.py",
    "fine_tuning/test_distributed.py",
    "fine_tuning/test_sweep.py",
    "triton_packaging/test_server.py",
    "model_registry/test_server.py",
    "pipelines/test_cli.py",
    "pipelines/test_submit.py",
    "pipelines/gateway/",
)

# Files that share a fixture which takes a minute, a whole run or a proven package: one worker runs them and builds it once.
# The worker of "run" also starts the clusters with a node, because a machine can run only one of them at a time.
SHARED_FIXTURES = {
    "tests/pipelines/test_pipeline.py": "run", "tests/pipelines/test_dry_run.py": "run", "tests/pipelines/test_report.py": "run",
    "tests/pipelines/test_pods.py": "run", "tests/engines/test_verification_pod.py": "run", "tests/engines/test_trainjob_cluster.py": "run",
    "tests/engines/test_pipeline_pods.py": "run", "tests/engines/test_training_pods.py": "run",
    "tests/engines/test_installation.py": "run",
    "tests/pipelines/explanation/test_explained_version.py": "run", "tests/pipelines/chat/test_chat_serving.py": "run",
    "tests/triton_packaging/test_server.py": "package", "tests/triton_packaging/test_streaming.py": "package",
    "tests/triton_packaging/test_overload.py": "package", "tests/triton_packaging/test_metrics.py": "package",
    "tests/triton_packaging/test_served_options.py": "package",
    **{f"tests/pipelines/gateway/test_{name}.py": "gateway"
       for name in ("conformance", "hostile_requests", "lifecycle", "row_judging", "telemetry", "traffic_server")},
}  # fmt: skip


class FileScheduling(LoadFileScheduling):
    """One worker runs all tests of a file, and of the files that share a fixture with it."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return SHARED_FIXTURES.get(file, file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FileScheduling:
    """Replace the scheduler of --dist loadfile."""
    return FileScheduling(config, log)


class FailureReporter:
    """Prints each failure when it occurs, so that a stopped run shows it."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self.terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Print the name, the duration and the end of the traceback of a failed test."""
        if report.failed:
            lines = report.longreprtext.splitlines()[-MAX_FAILURE_LINES:]
            self.terminal.write_line(f"\nFAILED {report.nodeid} ({report.when}, {report.duration:.0f} s)")
            self.terminal.write_line("\n".join(lines))


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Report failures at once. The terminal exists after all other plugins are configured; xdist workers have none."""
    if terminal := config.pluginmanager.get_plugin("terminalreporter"):
        config.pluginmanager.register(FailureReporter(terminal))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of engines as long; put the files of START_FIRST first and keep the order of the others."""
    for item in items:
        if item.nodeid.startswith("tests/engines/"):
            item.add_marker("long")
    names = [f"tests/{name}" for name in START_FIRST]
    items.sort(key=lambda item: next((n for n, name in enumerate(names) if item.nodeid.startswith(name)), len(names)))


@pytest.fixture(autouse=True)
def unchanged_umask() -> Iterator[None]:
    """Restore the umask, which a command or step that runs in this process restricts."""
    umask = os.umask(0o022)
    os.umask(umask)
    yield
    os.umask(umask)


@pytest.fixture(autouse=True, scope="session")
def fast_stack_inspection() -> Iterator[None]:
    """Leave out files and source lines in `inspect.stack`, which kfp calls at each change of a task.

    Python searches all imported modules for the file of each frame. With pytest's frames and torch's modules, a
    compilation takes 2 s instead of 0.1 s.
    """

    def list_frames(_: int = 1) -> list[inspect.FrameInfo]:
        frames = [frame for frame, _ in traceback.walk_stack(sys._getframe(1))]
        return [
            inspect.FrameInfo(frame, frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name, None, None)
            for frame in frames
        ]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inspect, "stack", list_frames)
        yield


MODULES_BETWEEN_FREEZES = 200


@pytest.fixture(autouse=True)
def frozen_modules(modules_at_freeze: list[int]) -> Iterator[None]:
    """Exempt the modules that tests import from later garbage collections.

    Accelerate, the evaluation and the proof of a package call `gc.collect`, which takes 0.3 s of CPU with the modules
    of torch, transformers and MLflow.
    """
    yield
    if len(sys.modules) >= modules_at_freeze[-1] + MODULES_BETWEEN_FREEZES:
        gc.collect()
        gc.freeze()
        modules_at_freeze.append(len(sys.modules))


@pytest.fixture(scope="session")
def modules_at_freeze() -> list[int]:
    """The number of imported modules at each freeze."""
    return [0]


# What a test, a command in its process or MLflow may set in the environment; the next test, or the next module's fixture, would use it.
RUN_VARIABLES = (
    "TUNELINE_WORKDIR",
    "TUNELINE_STORE",
    "TUNELINE_STATE",
    "TUNELINE_EVENTS",
    "TUNELINE_RUN_PID",
    "MLFLOW_TRACKING_URI",
    "MLFLOW_TRACKING_USERNAME",
    "MLFLOW_TRACKING_PASSWORD",
    "MLFLOW_RUN_ID",
)


@pytest.fixture(scope="session")
def isolation() -> None:
    """Skip tests that run generated code where processes may not create namespaces, as in restricted containers."""
    from components.common.runtime import code_sandbox
    from components.common.runtime.errors import ConfigurationError

    try:
        code_sandbox.check_isolation()
    except ConfigurationError as error:
        pytest.skip(error.message)


@pytest.fixture(autouse=True)
def separate_workdir(tmp_path: Path) -> Iterator[None]:
    """Give each test its workdir; converted base models stay in the user's cache, since a conversion takes half a minute.

    MLflow stores the tracking URI per process and in the environment; the fixture resets both. It does not use
    `monkeypatch`, whose undo comes before the end of this fixture and restores what a command had set.
    """
    for name in RUN_VARIABLES:
        os.environ.pop(name, None)
    os.environ["TUNELINE_WORKDIR"] = str(tmp_path / "workdir")
    yield
    if "mlflow" in sys.modules:
        sys.modules["mlflow"].set_tracking_uri(None)
    for name in RUN_VARIABLES:
        os.environ.pop(name, None)
