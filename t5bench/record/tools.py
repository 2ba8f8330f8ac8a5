"""Asks another program a question: a program that fails or hangs is told apart from one that has nothing to report."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from t5bench.text import visible

SECONDS = 5.0  # the time that a program has by default
LONGEST_SENTENCE = 300  # characters


@dataclass(frozen=True)
class ToolAnswer:
    """What a program printed, or why there is no answer."""

    output: str = ""
    """Its standard output, also if it failed."""
    fault: str = ""
    """Its own sentence if it failed, or that it is missing or hangs; empty if it succeeded."""
    seconds: float = 0.0
    """How long it took."""
    is_missing: bool = False
    is_late: bool = False
    status: int | None = None
    """Its exit status."""

    def __bool__(self) -> bool:
        return not self.fault


def ask(*command: str, seconds: float = SECONDS, environ: Mapping[str, str] | None = None) -> ToolAnswer:
    """Runs a program for at most so many seconds. ``environ``: its environment, by default this process's own.

    A program that waits for a device cannot be killed, so this does not wait for its end.
    """
    environment = {**(os.environ if environ is None else environ), "LC_ALL": "C"}
    begun = time.monotonic()
    try:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except FileNotFoundError:
        return ToolAnswer(fault=f"{command[0]} is not installed", is_missing=True)
    except OSError as error:
        return ToolAnswer(fault=f"{command[0]} cannot be run: {error.strerror}")
    try:
        output, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.2)
        for pipe in (process.stdout, process.stderr):
            if pipe:
                pipe.close()
        name = Path(command[0]).name
        return ToolAnswer(fault=f"{name} did not answer within {seconds:g} s", seconds=seconds, is_late=True)
    took = time.monotonic() - begun
    text = output.decode(errors="replace")
    fault = ""
    if process.returncode:
        fault = sentence(errors.decode(errors="replace")) or sentence(text)
        fault = fault or f"{Path(command[0]).name} ended with status {process.returncode} and printed nothing"
    return ToolAnswer(text, fault, took, status=process.returncode)


def sentence(text: str) -> str:
    """The line of a program's messages that says what is wrong, fit for a terminal: the first error, else the first
    line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith(("fatal:", "error:"))]
    chosen = (errors or lines or [""])[0]
    return visible(chosen)[:LONGEST_SENTENCE]
