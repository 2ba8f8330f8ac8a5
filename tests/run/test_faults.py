"""Faults of one node that docs/failure_table.md lists: each is played on a real launcher, whose torchrun is a stub."""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from support import (
    ITERATION,
    MEMORY,
    REPO_ROOT,
    Project,
    engine_output,
    make_project,
    nightly,
    processes_with,
    wait_for,
)

from t5bench.plan.ports import free_port
from t5bench.record.records import load
from t5bench.run.output import LONGEST_LINE, Output


@pytest.fixture(autouse=True)
def _own_port(request: pytest.FixtureRequest) -> None:
    """Other tests may hold the launchers' ports."""
    if "project" in request.fixturenames:
        request.getfixturevalue("project").environment["MASTER_PORT"] = str(free_port())


def status_of(project: Project) -> str:
    path = project.root / "outputs" / "ddp" / "node0.status"
    return path.read_text() if path.exists() else ""


def launch_ddp(project: Project, before: str = "", after: str = "", *account: str, **changes: str):
    """The DDP launcher as a part of a shell's command, perhaps of another account."""
    command = f"{before} bash {shlex.quote(str(project.script('run_megatron_t5_ddp.sh')))} {after}"
    options = {"env": project.environment | changes, "cwd": project.root, "capture_output": True, "timeout": 60}
    return subprocess.run([*account, "bash", "-c", command], text=True, check=False, **options)


def reading(directory: Path, *hidden: str) -> Output:
    return Output(directory / "log", directory / "metrics", hidden)


def logged(directory: Path) -> list[str]:
    return [line.partition(" ")[2] for line in (directory / "log").read_text().splitlines()]


@pytest.mark.parametrize("by", [signal.SIGTERM, None], ids=["term", "end"])
def test_suspended_and_continued(project: Project, by: signal.Signals | None):
    """Ctrl-Z and fg: training goes on meanwhile, and its output is recorded afterwards."""
    launcher = project.start_sleeping(STUB_SLEEP="300" if by else "2")
    os.killpg(launcher.pid, signal.SIGSTOP)  # a terminal's TSTP passes by a group that no shell waits for
    wait_for(lambda: psutil.Process(launcher.pid).status() == psutil.STATUS_STOPPED)
    if by:
        launcher.send_signal(by)
    else:
        wait_for(lambda: not processes_with(f"STUB_DIR={project.stubs}", but=launcher.pid))
    started = time.monotonic()
    os.killpg(launcher.pid, signal.SIGCONT)
    errors = launcher.communicate(timeout=40)[1]
    assert time.monotonic() - started < 25
    assert launcher.returncode == (128 + by if by else 0), errors
    assert status_of(project).startswith("cancelled" if by else "complete")
    assert processes_with(f"STUB_DIR={project.stubs}") == []


@pytest.mark.slow
def test_a_launcher_that_is_killed(project: Project):
    """The kernel ends the real torchrun and its workers; the next launcher says what happened to the earlier one."""
    project.use_real_torch()
    shutil.copy(REPO_ROOT / "tests/tools/nodes/stub_trainer.py", project.engine / "pretrain_t5.py")
    project.record_engine()
    settings = {"MODEL_PRESET": "tiny", "PRECISION_FLAG": "", "LOG_INTERVAL": "1", "MASTER_PORT": str(free_port())}
    launcher = start(project, "ddp", **settings, TRAIN_ITERS="100000")
    metrics = project.root / "outputs" / "ddp" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() or launcher.poll() is not None)
    launcher.kill()
    launcher.communicate()
    wait_for(lambda: not processes_with(f"STUB_DIR={project.stubs}"), 30)
    again = project.launch("ddp", **settings, TRAIN_ITERS="2")
    assert again.returncode == 0, again.stderr
    assert f"its launcher (process {launcher.pid}) was killed" in again.stderr


@pytest.mark.parametrize(
    "streams", [">/dev/full 2>/dev/full", "2>&1 | true", *nightly("</dev/null", "2>/dev/null | true")]
)
def test_nobody_reads_the_output(project: Project, streams: str):
    launch_ddp(project, after=streams, STUB_WAIT="1")
    assert status_of(project).startswith("complete")


def start(project: Project, script: str, **environment: str) -> subprocess.Popen[str]:
    """A launcher or a sweep, in its own process group."""
    settings = {"STRATEGIES": "ddp", "RETRIES": "0", "WANDB_MODE": "disabled"} | environment
    return subprocess.Popen(
        ["bash", str(project.script(f"run_megatron_t5_{script}.sh"))],
        env=project.environment_with(settings),
        cwd=project.root,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.parametrize(("script", "count"), [("ddp", 3), ("all", 2)])
def test_two_at_the_same_moment(project: Project, script: str, count: int):
    """One launcher or sweep trains, and the others say who does."""
    started = [start(project, script, STUB_WAIT="4", MASTER_PORT=str(free_port())) for _ in range(count)]
    said = [process.communicate(timeout=90)[1] for process in started]
    assert sorted(process.returncode for process in started) == [0] + [2] * (count - 1), "\n".join(said)
    assert sum("error: a run is already in progress in " in text for text in said) == count - 1
    if script == "ddp":
        lines = load(project.root / "outputs" / "ddp").iterations
        assert [line.iteration for line in lines] == list(range(20, 1001, 20))


REMOVED_NIGHTLY = (
    "metrics.jsonl", "node0.samples.jsonl", "node0.json", "node0.status", "*", "replaced node0.log", "longer node0.log",
)  # fmt: skip


@pytest.mark.parametrize("removed", ["", "node0.log", "emptied metrics.jsonl", *nightly(*REMOVED_NIGHTLY)])
def test_run_directory_removed(project: Project, removed: str):
    """Or files in it, or what is in one of them: the record is whole."""
    launcher = project.start_sleeping(STUB_SLEEP="6", SAMPLE_INTERVAL="1")
    directory = project.root / "outputs" / "ddp"
    wait_for(lambda: (directory / "metrics.jsonl").exists() and (directory / "node0.json").exists())
    damage, _, name = removed.rpartition(" ")
    paths = list(directory.glob(name)) if name else [directory]
    for path in paths:
        if damage == "emptied":
            path.write_text("")
        elif path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
        if damage in ("replaced", "longer"):
            path.write_text("another" * (1 if damage == "replaced" else 10000))
    wait_for((directory / "node0.log").exists, 10)
    assert launcher.poll() is None
    errors = launcher.communicate(timeout=60)[1]
    assert launcher.returncode == 0, errors
    if name not in ("node0.json", "node0.status", "node0.samples.jsonl"):
        assert "was removed " in errors
    run = load(directory, from_log=True)
    assert (run.status, len(run.iterations), len(run.samples[0]) > 3) == ("complete", 50, True)
    assert "stub torchrun output" in (directory / "node0.log").read_text()


@pytest.mark.parametrize("make", [os.mkfifo, *nightly(Path.mkdir)])
def test_what_is_no_file_in_the_place_of_a_runs_files(project: Project, make: Callable[[Path], None]):
    """It is set aside, and the record is whole: nothing waits for a pipe."""
    launcher = project.start_sleeping(STUB_SLEEP="6", SAMPLE_INTERVAL="1")
    directory = project.root / "outputs" / "ddp"
    wait_for(lambda: (directory / "metrics.jsonl").exists() and (directory / "node0.json").exists())
    suffixes = ("log", "json", "samples.jsonl", "status", "sha256")
    paths = [
        *(directory / f"node0.{suffix}" for suffix in suffixes),
        directory / "metrics.jsonl",
        directory / "run.json",
    ]
    for path in paths:
        path.unlink(missing_ok=True)
        make(path)
    errors = launcher.communicate(timeout=60)[1]
    assert launcher.returncode == 0, errors
    # The sampler may be the first to restore its own file.
    assert errors.count(" was replaced by something that is not a file, which is now ") >= len(paths) - 1
    run = load(directory, from_log=True)
    assert (run.status, len(run.iterations)) == ("complete", 50)


def test_a_log_that_was_cut_short_cannot_be_restored(project: Project):
    launcher = project.start_sleeping(STUB_SLEEP="3")
    log = project.root / "outputs" / "ddp" / "node0.log"
    wait_for(lambda: "peak memory | rank 7" in log.read_text())
    lost = log.stat().st_size
    os.truncate(log, 0)
    errors = launcher.communicate(timeout=60)[1]
    assert launcher.returncode == 0, errors
    assert f"node0.log was cut short during the run: {lost} bytes are lost" in errors


@pytest.mark.parametrize(
    ("number", "to_all"),
    [(signal.SIGUSR1, True), *nightly((signal.SIGUSR2, True), (signal.SIGUSR2, False), (signal.SIGQUIT, True))],
)
def test_signals_of_slurm_and_of_people(project: Project, number: signal.Signals, to_all: bool):
    """SLURM's --signal goes to all processes of a job, or to the launcher alone."""
    launcher = project.start_sleeping()
    send = os.killpg if to_all else os.kill
    send(launcher.pid, number)
    errors = launcher.communicate(timeout=40)[1]
    name = number.name.removeprefix("SIG")
    assert launcher.returncode == 128 + number, errors
    assert f"error: ddp on node 0: cancelled: {name} received" in errors
    assert load(project.root / "outputs" / "ddp").status == "cancelled"
    assert processes_with(f"STUB_DIR={project.stubs}") == []


SLOW_PLAN = """
import pathlib, time

def slow(of):
    def slowed(planned, *arguments, **options):
        pathlib.Path({mark!r}).touch()
        time.sleep(3)
        return of(planned, *arguments, **options)
    return slowed

{name} = slow({name})

"""


EARLY_SIGNALS = [
    (number, send, slowed)
    for number in (signal.SIGUSR1, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for send in (os.kill, os.killpg)
    for slowed in ("prepared", "headline")
]
EARLY_DAILY = [(signal.SIGINT, os.killpg, "prepared"), (signal.SIGTERM, os.kill, "headline")]


@pytest.mark.parametrize(
    ("number", "send", "slowed"), [*EARLY_DAILY, *nightly(*(case for case in EARLY_SIGNALS if case not in EARLY_DAILY))]
)
def test_a_signal_before_torchrun_starts(project: Project, number: signal.Signals, send: Callable, slowed: str):
    """While the run is being planned, and once its directory is prepared."""
    module, mark = project.root / "t5bench" / "plan" / "__main__.py", project.stubs / "slow"
    slow, begins = SLOW_PLAN.format(name=slowed, mark=str(mark)), 'if __name__ == "__main__":'
    module.write_text(module.read_text().replace(begins, slow + begins))
    launcher = start(project, "ddp", MASTER_PORT=str(free_port()))
    wait_for(mark.exists)
    send(launcher.pid, number)
    began = time.monotonic()
    errors = launcher.communicate(timeout=60)[1]
    assert launcher.returncode == -number and time.monotonic() - began < 10, errors
    assert "Traceback" not in errors and not project.was_started()
    wait_for(lambda: processes_with(f"STUB_DIR={project.stubs}") == [], 10)
    module.write_text(module.read_text().replace(slow, ""))
    assert project.launch("ddp").returncode == 0, "the directory is free"


@pytest.mark.parametrize("shell", ["bash -i", *nightly("bash -m", "env SHELLOPTS=monitor bash")])
def test_job_control(project: Project, shell: str):
    """With it, each command of a shell leads a process group."""
    script = shlex.quote(str(project.script("run_megatron_t5_ddp.sh")))
    options = {
        "env": project.environment | {"MASTER_PORT": str(free_port())},
        "cwd": project.root,
        "capture_output": True,
        "text": True,
        "timeout": 60,
    }
    result = subprocess.run(["bash", "-c", f"STUB_WAIT=4 exec {shell} {script}"], check=False, **options)
    assert result.returncode == 0, result.stderr
    assert load(project.root / "outputs" / "ddp").status == "complete"


SLOW_START = """
import time
from t5bench.sweep import launch

class SlowNode(launch.Node):
    def send(self, script):
        super().send(script)
        time.sleep(5)

launch.Node = SlowNode
"""


def test_second_ctrl_c_in_a_sweep(project: Project):
    """Both come while the run is being started, and nobody knows its processes yet."""
    with (project.root / "t5bench" / "sweep" / "launch.py").open("a") as module:
        module.write(SLOW_START)
    process = start(project, "all", STUB_SLEEP="300")
    wait_for((project.stubs / "started").exists)
    for _ in range(2):
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.2)
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == 128 + signal.SIGINT
    assert "INT received: stopped; nothing is left running" in errors
    assert processes_with(f"STUB_DIR={project.stubs}") == []


def test_two_ranks_lines_as_one(tmp_path: Path):
    lines = MEMORY.format(0), ITERATION.format(3, 3, "8.0E+00")
    for first, second in (lines, lines[::-1]):
        output = reading(tmp_path)
        output.take((engine_output(2, ranks=()) + first.rstrip("\n") + second).encode(), 1e9)
        assert output.last and output.last.iteration == 3 and output.memory[0].host_mib == 562.4


@pytest.mark.parametrize("size", [1, 7, 1 << 16])
def test_secret_cut_in_two(tmp_path: Path, size: int):
    """By the blocks that are read."""
    secret = "0123456789abcdef"
    begun = secret[:7]
    text = f"a {secret} b\n{begun}!\n{begun}".encode()
    longer = f"{secret}0123"  # its beginning is also a secret, and its end begins one
    text += f" {longer} {longer}{secret}".encode()
    output = reading(tmp_path, longer, secret)
    shown = [output.take(text[at : at + size], 1e9) for at in range(0, len(text), size)]
    shown.append(output.end(1e9))
    assert b"".join(shown) == f"a *** b\n{begun}!\n{begun} *** ******".encode()
    assert logged(tmp_path) == ["a *** b", f"{begun}!", f"{begun} *** ******"]


@pytest.mark.parametrize("piece", [b"x", b" 45%|####    | 45/100 [00:10<00:12, 4.5it/s]\r"], ids=["line", "bar"])
def test_line_without_end(tmp_path: Path, piece: bytes):
    """60 MiB, and then a line that counts, which comes on the same line."""
    block, last = piece * ((1 << 16) // len(piece)), engine_output(1, 1).encode()
    output = reading(tmp_path, "0123456789abcdef")
    began = time.process_time()
    for _ in range((60 << 20) // len(block)):
        output.take(block, 1e9)
    output.take(last, 1e9)
    output.end(1e9)
    assert time.process_time() - began < 15  # it took 0.3 s and 1.7 s
    assert (tmp_path / "log").stat().st_size < 2 * LONGEST_LINE
    assert output.last and output.last.iteration == 1 and 0 in output.memory


def test_an_iteration_line_under_a_progress_bar_counts(tmp_path: Path):
    output, lines = reading(tmp_path), engine_output(1, 2).splitlines()
    output.take(f"{lines[0]}\r 1%\r 2%\r\nplain\r\n{lines[-1]}\r 3%\r\n".encode(), 1e9)
    output.end(1e9)
    assert output.last and output.memory and logged(tmp_path) == [lines[0], " 2%", "plain", lines[-1], " 3%"]


@pytest.mark.parametrize("by", [signal.SIGTERM, None], ids=["term", "end"])
def test_nothing_stays_in_tmpdir(project: Project, by: signal.Signals | None):
    """What is compiled there needs a path without blanks."""
    scratch = Path(tempfile.mkdtemp(prefix="a ", dir="/tmp"))  # a short name, for sockets
    left = '\ncase $TMPDIR in *" "*) exit ;; esac\nmkdir "$TMPDIR/torchelastic_1" "$TMPDIR/pymp-1"\n'
    project.add_stub("torchrun", (project.stubs / "torchrun").read_text().replace("\n", left, 1))
    launcher = project.start_sleeping(TMPDIR=str(scratch), STUB_SLEEP="300" if by else "1")
    assert list(scratch.rglob("torchelastic_1"))
    if by:
        launcher.send_signal(by)
    launcher.communicate(timeout=60)
    wait_for(lambda: not list(scratch.iterdir()))
    scratch.rmdir()


@pytest.fixture
def mount(project: Project) -> Iterator[Callable[..., Path]]:
    """mount(KIND, OPTIONS): a file system for the run's directory."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a file system")
    image, directory = project.stubs / "image", project.root / "outputs"
    directory.mkdir()

    def make(kind: str, options: str) -> Path:
        if kind == "ext4":
            if not Path("/dev/loop-control").exists():
                pytest.skip("it needs a loop device")
            image.write_bytes(bytes(16 << 20))
            subprocess.run(["mkfs.ext4", "-q", image], check=True)
        subprocess.run(["mount", "-t", kind, "-o", options, image, directory], check=True)
        return directory

    yield make
    subprocess.run(["umount", "--lazy", directory], check=False)


FILL = 'head -c 100M /dev/zero >"$FILL/filler" 2>/dev/null\n'
MUCH = 'for i in {1..300}; do echo "line $i of what fills what is left of a page, and of the next one"; done\n'


@pytest.mark.parametrize("when", ["while it logs", "at the end"])
def test_disk_full_while_logging(project: Project, mount: Callable[..., Path], when: str):
    directory = mount("tmpfs", "size=256k")
    stub = (project.stubs / "torchrun").read_text()
    fill = FILL + (MUCH if when == "while it logs" else "")
    project.add_stub("torchrun", stub.replace('exit "${STUB', fill + 'exit "${STUB'))
    result = project.launch("ddp", FILL=str(directory), STUB_WAIT="2")
    assert result.returncode == 1, result.stderr
    assert "No space left on device" in result.stderr and "record in" not in result.stderr
    assert status_of(project).startswith("crashed ")
    left = [path for path in (directory / "ddp").iterdir() if path.suffix == ".json"]
    assert all(json.loads(path.read_text()) for path in left)
    assert not list((directory / "ddp").glob(".*"))
    # The same command continues once there is space again.
    (directory / "filler").unlink()
    project.add_stub("torchrun", stub)
    assert project.launch("ddp").returncode == 0


@pytest.mark.parametrize("inodes", [6, *nightly(3, 9)])
def test_no_inode_at_the_start(project: Project, mount: Callable[..., Path], inodes: int):
    """Or at the end, where there were just enough to begin."""
    mount("tmpfs", f"size=1m,nr_inodes={inodes}")
    result = project.launch("ddp")
    assert "Traceback" not in result.stderr and not status_of(project).startswith("running")
    if result.returncode == 2:
        assert "error: cannot write to the run directory" in result.stderr and "df -i" in result.stderr
        assert not project.was_started()
    else:
        assert result.returncode == 1 and "error: ddp on node 0: crashed: " in result.stderr


def test_file_system_becomes_read_only(project: Project, mount: Callable[..., Path]):
    """As the kernel makes it when it finds an error."""
    lines = "\nfor i in {1..30}; do echo line $i; sleep 0.1; done\nexit"
    project.add_stub("torchrun", (project.stubs / "torchrun").read_text().replace("\nexit", lines))
    ext4 = mount("ext4", "loop,errors=remount-ro")
    launcher = project.start_sleeping(STUB_SLEEP="2")
    device = Path(subprocess.check_output(["findmnt", "-no", "SOURCE", str(ext4)], text=True).strip()).name
    with contextlib.suppress(OSError):  # the kernel answers so
        Path("/sys/fs/ext4", device, "trigger_fs_error").write_text("played by a test")
    errors = launcher.communicate(timeout=60)[1]
    assert launcher.returncode == 1, errors
    assert "error: ddp on node 0: crashed: " in errors and "Read-only file system" in errors
    assert "complete; record" not in errors


def test_clock_jumps(project: Project):
    """The recorder's clock, every two seconds, to five hours behind, to five hours ahead and back."""
    jump = "real() + 5 * 3600 * (int(time.perf_counter() / 2) % 3 - 1)"
    with (project.stubs / "site" / "sitecustomize.py").open("a") as customization:
        customization.write(f"import time\nreal = time.time\ntime.time = lambda: {jump}\n")
    began = time.monotonic()
    launcher = project.start_sleeping(STUB_SLEEP="6", WATCHDOG_SECONDS="60")
    errors = launcher.communicate(timeout=60)[1]
    assert (launcher.returncode, time.monotonic() - began < 30) == (0, True), errors
    assert load(project.root / "outputs" / "ddp").status == "complete"


@pytest.mark.parametrize("limit", ["-n 12", "-f 4", "-v 200000"], ids=["open files", "file size", "memory"])
def test_process_limits(project: Project, limit: str):
    """Whatever is too little for a run ends it with a sentence, or is enough."""
    result = launch_ddp(project, f"ulimit {limit}; exec")
    assert result.returncode == 0 or "error: " in result.stderr, result.stderr
    assert "Traceback" not in result.stderr, result.stderr[-3000:]
    assert not status_of(project).startswith("running")


def test_no_more_processes():
    """Root has no such limit: another account, which may read and write what root may."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another account")
    capabilities = "-all,+dac_override,+dac_read_search"
    account = ["setpriv", "--reuid=54321", f"--inh-caps={capabilities}", f"--ambient-caps={capabilities}"]
    with tempfile.TemporaryDirectory() as directory:
        project = make_project(Path(directory))
        # A shell finds no program in another account's private directory, whatever it may read.
        project.add_stub("python", f'#!/bin/bash\nexec {shlex.quote(sys.executable)} "$@"\n')
        subprocess.run(["chown", "-R", "54321", directory], check=True)
        changes = {"PYTHON": str(project.stubs / "python"), "STUB_WAIT": "2"}
        result = launch_ddp(project, "ulimit -u 6; exec", "", *account, **changes)
        assert result.returncode == 1
        assert "crashed: the limit on processes or threads is reached here: can't start new thread" in result.stderr
        assert "Traceback" not in result.stderr and not processes_with(f"STUB_DIR={project.stubs}")


def test_the_document_names_the_tests_that_play_its_rows():
    text = (REPO_ROOT / "docs" / "failure_table.md").read_text()
    here = re.findall(r"^\| .*\| `(\S+)::(test_\w+)`(?: \(mount\))? \|$", text, re.MULTILINE)
    for file, name in here:
        assert f"def {name}(" in (REPO_ROOT / "tests" / file).read_text(), name
    own = re.findall(r"^def (test_\w+)", Path(__file__).read_text(), re.MULTILINE)[:-1]
    assert set(own) <= {name for _, name in here}
