"""Profiles every Python process with this folder on its PYTHONPATH into a separate file in the folder PROFILE_FOLDER.

Python imports this module at startup. A process that ends with os._exit writes no file. Seconds are CPU seconds of the main thread.
"""

import atexit
import cProfile
import os
import time

FOLDER = os.environ.get("PROFILE_FOLDER")


def start() -> cProfile.Profile:
    """Start a profile of this process, which is written at its normal exit."""
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
        """In a process of multiprocessing, which ends without atexit: discard the inherited profile, and write that of this process."""
        profile.disable()
        own = cProfile.Profile(time.process_time)
        util.Finalize(None, write, [own], exitpriority=100)
        own.enable()

    util.register_after_fork(inherited, afresh)
