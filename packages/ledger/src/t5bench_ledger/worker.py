"""The process that trains the cells of one release, started with that release first on PYTHONPATH.

It imports torch, DeepSpeed and the native engine once, and forks the processes of each cell from itself: what would
take most of a cell's time is done once for a release. On standard input come the cells as JSON, one a line; each is
answered by one line. A fork begins with nothing but imported modules.
"""

import gc
import json
import os
import runpy
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from t5bench import Problem
from t5bench.imports import import_deepspeed, import_transformers, leave_out_compiler
from t5bench.text import guard_streams

SECONDS_BETWEEN_LOOKS = 0.05
TRANSFORMERS_PARTS = (
    *("Trainer", "LlamaForCausalLM", "T5ForConditionalGeneration", "BartForConditionalGeneration"),
    *("BertForSequenceClassification", "GPT2LMHeadModel"),
)


def import_torch() -> dict[str, str]:
    """Imports it; the versions."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    leave_out_compiler()
    import torch
    import torch._dynamo

    torch.set_num_threads(1)
    return {"torch": torch.__version__, "python": sys.version.split()[0]}


def import_rest(tokenizer: str, *, with_deepspeed: bool) -> dict[str, str]:
    """Imports what else the cells need; DeepSpeed's version. tokenizer: "" if no cell needs the native engine."""
    versions = {}
    if with_deepspeed:
        import_deepspeed()
        import deepspeed

        versions["deepspeed"] = deepspeed.__version__

    if tokenizer:
        import native.train  # noqa: F401
        from native.token_file import Vocabulary

        Vocabulary.load(tokenizer)
    else:
        import torch.distributed.fsdp  # noqa: F401
    gc.freeze()
    return versions


def import_trainer(library: str) -> dict[str, str]:
    """Imports transformers or accelerate, and what they train with; the versions."""
    versions = {}
    if library == "transformers":
        transformers = import_transformers()
        versions["transformers"] = transformers.__version__
        # It imports a part when that is first asked for.
        for name in TRANSFORMERS_PARTS:
            getattr(transformers, name)
    # accelerate imports it in every training, whether that uses it or not.
    import_deepspeed()
    if library == "accelerate":
        import deepspeed

        versions["deepspeed"] = deepspeed.__version__
    import accelerate

    gc.freeze()
    return versions | {"accelerate": accelerate.__version__}


def train(cell: dict[str, Any]) -> None:
    """One process of a cell: the native engine or a small program, with the cell's arguments."""
    words = cell["words"]
    if cell["poisons_memory"]:
        import torch

        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True
    if cell["program"]:
        sys.argv = [cell["program"], *words]
        runpy.run_path(cell["program"], run_name="__main__")
        return
    from native.arguments import parse
    from native.train import run

    if cell.get("counts") and os.environ["RANK"] == "0":
        from t5bench_ledger.counts import count_iteration

        count_iteration(Path(cell["counts"]))
    run(parse(words))


def fork(rank: int, cell: dict[str, Any]) -> int:
    """Starts a rank of a cell; its process id."""
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        log = os.open(Path(cell["directory"], f"rank{rank}.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(cell["processes"])}
        os.environ |= {"LOCAL_SIZE": str(cell["processes"]), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": cell["port"]}
        train(cell)
        status = 0
    except Problem as problem:
        print(problem.report, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def run_cell(cell: dict[str, Any]) -> dict[str, Any]:
    """Trains a cell and waits until its processes have ended, at most the cell's limit in seconds."""
    begin = time.monotonic()
    running = {fork(rank, cell): rank for rank in range(cell["processes"])}
    statuses: dict[int, int] = {}
    failed_at = None
    hangs = False
    while running:
        process, status = os.waitpid(-1, os.WNOHANG)
        if process:
            statuses[running.pop(process)] = os.waitstatus_to_exitcode(status)
            if status and failed_at is None:
                failed_at = time.monotonic()
            continue
        now = time.monotonic()
        # The peers of a process that failed may wait for it for ever.
        peers_wait = failed_at is not None and now - failed_at > cell["patience"]
        if peers_wait or now - begin > cell["limit"]:
            hangs = hangs or failed_at is None
            for left in running:
                os.kill(left, signal.SIGKILL)
        time.sleep(SECONDS_BETWEEN_LOOKS)
    seconds = time.monotonic() - begin
    return {"statuses": [statuses[rank] for rank in sorted(statuses)], "seconds": seconds, "hangs": hangs}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not be taken for an answer

    def answer(of: dict[str, Any]) -> None:
        print(json.dumps(of), file=answers, flush=True)

    versions: dict[str, str] = {}
    try:
        versions = import_torch()
        library = sys.argv[2]
        if library in ("transformers", "accelerate"):
            versions |= import_trainer(library)
        else:
            versions |= import_rest(sys.argv[1], with_deepspeed=library == "deepspeed")
    except Exception as error:
        traceback.print_exc()
        answer(versions | {"failed": f"{type(error).__name__}: {error}"})
        return
    answer(versions)
    for line in sys.stdin:
        cell = json.loads(line)
        answer({"number": cell["number"]} | run_cell(cell))


if __name__ == "__main__":
    guard_streams()
    main()
