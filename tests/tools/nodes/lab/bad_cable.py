"""A bad cable, where the kernel has no netem: python bad_cable.py HOST MILLISECONDS LOST DAMAGED

Carries frames between two TAP devices that it makes, in-HOST and out-HOST, both ways, until it is ended. Delays each,
loses so many per cent of them, and changes a byte in so many per cent. It prints "ready" once there are the devices.
"""

import contextlib
import fcntl
import heapq
import os
import random
import select
import struct
import sys
import time

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x2, 0x1000
LONGEST_FRAME, ETHERNET_HEADER = 1 << 16, 14


def tap(name: str) -> int:
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    return device


def damaged(frame: bytes) -> bytes:
    """With another byte in its payload. The kernel writes checksums before a frame reaches a TAP device."""
    place = random.randrange(ETHERNET_HEADER, len(frame))
    return frame[:place] + bytes([frame[place] ^ random.randrange(1, 256)]) + frame[place + 1 :]


def main(host: str, milliseconds: float, lost: float, spoiled: float) -> None:
    ends = tap(f"in-{host}"), tap(f"out-{host}")
    print("ready", flush=True)
    under_way: list[tuple[float, int, bytes]] = []
    while True:
        wait = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        for end in select.select(ends, [], [], wait)[0]:
            frame = os.read(end, LONGEST_FRAME)
            if random.random() * 100 < spoiled:
                frame = damaged(frame)
            if random.random() * 100 >= lost:
                heapq.heappush(under_way, (time.monotonic() + milliseconds / 1000, ends[end == ends[0]], frame))
        while under_way and under_way[0][0] <= time.monotonic():
            _, end, frame = heapq.heappop(under_way)
            with contextlib.suppress(OSError):  # that end is not up yet
                os.write(end, frame)


if __name__ == "__main__":
    main(sys.argv[1], *map(float, sys.argv[2:]))
