"""A training as a RayJob: KubeRay starts a head and two nodes as pods, and the training ends with the weights of a local one.

The namespace, the accounts and the image are those of test_training_pods.py. In the `stress` tier because a cluster starts, and
Ray in three pods.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import ray

from tests.engines.cluster import REQUIRED, Cluster
from tests.engines.test_training_pods import (
    CHECKPOINT_EVERY,
    QUEUES,
    URGENT_JOB,
    Json,
    Trainings,
    kill_worker,
    local_training,
    prepare_trainings,
    suspended_training,
)

__all__ = ["local_training"]
pytestmark = [pytest.mark.stress, pytest.mark.cluster, pytest.mark.ray, REQUIRED]
PODS = {"ray_version": ray.__version__, "head_cpu": "1", "head_memory": ""}  # the queue has no memory


@pytest.fixture(scope="module")
def trainings(
    local_training: tuple[Path, Json], cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Trainings:
    """Prepare the cluster as deploy/ does, with a queue whose capacity is the head of one RayJob."""
    cluster.start_controllers("ray", "kueue")
    files = ("components/launcher-rayjob/launcher-rbac.yaml", "components/launcher-policies/rayjob-policy.yaml")
    folder = tmp_path_factory.mktemp("rayjob-pods")
    prepared = prepare_trainings(cluster, local_training, folder, "rayjob", files)
    queues = QUEUES.replace('nominalQuota: "2"', 'nominalQuota: "1"')
    cluster.kubectl("apply", "--server-side", "-f", "-", text=queues)
    return prepared


def find_pod(trainings: Trainings, part: str) -> str:
    """Return the name of a pod of the head or of a node."""
    names = trainings.kubectl("get", "pods", "-l", f"tuneline/part={part}", "-o", "name").split()
    return names[0].removeprefix("pod/")


def test_disturbed_and_preempted_rayjob_ends_with_the_weights_of_a_local_training(trainings: Trainings) -> None:
    """One training, because each start of Ray takes most of a minute."""
    name = "disturbed"
    trainings.start(name, **PODS, queue="team-a", priority="batch")
    trainings.wait_for_step(name, 1 * CHECKPOINT_EVERY)
    kill_worker()

    trainings.wait_for_step(name, trainings.find_step(name) + CHECKPOINT_EVERY)
    with suspended_training():
        trainings.restart_kubelet()
        trainings.restart_api_server()
        trainings.replace_step(name)

    # KubeRay replaces the node, for which the training waits.
    trainings.wait_for_step(name, trainings.find_step(name) + CHECKPOINT_EVERY)
    node = find_pod(trainings, "node")
    trainings.evict(node)
    trainings.wait_until(lambda: f"pod/{node}" not in trainings.list_nodes(), name)

    # Kueue suspends the job until the urgent one has ended; KubeRay then starts new pods.
    trainings.wait_for_step(name, trainings.find_step(name) + CHECKPOINT_EVERY)
    head = find_pod(trainings, "head")
    trainings.kubectl("create", "-f", "-", text=URGENT_JOB)
    trainings.wait_until(lambda: f"pod/{head}" not in trainings.list_nodes(), name)

    # Without persistent storage, Ray has lost the job: the step submits it again.
    trainings.wait_for_step(name, trainings.find_step(name) + CHECKPOINT_EVERY)
    trainings.kubectl("delete", "pod", find_pod(trainings, "head"), "--grace-period=0", "--force")
    answer = trainings.finish(name)
    assert answer["resumed_from"]
