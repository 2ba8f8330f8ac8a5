"""The secret with which nodes prove to each other that they belong to one run; docs/security.md says who knows it."""

import contextlib
import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from t5bench import note

VARIABLE = "T5_RUN_SECRET"
REMEDY = (
    f"Give all nodes the same secret: export {VARIABLE}=$(openssl rand -hex 32) on the first, and the same value on the"
    " others; nodes with a common home directory already share one"
)


def secret(environment: Mapping[str, str]) -> bytes:
    """T5_RUN_SECRET, else the one in the user's home directory, which is created if missing; "" if neither works."""
    if given := environment.get(VARIABLE):
        return given.encode()
    home = environment.get("HOME")
    if not (folder := environment.get("XDG_CONFIG_HOME") or (f"{home}/.config" if home else "")):
        return b""
    path = Path(folder, "t5-parallelism", "secret")
    try:
        if not path.exists():
            _make(path)
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            if found.st_uid == os.geteuid() and not found.st_mode & 0o077:
                return file.read(1024).strip()
        note(f"warning: {path} is ignored because other users can read or write it: chmod 600 {path}")
    except OSError:
        pass
    return b""


def _make(path: Path) -> None:
    """Several nodes may do this at once on a shared file system: one of them wins, and all read its secret."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    own = path.with_name(f"secret.{secrets.token_hex(8)}")
    try:
        with os.fdopen(os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32) + "\n")
        with contextlib.suppress(FileExistsError):
            os.link(own, path)
    finally:
        own.unlink(missing_ok=True)
