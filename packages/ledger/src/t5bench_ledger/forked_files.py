"""Runs files under releases of a library, each in a fork that begins with nothing but torch.

It imports nothing of this project. On standard input come requests, one a line, as JSON: a library, the folders of its
release, files, and where to write what they print. Each is answered by a line with its number; a file that does not
end is killed.
"""

import importlib
import json
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIMIT_SECONDS = 300
# Imported once for all releases.
OF_ALL = ("torch", "torch.distributed", "torch._dynamo", "torch.distributed.fsdp")
# What transformers imports only when it is first asked for.
PARTS = {
    "transformers": (
        *("Trainer", "TrainingArguments", "LlamaForCausalLM", "T5ForConditionalGeneration"),
        *("BartForConditionalGeneration", "BertForSequenceClassification"),
    )
}


def in_fork(act: Callable[[], None], limit: float) -> None:
    """In a process group of its own, and at most that many seconds."""
    begin = time.monotonic()
    process = os.fork()
    if not process:
        os.setpgid(0, 0)
        try:
            act()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
    while not os.waitpid(process, os.WNOHANG)[0]:
        if time.monotonic() - begin > limit:
            os.killpg(process, signal.SIGKILL)
        time.sleep(0.05)


def run_file(file: Path, directory: Path) -> None:
    def act() -> None:
        output = os.open(directory / f"{file.name}.out", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        sys.argv = [str(file)]
        runpy.run_path(str(file), run_name="__main__")

    in_fork(act, LIMIT_SECONDS)


def run_release(request: dict[str, Any]) -> None:
    directory = Path(request["directory"])

    def act() -> None:
        errors = os.open(directory / "errors", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(errors, 1)
        os.dup2(errors, 2)
        os.chdir(directory)
        sys.path[:0] = request["folders"]
        module = importlib.import_module(request["library"])
        for name in PARTS.get(request["library"], ()):
            getattr(module, name)
        for file in request["files"]:
            run_file(Path(file), directory)

    in_fork(act, LIMIT_SECONDS * (1 + len(request["files"])))


def main() -> None:
    for name in OF_ALL:
        importlib.import_module(name)
    for line in sys.stdin:
        request = json.loads(line)
        run_release(request)
        print(json.dumps({"number": request["number"]}), flush=True)


if __name__ == "__main__":
    main()
