"""Steps of a pipeline that are not stages: input resolution, the platform check, and the run report."""
