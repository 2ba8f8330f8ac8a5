"""What the parent of a launcher left it: signals, masks, limits and streams. A run's status depends on none of them."""

import contextlib
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from support import REPO_ROOT, Project, nightly, processes_with, wait_for

from t5bench.plan.ports import free_port
from t5bench.record.records import load

RUN = Path("outputs", "ddp")


def ignore(*numbers: signal.Signals) -> Callable[[], None]:
    def prepare() -> None:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)

    return prepare


def block_all() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())


def every_signal_ignored() -> None:
    """But those that people ignore on purpose, which the run must go on ignoring."""
    kept = {signal.SIGKILL, signal.SIGSTOP, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT}
    for number in signal.valid_signals() - kept:
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_IGN)


def start(project: Project, prepare: Callable[[], None] = lambda: None, streams: str = "", **changes: object):
    """The DDP launcher, after its parent has prepared the process. streams: redirections of a shell."""
    pipes = {name: changes.pop(name) for name in ("stdin", "stdout", "stderr") if name in changes}
    settings = {"MASTER_PORT": str(free_port()), "WANDB_MODE": "disabled"} | changes
    script = shlex.quote(str(project.script("run_megatron_t5_ddp.sh")))
    return subprocess.Popen(
        ["bash", "-c", f"exec bash {script} {streams}"],
        env=project.environment_with(settings),
        cwd=project.root,
        preexec_fn=prepare,
        start_new_session=True,
        restore_signals=False,
        **pipes,
    )


def status_of(project: Project) -> str:
    return (project.root / RUN / "node0.status").read_text().split()[0]


@pytest.mark.parametrize(
    ("prepare", "ends"),
    [
        (ignore(signal.SIGCHLD), 1),
        (every_signal_ignored, 1),
        (every_signal_ignored, "TERM"),
        (block_all, 1),
        (block_all, "TERM"),
        (lambda: os.umask(0o777), 0),
        # As `perl -e 'alarm 60; exec @ARGV'` sets a limit, and as a machine that loses its power says it.
        (lambda: None, "ALRM"),
        *nightly((lambda: None, "PWR"), (lambda: None, "VTALRM"), (lambda: None, "XCPU")),
    ],
    ids=[
        *("child-ignored", "all-ignored", "all-ignored-term", "all-blocked", "all-blocked-term", "umask"),
        *("alarm", "power", "virtual-alarm", "processor-time"),
    ],
)
def test_dispositions_and_masks(project: Project, prepare: Callable[[], None], ends: int | str):
    launcher = start(project, prepare, STUB_SLEEP="300" if isinstance(ends, str) else "", STUB_STATUS=str(ends))
    if isinstance(ends, str):
        number = signal.Signals[f"SIG{ends}"]
        wait_for((project.stubs / "started").exists)
        launcher.send_signal(number)
        expected = ("cancelled", 128 + number)
    else:
        expected = {0: ("complete", 0), 1: ("crashed", 1)}[ends]
    assert (launcher.wait(40), status_of(project)) == (expected[1], expected[0])
    assert load(project.root / RUN).status == expected[0]
    assert not processes_with(f"STUB_DIR={project.stubs}")


def test_what_people_ignore_on_purpose_stays_ignored(project: Project):
    """nohup, and a background job of a shell without job control."""
    launcher = start(project, ignore(signal.SIGHUP, signal.SIGINT), STUB_SLEEP="2")
    wait_for((project.stubs / "started").exists)
    launcher.send_signal(signal.SIGHUP)
    launcher.send_signal(signal.SIGINT)
    assert (launcher.wait(40), status_of(project)) == (0, "complete")


def test_a_command_that_starts_programs_sees_how_they_end(tmp_path: Path):
    """Not only a launcher: collect, which asks ssh and tar."""
    program = f"import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN); import os; os.execv({sys.executable!r}, "
    words = [sys.executable, "-m", "t5bench", "collect", str(tmp_path / "none"), f"localhost:{tmp_path}/none"]
    ended = subprocess.run([sys.executable, "-c", f"{program}{words!r})"], capture_output=True, text=True, check=False)
    plain = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (plain.returncode, plain.stderr)
    assert ended.returncode != 0


@pytest.mark.parametrize(
    "streams", ["<&-", "<&- >&- 2>&-", "</", *nightly(">&-", "2>&-", ">&- 2>&-", "0>/dev/null 1</dev/null")]
)
def test_streams_that_are_closed(project: Project, streams: str):
    launcher = start(project, streams=streams, STUB_STATUS="1")
    assert (launcher.wait(40), status_of(project)) == (1, "crashed")


def test_a_python_that_would_go_on_with_what_somebody_types(project: Project):
    launcher = start(project, PYTHONINSPECT="1", stdin=subprocess.PIPE)
    assert (launcher.wait(40), status_of(project)) == (0, "complete")


def test_a_signal_during_the_planning_is_not_lost(project: Project):
    """To the launcher alone: its Python does not hear of it, and bash would think that Python has dealt with it."""
    launcher = start(project, STUB_SLEEP="300", stderr=subprocess.PIPE)
    wait_for(lambda: any(child.name().startswith("python") for child in children_of(launcher)))
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(40) == -signal.SIGINT and not project.was_started()


def children_of(process: subprocess.Popen) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(process.pid).children()
    return []


def test_a_plan_does_not_outlive_its_launcher(project: Project):
    """Killed before Python could ask the kernel to be told of it, a launcher left a plan that claimed its directory."""
    words = ["launch", "ddp\tDDP\t29800\t1\t1\t\t\t\t\t", "1", "--"]
    command = [sys.executable, "-m", "t5bench.plan", str(project.root), *words]
    settings = project.environment_with({"NNODES": "1", "MASTER_ADDR": "127.0.0.1", "NODE_RANK": "0"})
    planned = subprocess.run(command, env=settings, cwd=project.root, capture_output=True, text=True, check=False)
    assert (planned.returncode, planned.stdout) == (143, "") and not (project.root / RUN).exists()


ATTENDED = """set -euo pipefail
source "$1"
attend "${@:2}" 2>/dev/null
echo "went on"
"""


def attending(tmp_path: Path, *command: str) -> list[str]:
    script = tmp_path / "script.sh"
    script.write_text(ATTENDED)
    return ["bash", str(script), str(REPO_ROOT / "scripts" / "common.sh"), *command]


@pytest.mark.parametrize("name", ["TERM", "INT", "HUP", "QUIT", "USR1"])
def test_a_signal_to_a_script_alone_ends_what_it_started(tmp_path: Path, name: str):
    number = signal.Signals[f"SIG{name}"]
    child = f"touch {shlex.quote(str(tmp_path))}/started; exec sleep 300"
    mark = {**os.environ, "ATTENDED": str(tmp_path)}
    script = subprocess.Popen(attending(tmp_path, "bash", "-c", child), env=mark, stdout=subprocess.PIPE)
    wait_for((tmp_path / "started").exists)
    script.send_signal(number)
    said, _ = script.communicate(timeout=20)
    ends = {-number} if name != "QUIT" else {-number, 128 + number}  # which bash may ignore
    assert script.returncode in ends and said == b""
    wait_for(lambda: not processes_with(f"ATTENDED={tmp_path}"), 10)


def test_what_a_script_attends_to_counts_as_usual(tmp_path: Path):
    def ended(*command: str, **options) -> tuple[int, bytes]:
        result = subprocess.run(attending(tmp_path, *command), stdout=subprocess.PIPE, check=False, **options)
        return result.returncode, result.stdout

    assert ended("true") == (0, b"went on\n")
    assert ended("bash", "-c", "exit 3") == (3, b"")
    assert ended("bash", "-c", "kill -KILL $$") == (137, b"")
    # INT is ignored on purpose, as in the background of a shell.
    asks = "trap -p INT; kill -INT $PPID; sleep 0.2"
    said = ended("bash", "-c", asks, preexec_fn=ignore(signal.SIGINT), restore_signals=False)
    assert said == (0, b"trap -- '' SIGINT\nwent on\n")


def test_no_script_starts_another_without_attending_to_it():
    """Where a script of ours is a command, not a part of a text. A step of gpu_acceptance.sh is attended to."""
    started = []
    for path in (REPO_ROOT / "scripts").glob("*.sh"):
        for line in path.read_text().splitlines():
            command = re.search(r'bash ("\$REPO_ROOT/)?scripts/\w+\.sh', line)
            if command and not line.startswith("#") and line[: command.start()].count('"') % 2 == 0:
                started.append(line)
    assert len(started) >= 7
    assert [line for line in started if not re.search(r"\battend bash|^ +step |^exec ", line)] == []


@pytest.mark.parametrize("streams", ["<&-", ">&-", "<&- >&- 2>&-"])
def test_a_command_whose_streams_are_closed(tmp_path: Path, streams: str):
    command = f"exec {shlex.quote(sys.executable)} -m t5bench strategies {streams}"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert ended.returncode == 0 and "Traceback" not in ended.stderr
    assert (">&-" in streams) == (not ended.stdout)


def noisy(project: Project) -> None:
    """torchrun prints four megabytes before it does what the stub does: more than all pipes hold."""
    stub = (project.stubs / "torchrun").read_text()
    prints = 'for ((i = 0; i < 40000; i++)); do echo "line $i of a hundred characters ......................"\
"................................"; done\n'
    project.add_stub("torchrun", stub.replace('echo "stub torchrun output"\n', prints))


def fill(writer: int) -> None:
    """Writes to a pipe what it holds."""
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"." * 4096)


def test_a_note_before_the_plan_waits_for_no_reader(project: Project):
    reader, writer = os.pipe()
    fill(writer)
    os.set_blocking(writer, True)
    launcher = start(project, streams="192.0.2.7 1 --dry-run", stdout=subprocess.PIPE, stderr=writer)
    printed, _ = launcher.communicate(timeout=40)
    assert launcher.returncode == 0 and b"--nnodes 2" in printed
    os.close(writer)
    os.close(reader)


@pytest.mark.parametrize(
    ("ends", "blocking", "full"),
    [
        pytest.param("itself", True, False, id="unread"),
        pytest.param("TERM", False, True, id="term-O_NONBLOCK-full"),
        pytest.param("TERM", True, True, id="term-full-from-the-start", marks=pytest.mark.nightly),
        pytest.param("itself", False, True, id="O_NONBLOCK-full", marks=pytest.mark.nightly),
        pytest.param("TERM", False, False, id="term-O_NONBLOCK", marks=pytest.mark.nightly),
    ],
)
def test_a_pipe_that_nobody_reads(project: Project, ends: str, blocking: bool, full: bool):
    """A pager that waits, or a parent that only waits for the end."""
    noisy(project)
    reader, writer = os.pipe()
    if full:
        fill(writer)
    os.set_blocking(writer, blocking)
    settings = {"STUB_SLEEP": "300"} if ends == "TERM" else {}
    launcher = start(project, stdout=writer, stderr=writer, **settings)
    os.close(writer)
    if ends == "TERM":
        wait_for((project.stubs / "started").exists)
        launcher.terminate()
    assert launcher.wait(40) == (143 if ends == "TERM" else 0)
    assert status_of(project) == ("cancelled" if ends == "TERM" else "complete")
    assert sum(" line " in line for line in (project.root / RUN / "node0.log").open()) == 40000
    os.close(reader)


def test_a_reader_that_is_slow_gets_everything(project: Project):
    """And one that is late: a pager that goes on."""
    noisy(project)
    launcher = start(project, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert launcher.stdout
    time.sleep(2)
    lines = launcher.stdout.read().decode().splitlines()
    assert launcher.wait(40) == 0
    assert [line for line in lines if line.startswith("line 39999 ")] and len(lines) > 40000


def test_a_suspended_torchrun_does_not_outlive_its_recorder(project: Project):
    """torchrun's own workers end with it (run/worker.py)."""
    launcher = start(project, STUB_SLEEP="300", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for((project.stubs / "started").exists)
    torchrun = psutil.Process(int((project.stubs / "pid").read_text()))
    others = processes_with(f"STUB_DIR={project.stubs}", but=torchrun.pid)
    torchrun.suspend()
    wait_for(lambda: torchrun.status() == psutil.STATUS_STOPPED)
    launcher.kill()
    launcher.wait()
    wait_for(lambda: not torchrun.is_running() or torchrun.status() == psutil.STATUS_ZOMBIE, 10)
    for pid in others:  # the stub's are sleeping shells, which nothing ties to it
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("limit", "most"), [(resource.RLIMIT_CORE, 0), (resource.RLIMIT_STACK, 1 << 20), (resource.RLIMIT_NOFILE, 64)]
)
def test_limits_that_a_run_can_do_with(project: Project, limit: int, most: int):
    def lower() -> None:
        resource.setrlimit(limit, (most, resource.getrlimit(limit)[1]))

    launcher = start(project, lower)
    assert (launcher.wait(40), status_of(project)) == (0, "complete")


def test_a_file_size_limit_is_not_called_a_full_disk(project: Project):
    """As a batch system sets it (ulimit -f); the record does not fit."""
    noisy(project)

    def lower() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, resource.RLIM_INFINITY))

    launcher = start(project, lower, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    said = launcher.communicate(timeout=40)[1].decode()
    assert launcher.returncode == 1 and "File too large" in said, said
    assert "ulimit -f" in said and "df -h" not in said


def test_a_sweep_goes_on_though_nobody_reads(project: Project):
    """Its next run starts, and TERM ends it."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"." * 4096)
    os.set_blocking(writer, True)
    settings = {"STRATEGIES": "ddp", "REPEATS": "2", "STUB_SLEEP": "300", "WANDB_MODE": "disabled"}
    sweep = subprocess.Popen(
        ["bash", str(project.script("run_megatron_t5_all.sh"))],
        env=project.environment_with(settings | {"MASTER_PORT": str(free_port())}),
        cwd=project.root,
        stdout=writer,
        stderr=writer,
        preexec_fn=ignore(signal.SIGCHLD),
    )
    os.close(writer)
    wait_for((project.stubs / "started").exists)
    sweep.terminate()
    assert sweep.wait(40) == 143
    os.close(reader)
