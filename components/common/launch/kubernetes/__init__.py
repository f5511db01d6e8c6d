"""Training as a Kubernetes job: a TrainJob of Kubeflow Trainer or a RayJob of KubeRay, and the settings of their pods."""
