"""setup_megatron.sh on real checkouts: cloned from the engine that the tests found, so that no network is needed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from harness import REPO_ROOT

PATCHES = REPO_ROOT / "patches"
SERIES = (PATCHES / "series").read_text().split()
COMMIT = "4efb479d5317ce9b86096b9d8e3e8030b0b5263b"


def git(directory: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(directory), *arguments], capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.fixture(scope="module")
def upstream(megatron_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone of the engine as upstream has it."""
    clone = tmp_path_factory.mktemp("upstream") / "engine"
    subprocess.run(["git", "clone", "--quiet", "--no-checkout", str(megatron_dir), str(clone)], check=True)
    git(clone, "checkout", "--quiet", COMMIT)
    return clone


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "a place with spaces" / "Megatron-DeepSpeed"


def setup(target: Path, upstream: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    target.parent.mkdir(exist_ok=True)
    return subprocess.run(
        ["bash", str(REPO_ROOT / "scripts" / "setup_megatron.sh"), *arguments],
        env=os.environ
        | {"MEGATRON_DIR": str(target), "MEGATRON_REPO": str(upstream), "INSTALL": "0", "PYTHON": sys.executable}
        | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def copy_of(upstream: Path, target: Path) -> None:
    target.parent.mkdir()
    shutil.copytree(upstream, target)


def test_clones_patches_and_may_run_again(upstream: Path, target: Path):
    first = setup(target, upstream)
    assert first.returncode == 0, first.stderr
    assert git(target, "rev-parse", "HEAD") == COMMIT
    assert "return len(self.tokenizer)" in (target / "megatron" / "tokenizer" / "tokenizer.py").read_text()
    before = git(target, "diff")
    again = setup(target, upstream)
    assert again.returncode == 0, again.stderr
    assert git(target, "diff") == before
    assert setup(target, upstream, "--check").returncode == 0


def test_completes_the_manual_step(upstream: Path, target: Path):
    copy_of(upstream, target)
    git(target, "apply", str(PATCHES / "megatron_t5_fixes.patch"))
    check = setup(target, upstream, "--check")
    assert check.returncode == 1
    assert "only megatron_t5_fixes.patch is applied" in check.stderr
    assert setup(target, upstream).returncode == 0
    assert setup(target, upstream, "--check").returncode == 0


def test_check_of_an_unpatched_or_missing_checkout_changes_nothing(upstream: Path, target: Path):
    missing = setup(target, upstream, "--check")
    assert missing.returncode == 1
    assert "no Megatron-DeepSpeed checkout" in missing.stderr
    assert not target.exists()
    target.parent.rmdir()
    copy_of(upstream, target)
    unpatched = setup(target, upstream, "--check")
    assert unpatched.returncode == 1
    assert all(patch in unpatched.stderr for patch in SERIES)
    assert git(target, "status", "--porcelain") == ""


def test_names_what_was_changed_and_keeps_it(upstream: Path, target: Path):
    assert setup(target, upstream).returncode == 0
    changed = target / "megatron" / "training.py"
    changed.write_text(changed.read_text() + "# mine\n")
    (target / "megatron" / "timers.py").unlink()
    check = setup(target, upstream, "--check")
    assert check.returncode == 1
    assert "megatron/training.py differs" in check.stderr
    assert "megatron/timers.py is missing" in check.stderr
    refused = setup(target, upstream)
    assert refused.returncode == 2
    assert "--reset" in refused.stderr
    assert changed.read_text().endswith("# mine\n")

    reset = setup(target, upstream, "--reset")
    assert reset.returncode == 0, reset.stderr
    assert setup(target, upstream, "--check").returncode == 0
    assert "# mine" in git(target, "stash", "show", "-p")


def test_goes_to_the_pinned_commit(upstream: Path, target: Path):
    copy_of(upstream, target)
    git(target, "checkout", "--quiet", f"{COMMIT}~1")
    assert setup(target, upstream).returncode == 0
    assert git(target, "rev-parse", "HEAD") == COMMIT


def test_a_clone_that_fails_leaves_nothing(target: Path, tmp_path: Path):
    result = setup(target, tmp_path / "nothing here")
    assert result.returncode == 2
    assert "cannot clone" in result.stderr
    assert not list(target.parent.iterdir())


def test_the_series_applies_one_by_one(upstream: Path, target: Path):
    copy_of(upstream, target)
    for name in SERIES:
        git(target, "apply", str(PATCHES / name))
    assert setup(target, upstream, "--check").returncode == 0


def test_checksums_are_those_of_the_patches(upstream: Path, target: Path, tmp_path: Path):
    """Made anew from the patches, they are the ones in the repository."""
    project = tmp_path / "project"
    for folder in ("scripts", "patches"):
        shutil.copytree(REPO_ROOT / folder, project / folder)
    shutil.rmtree(project / "patches" / "checksums")
    subprocess.run(
        ["bash", str(project / "scripts" / "setup_megatron.sh"), "--write-checksums"],
        env=os.environ | {"MEGATRON_DIR": str(upstream)},
        check=True,
        timeout=120,
    )
    written = {path.name: path.read_text() for path in (project / "patches" / "checksums").iterdir()}
    assert written == {path.name: path.read_text() for path in (PATCHES / "checksums").iterdir()}


def test_patches_leave_the_upstream_licence_and_carry_little_context():
    for name in SERIES:
        text = (PATCHES / name).read_text()
        assert "diff --git a/LICENSE" not in text
        assert not any(line.startswith(("GIT binary patch", "Binary files")) for line in text.splitlines())
