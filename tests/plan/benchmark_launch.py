"""What a launcher costs before torchrun starts, which may be 0.15 s of CPU. On a busy machine it says nothing.

PYTHONPATH=.:tests python tests/plan/benchmark_launch.py
"""

import resource
import shlex
import statistics
import tempfile
from pathlib import Path

from support import make_project

ENGINE_FILES = 140  # as many to check as the real engine has
ATTEMPTS = 9

with tempfile.TemporaryDirectory() as folder:
    # The stub torchrun ends at once, instead of the recorder a cat runs, and nothing looks for processes that are left.
    project = make_project(Path(folder))
    python = shlex.quote(project.environment["PYTHON"])
    stub = f"""#!/bin/bash
[[ $2 != t5bench ]] || exec cat
[[ $2 != t5bench.run.processes ]] || exit 0
exec {python} "$@"
"""
    project.add_stub("python", stub)
    project.environment["PYTHON"] = "python"
    for number in range(ENGINE_FILES):
        (project.engine / "megatron" / f"module{number}.py").write_text(f"# {number}\n" * 400)
    project.record_engine()
    seconds = []
    for number in range(ATTEMPTS):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        project.launch("zero3_offload", OUTPUT_DIR=f"run{number}")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    print(f"{statistics.median(seconds):.3f} s of CPU before torchrun (least {min(seconds):.3f})")
