"""Names and display labels of the pipeline's steps."""

from __future__ import annotations

STAGE_LABELS = {
    "resolve": "resolve",
    "data_curation": "curate",
    "data_versioning": "version",
    "fine_tuning": "fine-tune",
    "evaluation": "evaluate",
    "triton_packaging": "package",
    "registration": "register",
    "promotion": "promote",
    "report": "report",
}
# Display names in the Kubeflow UI.
STEP_TITLES = {
    "check_the_platform": "Check the platform",
    "check_chain": "Check the chain",
    "resolve": "Plan the run",
    "plan_one": "Plan the stage",
    "data_curation": "Curate the data",
    "data_versioning": "Version the dataset",
    "fine_tuning": "Fine-tune the model",
    "evaluation": "Evaluate against base and champion",
    "triton_packaging": "Package for Triton and prove",
    "registration": "Register the version",
    "promotion": "Promote to champion",
    "report": "Write the report",
    "promote": "Promote the version",
    "deploy": "Deploy to Triton",
    "finish": "Report the end of the run",
}
CONDITIONAL_STAGES = ("triton_packaging", "promotion")
REPORTED_STAGES = tuple(stage for stage in STAGE_LABELS if stage != "report")  # the report step is still running
