"""Exports of a registered version in standard formats: ML-BOM, Croissant, model card, technical documentation.

`version_facts` collects the facts of the lineage, `rendering` selects the format, and each other module renders one format.
"""
