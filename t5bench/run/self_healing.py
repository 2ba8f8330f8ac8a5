"""A file of a run that grows during the run and survives what people do to run directories meanwhile."""

import os
import shutil
from pathlib import Path


class SelfHealingFile:
    """Appends to a file, and restores it if somebody removed it, put a shorter one in its place or emptied it.

    Its own open file still has what was removed. What was cut off is only known to a file that remembers its content,
    which must therefore be small. All methods raise OSError.
    """

    lost: int = 0
    """The bytes that were cut off and cannot be restored."""

    def __init__(self, path: Path, *, remembers: bool = False) -> None:
        self.path = path
        self.file = path.open("ab")
        self.content = bytearray(path.read_bytes()) if remembers else None
        self.length = os.fstat(self.file.fileno()).st_size

    def write(self, text: bytes) -> None:
        if self.content is not None:
            self.content += text
        self.file.write(text)
        self.length += len(text)

    def flush(self) -> None:
        self.file.flush()

    def close(self) -> None:
        self.file.close()

    def restore(self) -> bool:
        """Whether it was damaged; it is whole again now."""
        self.file.flush()
        self._count_what_is_lost()
        if not self._is_damaged():
            return False
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_name(f".{self.path.name}.restored")
        if self.content is not None:
            new.write_bytes(self.content)
        else:
            shutil.copyfile(f"/proc/self/fd/{self.file.fileno()}", new)
        new.replace(self.path)
        self.file.close()
        self.file = self.path.open("ab")
        self.length = os.fstat(self.file.fileno()).st_size
        return True

    def _count_what_is_lost(self) -> None:
        if self.content is None:
            size = os.fstat(self.file.fileno()).st_size
            self.lost += max(0, self.length - size)
            self.length = size

    def _is_damaged(self) -> bool:
        ours = os.fstat(self.file.fileno())
        try:
            there = self.path.stat()
        except FileNotFoundError:
            return True
        except OSError:  # a file system that does not answer now may answer later
            return False
        if not os.path.samestat(there, ours):
            return there.st_size != ours.st_size
        return self.content is not None and there.st_size < len(self.content)
