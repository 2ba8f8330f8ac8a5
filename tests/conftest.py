"""Fixtures of all tests."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from harness import REPO_ROOT, Project, make_project

# Tests run beside one another, and a library's threads that wait for each other by spinning would slow all of them
# down many times over. What a test itself says about threads stands.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return make_project(tmp_path)


def find_megatron() -> Path:
    """A Megatron-DeepSpeed checkout: MEGATRON_DIR, the sibling of the repository, or the one in the user's cache."""
    cache = Path.home() / ".cache" / "t5-parallelism" / "Megatron-DeepSpeed"
    for candidate in (os.environ.get("MEGATRON_DIR"), REPO_ROOT.parent / "Megatron-DeepSpeed", cache):
        if candidate and (Path(candidate) / "pretrain_t5.py").is_file():
            return Path(candidate).resolve()
    pytest.skip("no Megatron-DeepSpeed checkout: set MEGATRON_DIR, or run scripts/setup_megatron.sh")


@pytest.fixture(scope="session")
def megatron_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone of the checkout that is found, patched as this repository says, whatever state the found one is in."""
    found = find_megatron()
    if not (found / ".git").exists():
        pytest.skip(f"{found} is not a git checkout to clone from")
    if not shutil.which("g++"):
        pytest.skip("Megatron-DeepSpeed compiles its index builder, and there is no g++")
    clone = tmp_path_factory.mktemp("engine") / "Megatron-DeepSpeed"
    environment = {"MEGATRON_DIR": str(clone), "MEGATRON_REPO": str(found), "INSTALL": "0"}
    setup = ["bash", str(REPO_ROOT / "scripts" / "setup_megatron.sh")]
    subprocess.run(setup, env=os.environ | environment, check=True, timeout=120)
    return clone


@pytest.fixture(scope="session")
def sample_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled articles as an indexed dataset."""
    directory = tmp_path_factory.mktemp("sample data")
    prepare = ["bash", str(REPO_ROOT / "scripts" / "prepare_xsum_megatron.sh")]
    environment = {"SAMPLE": "1", "MEGATRON_DATA_DIR": str(directory), "PYTHON": sys.executable}
    subprocess.run(prepare, env=os.environ | environment, check=True, timeout=120, capture_output=True)
    return directory


# First: pytest-xdist reads the groups in the same hook, and later plugins' hooks would come before this one.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """For several test processes: a file's tests stay together, for their fixtures train; so does tests/cluster, which
    waits more than it computes."""
    cluster = REPO_ROOT / "tests" / "cluster"
    for item in items:
        group = "cluster" if cluster in item.path.parents else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))
