"""The clock of a record, which is not adjusted during a run."""

import time

_START = time.time() - time.monotonic()


def now() -> float:
    """Seconds since 1970 by this machine's clock when the process began, increasing steadily from there."""
    return _START + time.monotonic()
