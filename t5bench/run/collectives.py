"""The collective operation that a worker waits in, or the last one that it began.

PyTorch's flight recorder keeps them, of NCCL and of gloo, with the group and the number of each in its group. Where it
has none, as in older releases, nothing is said.
"""

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MOST_RANKS = 8
# How a line begins that says it, behind a worker's stacks.
MARK = "Collective operation: "


def words_of(entry: dict[str, Any], ranks: Sequence[int]) -> str:
    """An operation that the flight recorder has: "all_reduce 7 of ranks 0, 1".

    ranks: of its group, none if they are unknown; then the group's own description stands for them.
    """
    name = str(entry.get("profiling_name", "")).rpartition(":")[2]
    number = entry.get("p2p_seq_id" if entry.get("is_p2p") else "collective_seq_id")
    group = " ".join(map(str, entry.get("process_group") or ())) or "?"
    if len(ranks) > MOST_RANKS:
        of = f"{len(ranks)} ranks, {ranks[0]} to {ranks[-1]}"
    else:
        of = f"ranks {', '.join(map(str, ranks))}" if ranks else f"group {group}"
    return f"{name} {number} of {of}"


def current() -> tuple[str, bool]:
    """In words the oldest operation that has not ended, else the last one; whether it has not ended. "" without any.

    For a worker that is stuck, from another thread.
    """
    if "torch.distributed" not in sys.modules:
        return "", False
    with contextlib.suppress(Exception):  # whatever is wrong there must not replace what is told without it
        from torch._C._distributed_c10d import _dump_fr_trace_json

        entries = json.loads(_dump_fr_trace_json(True, False)).get("entries", [])
        waiting = [entry for entry in entries if not entry["retired"]]
        if entries:
            chosen = (waiting or entries[-1:])[0]
            return words_of(chosen, _ranks_of(chosen)), bool(waiting)
    return "", False


def _ranks_of(entry: dict[str, Any]) -> list[int]:
    from torch.distributed import distributed_c10d

    name = str(entry["process_group"][0])
    for group, its_name in distributed_c10d._world.pg_names.items():
        if its_name == name:
            return sorted(distributed_c10d.get_process_group_ranks(group))
    return []


def tell_when_asked(path: Path) -> None:
    """Lets each SIGUSR2 append a line to the file, also while the main thread waits in C++, which ends no wait for a
    handler in Python. Call it in the main thread, before faulthandler gets the signal."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.signal(signal.SIGUSR2, lambda *_: None)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)

    def tell() -> None:
        while True:
            numbers = os.read(read, 1)
            if not numbers:
                return
            if numbers[0] == signal.SIGUSR2:
                operation, is_waiting = current()
                with contextlib.suppress(OSError), path.open("a") as file:
                    file.write(f"\n{MARK}{'in' if is_waiting else 'after'} {operation or 'none'}\n")

    threading.Thread(target=tell, daemon=True).start()
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
