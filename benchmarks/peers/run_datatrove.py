"""datatrove's MinHash pipeline with its four stages, as in its documentation, on local files with one worker."""

import gzip
import json
import sys

from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.dedup import MinhashDedupCluster, MinhashDedupFilter, MinhashDedupSignature
from datatrove.pipeline.dedup.minhash import MinhashConfig, MinhashDedupBuckets
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers.jsonl import JsonlWriter

BANDS, ROWS = 16, 8


def run(corpus: str, folder: str) -> None:
    """Compute signatures, buckets and clusters, and filter. spaCy's rules split English into words and need no model."""
    name = corpus.rpartition("/")
    config = MinhashConfig(n_grams=5, num_buckets=BANDS, hashes_per_bucket=ROWS)
    reader = JsonlReader(name[0], glob_pattern=name[2])
    stages = [
        ([reader, MinhashDedupSignature(f"{folder}/signatures", config=config, language="en")], 1),
        ([MinhashDedupBuckets(f"{folder}/signatures", f"{folder}/buckets", config=config)], BANDS),
        ([MinhashDedupCluster(f"{folder}/buckets", f"{folder}/clusters", config=config)], 1),
        (
            [
                reader,
                MinhashDedupFilter(f"{folder}/clusters", JsonlWriter(f"{folder}/removed")),
                JsonlWriter(f"{folder}/kept"),
            ],
            1,
        ),
    ]
    for number, (steps, tasks) in enumerate(stages):
        LocalPipelineExecutor(steps, tasks=tasks, workers=1, logging_dir=f"{folder}/logs/{number}").run()


def removed(_corpus: str, folder: str) -> list[int]:
    with gzip.open(f"{folder}/removed/00000.jsonl.gz", "rt", encoding="utf-8") as file:
        return [int(json.loads(line)["id"][1:]) for line in file]


if __name__ == "__main__":
    if sys.argv[1] == "run":
        run(*sys.argv[2:])
    else:
        print(json.dumps(removed(*sys.argv[2:])))
