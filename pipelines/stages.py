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
CONDITIONAL = ("triton_packaging", "promotion")
MAKERS = {"dataset": "data_curation", "model": "fine_tuning", "evaluation": "evaluation", "repository": "triton_packaging"}
REPORTED = tuple(stage for stage in STAGES if stage != "report")  # the report is made before its own step has ended
