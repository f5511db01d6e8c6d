"""Captured traffic: settings, files, compaction, retention, erasure and export."""
