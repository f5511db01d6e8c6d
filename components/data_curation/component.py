"""Data curation as a Kubeflow component."""

from typing import NamedTuple

from kfp import dsl

from components.common.images import CURATION


@dsl.component(base_image=CURATION, install_kfp_package=False)
def data_curation(plan: str, report: dsl.Output[dsl.HTML], links: dsl.Output[dsl.Markdown]) -> NamedTuple("Outputs", [("dataset", str)]):
    """Clean, deduplicate and split raw text. `plan`: sources, evaluation sets and earlier revisions with digests, configuration, seed and code digest, as JSON."""
    import json

    from components.common import step
    from components.data_curation.config import DataCurationConfig
    from components.data_curation.stage import Earlier, Source, curate

    p = json.loads(plan)
    where = p.pop("where")  # nothing of the result depends on it
    sources, benchmarks, config = (
        [Source(**s) for s in p["sources"]],
        [Source(**s) for s in p["benchmarks"]],
        DataCurationConfig(**p["config"], **where),
    )
    made = step.produce(
        "data_curation",
        p,
        lambda out, s: curate(
            sources,
            out,
            config,
            seed=p["seed"],
            reporter=s.reporter,
            benchmarks=benchmarks,
            earlier=[Earlier(tag, s.artifact(sha256, "dataset")) for tag, sha256 in p["earlier"]],
        ),
        links.path,
    )
    step.copy_report(made, report.path)
    return (made.sha256,)
