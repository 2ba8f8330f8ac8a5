"""A pytest plugin that keeps, in the file $SAID, what the programs that a test started said and how they ended.

It also keeps the problems that were raised in the test's own process. A test's definition of a fault is so used twice.
"""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import t5bench

# What a user reads of a failure; the rest of the output is the plan's notes and the trained iterations.
SENTENCES = re.compile(
    r"^(?:.*?\d: +)?"  # srun puts the task's number before a line
    r"((?:error: |warning: |note: |  - ).*(?:\n {7}.*)*"
    r"|.*(?:: complete; record in |suspended; resuming|received: ).*)$",
    re.MULTILINE,
)
# Of what is still in a test's text, test_process_limits[open files] varies: it has one of two sentences.
VARYING = (
    (r"(MASTER_PORT is) '\d+' there and '\d+' here", r"\1 '<port>' there and '<port>' here"),
    (r"/pytest/(popen-gw\d+/)?[^/'\s]+", "/pytest/<test>"),
    (r"/tmp/(tmp\w{8}|t5-[\d-]+)", "/tmp/<directory>"),
    (r"\b(port|pid|signal sent by) \d+", r"\1 <number>"),
    (r"(127\.0\.0\.1|localhost|node\d|login)(:|, )\d{4,5}\b", r"\1\2<port>"),
    (r"\d+\.\d+ s\b", "<seconds> s"),
)
_said: list[str] = []


def sentences(text: str | bytes | None) -> str:
    if isinstance(text, bytes):
        text = text.decode(errors="replace")
    found = SENTENCES.findall(text or "")
    for pattern, name in VARYING:
        found = [re.sub(pattern, name, sentence) for sentence in found]
    return "\n".join(dict.fromkeys(found))


class Listened(subprocess.Popen):
    """A program whose end and sentences are kept when somebody waits for its output."""

    def communicate(self, *args, **options):
        output, errors = super().communicate(*args, **options)
        if re.search(r"t5bench|run_megatron_t5_", str(self.args)):
            _said.append(f"exit status {self.returncode}\n{sentences(errors)}".rstrip())
        return output, errors


subprocess.Popen = Listened
_initialised = t5bench.Problem.__post_init__


def _kept(problem: t5bench.Problem) -> None:
    _initialised(problem)
    _said.append(sentences(f"error: {problem.found}\n       {problem.remedy}"))


t5bench.Problem.__post_init__ = _kept


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Leaves out what its fixtures said, which other tests may share."""
    _said.clear()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
    report = yield
    if report.when == "call" or report.outcome == "skipped":
        name, _, case = item.name.partition("[")
        printed = "\n".join(sentences(text) for text in printed_by_terminals(report.capstdout))
        texts = sorted(set(_said))
        if printed:
            texts.append(printed)
        line = json.dumps({"test": name, "case": case.removesuffix("]"), "text": "\n".join([report.outcome, *texts])})
        with Path(os.environ["SAID"]).open("a") as file:
            file.write(f"{line}\n")
    return report


def printed_by_terminals(text: str) -> list[str]:
    """What tests of several hosts print of each of their terminals: a line that names it, with the exit status."""
    return re.split(r"^(?=---- node)", text, flags=re.MULTILINE)[1:]
