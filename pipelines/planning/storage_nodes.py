"""Number of storage nodes for a capacity and for rates; the figures of a node are in storage_nodes.yaml."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from components.common.runtime.errors import UsageError
from components.common.runtime.yaml_loading import load_yaml

TERA = 10**12
MAX_STORAGE_NODES = 252  # of a OneFS cluster (unstructureddatatips.com, PowerScale F210 platform node)
# +2d:1n writes at most 16 + 2 units, on nine nodes (unstructureddatatips.com, 2021/08, OneFS protection overhead).
MAX_STRIPE_NODES = 9
# OneFS can be slower above 90% (unstructureddatatips.com, OneFS capacity management), and 10% is the advised space to
# rebuild a failed drive (OneFS virtual hot spare).
MAX_FILL = 0.9


@dataclass(frozen=True)
class StorageNode:
    """Figures of one node; see storage_nodes.yaml."""

    name: str
    drives: int
    drive_tb: list[float]
    gbit: float
    min_nodes: int
    source: str

    def compute_usable_bytes(self, nodes: int, drive_tb: float) -> float:
        """Return the usable capacity of a cluster with protection +2d:1n: of n nodes, one holds protection data."""
        return MAX_FILL * nodes * self.drives * drive_tb * TERA * (1 - 1 / min(nodes, MAX_STRIPE_NODES))


@dataclass(frozen=True)
class StorageCluster:
    """Nodes of a storage cluster with their drives, and what decides their number."""

    node: StorageNode
    nodes: int
    drive_tb: float
    bound: str

    @property
    def usable_bytes(self) -> float:
        """The usable capacity in bytes."""
        return self.node.compute_usable_bytes(self.nodes, self.drive_tb)


@cache
def load_storage_nodes() -> dict[str, StorageNode]:
    """Return all storage nodes by name."""
    rows = load_yaml(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    assert isinstance(rows, dict)
    return {name: StorageNode(name=name, **row) for name, row in rows.items()}


def find_storage_node(name: str) -> StorageNode:
    """Return a storage node by name.

    Raises:
        UsageError: the node is unknown.
    """
    known = load_storage_nodes()
    if name.lower() not in known:
        nearest = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.4)
        suggestion = f"Did you mean {nearest[0]}? " if nearest else ""
        raise UsageError(
            f"--storage-node {name!r} is not a known storage node",
            hint=f"{suggestion}Known storage nodes: {', '.join(known)}.",
        )
    return known[name.lower()]


def choose_storage_cluster(node: StorageNode, capacity: float, rate: float, node_rate: float | None) -> StorageCluster:
    """Return the smallest cluster: the least nodes, and the smallest drives of those that hold the capacity.

    Args:
        node: the kind of node.
        capacity: bytes to store.
        rate: bytes per second, reads and writes together.
        node_rate: measured bytes per second of one node. None: the line rate of its ports, which is an upper limit.

    Raises:
        UsageError: no cluster is large enough.
    """
    ports = node_rate or node.gbit / 8 * 1e9
    for nodes in range(node.min_nodes, MAX_STORAGE_NODES + 1):
        fitting = [size for size in node.drive_tb if node.compute_usable_bytes(nodes, size) >= capacity]
        if fitting and nodes * ports >= rate:
            by_rate, smallest = math.ceil(rate / ports), nodes == node.min_nodes
            bound = "smallest supported cluster" if smallest else "rate" if by_rate == nodes else "capacity"
            return StorageCluster(node, nodes, min(fitting), bound)
    raise UsageError(
        f"--storage-node {node.name}: {capacity / TERA:,.0f} TB and {rate / 1e9:,.1f} GB/s need more than "
        f"{MAX_STORAGE_NODES} nodes",
        hint="Lower --raw, --versions or --demand, or split the demand across clusters.",
    )
