"""Base and tuned models: sources, import, licences, loading, chat templates, text embeddings, devices, memory and FLOPs."""
