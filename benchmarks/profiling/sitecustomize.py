"""Profiles every Python process that has this folder on its PYTHONPATH, into a file of its own in the folder PROFILE_FOLDER.

Python imports this as it starts. A process that ends with os._exit leaves no file. Seconds are CPU seconds of the main thread's calls.
"""

import atexit
import cProfile
import os
import time

FOLDER = os.environ.get("PROFILE_FOLDER")


def start() -> cProfile.Profile:
    """A profile of this process, written when it ends as programs do."""
    profile = cProfile.Profile(time.process_time)
    profile.enable()
    atexit.register(write, profile)
    return profile


def write(profile: cProfile.Profile) -> None:
    profile.disable()
    profile.dump_stats(f"{FOLDER}/{os.getpid()}.pstats")


if FOLDER:
    from multiprocessing import util

    inherited = start()

    def afresh(profile: cProfile.Profile) -> None:
        """In a process of multiprocessing, which ends without atexit: what it inherited goes, and what it does itself is written."""
        profile.disable()
        own = cProfile.Profile(time.process_time)
        util.Finalize(None, write, [own], exitpriority=100)
        own.enable()

    util.register_after_fork(inherited, afresh)
