"""Writes the generated pages again, into docs/generated or a folder: ``python -m docs.make_generated [folder]``.

So are the answers of the commands in learn.md, and the tables of README.md and of packages/verify. A test
(tests/docs/test_generated.py) asks that this changes nothing.
What comes from runs stays as it is: continuations.json, across_engines.json, the example, the pictures of the quick
start and that of a search. What the ledger makes of its cells is written into its package, and for launchers.
"""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

from docs import across_engines, continuations
from t5bench.__main__ import main as t5bench
from t5bench_evidence import lab, lab_picture
from t5bench_ledger import measure, tables
from t5bench_verify.relations import RELATIONS

FOLDER = Path(__file__).resolve().parent / "generated"
COURSE = FOLDER.parent / "learn.md"
README = FOLDER.parents[1] / "README.md"
RELATIONS_PAGE = FOLDER.parents[1] / "packages" / "verify" / "RELATIONS.md"
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


TABLE = re.compile(r"(?P<begin>^<!-- the table of layouts: .* -->\n)(?s:.*?)(?P<end>^<!-- its end -->$)", re.MULTILINE)
MACHINES = {
    "2 nodes x 1 RTX 5000 Ada, 10 Gbit/s": "--gpus 2 --per-node 1 --device rtx5000-ada --link 10",
    "1 node x 8 A100": "--gpus 8 --device a100",
    "2 nodes x 8 H100, 3,200 Gbit/s": "--gpus 16 --device h100 --link 3200",
}
GIB = 2**30


def layouts_on(machine: str) -> list[dict[str, Any]]:
    """What `layouts --json` says of the layouts whose time is known, the fastest first."""
    output = io.StringIO()
    words = ["layouts", *machine.split(), "--global-batch", "16", "--json"]
    with without_settings(), contextlib.redirect_stdout(output):
        t5bench(words)
    (candidates,) = json.loads(output.getvalue()).values()
    return [candidate for candidate in candidates if candidate["seconds"]]


def named(candidate: Mapping[str, Any]) -> str:
    parallel = candidate["parallel"]
    sizes = [f"{name}={parallel[key]}" for name, key in (("TP", "tensor"), ("PP", "pipeline")) if parallel[key] > 1]
    return f"{candidate['kind']} ({', '.join(sizes)})" if sizes else candidate["kind"]


def timed(candidate: Mapping[str, Any]) -> str:
    low, high = candidate["seconds_interval"]
    mark = "" if candidate["told_from_the_fastest"] else "\\*"
    return f"{candidate['seconds']:.2f} s [{low:.2f}, {high:.2f}]{mark}"


def column_of(machine: str) -> dict[str, str]:
    """The column of the README's table for a machine, by the name of its row."""
    every = layouts_on(machine)
    of_megatron = [candidate for candidate in every if candidate["engine"] == "megatron"]
    of_native = [candidate for candidate in every if candidate["engine"] == "native"]
    least = min(of_megatron, key=lambda candidate: candidate["memory"])
    cells = {"fastest": f"{named(of_megatron[0])}, {timed(of_megatron[0])}"}
    for kind in ("DDP", "ZeRO-3"):
        cells[kind] = timed(next(candidate for candidate in of_megatron if candidate["kind"] == kind))
    cells["least memory"] = f"{least['kind']}, {least['memory'] / GIB:.1f} GiB"
    cells["fastest, native"] = f"{named(of_native[0])}, {timed(of_native[0])}"
    cells["FSDP2, native"] = timed(next(candidate for candidate in of_native if candidate["kind"] == "FSDP2"))
    return cells


def with_table(page: str) -> str:
    """The README with the table of what `layouts` names today."""
    columns = [column_of(machine) for machine in MACHINES.values()]
    lines = [f"| Predicted | {' | '.join(MACHINES)} |", "|---" * (1 + len(MACHINES)) + "|"]
    lines += [f"| {name} | {' | '.join(column[name] for column in columns)} |" for name in columns[0]]
    table = "".join(f"{line}\n" for line in lines)
    return TABLE.sub(lambda block: block["begin"] + table + block["end"], page)


RELATIONS_TABLE = re.compile(
    r"(?P<begin>^<!-- the table of relations: .* -->\n)(?s:.*?)(?P<end>^<!-- its end -->$)", re.MULTILINE
)


def with_relations(page: str) -> str:
    """The page of relations with the table of what `verify` checks."""
    lines = ["| Quantity | Follows from | Tolerance |", "|---|---|---|"]
    for relation in RELATIONS:
        lines.append(f"| {relation.quantity} | {relation.follows_from} | {relation.tolerance} |")
    table = "".join(f"{line}\n" for line in lines)
    return RELATIONS_TABLE.sub(lambda block: block["begin"] + table + block["end"], page)


def write_all(folder: Path) -> None:
    with without_settings():
        write_printed(folder / "settings.md", "settings")
        write_printed(folder / "support.md", "support")
        write_printed(folder / "published.md", "predict", "--published")
        t5bench(["layouts", "--page", str(folder / "layouts.html")])
    (choice,) = lab.choices(lab.TABLE_OF_MODELS)
    lab_picture.write(choice, folder / "llama_choice.svg")
    continuations.write(folder)
    across_engines.write(folder)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        write_all(Path(sys.argv[1]))
    else:
        write_all(FOLDER)
        COURSE.write_text(with_answers(COURSE.read_text()))
        README.write_text(with_table(README.read_text()))
        RELATIONS_PAGE.write_text(with_relations(RELATIONS_PAGE.read_text()))
        measure.publish(tables.read(tables.CELLS))
