"""The workdir: artifact store, state of unfinished work, private folders and locks of jobs, and heartbeats.

A heartbeat shows whether the owner of a folder or lock on another host is running.
"""
