"""The customization, single-stage and promotion pipelines, their parameters and their pod specifications."""
