"""Container images of the components. platform.yaml replaces them for a cluster; local runs do not use images."""

CURATION_IMAGE = "tuneline/python-curation:latest"
TRAINING_IMAGE = "tuneline/python-training:latest"
EVALUATION_IMAGE = "tuneline/python-evaluation:latest"
SERVING_IMAGE = "tuneline/python-serving:latest"
