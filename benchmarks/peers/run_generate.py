"""The baseline of the serving benchmark: transformers' generate in a loop over the prompts. Prints its figures as JSON.

python -m benchmarks.peers.run_generate SETTINGS.json
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WARMUP = 2


def main() -> None:
    """Run the measurement of the settings: model, texts, max_tokens, threads."""
    settings = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    print(json.dumps(run(**settings)))


def run(model: str, texts: Sequence[str], max_tokens: int, threads: int) -> dict[str, Any]:
    """Return seconds, which include tokenization and decoding but not loading, and the answers as texts in order."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(threads)
    tokenizer = AutoTokenizer.from_pretrained(model)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    def answer(text: str) -> tuple[str, int]:
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        how = {
            "do_sample": False,
            "temperature": None,
            "top_p": None,
            "top_k": None,
            "pad_token_id": tokenizer.pad_token_id,
        }
        made = loaded.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, **how)[
            0, ids.shape[1] :
        ]
        return str(tokenizer.decode(made, skip_special_tokens=True)), len(made)

    with torch.inference_mode():
        for text in texts[:WARMUP]:
            answer(text)
        began, cpu = time.monotonic(), time.process_time()
        answers = [answer(text) for text in texts]
    seconds, tokens = time.monotonic() - began, sum(count for _, count in answers)
    return {
        "seconds": seconds,
        "cpu": time.process_time() - cpu,
        "tokens": tokens,
        "tokens_per_second": tokens / seconds,
        "answers": [text for text, _ in answers],
    }


if __name__ == "__main__":
    main()
