"""What the parent of a launcher left it: signals, masks, limits and streams. A run's status depends on none of them."""

import contextlib
import os
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
from support import Project, nightly, processes_with, wait_for

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
    pipes = {name: changes.pop(name) for name in ("stdout", "stderr") if name in changes}
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
    ],
    ids=["child-ignored", "all-ignored", "all-ignored-term", "all-blocked", "all-blocked-term", "umask"],
)
def test_dispositions_and_masks(project: Project, prepare: Callable[[], None], ends: int | str):
    launcher = start(project, prepare, STUB_SLEEP="300" if ends == "TERM" else "", STUB_STATUS=str(ends))
    if ends == "TERM":
        wait_for((project.stubs / "started").exists)
        launcher.terminate()
    expected = {0: ("complete", 0), 1: ("crashed", 1), "TERM": ("cancelled", 143)}[ends]
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
    "streams", ["<&-", "<&- >&- 2>&-", *nightly(">&-", "2>&-", ">&- 2>&-", "0>/dev/null 1</dev/null")]
)
def test_streams_that_are_closed(project: Project, streams: str):
    launcher = start(project, streams=streams, STUB_STATUS="1")
    assert (launcher.wait(40), status_of(project)) == (1, "crashed")


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
