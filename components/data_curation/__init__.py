"""Data curation stage: raw text in; clean train, validation and test rows out; a reason per rejected row.

`reading` parses source files, `filters` reject or change single rows, `comparison` finds duplicates and assigns splits.
"""
