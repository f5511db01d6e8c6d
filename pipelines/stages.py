"""The steps of a run: their names, what people read of them, and what they make."""

from __future__ import annotations

STAGES = {
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
# What stands in the boxes of the Kubeflow UI.
TITLES = {
    "check_the_platform": "Check the platform",
    "resolve": "Plan the run",
    "plan_one": "Plan the stage",
    "data_curation": "Curate the data",
    "data_versioning": "Version the dataset",
    "fine_tuning": "Fine-tune the model",
    "evaluation": "Evaluate against base and champion",
    "triton_packaging": "Package for Triton and prove",
    "registration": "Register the version",
    "promotion": "Promote to champion",
    "report": "Report the evidence",
    "promote": "Promote the version",
    "deploy": "Bring it into service in Triton",
}
CONDITIONAL = ("triton_packaging", "promotion")
MAKERS = {"dataset": "data_curation", "model": "fine_tuning", "evaluation": "evaluation", "repository": "triton_packaging"}
REPORTED = tuple(stage for stage in STAGES if stage != "report")  # the report is made before its own step has ended
