"""Base and tuned models: sources, import, licences, loading, chat templates, compute devices, memory and FLOPs."""
