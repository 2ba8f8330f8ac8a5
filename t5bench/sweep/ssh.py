"""Starts one launcher on every host over ssh, from one terminal, waits for all of them and brings their records back.

Each host is sent a script on ssh's standard input: the settings (so that no key stands in a command line), the
launcher, and a watch on that input. When this process ends, or the connection breaks, the input ends and the host's
launcher is told to end what it started. The repository lies at the same path on every host. Exit status: the run's.
"""

import argparse
import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from t5bench import REPOSITORY
from t5bench.record import collect
from t5bench.record.records import RecordError, write_run
from t5bench.record.status import COMPLETE, CONFIGURATION, CRASHED, EXIT_CODES

SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=15")
SSH_FAILED = 255
# A launcher that is told to end needs up to 25 s; one whose peer failed ends by itself within 30 s, mostly in 3.
GRACE_SECONDS = 45
_ALSO_SENT = re.compile(r"^(PATH|PYTHON|NCCL_|GLOO_|CUDA_VISIBLE_DEVICES|OMP_|HF_|TORCH_|UCX_|FI_|WANDB_)")
_NOT_SENT = {"NODE_RANK", "MASTER_ADDR"}

# {launcher} runs in the background, and what comes on standard input is read until it ends.
REMOTE = """main() {{
  cd -- {repository} || {{ echo "error: there is no {repository} on $HOSTNAME" >&2; exit 2; }}
  bash {launcher} {arguments} </dev/null &
  launcher=$!
  {{ cat >/dev/null; kill -TERM "$launcher" 2>/dev/null; }} <&0 &
  watch=$!
  wait "$launcher"; status=$?
  while kill -0 "$launcher" 2>/dev/null; do wait "$launcher"; status=$?; done
  pkill -P "$watch" 2>/dev/null; kill "$watch" 2>/dev/null
  exit "$status"
}}
main
"""


def settings_of(launcher: Path) -> set[str]:
    """The names of a launcher's settings, from its --help."""
    text = subprocess.run(["bash", str(launcher), "--help"], capture_output=True, text=True, check=True).stdout
    return set(re.findall(r"^  ([A-Z][A-Z0-9_]+) ", text, re.MULTILINE))


def sent_environment(environment: Mapping[str, str], settings: set[str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if (name in settings or _ALSO_SENT.match(name)) and name not in _NOT_SENT
    }


def script_for(launcher: Path, arguments: Sequence[str], environment: Mapping[str, str]) -> str:
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in sorted(environment.items()))
    return exports + REMOTE.format(
        repository=shlex.quote(str(REPOSITORY)),
        launcher=shlex.quote(str(launcher.relative_to(REPOSITORY))),
        arguments=shlex.join(arguments),
    )


class Node:
    """A host, the ssh to it and the file that takes its output."""

    def __init__(self, host: str, script: str, output: Path | None) -> None:
        self.host, self.output = host, output
        self.file = output.open("wb") if output else None
        self.process = subprocess.Popen(
            [*SSH, host, "bash", "-s"],
            stdin=subprocess.PIPE,
            stdout=self.file,
            stderr=subprocess.STDOUT if self.file else None,
            start_new_session=True,  # a Ctrl-C is for this process, which then ends the nodes in order
        )
        assert self.process.stdin
        with contextlib.suppress(BrokenPipeError):  # ssh has ended, and its exit status tells
            self.process.stdin.write(script.encode())
            self.process.stdin.flush()

    def end(self) -> None:
        """Let the host's launcher end what it started."""
        assert self.process.stdin
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()

    def refusal(self) -> str | None:
        """Why the launcher was never started, or started nothing; None when it did, or still may."""
        code = self.process.poll()
        if code not in (SSH_FAILED, EXIT_CODES[CONFIGURATION]) or not self.output:
            return None
        lines = self.output.read_text(errors="replace").strip().splitlines()
        if code == SSH_FAILED:
            return f"ssh to {self.host} failed: {lines[-1] if lines else 'it said nothing'}"
        error = next((line for line in lines if line.startswith("error: ")), "error: exit status 2")
        return f"{self.host}: {error.removeprefix('error: ')}"


def watch(nodes: Sequence[Node]) -> None:
    """Until all have ended. When one fails, the others get time to end by themselves; at once when one never began."""
    deadline = None
    while any(node.process.poll() is None for node in nodes):
        if deadline is None and any(node.process.poll() for node in nodes):
            begun = not any(node.refusal() for node in nodes)
            deadline = time.monotonic() + (GRACE_SECONDS if begun else 0)
        if deadline is not None and time.monotonic() > deadline:
            for node in nodes:
                node.end()
            deadline += GRACE_SECONDS
        time.sleep(0.2)


def bring_back(hosts: Sequence[str], directory: Path) -> None:
    """The parts that are not here already, as they are with a shared file system."""
    for rank, host in enumerate(hosts):
        if not (directory / f"node{rank}.json").exists():
            source = f"{host}:{directory}"
            try:
                with collect.local_copy(source) as found:
                    collect.bring(found, source, directory)
            except RecordError as error:
                print(f"warning: no record of node {rank}: {error}", file=sys.stderr)


def exit_status(nodes: Sequence[Node], directory: Path) -> int:
    if refusals := [refusal for node in nodes if (refusal := node.refusal())]:
        print("\n".join(f"error: {refusal}" for refusal in refusals), file=sys.stderr)
        return EXIT_CODES[CONFIGURATION]
    try:
        record = write_run(directory)
    except RecordError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_CODES[CRASHED]
    if record["status"] != COMPLETE:
        print(f"{record['status']}: {record['reason']}\n       {record['remedy']}".rstrip(), file=sys.stderr)
    return EXIT_CODES.get(record["status"], EXIT_CODES[CRASHED])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", required=True, help="in rank order, separated by spaces")
    parser.add_argument("--launcher", type=Path, required=True)
    parser.add_argument("--directory", type=Path, required=True, help="the run directory, on every host")
    parser.add_argument("--dry-run", action="store_true", help="the launcher's --dry-run, on the first host")
    args = parser.parse_args()
    hosts, launcher = args.hosts.split(), args.launcher.resolve()
    environment = sent_environment(os.environ, settings_of(launcher)) | {
        "HOSTS": args.hosts,
        "OUTPUT_DIR": str(args.directory),
    }
    if args.dry_run:
        node = Node(hosts[0], script_for(launcher, [hosts[0], "0", "--dry-run"], environment), None)
        return node.process.wait(timeout=60)

    def interrupted(number: int, frame: object) -> None:
        for node in nodes:
            node.end()
        raise SystemExit(128 + number)

    nodes: list[Node] = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupted)
    try:
        for rank, host in enumerate(hosts):
            script = script_for(launcher, [hosts[0], str(rank)], environment)
            nodes.append(Node(host, script, args.directory / f"node{rank}.terminal"))
        watch(nodes)
    finally:
        for node in nodes:
            node.end()
        for node in nodes:
            node.process.wait(timeout=GRACE_SECONDS)
    bring_back(hosts, args.directory)
    return exit_status(nodes, args.directory)


if __name__ == "__main__":
    sys.exit(main())
