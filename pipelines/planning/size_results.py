"""Results of `tuneline size` and of `tuneline.size`: figures, text, HTML page and representation in a notebook."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.common.artifacts import output_paths
from components.common.reporting import html_report
from components.common.runtime.reporters import Reporter
from pipelines.config.customization_config import Customization
from pipelines.planning import cluster_report, cluster_size, size_options, sizing, sizing_report
from pipelines.planning.cluster_size import ClusterRequest
from pipelines.planning.size_options import SizeOptions
from pipelines.planning.sizing import SizingRequest

Cases = dict[str, float]


class _Size:
    """Representations that both results have: text, the page, and the main sections of the page in a notebook."""

    values: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """Return the object that `tuneline size --json` prints."""
        return self.values

    def format_lines(self) -> list[str]:
        """Return the lines that `tuneline size` prints."""
        raise NotImplementedError

    def render_page(self) -> str:
        """Return the HTML page."""
        raise NotImplementedError

    def render_sections(self) -> Mapping[str, str]:
        """Return the HTML of a notebook by heading."""
        raise NotImplementedError

    def write_page(self, path: Path | str) -> Path:
        """Write the HTML page that `tuneline size --report` writes, and return its path.

        Raises:
            TunelineError: the path cannot be written.
        """
        output_paths.check_file(Path(path), inputs=[], example="size.html")
        output_paths.write_file(Path(path), self.render_page())
        return Path(path)

    def __str__(self) -> str:
        return "\n".join(self.format_lines())

    def _repr_html_(self) -> str:
        return html_report.render_fragment(type(self).__name__, self.render_sections())


@dataclass(frozen=True, repr=False)
class TrainingSize(_Size):
    """GPUs, memory, time, storage, energy and cost of a customization; `str()` formats them as text.

    Attributes:
        values: the object that `tuneline size --json` prints; see docs/how-to/sizing.md.
    """

    values: dict[str, Any]

    @property
    def gpus(self) -> int:
        """GPUs of one training run."""
        return int(self.values["gpus"])

    @property
    def fits(self) -> bool:
        """Whether the training fits in the memory of the GPUs."""
        return bool(self.values["fits"])

    @property
    def binds(self) -> dict[str, str]:
        """The limit that determines the number of GPUs (`bound`), and its `reason`."""
        return dict(self.values["binds"])

    @property
    def memory_gib_per_gpu(self) -> float:
        """Peak memory of one GPU in GiB."""
        return float(self.values["memory_gib_per_gpu"])

    @property
    def tokens_per_second(self) -> Cases | None:
        """Speed of the training by case: low, typical and best. None: the peak of the GPU is not known."""
        return self.values["tokens_per_second"]  # type: ignore[no-any-return]

    @property
    def hours(self) -> Cases | None:
        """Hours of the training by case. None: the amount of data is not known."""
        return self.values["hours"]  # type: ignore[no-any-return]

    def format_lines(self) -> list[str]:
        """Return the lines that `tuneline size` prints."""
        return sizing_report.format_size(self.values)

    def render_page(self) -> str:
        """Return the HTML page."""
        return sizing_report.render_report(self.values)

    def render_sections(self) -> Mapping[str, str]:
        """Return key figures, ranges and the plot of the memory."""
        return sizing_report.render_main_sections(self.values)

    def __repr__(self) -> str:
        hours = "unknown" if self.hours is None else self.hours["typical"]
        gpus = f"{self.gpus} × {self.values['gpu']}"
        return f"TrainingSize(gpus='{gpus}', memory_gib_per_gpu={self.memory_gib_per_gpu:g}, typical_hours={hours})"


@dataclass(frozen=True, repr=False)
class ClusterSize(_Size):
    """A cluster that several models share; `str()` formats it as text.

    Attributes:
        values: the object that `tuneline size --demand --json` prints; see docs/how-to/sizing.md.
        request: the demand; the plots of the page simulate it with other node counts.
    """

    values: dict[str, Any]
    request: ClusterRequest

    @property
    def nodes(self) -> int:
        """Nodes of the cluster."""
        return int(self.values["nodes"])

    @property
    def gpus(self) -> int:
        """GPUs of the cluster."""
        return int(self.values["gpus"])

    @property
    def keeps_up(self) -> bool:
        """Whether the cluster meets the demand; otherwise its queue grows."""
        return bool(self.values["keeps_up"])

    @property
    def wait_hours(self) -> Cases:
        """Hours that customizations wait for GPUs: mean, p50, p90 and p99."""
        return dict(self.values["wait_hours"])

    @property
    def bill_of_materials(self) -> list[dict[str, Any]]:
        """The items to buy or reserve, with quantity, unit and reason."""
        return list(self.values["bill_of_materials"])

    def format_lines(self) -> list[str]:
        """Return the lines that `tuneline size --demand` prints."""
        return cluster_report.format_cluster(self.values)

    def render_page(self) -> str:
        """Return the HTML page. This simulates the cluster for each number of nodes in the plots."""
        return cluster_report.render_report(self.request, self.values)

    def render_sections(self) -> Mapping[str, str]:
        """Return key figures, the bill of materials and the plot of the utilization."""
        return cluster_report.render_main_sections(self.values)

    def __repr__(self) -> str:
        wait = self.wait_hours["p90"]
        return f"ClusterSize(nodes={self.nodes}, gpus='{self.gpus} × {self.values['gpu']}', p90_wait_hours={wait:g})"


def size(customization: Customization, options: SizeOptions, reporter: Reporter) -> TrainingSize | ClusterSize:
    """Size a training run or, with a demand, a cluster.

    Raises:
        UsageError: an option is invalid, or no configuration meets the limits.
    """
    request = size_options.build_request(customization, options, reporter)
    if isinstance(request, SizingRequest):
        return TrainingSize(sizing.size(request))
    return ClusterSize(cluster_size.size_cluster(request), request)
