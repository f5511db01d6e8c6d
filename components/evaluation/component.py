"""Evaluation as a Kubeflow component."""

from typing import NamedTuple

from kfp import dsl

from components.common.runtime.container_images import EVALUATION_IMAGE


@dsl.component(base_image=EVALUATION_IMAGE, install_kfp_package=False)
def evaluation(
    config: str,
    inputs: str,
    seed: int,
    model: str,
    dataset: str,
    report: dsl.Output[dsl.HTML],
    links: dsl.Output[dsl.Markdown],
    metrics: dsl.Output[dsl.Metrics],
    refusals: dsl.Output[dsl.ClassificationMetrics],
    curated_dataset: dsl.Input[dsl.Dataset] = None,
    tuned_model: dsl.Input[dsl.Model] = None,
) -> NamedTuple("Outputs", [("evaluation", str), ("verdict", str), ("packaging", str)]):
    """Compare a model with its base model and the incumbent.

    Args:
        config: The section evaluation of the customization, as JSON.
        inputs: Digests of the incumbent, the tasks' files and the code, as JSON.
        seed: Seed of the confidence intervals and of sampled items.
        model: Digest of the model artifact.
        dataset: Digest of the dataset artifact.
        report: Evaluation report.
        links: Links to the run and its artifacts.
        metrics: Metrics for the Kubeflow UI.
        refusals: Harmful and harmless requests by the candidate's answer; empty without the regression suite.
        curated_dataset: The dataset for Kubeflow's lineage; the digest selects the artifact.
        tuned_model: The model for Kubeflow's lineage; the digest selects the artifact.

    Returns:
        Digest of the evaluation artifact; the verdict: accepted, refused or unchanged; and whether packaging follows: yes
        for an accepted model that answers prompts, otherwise no.
    """
    import json

    from components.common import pipeline_step
    from components.common.artifacts.artifact_folder import REWARD_MODEL
    from components.common.models import model_loading
    from components.evaluation import evaluation_result
    from components.evaluation.config import EvaluationConfig
    from components.evaluation.stage import evaluate

    p = {"config": json.loads(config), "seed": seed, **json.loads(inputs)}
    incumbent = p["incumbent"]

    def build(out, s):  # type: ignore[no-untyped-def]
        opened = [
            model_loading.open_model_artifact(s.load_artifact(sha, "model"), s.reporter, accepts_reward_models=True)
            for sha in (model, incumbent)
            if sha
        ]
        options = {
            "incumbent": opened[1] if incumbent else None,
            "seed": seed,
            "state": s.workdir.state,
            "reporter": s.reporter,
        }
        return evaluate(opened[0], s.load_artifact(dataset, "dataset"), out, EvaluationConfig(**p["config"]), **options)

    made = pipeline_step.produce_artifact(
        "evaluation", {"plan": p, "model": model, "dataset": dataset}, build, links.path
    )
    pipeline_step.copy_report(made, report.path)
    pipeline_step.log_kfp_metrics(made, metrics)
    if table := evaluation_result.count_refusals(made):
        refusals.log_confusion_matrix(["refuse", "answer"], table)
    verdict, is_served = made.manifest.summary["verdict"], made.manifest.inputs[0].kind != REWARD_MODEL
    return (made.sha256, verdict, "yes" if verdict == "accepted" and is_served else "no")
