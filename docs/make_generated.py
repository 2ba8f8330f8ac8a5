"""Writes the generated pages again, into docs/generated or a folder: ``python -m docs.make_generated [folder]``.

So are the answers of the commands in learn.md. A test (tests/docs/test_generated.py) asks that this changes nothing.
What comes from runs stays as it is: ledger.json, continuations.json, release_costs.*, the example, the pictures of
the quick start and that of a search. What launchers read of the ledger is written, too.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

from docs import continuations
from t5bench.__main__ import main as t5bench
from t5bench.record.ledger import DATA
from t5bench_ledger import tables, verdicts

FOLDER = Path(__file__).resolve().parent / "generated"
COURSE = FOLDER.parent / "learn.md"
# Without the settings of whoever runs this, and without the data of this checkout, whose vocabulary may be another.
KEPT = ("PATH", "HOME", "LANG", "PYTHONPATH", "TMPDIR")


@contextlib.contextmanager
def without_settings() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as empty:
        environment = {name: value for name, value in os.environ.items() if name in KEPT}
        with patch.dict(os.environ, environment | {"MEGATRON_DATA_DIR": empty}, clear=True):
            yield


def write_printed(path: Path, *words: str) -> None:
    """What the command prints becomes the page."""
    with path.open("w") as file, contextlib.redirect_stdout(file):
        status = t5bench(list(words))
    if status:
        raise RuntimeError(f"python -m t5bench {' '.join(words)} ended with status {status}")


# A command of a page with what it prints, which is its own block below.
ANSWERED = re.compile(
    r"(?P<asks>^```bash\n(?P<command>.*)\n```\n\n```text\n)(?P<answer>(?s:.*?))(?=^```$)", re.MULTILINE
)


def with_answers(page: str) -> str:
    """The page with what its commands print today."""

    def asked(block: re.Match[str]) -> str:
        command = ["bash", "-euo", "pipefail", "-c", block["command"]]
        run = subprocess.run(command, cwd=FOLDER.parents[1], capture_output=True, text=True, check=True)
        lines = [line.rstrip() for line in run.stdout.splitlines()]
        return block["asks"] + "".join(f"{line}\n" for line in lines)

    with without_settings():
        return ANSWERED.sub(asked, page)


def write_all(folder: Path) -> None:
    cells = json.loads(DATA.read_text())["cells"]
    with without_settings():
        write_printed(folder / "settings.md", "settings")
        write_printed(folder / "support.md", "support")
        write_printed(folder / "published.md", "predict", "--published")
        t5bench(["layouts", "--page", str(folder / "layouts.html")])
    tables.write(folder, cells)
    continuations.write(folder)
    verdicts.write_schema(folder)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        write_all(Path(sys.argv[1]))
    else:
        write_all(FOLDER)
        COURSE.write_text(with_answers(COURSE.read_text()))
        verdicts.write(json.loads(DATA.read_text())["cells"])
