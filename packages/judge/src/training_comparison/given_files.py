"""Files that a user, another program or a stranger gives: read whole, once their kind and their size are known.

A FIFO or a terminal would be waited for, and /dev/zero has no end, so only regular files are read.
"""

import os
import stat
from pathlib import Path
from typing import BinaryIO

from training_comparison.problem import Problem

MOST_BYTES = 1 << 26


def open_file(path: Path, remedy: str = "") -> BinaryIO:
    """Opens a regular file, and waits for nothing. Raises Problem with this remedy for anything else."""
    try:
        file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb")
    except OSError as error:
        raise Problem(f"{path} cannot be read: {error.strerror}", remedy) from error
    mode = os.fstat(file.fileno()).st_mode
    if not stat.S_ISREG(mode):
        file.close()
        raise Problem(f"{path} is a pipe or a device, not a regular file", remedy)
    return file


def read_file(path: Path, remedy: str = "", most: int = MOST_BYTES) -> bytes:
    """most: bytes; no file of this kind comes near. Raises Problem with this remedy, unless it can be read."""
    try:
        with open_file(path, remedy) as file:
            size = os.fstat(file.fileno()).st_size
            content = file.read(min(size, most) + 1)
    except OSError as error:
        raise Problem(f"{path} cannot be read: {error.strerror}", remedy) from error
    if len(content) > most:
        raise Problem(f"{path} is larger than {most >> 20} MiB", remedy)
    return content


def read_text(path: Path, remedy: str = "", most: int = MOST_BYTES) -> str:
    """UTF-8. Raises Problem."""
    try:
        return read_file(path, remedy, most).decode("utf-8")
    except UnicodeDecodeError as error:
        raise Problem(f"{path} is no text: {error}", remedy) from error
