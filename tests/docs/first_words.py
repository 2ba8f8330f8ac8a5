"""What a user types first, to every command: --help, nothing, and the wrong kind of file where one is named.

python tests/docs/first_words.py DIRECTORY RUN few|all; prints a line of JSON for each case: the words, the exit
status, what was printed, and the seconds. All in one process, because starting Python takes longer than to refuse.
"""

import contextlib
import json
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from t5bench.__main__ import COMMANDS, main

LIMIT_SECONDS = 60
MEMORY = 16 << 30  # /dev/zero has no end
# With nothing else, these do something.
NEED_NOTHING = (
    "strategies", "settings", "support", "ledger", "cluster", "predict", "ranks", "prove", "layout-bench", "gate-score",
)  # fmt: skip
FILE = "{}"
NAMED = {
    "sweep": [["--runs-dir", FILE]],
    "compare": [[FILE], ["RUN", FILE]],
    "explain": [[FILE]],
    "parity": [[FILE], [FILE, "--baseline", "RUN"], ["RUN", "--baseline", FILE], ["RUN", "--reference", FILE],
               ["RUN", "--outside", FILE], ["--sensitivity", FILE]],
    "history": [[FILE]],
    "pack": [[FILE, "-o", "new/package"]],
    "verify": [[FILE]],
    "wandb": [[FILE]],
    "predict": [[FILE], ["--device", "A100", "--network", FILE], ["--calibrate", FILE], ["--check", FILE],
                ["--calibrate", "RUN", "--calibrate-network", FILE]],
    "layouts": [["--gpus", "8", "--device", "A100", "--network", FILE]],
    "merge-data": [["new/data", FILE]],
    "generate": [[FILE, "--prompt", "x"], ["RUN", "--prompts", FILE]],
    "evaluate": [[FILE]],
    "reshape": [[FILE]],
    "export": [[FILE, "new/export"]],
    "import": [[FILE, "new/import"]],
    "collect": [["new/collected", FILE]],
}  # fmt: skip


def make_files(directory: Path) -> list[Path]:
    """Paths of every kind at which nothing that a command reads can be."""
    directory.mkdir(parents=True)
    (directory / "directory").mkdir()
    (directory / "empty").touch()
    (directory / "text").write_text("hello\n")
    (directory / "number.json").write_text("7\n")
    (directory / "list.json").write_text("[1, 2]\n")
    (directory / "deep.json").write_text("[" * 100_000)
    (directory / "binary").write_bytes(bytes(range(256)) * 16)
    os.mkfifo(directory / "pipe")
    (directory / "loop").symlink_to("loop")
    names = ["directory", "empty", "text", "number.json", "list.json", "deep.json", "binary", "pipe", "loop"]
    below = [directory / "text" / "below", directory / "nowhere", directory / ("long" * 100)]
    return [*(directory / name for name in names), *below, Path("/dev/null"), Path("/dev/zero")]


# Every command still meets these in the daily tests; given_files.py and the record's reader meet all.
FEW = ("list.json", "pipe")


def cases(directory: Path, run: Path, which: str) -> Iterator[list[str]]:
    files = [file for file in make_files(directory / "files") if which == "all" or file.name in FEW]
    for name in COMMANDS:
        yield [name, "--help"]
        yield [name, "--no-such-option"]
        if name not in NEED_NOTHING:
            yield [name]
        for words in NAMED.get(name, []):
            for file in files:
                if name == "sweep" and file.name in ("directory", "nowhere"):
                    continue  # there a sweep would run
                replaced = {FILE: str(file), "RUN": str(run)}
                yield [name, *(replaced.get(word, word) for word in words)]


class TookTooLong(BaseException):
    """Raised by the alarm; no command catches it."""


def stop(*_: object) -> None:
    raise TookTooLong


def outcome(words: list[str]) -> dict[str, object]:
    began = time.monotonic()
    with tempfile.NamedTemporaryFile("w+") as output, tempfile.NamedTemporaryFile("w+") as errors:
        signal.alarm(LIMIT_SECONDS)
        try:
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
                status: object = main(words)
        except SystemExit as end:  # of argparse's --help
            status = end.code
        except BaseException as error:  # which a user would see as a traceback
            status = repr(error)
        finally:
            signal.alarm(0)
        told = {"words": words, "status": status, "seconds": time.monotonic() - began}
        for name, stream in (("output", output), ("errors", errors)):
            stream.flush()
            told[name] = Path(stream.name).read_text()[-20_000:]
    return told


if __name__ == "__main__":
    os.chdir(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    signal.signal(signal.SIGALRM, stop)
    for each in cases(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]):
        print(json.dumps(outcome(each)), flush=True)
