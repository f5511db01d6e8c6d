"""text-dedup's own command `python -m text_dedup.minhash` in this process; VERIFY in the environment compares the texts of each cluster."""

import json
import os
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
[debug]
enable_profiling = false
"""


def run(corpus: str, folder: str) -> None:
    verify = "true" if os.environ.get("VERIFY") else "false"
    Path(folder, "config.toml").write_text(CONFIG.format(corpus=json.dumps(corpus), verify=verify))
    sys.argv = ["minhash"]
    runpy.run_module("text_dedup.minhash", run_name="__main__")


def removed(corpus: str, folder: str) -> list[int]:
    from datasets import load_from_disk

    kept = set(load_from_disk(f"{folder}/kept")["id"])
    with open(corpus, encoding="utf-8") as file:
        return [number for number, line in enumerate(file) if json.loads(line)["id"] not in kept]


if __name__ == "__main__":
    if sys.argv[1] == "run":
        run(*sys.argv[2:])
    else:
        print(json.dumps(removed(*sys.argv[2:])))
