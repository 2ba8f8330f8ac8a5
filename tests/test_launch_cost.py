"""What a launcher costs before torchrun starts: a benchmark with a bound. Run it with -s to see the figures."""

import os
import resource
import statistics
import subprocess

import pytest
from harness import Project

CPU_SECONDS = 0.15


def children_cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@pytest.mark.parametrize("strategy", ["ddp", "zero3_offload"])
def test_cpu_time_before_torchrun(project: Project, strategy: str, capsys: pytest.CaptureFixture):
    """The stub torchrun ends at once, so its own few milliseconds are the only ones too many."""
    engine = project.engine / "megatron"
    for number in range(140):  # as many files to check as the real engine has
        (engine / f"module{number}.py").write_text(f"# {number}\n" * 400)
    project.record_engine()
    seconds = []
    for attempt in range(7):
        before = children_cpu()
        result = project.launch(strategy, OUTPUT_DIR=f"run{attempt}")
        seconds.append(children_cpu() - before)
        assert result.returncode == 0, result.stderr
    with capsys.disabled():
        milliseconds = statistics.median(seconds) * 1000
        print(f"\n{strategy}: {milliseconds:.0f} ms CPU (median of {len(seconds)}), {os.cpu_count()} cores")
    # What else runs on the machine can only add to it.
    assert min(seconds) <= CPU_SECONDS


def test_dry_run_does_not_import_torch(project: Project):
    """The bound above must not rest on a warm disk cache."""
    (project.stubs / "site" / "torch.py").write_text("raise SystemExit('torch was imported')\n")
    result = subprocess.run(
        ["bash", str(project.script("run_megatron_t5_zero1.sh")), "--dry-run"],
        env=project.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
