"""Which to run of layouts that cannot be told apart: one rule, everywhere in this project."""

from t5bench.costmodel.machine import GIB

TOO_CLOSE = 0.03
"""Two layouts whose times differ by less are equal: nobody would change a launcher for it."""
TIES = "the least memory (in whole GiB), then the fewest settings"


def place_in_a_tie(memory_bytes: float, count_of_settings: int, seconds: float) -> tuple[int, int, float]:
    """What TIES orders them by; of those that are alike in both, the faster one comes first."""
    return round(memory_bytes / GIB), count_of_settings, seconds
