"""Runs modules of this room on nodes over ssh, and says why a node gave no answer."""

import json
import os
import shlex
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from t5bench import REPOSITORY
from t5bench.record.hosts import BEGINS, ssh
from t5bench.record.tools import ask
from t5bench.text import visible, visible_in
from t5bench.tools.nodes.findings import Finding

CONNECT_SECONDS = 5
# An ssh master process that stays in the background would keep our pipes open.
SSH_OPTIONS = ("-T", "-o", f"ConnectTimeout={CONNECT_SECONDS}", "-o", "ControlMaster=no")
PASSED_ON = ("NCCL_", "GLOO_", "UCX_", "FI_", "OMP_", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES")

# What ssh prints, what the table shows for it, and what to do about {host}; the last entry covers everything else.
SSH_FAILURES = (
    ("Permission denied", "refused", "Authorize this host's key: ssh-copy-id {host}   (or get an allocation first)"),
    ("Too many authentication failures", "refused",
     "Name the key in ~/.ssh/config: IdentityFile, with IdentitiesOnly yes"),
    ("you have requested strict checking", "another key",
     "If {host} was installed again, forget its old key: ssh-keygen -R {host}   Then compare the new one: ssh {host}"),
    ("Host key verification failed", "unknown key", "Connect once by hand and compare the key: ssh {host}"),
    ("Could not resolve hostname", "unknown name", "Check the spelling; scontrol show hostnames lists SLURM's names"),
    ("No such file or directory", "no python",
     "Put the repository and the environment at the same paths on {host}, or set PYTHON to one that every node has"),
    ("Connection refused", "no sshd", "Start sshd on {host}, or run this check from a node that can log in there"),
    ("No module named", "another version", "Give {host} this host's commit and environment"),
    ("without any output", "no answer", "Does {host} have this host's commit? Else log in by hand: ssh {host}"),
    ("", "unreachable", "Is {host} up, with sshd and the network? Log in by hand: ssh {host}"),
)  # fmt: skip

Answer = dict[str, Any]


@dataclass(frozen=True)
class Reply:
    """What a module of this room printed on a node."""

    answer: Answer
    """Empty if it printed none."""
    error: str
    """What ssh or the module said on standard error."""
    seconds: float
    """How long it took."""
    clock: float | None = None
    """The node's clock less ours when the answer arrived."""


def execute(
    host: str, python: str, module: str, words: Sequence[str], limit: float, *, here: bool = False, **environment: str
) -> Reply:
    """Runs a module of this room on a node for at most so many seconds; it prints a JSON object."""
    environment |= {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)}
    assignments = [f"{name}={value}" for name, value in environment.items()]
    program = shlex.join(["env", *assignments, python, "-m", f"t5bench.tools.nodes.{module}", *words])
    line = f"echo {shlex.quote(BEGINS)} && cd {shlex.quote(str(REPOSITORY))} && exec {program}"
    command = ["sh", "-c", line] if here else ssh(host, line, options=SSH_OPTIONS)
    start = time.monotonic()
    try:
        result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=limit, check=False)
        output = result.stdout
        error = result.stderr.decode(errors="replace").replace("\r\n", "\n").strip()
    except subprocess.TimeoutExpired as late:
        output = late.stdout or b""
        error = f"no answer within {limit:.0f} s"
    arrived = time.time()
    printed = output.decode(errors="replace").partition(BEGINS)[2]
    text = next((line for line in printed.splitlines() if line.startswith("{")), "{}")
    answer = visible_in(json.loads(text))
    clock = answer["clock"] - arrived if "clock" in answer else None
    error = visible(error, "\n") or "it ended without any output"
    return Reply(answer, error, time.monotonic() - start, clock)


def unreachable(host: str, error: str) -> Finding:
    """What ssh said, in short and in its own words, and what to do."""
    lines = error.splitlines()[::-1]
    causes = ((line, word, remedy) for text, word, remedy in SSH_FAILURES for line in lines if text in line)
    line, word, remedy = next(causes)
    remedy = remedy.format(host=host)
    if word == "refused" and (key := locked_key(host)):
        remedy = f'The key {key} has a passphrase. Load it first: eval "$(ssh-agent)" && ssh-add {shlex.quote(key)}'
    return Finding(word, line.strip(), remedy)


def locked_key(host: str) -> str:
    """A key that ssh would use for a host, if none of them works without a passphrase and no agent holds one."""
    if ask("ssh-add", "-l"):
        return ""
    configured = ask("ssh", "-G", host).output
    names = [line.partition(" ")[2] for line in configured.splitlines() if line.startswith("identityfile ")]
    locked = ""
    for name in names:
        key = str(Path(name).expanduser())
        if not os.access(key, os.R_OK):
            continue
        opened = ask("ssh-keygen", "-y", "-P", "", "-f", key)
        if opened:
            return ""
        if "passphrase" in opened.fault:
            locked = locked or key
    return locked
