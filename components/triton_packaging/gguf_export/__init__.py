"""Export of a model to a GGUF file for llama.cpp, and its comparison with the unquantized model.

`architectures` maps configurations and tensors, `vocabulary` maps tokenizers, `gguf_file` writes the file, and `export`
measures and publishes it.
"""
