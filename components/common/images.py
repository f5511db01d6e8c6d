"""The images the components name. On a cluster platform.yaml replaces them by digest; on one machine no image is pulled."""

CURATION = "tuneline/python-curation:latest"
TRAINING = "tuneline/python-training:latest"
EVALUATION = "tuneline/python-evaluation:latest"
SERVING = "tuneline/python-serving:latest"
