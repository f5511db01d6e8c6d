"""A trial of each pod: the API server is asked whether it would take it (dryRun=All), and nothing is made.

It finds what no other check can know: an admission webhook that refuses, a quota with scopes, a security standard of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

from components.common.errors import TunelineError
from pipelines.cluster import kubeflow_pods, permissions
from pipelines.cluster.access import ForbiddenError, Json, RefusedError
from pipelines.cluster.look import RULES, Look
from pipelines.findings import Finding, finding, unchecked
from pipelines.platform import Platform

NAME = "trial of the pods"
GATE = "kueue.x-k8s.io/admission"
USED_UP = "exceeded quota"  # a pod that waits for others of the namespace, which Argo Workflows makes again
FIRST = ("namespace", "service account", "pod security", "limit ranges", "resource quotas")  # what would only be said a second time


def trial(look: Look) -> Iterator[Finding]:
    """Whether the API server takes every pod of the pipeline as Kubeflow would make it."""
    again = sorted(name for name in look.failed if name.startswith(FIRST))
    if again:
        yield unchecked(NAME, f"{', '.join(again)} first", "Mend that, then look again.")
    elif not permissions.may(look, "create", "", "pods"):
        yield unchecked(NAME, f"{look.user or 'the caller'} may not create pods in {look.namespace}", RULES)
    else:
        yield from _tried(look)


def pods(platform: Platform) -> dict[str, Json]:
    """Every pod of the pipeline by its step, as Kubeflow would make it for this platform."""
    from pipelines import compiling
    from pipelines.config import Customization

    return kubeflow_pods.pods(compiling.compiled(Customization(), platform))


def _tried(look: Look) -> Iterator[Finding]:
    taken: dict[str, Json] = {}
    for name, pod in pods(look.platform).items():
        try:
            taken[name] = look.api.create(f"{look.path('pods')}?dryRun=All", _placed(look, name, pod))
        except (ForbiddenError, RefusedError) as error:
            yield _refused(name, error)
            return
    yield finding(NAME, True, f"the API server would take all {len(taken)}", "")
    yield from _gated(look, taken)


def _placed(look: Look, name: str, pod: Json) -> Json:
    metadata = {**pod["metadata"], "generateName": f"tuneline-doctor-{name}-", "namespace": look.namespace}
    metadata.pop("name")
    return {**pod, "metadata": metadata, "spec": {**pod["spec"], "serviceAccountName": look.account}}


def _refused(name: str, error: TunelineError) -> Finding:
    hint = "Set what is asked for in platform.yaml (scheduling.labels, images, security, resources), or ask who runs what refuses it."
    return finding(NAME, False, f"the pod of {name} is refused: {error.message}", hint, needed=USED_UP not in error.message)


def _gated(look: Look, taken: dict[str, Json]) -> Iterator[Finding]:
    """Kueue takes plain pods only where it was set up for them; elsewhere its label means nothing."""
    free = [
        name for name, pod in taken.items() if _queued(pod) and GATE not in [one["name"] for one in pod["spec"].get("schedulingGates", [])]
    ]
    if any(_queued(pod) for pod in taken.values()):
        hint = "Have `pod` added to integrations.frameworks in Kueue's configuration, and the namespace to those it manages."
        said = (
            "Kueue does not hold the pods back: they would pass its queue by" if free else "Kueue holds the pods back until it admits them"
        )
        yield finding("Kueue and pods", not free, said, hint, needed=False)


def _queued(pod: Json) -> bool:
    return "kueue.x-k8s.io/queue-name" in (pod["metadata"].get("labels") or {})
