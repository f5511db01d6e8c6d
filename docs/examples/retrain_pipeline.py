"""A Kubeflow pipeline that runs `tuneline retrain`, as a recurring run: python retrain_pipeline.py ENDPOINT EXPERIMENT."""

import sys

from kfp import Client, compiler, dsl, kubernetes

IMAGE = "registry.example/tuneline/training"


@dsl.container_component
def retrain() -> dsl.ContainerSpec:
    """Check the triggers, and retrain if one fires; an interrupted retraining resumes in the next run."""
    return dsl.ContainerSpec(
        image=IMAGE,
        command=["tuneline", "retrain"],
        args=[
            "--config=/data/customization.yaml",
            "--capture=/data/traffic/capture.yaml",
            "--feedback=/data/traffic/feedback.jsonl",
            "--folder=/data/retraining",
            "--workdir=/data/work",
            "--min-feedback=200",
            "--every-days=30",
            "--json",
        ],
    )


@dsl.pipeline(name="tuneline-retrain")
def retrain_pipeline() -> None:
    """Run the command as the only step. Its result depends on the traffic, so it is never cached."""
    task = retrain()
    task.set_caching_options(enable_caching=False)
    kubernetes.mount_pvc(task, pvc_name="tuneline", mount_path="/data")


if __name__ == "__main__":
    compiler.Compiler().compile(retrain_pipeline, "retrain.yaml")
    client = Client(host=sys.argv[1])
    experiment = client.create_experiment(sys.argv[2])
    client.create_recurring_run(
        experiment.experiment_id,
        "tuneline-retrain",
        cron_expression="0 41 5 * * *",  # with seconds
        max_concurrency=1,
        no_catchup=True,
        pipeline_package_path="retrain.yaml",
    )
