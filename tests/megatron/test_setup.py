"""setup_megatron.sh on real checkouts, cloned from the engine that the tests found, so that no network is needed."""

import shutil
import subprocess
from pathlib import Path

import pytest
from real_runs import environment
from support import REPO_ROOT

PATCHES = REPO_ROOT / "patches"
SERIES = (PATCHES / "series").read_text().split()
COMMIT = "4efb479d5317ce9b86096b9d8e3e8030b0b5263b"


def git(directory: Path, *arguments: str) -> str:
    command = ["git", "-C", str(directory), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """Where the engine is to be."""
    (tmp_path / "a place with spaces").mkdir()
    return tmp_path / "a place with spaces" / "Megatron-DeepSpeed"


@pytest.fixture
def upstream(megatron_dir: Path, target: Path) -> Path:
    """The engine there already, as upstream has it."""
    subprocess.run(["git", "clone", "--quiet", "--no-checkout", str(megatron_dir), str(target)], check=True)
    git(target, "checkout", "--quiet", COMMIT)
    return target


def setup(target: Path, *arguments: str, status: int = 0, source: Path | None = None, root: Path = REPO_ROOT) -> str:
    """What setup_megatron.sh, which clones from the source, says before it ends with that status."""
    result = subprocess.run(
        ["bash", str(root / "scripts" / "setup_megatron.sh"), *arguments],
        env=environment(MEGATRON_DIR=str(target), MEGATRON_REPO=str(source or target), INSTALL="0"),
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == status, result.stderr
    return result.stderr


def test_clones_patches_and_may_run_again(megatron_dir: Path, target: Path, tmp_path: Path):
    assert "no Megatron-DeepSpeed checkout" in setup(target, "--check", status=1)
    assert "cannot clone" in setup(target, source=tmp_path / "nothing here", status=2)
    assert not list(target.parent.iterdir())
    setup(target, source=megatron_dir)
    assert git(target, "rev-parse", "HEAD") == COMMIT
    patched = git(target, "diff")
    assert "return len(self.tokenizer)" in patched
    setup(target, source=megatron_dir)
    assert git(target, "diff") == patched
    setup(target, "--check")


def test_missing_parts_are_named_and_completed(upstream: Path):
    said = setup(upstream, "--check", status=1)
    assert all(patch in said for patch in SERIES)
    assert git(upstream, "status", "--porcelain") == ""
    git(upstream, "apply", str(PATCHES / SERIES[0]))  # the README's manual step
    assert "only megatron_t5_fixes.patch is applied" in setup(upstream, "--check", status=1)
    setup(upstream)
    setup(upstream, "--check")
    git(upstream, "reset", "--quiet", "--hard")
    git(upstream, "clean", "--quiet", "-fd")
    for name in SERIES:
        git(upstream, "apply", str(PATCHES / name))
    setup(upstream, "--check")


def test_names_what_was_changed_and_keeps_it(upstream: Path):
    """On another commit, too."""
    git(upstream, "checkout", "--quiet", f"{COMMIT}~1")
    setup(upstream)
    assert git(upstream, "rev-parse", "HEAD") == COMMIT
    changed = upstream / "megatron" / "training.py"
    changed.write_text(changed.read_text() + "# mine\n")
    (upstream / "megatron" / "timers.py").unlink()
    said = setup(upstream, "--check", status=1)
    assert "megatron/training.py differs" in said and "megatron/timers.py is missing" in said
    assert "--reset" in setup(upstream, status=2)
    assert changed.read_text().endswith("# mine\n")
    setup(upstream, "--reset")
    setup(upstream, "--check")
    assert "# mine" in git(upstream, "stash", "show", "-p")
    # What git overlooks is found, and never removed.
    git(upstream, "update-index", "--skip-worktree", kernel := "megatron/fused_kernels/scaled_softmax_cuda.cu")
    (upstream / kernel).write_text("// mine")
    (upstream / ".git" / "info" / "exclude").write_text("deepspeed/\n")
    (upstream / "deepspeed").mkdir()
    (upstream / "deepspeed" / "__init__.py").touch()
    for option, status in (("--check", 1), ("--reset", 2)):
        said = setup(upstream, option, status=status)
        assert f"{kernel} differs" in said and "deepspeed/ would be imported" in said
    assert (upstream / kernel).read_text() == "// mine" and (upstream / "deepspeed" / "__init__.py").exists()


def test_what_is_no_checkout_and_what_lies_around_it_are_left_alone(upstream: Path):
    """Of a copy without its .git in another repository, --reset would stash the other's files."""
    (empty := upstream.parent / "empty").mkdir()
    assert "exists, but holds no Megatron-DeepSpeed checkout" in setup(empty, source=upstream, status=2)
    (upstream / "megatron" / "training.py").write_text("# mine\n")
    shutil.rmtree(upstream / ".git")
    git(upstream.parent, "init", "--quiet")
    assert "not a git repository" in setup(upstream, "--reset", status=2)
    assert (upstream / "megatron" / "training.py").read_text() == "# mine\n"


def test_checksums_are_those_of_the_patches(upstream: Path, tmp_path: Path):
    """Made anew from the patches, they are the ones in the repository. The patches have no binaries."""
    root = tmp_path / "project"
    for folder in ("scripts", "patches", "t5bench", "packages/judge/src", "native", "ds_configs"):
        shutil.copytree(REPO_ROOT / folder, root / folder)
    shutil.rmtree(root / "patches" / "checksums")
    setup(upstream, "--write-checksums", root=root)
    for path in (PATCHES / "checksums").iterdir():
        assert (root / "patches" / "checksums" / path.name).read_text() == path.read_text()
    for name in SERIES:
        text = (PATCHES / name).read_text()
        assert "diff --git a/LICENSE" not in text and "\nGIT binary patch" not in text
