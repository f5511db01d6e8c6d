"""Extraction of rows from databases and tables into Parquet files."""
