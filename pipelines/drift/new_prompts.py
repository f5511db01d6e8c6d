"""Examples of new prompts: clusters of prompts that are far from all prompts of the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipelines.drift import window_test
from pipelines.drift.captured_prompts import Prompt

NEIGHBOURS = 5
FAR_SHARE = 0.01  # of the reference's prompts are as far from the others
MAX_COMPARED_PROMPTS = 2_000
MAX_CLUSTERS = 6
PROMPTS_PER_CLUSTER = 10  # a smaller number of far prompts is one cluster
EXAMPLES = 3


@dataclass(frozen=True)
class Cluster:
    """Similar prompts that are far from the reference; the examples are nearest to their centre."""

    size: int
    examples: Sequence[Prompt]


def find_clusters(
    reference: np.ndarray, embeddings: np.ndarray, prompts: Sequence[Prompt], seed: int
) -> tuple[list[Cluster], float]:
    """Return the clusters of far prompts, the largest first, and the share of prompts that are far.

    A prompt is far if its distance to its fifth nearest reference prompt exceeds that of 99% of the reference's prompts
    (Ramaswamy et al., SIGMOD 2000). Distances are those of whitened principal components.

    Args:
        reference: embeddings of the reference (prompts x width).
        embeddings: embeddings of the compared prompts.
        prompts: the compared prompts.
        seed: seed of the samples and of k-means.
    """
    from scipy.cluster.vq import kmeans2
    from scipy.spatial import cKDTree

    generator = np.random.default_rng(seed)
    reference = reference[generator.permutation(len(reference))[:MAX_COMPARED_PROMPTS]]
    compared = np.sort(generator.permutation(len(embeddings))[:MAX_COMPARED_PROMPTS])
    features, components = window_test.compute_features(np.concatenate([reference, embeddings[compared]]))
    if not components:  # all prompts have equal embeddings
        return [], 0.0
    known, new = features[: len(reference), :components], features[len(reference) :, :components]
    tree = cKDTree(known)
    usual = tree.query(known, NEIGHBOURS + 1)[0][:, -1]  # the nearest is the prompt itself
    distances = tree.query(new, NEIGHBOURS)[0][:, -1]
    far = np.flatnonzero(distances > np.quantile(usual, 1 - FAR_SHARE))
    share = len(far) / len(new)
    if not len(far):
        return [], share
    count = min(MAX_CLUSTERS, max(1, len(far) // PROMPTS_PER_CLUSTER))
    centres, labels = kmeans2(new[far].astype(np.float64), count, minit="++", seed=seed)
    clusters = []
    for label in sorted(set(labels.tolist())):
        members = far[labels == label]
        order = members[np.argsort(np.linalg.norm(new[members] - centres[label], axis=1), kind="stable")]
        unique = {prompts[compared[number]].text: prompts[compared[number]] for number in order[::-1]}
        clusters.append(Cluster(len(members), [*unique.values()][::-1][:EXAMPLES]))
    return sorted(clusters, key=lambda cluster: -cluster.size), share
