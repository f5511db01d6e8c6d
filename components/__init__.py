"""The stages, one package each, and `common`, the code that they share. A stage imports no other stage."""
