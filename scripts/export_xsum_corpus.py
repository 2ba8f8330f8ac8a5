"""The articles of XSum as one JSON line each: see t5bench/corpus/export.py, which this runs."""

import os
import sys
from pathlib import Path

repository = str(Path(__file__).resolve().parent.parent)
path = os.pathsep.join(filter(None, (repository, os.environ.get("PYTHONPATH"))))
command = [sys.executable, "-m", "t5bench.corpus.export", *sys.argv[1:]]
# From Python 3.11 on, PYTHONSAFEPATH keeps another t5bench in the current directory out.
os.execve(sys.executable, command, os.environ | {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"})
