"""Python API of tuneline: customize a language model on your own text and deploy it.

    from tuneline import Customization, run, serve

    customization = Customization.load(data_curation={"sources": ["tickets.jsonl"]}, model_registry={"name": "helper"})
    result = run(customization, workdir="my-project")
    print(result.verdict, result.model)
    with serve(result.artifacts.repository) as server:
        print(server.openai_url)

The functions do what the commands of the same names do, return typed results, and raise `TunelineError`. Progress is
written to standard error, or shown below the cell of a notebook; nothing is written to standard output. Names are
imported on first use, so that `import tuneline` is fast.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from components.common.runtime.errors import TunelineError as TunelineError
    from pipelines.config.customization_config import Customization as Customization
    from pipelines.planning.size_results import ClusterSize as ClusterSize
    from pipelines.planning.size_results import TrainingSize as TrainingSize
    from pipelines.runs.results import DatasetResult as DatasetResult
    from pipelines.runs.results import EvaluationResult as EvaluationResult
    from pipelines.runs.results import ModelResult as ModelResult
    from pipelines.runs.results import PackageResult as PackageResult
    from pipelines.runs.results import RunResult as RunResult
    from pipelines.runs.single_stages import ServedPackage as ServedPackage
    from tuneline.comparison import Comparison as Comparison
    from tuneline.comparison import compare as compare
    from tuneline.model_registry import ModelVersion as ModelVersion
    from tuneline.model_registry import ModelVersions as ModelVersions
    from tuneline.model_registry import Registry as Registry
    from tuneline.sizing import size as size
    from tuneline.stages import curate as curate
    from tuneline.stages import evaluate as evaluate
    from tuneline.stages import finetune as finetune
    from tuneline.stages import package as package
    from tuneline.stages import serve as serve
    from tuneline.whole_runs import RunEstimate as RunEstimate
    from tuneline.whole_runs import run as run

_MODULES = {
    "Customization": "pipelines.config.customization_config",
    "run": "tuneline.whole_runs",
    "curate": "tuneline.stages",
    "finetune": "tuneline.stages",
    "evaluate": "tuneline.stages",
    "package": "tuneline.stages",
    "serve": "tuneline.stages",
    "compare": "tuneline.comparison",
    "size": "tuneline.sizing",
    "TrainingSize": "pipelines.planning.size_results",
    "ClusterSize": "pipelines.planning.size_results",
    "Registry": "tuneline.model_registry",
    "RunResult": "pipelines.runs.results",
    "RunEstimate": "tuneline.whole_runs",
    "Comparison": "tuneline.comparison",
    "DatasetResult": "pipelines.runs.results",
    "ModelResult": "pipelines.runs.results",
    "EvaluationResult": "pipelines.runs.results",
    "PackageResult": "pipelines.runs.results",
    "ServedPackage": "pipelines.runs.single_stages",
    "ModelVersion": "tuneline.model_registry",
    "ModelVersions": "tuneline.model_registry",
    "TunelineError": "components.common.runtime.errors",
}
__all__ = list(_MODULES)


def _check_import_path() -> None:
    """Raise ImportError if another project's `components` or `pipelines` precedes tuneline's on the import path."""
    own = Path(__file__).resolve().parents[1]
    for package in ("components", "pipelines"):
        spec = importlib.util.find_spec(package)
        for folder in map(Path, (spec.submodule_search_locations or [str(spec.origin)]) if spec else []):
            if folder.resolve() != own / package:
                raise ImportError(
                    f"the package '{package}' of another project in {folder} hides that of tuneline in {own / package}; "
                    f"remove {folder.parent} from PYTHONPATH and sys.path, or run Python with -P in another folder"
                )


try:
    _check_import_path()
except ImportError as error:
    if Path(sys.argv[0]).name == "tuneline":  # the console script: a message without a traceback
        sys.exit(f"tuneline: {error}")
    raise


def __getattr__(name: str) -> object:
    """Import a name of the API on its first use (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module 'tuneline' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
