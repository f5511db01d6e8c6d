"""Row filters, which accept or reject each row independently of other rows.

A filter rejects a row for a reason, which the manifest counts and the report shows. `reject_reasons` is the registry.
"""
