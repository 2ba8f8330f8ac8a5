"""PyTorch's caching allocator, as far as it makes tensors larger: c10/cuda/CUDACachingAllocator.cpp, constants of 2.x.

It rounds to 512 bytes, takes small blocks from segments of 2 MiB and large ones from segments of 20 MiB or more, and
splits a large block only if more than 1 MiB is left over: the rest counts as allocated.
"""

import bisect
from collections.abc import Iterable

MIB = 2**20
SMALL, SMALL_SEGMENT, LARGE_SEGMENT, OWN_SEGMENT, STEP = MIB, 2 * MIB, 20 * MIB, 10 * MIB, 2 * MIB
ROUNDING = 512


def slack(sizes: Iterable[int]) -> int:
    """Bytes that count as allocated beyond those that were asked for, when tensors are made one after another."""
    free: dict[bool, list[int]] = {True: [], False: []}  # sorted sizes of blocks, small and large
    found = 0
    for size in sizes:
        rounded = max(ROUNDING, -(-size // ROUNDING) * ROUNDING)
        small = rounded <= SMALL
        pool = free[small]
        place = bisect.bisect_left(pool, rounded)
        block = pool.pop(place) if place < len(pool) else _segment(rounded, small)
        left = block - rounded
        if left >= ROUNDING if small else left > SMALL:
            bisect.insort(pool, left)
            block = rounded
        found += block - size
    return found


def _segment(size: int, small: bool) -> int:
    if small:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < OWN_SEGMENT else -(-size // STEP) * STEP
