"""Garbage collection: inventory of all stored items, retention plan, and deletion of unreferenced items."""
