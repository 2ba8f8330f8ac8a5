"""What a launcher costs before torchrun starts: a benchmark.

    PYTHONPATH=.:tests python tests/plan/benchmark_launch.py

A launcher may use 0.30 s of CPU before torchrun. pytest does not collect this: a busy machine says nothing about it.
"""

import resource
import shlex
import shutil
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

from harness import REPO_ROOT, make_project, write_data_record

from t5bench.corpus.checksum import tokenizer_checksum

TOKENIZER = REPO_ROOT / "megatron_data" / "sample" / "tokenizer"
ENGINE_FILES = 140  # as many to check as the real engine has
ATTEMPTS = 9


def cpu_seconds(work: Callable[[], object]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    work()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def launches(folder: Path, strategy: str) -> list[float]:
    """The stub torchrun ends at once, and instead of the recorder a cat runs."""
    project = make_project(folder)
    python = shlex.quote(project.environment["PYTHON"])
    project.add_stub("python", f'#!/bin/bash\n[[ $2 != t5bench ]] || exec cat\nexec {python} "$@"\n')
    project.environment["PYTHON"] = "python"
    for number in range(ENGINE_FILES):
        (project.engine / "megatron" / f"module{number}.py").write_text(f"# {number}\n" * 400)
    project.record_engine()
    shutil.copytree(TOKENIZER, tokenizer := project.data_prefix.parent / "tokenizer")
    write_data_record(project.data_prefix, tokenizer_checksum=tokenizer_checksum(tokenizer))
    return [cpu_seconds(lambda n=n: project.launch(strategy, OUTPUT_DIR=f"run{n}")) for n in range(ATTEMPTS)]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for strategy in ("ddp", "zero3_offload"):
            seconds = launches(Path(folder, strategy), strategy)
            print(f"{strategy}: {statistics.median(seconds):.3f} s of CPU before torchrun (least {min(seconds):.3f})")


if __name__ == "__main__":
    main()
