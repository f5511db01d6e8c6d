"""Consistency and throughput probe for shared storage: `tuneline storage probe`.

Two processes, on one host or on two, run the same steps in a private folder below the probed path. They exchange
messages and measurements through files in that folder.
"""

# Each step compares the writes of one process with the reads of the other process.
