"""What a record says of the machine."""

from pathlib import Path

from t5bench.record import machine


def test_only_kills_in_the_own_control_group_count(tmp_path: Path):
    """Someone else's process that the kernel kills is not this run's cause."""
    own = tmp_path / "cgroup"
    group = tmp_path / "fs" / "slurm" / "job_1"
    group.mkdir(parents=True)
    own.write_text("0::/slurm/job_1\n")
    (group / "memory.events").write_text("low 0\noom 3\noom_kill 2\n")
    assert machine.oom_kills(own, tmp_path / "fs") == 2
    legacy = tmp_path / "fs" / "memory" / "docker"
    legacy.mkdir(parents=True)
    own.write_text("5:cpu:/docker\n4:memory:/docker\n")
    (legacy / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
    assert machine.oom_kills(own, tmp_path / "fs") == 1
