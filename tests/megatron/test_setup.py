"""setup_megatron.sh on real checkouts, cloned from the engine that the tests found, so that no network is needed."""

import shutil
import subprocess
from pathlib import Path

import pytest
from harness import REPO_ROOT
from real_runs import environment

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


def setup(target: Path, *arguments: str, source: Path | None = None, root: Path = REPO_ROOT) -> tuple[int, str]:
    """setup_megatron.sh's exit status and what it said; it clones from the source."""
    result = subprocess.run(
        ["bash", str(root / "scripts" / "setup_megatron.sh"), *arguments],
        env=environment(MEGATRON_DIR=str(target), MEGATRON_REPO=str(source or target), INSTALL="0"),
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
    )
    return result.returncode, result.stderr


def test_clones_patches_and_may_run_again(megatron_dir: Path, target: Path):
    status, said = setup(target, "--check")
    assert status == 1
    assert "no Megatron-DeepSpeed checkout" in said
    assert not target.exists()
    assert setup(target, source=megatron_dir)[0] == 0
    assert git(target, "rev-parse", "HEAD") == COMMIT
    patched = git(target, "diff")
    assert "return len(self.tokenizer)" in patched
    assert setup(target, source=megatron_dir)[0] == 0
    assert git(target, "diff") == patched
    assert setup(target, "--check")[0] == 0


def test_a_clone_that_fails_leaves_nothing(target: Path, tmp_path: Path):
    status, said = setup(target, source=tmp_path / "nothing here")
    assert status == 2
    assert "cannot clone" in said
    assert not list(target.parent.iterdir())


def test_missing_parts_are_named_and_completed(upstream: Path):
    status, said = setup(upstream, "--check")
    assert status == 1
    assert all(patch in said for patch in SERIES)
    assert git(upstream, "status", "--porcelain") == ""
    git(upstream, "apply", str(PATCHES / SERIES[0]))  # the README's manual step
    status, said = setup(upstream, "--check")
    assert status == 1
    assert "only megatron_t5_fixes.patch is applied" in said
    assert setup(upstream)[0] == 0
    assert setup(upstream, "--check")[0] == 0


def test_the_series_applies_one_by_one(upstream: Path):
    for name in SERIES:
        git(upstream, "apply", str(PATCHES / name))
    assert setup(upstream, "--check")[0] == 0


def test_names_what_was_changed_and_keeps_it(upstream: Path):
    """On another commit, too."""
    git(upstream, "checkout", "--quiet", f"{COMMIT}~1")
    assert setup(upstream)[0] == 0
    assert git(upstream, "rev-parse", "HEAD") == COMMIT
    changed = upstream / "megatron" / "training.py"
    changed.write_text(changed.read_text() + "# mine\n")
    (upstream / "megatron" / "timers.py").unlink()
    status, said = setup(upstream, "--check")
    assert status == 1
    assert "megatron/training.py differs" in said
    assert "megatron/timers.py is missing" in said
    status, said = setup(upstream)
    assert status == 2
    assert "--reset" in said
    assert changed.read_text().endswith("# mine\n")

    assert setup(upstream, "--reset")[0] == 0
    assert setup(upstream, "--check")[0] == 0
    assert "# mine" in git(upstream, "stash", "show", "-p")


def test_what_is_no_checkout_and_what_lies_around_it_are_left_alone(upstream: Path):
    """Of a copy without its .git in another repository, --reset would stash the other's files."""
    empty, outer = upstream.parent / "empty", upstream.parent
    empty.mkdir()
    status, said = setup(empty, source=upstream)
    assert status == 2 and "exists, but holds no Megatron-DeepSpeed checkout" in said
    (upstream / "megatron" / "training.py").write_text("# mine\n")
    (upstream / ".git" / "index.lock").touch()
    status, said = setup(upstream, "--reset")
    assert status == 2 and "git cannot stash your changes" in said
    shutil.rmtree(upstream / ".git")
    git(outer, "init", "--quiet")
    status, said = setup(upstream, "--reset")
    assert status == 2 and "not a git repository" in said
    assert (upstream / "megatron" / "training.py").read_text() == "# mine\n"


def test_files_that_git_overlooks_are_found_and_never_removed(upstream: Path):
    assert setup(upstream)[0] == 0
    git(upstream, "update-index", "--skip-worktree", kernel := "megatron/fused_kernels/scaled_softmax_cuda.cu")
    (upstream / kernel).write_text("// mine")
    (upstream / ".git" / "info" / "exclude").write_text("deepspeed/\n")
    (upstream / "deepspeed").mkdir()
    (upstream / "deepspeed" / "__init__.py").touch()
    for option, status in (("--check", 1), ("--reset", 2)):
        found, said = setup(upstream, option)
        assert found == status
        assert f"{kernel} differs" in said and "deepspeed/ would be imported" in said
    assert (upstream / kernel).read_text() == "// mine" and (upstream / "deepspeed" / "__init__.py").exists()


def test_checksums_are_those_of_the_patches(upstream: Path, tmp_path: Path):
    """Made anew from the patches, they are the ones in the repository."""
    root = tmp_path / "project"
    for folder in ("scripts", "patches", "t5bench"):
        shutil.copytree(REPO_ROOT / folder, root / folder)
    shutil.rmtree(root / "patches" / "checksums")
    assert setup(upstream, "--write-checksums", root=root)[0] == 0

    def checksums(patches: Path) -> dict[str, str]:
        return {path.name: path.read_text() for path in (patches / "checksums").iterdir()}

    assert checksums(root / "patches") == checksums(PATCHES)


def test_patches_keep_the_upstream_licence_and_have_no_binaries():
    for name in SERIES:
        text = (PATCHES / name).read_text()
        assert "diff --git a/LICENSE" not in text
        assert not any(line.startswith(("GIT binary patch", "Binary files")) for line in text.splitlines())
