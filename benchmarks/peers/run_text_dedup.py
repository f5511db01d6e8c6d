"""text-dedup's command `python -m text_dedup.minhash` in this process; the variable VERIFY compares the texts of each cluster."""

import json
import os
import pickle
import runpy
import sys
from pathlib import Path

CONFIG = """
[input]
input_type = "local_files"
file_type = "json"
[input.read_arguments]
path = "json"
data_files = {corpus}
split = "train"
cache_dir = "cache"
[algorithm]
algorithm_name = "minhash"
text_column = "text"
num_perm = 128
threshold = 0.7
ngram_size = 5
num_proc = 1
check_false_positive = {verify}
[output]
output_dir = "kept"
save_clusters = true
[debug]
enable_profiling = false
"""


def run(corpus: str, folder: str) -> None:
    verify = "true" if os.environ.get("VERIFY") else "false"
    Path(folder, "config.toml").write_text(CONFIG.format(corpus=json.dumps(corpus), verify=verify))
    sys.argv = ["minhash"]
    runpy.run_module("text_dedup.minhash", run_name="__main__")


def removed(_corpus: str, folder: str) -> list[int]:
    """Return all but the first document of each cluster.

    Without the check, version 0.4.1 writes a dataset that lacks all of them: its filter keeps the document whose number equals the cluster's,
    but the clusters are renumbered.
    """
    clusters: dict[int, list[int]] = {}
    for document, cluster in pickle.loads(Path(folder, "kept", "clusters.pickle").read_bytes()).items():  # noqa: S301  # just written
        clusters.setdefault(cluster, []).append(document)
    return [document for members in clusters.values() for document in sorted(members)[1:]]


if __name__ == "__main__":
    if sys.argv[1] == "run":
        run(*sys.argv[2:])
    else:
        print(json.dumps(removed(*sys.argv[2:])))
