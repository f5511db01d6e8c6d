"""The held-out loss of each contestant's adapter, measured by one evaluator on rows that no contestant trained on.

python -m benchmarks.held_out REQUEST.json

REQUEST.json is {"base": source, "rows": FILE, "max_length": tokens, "adapters": {name: folder or null}}; null stands for the base model.
The program prints {name: loss}: the mean float32 cross-entropy in nats over the tokens of all answers, rendered with the model's chat
template.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from components.common.models import chat_templates, model_loading


def losses(request: dict[str, Any]) -> dict[str, float]:
    """Return the loss of each adapter."""
    import torch

    model_loading.prepare_torch(0, "cpu")
    model_loading.silence_transformers()
    base = model_loading.resolve_base_model(request["base"])
    tokenizer = model_loading.load_tokenizer(base.path)
    rows = json.loads(Path(request["rows"]).read_text(encoding="utf-8"))
    encoded = [
        chat_templates.encode_conversation(tokenizer, row["messages"], max_length=request["max_length"]) for row in rows
    ]
    found = {}
    for name, folder in request["adapters"].items():
        adapter = Path(folder) if folder else None
        model = model_loading.load_model(
            model_loading.LoadableModel(base.sha256, base, base.path, adapter, None), dtype=torch.float32
        ).to("cpu")
        found[name] = _loss(model, encoded)
    return found


def _loss(model: Any, rows: list[chat_templates.EncodedConversation]) -> float:
    """Compute the loss row by row, so that no row is padded or attends to another."""
    import torch
    from torch.nn.functional import cross_entropy

    total, count = 0.0, 0
    with torch.inference_mode():
        for row in rows:
            ids = torch.tensor([row.input_ids])
            learned = torch.tensor(row.answer_mask[1:]).nonzero().flatten()
            logits = model(input_ids=ids, use_cache=False, logits_to_keep=learned).logits[0]
            total += float(cross_entropy(logits.float(), ids[0, 1:][learned], reduction="sum"))
            count += len(learned)
    return total / count


if __name__ == "__main__":
    print("\n" + json.dumps(losses(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))), flush=True)
