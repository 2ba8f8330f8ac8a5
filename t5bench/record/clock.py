"""The clock of a record: what time it is, by one that nobody sets while a run goes on."""

import time

_START = time.time() - time.monotonic()


def now() -> float:
    """Seconds since 1970, as this machine had it when the process began; they go on evenly from there."""
    return _START + time.monotonic()
