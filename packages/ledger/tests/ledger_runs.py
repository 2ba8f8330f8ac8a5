"""The ledger's command, with a folder in place of what it would install."""

import os
import subprocess
import sys
from pathlib import Path

from real_runs import environment
from support import REPO_ROOT

# Of a process that imports no t5bench, which would find the packages beside it.
PYTHONPATH = os.pathsep.join(map(str, (REPO_ROOT, REPO_ROOT / "packages" / "ledger" / "src")))


def run_ledger(
    output: Path, folder: Path, *arguments: str, first_folder: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """The command, with a folder in place of what it would install. first_folder: of Python's modules."""
    program = (
        "import sys; from pathlib import Path\n"
        "from t5bench.__main__ import main; from t5bench_ledger import environments\n"
        f"environments.release_folder = lambda *_: Path({str(folder)!r})\n"
        f"first = {[str(first_folder)] if first_folder else []}\n"
        "usual = environments.environment\n"
        "environments.environment = lambda folders, added: usual([*first, *folders], added)\n"
        "sys.exit(main(['ledger', *sys.argv[1:]]))"
    )
    words = [sys.executable, "-c", program, "--output", str(output), *arguments]
    settings = environment(PYTHONPATH=PYTHONPATH)
    return subprocess.run(words, env=settings, capture_output=True, text=True, timeout=500, check=False)
