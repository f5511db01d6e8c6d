"""Fine-tuning as a Kubeflow component."""

from typing import NamedTuple

from kfp import dsl

from components.common.runtime.container_images import TRAINING_IMAGE


@dsl.component(base_image=TRAINING_IMAGE, install_kfp_package=False)
def fine_tuning(
    config: str,
    inputs: str,
    seed: int,
    dataset: str,
    version: str,
    report: dsl.Output[dsl.HTML],
    links: dsl.Output[dsl.Markdown],
    tuned_model: dsl.Output[dsl.Model],
    curated_dataset: dsl.Input[dsl.Dataset] = None,
) -> NamedTuple("Outputs", [("model", str)]):
    """Tune the base model on a dataset.

    Args:
        config: The section fine_tuning of the customization, as JSON.
        inputs: Digests of the base model and the code, and settings of the machine, as JSON.
        seed: Seed of the training.
        dataset: Digest of the dataset artifact.
        version: Published revision of the dataset, as JSON.
        report: Training report.
        links: Links to the run and its artifacts.
        tuned_model: Manifest of the model artifact; its digest and address are the metadata.
        curated_dataset: The dataset for Kubeflow's lineage; the digest selects the artifact.

    Returns:
        Digest of the model artifact.
    """
    import json

    from components.common import pipeline_step, tool_rows
    from components.common.launch import launcher_settings
    from components.common.models import model_loading
    from components.fine_tuning import adapters
    from components.fine_tuning.config import recipe_from_plan
    from components.fine_tuning.sweep import tune

    p, uri = {"config": json.loads(config), "seed": seed, **json.loads(inputs)}, json.loads(version)["uri"]
    where = p.pop("where", {})
    call_metrics = where.pop("tool_call_metrics", [])
    recipe = recipe_from_plan(p["config"], where)

    def train(output, step):  # type: ignore[no-untyped-def]
        artifact = step.load_artifact(dataset, "dataset")
        if call_metrics:  # otherwise an invalid row would end the evaluation
            tool_rows.check_dataset(artifact, checks_schemas="valid_calls" in call_metrics)
        base = model_loading.resolve_base_model(p["config"]["base_model"], step.reporter, p["base_sha256"])
        initial = None
        if expected := p.get("initial_adapter_sha256"):
            model_config = model_loading.load_configuration(base.path)
            initial = adapters.open_initial_adapter(recipe, base.sha256, model_config, expected)
        return tune(
            artifact,
            output,
            recipe,
            seed=seed,
            state=step.workdir.state,
            reporter=step.reporter,
            dataset_uri=uri,
            base=base,
            initial_adapter=initial,
            launcher_settings=launcher_settings.load_settings(),
            tracked=step.mlflow_run,
            budget=step.spending,
        )

    # The commit instead of the URI: a cached result stays valid when the workdir moves.
    key = {"plan": p, "dataset": dataset, "revision": uri.rpartition("@")[2]}
    model = pipeline_step.produce_artifact("fine_tuning", key, train, links.path)
    pipeline_step.copy_report(model, report.path)
    pipeline_step.describe_to_kfp(model, tuned_model)
    return (model.sha256,)
