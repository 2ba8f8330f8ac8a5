"""Fixtures of all tests."""

import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from filelock import FileLock
from hypothesis import settings
from real_runs import CLONE, EXACT, WATCHED, run_quickstart, train
from support import REPO_ROOT, STRATEGIES, Project, make_project

# Tests run at the same time, and a library's threads that wait for each other by spinning would slow all of them down
# many times over. A test may set its own number of threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Else a run on two nodes would make one in the home directory of whoever tests.
os.environ.setdefault("T5_RUN_SECRET", "what the nodes of the tests' runs share")
# On a busy machine any example may take long.
settings.register_profile("busy", deadline=None)
settings.load_profile("busy")

Once = Callable[[str, Callable[[Path], None]], Path]


# LONG_TESTS is what it was called first.
IS_NIGHTLY = "1" in (os.environ.get("NIGHTLY"), os.environ.get("LONG_TESTS"))


def pytest_report_header() -> str:
    if IS_NIGHTLY:
        return "nightly tests: included"
    return "nightly tests: left out; NIGHTLY=1 includes them, and CONTRIBUTING.md says what they are"


def leave_out_nightly(items: list[pytest.Item], config: pytest.Config) -> None:
    if IS_NIGHTLY:
        return
    left_out = [item for item in items if item.get_closest_marker("nightly")]
    items[:] = [item for item in items if not item.get_closest_marker("nightly")]
    config.hook.pytest_deselected(items=left_out)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """.ci/run has an hour for all; what has no time to begin says so."""
    until = os.environ.get("NIGHTLY_UNTIL")
    if until and item.get_closest_marker("nightly") and time.time() > float(until):
        pytest.skip("no time was left to begin it: `NIGHTLY=1 .ci/run` gives all nightly tests their time")


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return make_project(tmp_path)


@pytest.fixture(scope="session")
def once(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Once:
    """once(name, make): a directory that make(directory) has filled, in one of the test processes for all of them."""
    root = tmp_path_factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root
    capture = request.config.pluginmanager.getplugin("capturemanager")

    def get(name: str, make: Callable[[Path], None]) -> Path:
        directory, made = root / name, root / f"{name}.made"
        with FileLock(root / f"{name}.lock"):
            if not made.exists():
                with capture.global_and_fixture_disabled():
                    print(f"\nmaking the {name}, once for all tests", file=sys.stderr, flush=True)
                shutil.rmtree(directory, ignore_errors=True)
                directory.mkdir()
                try:
                    make(directory)
                except Exception:
                    made.write_text(traceback.format_exc())
                    raise
                made.touch()
        if failure := made.read_text():
            pytest.fail(f"the {name} could not be made:\n{failure}", pytrace=False)
        return directory

    return get


@pytest.fixture(scope="session")
def megatron_dir(once: Once) -> Path:
    """A patched clone of the checkout that was found, in whatever state that checkout is."""
    cache = Path.home() / ".cache" / "t5-parallelism" / "Megatron-DeepSpeed"
    candidates = [os.environ.get("MEGATRON_DIR"), REPO_ROOT.parent / "Megatron-DeepSpeed", cache]
    found = next((Path(path).resolve() for path in candidates if path and (Path(path) / ".git").exists()), None)
    if not found:
        pytest.skip("no git checkout of Megatron-DeepSpeed: set MEGATRON_DIR, or run scripts/setup_megatron.sh")
    if not shutil.which("g++"):
        pytest.skip("Megatron-DeepSpeed compiles its index builder, and there is no g++")

    def clone(directory: Path) -> None:
        settings = {"MEGATRON_DIR": str(directory / "Megatron-DeepSpeed"), "MEGATRON_REPO": str(found), "INSTALL": "0"}
        setup = ["bash", str(REPO_ROOT / "scripts" / "setup_megatron.sh")]
        subprocess.run(setup, env=os.environ | settings, check=True, timeout=120)

    return once("patched engine", clone) / "Megatron-DeepSpeed"


def prepare_sample(directory: Path, **settings: str) -> None:
    script = ["bash", str(REPO_ROOT / "scripts" / "prepare_xsum_megatron.sh")]
    settings |= {"SAMPLE": "1", "MEGATRON_DATA_DIR": str(directory), "PYTHON": sys.executable}
    subprocess.run(script, env=os.environ | settings, check=True, timeout=120, capture_output=True)


@pytest.fixture(scope="session")
def sample_data(once: Once) -> Path:
    """The bundled articles as an indexed dataset."""
    return once("sample data", prepare_sample)


@pytest.fixture(scope="session")
def gpt(once: Once, megatron_dir: Path) -> dict[str, str]:
    """The settings that make a launcher train a GPT on the bundled articles."""
    settings = {"MODEL_FAMILY": "gpt", "MEGATRON_DIR": str(megatron_dir)}
    data = once("GPT's sample data", partial(prepare_sample, **settings))
    return settings | {"ENGINE": "megatron", "MEGATRON_DATA_DIR": str(data)}


@pytest.fixture(scope="session")
def quickstart(once: Once) -> Path:
    """A clone in which the quickstart ran to its end; its output is in outputs/stdout and outputs/stderr."""
    if sys.prefix == sys.base_prefix:
        pytest.skip("the tests do not run in a virtual environment that a clone could use")
    return once("quickstart", run_quickstart) / CLONE


@pytest.fixture(scope="session")
def native_runs(quickstart: Path) -> Path:
    """The native engine's run of every strategy, by the strategy's name: the quickstart's."""
    (directory,) = (quickstart / "outputs" / "quickstart").glob("*/repeat1")
    return directory


@pytest.fixture(scope="session")
def megatron_runs(once: Once, megatron_dir: Path, sample_data: Path) -> Path:
    """The real engine's run of every strategy with the same settings, by the strategy's name. The pipeline's stages are
    on two nodes that share a file system; the hybrid has three dimensions, TP 2 x PP 2 x DP 2."""
    engine = {"ENGINE": "megatron", "MEGATRON_DIR": str(megatron_dir), "MEGATRON_DATA_DIR": str(sample_data)}

    def train_all(directory: Path) -> None:
        for strategy in STRATEGIES:
            nodes = [directory / strategy] * (2 if strategy == "pipeline" else 1)
            processes = {"NPROC_PER_NODE": "8"} if strategy == "hybrid" else {}
            train(strategy, *nodes, **EXACT, **WATCHED, **engine, **processes)

    return once("runs of Megatron-DeepSpeed", train_all)


# First: pytest-xdist reads the groups in the same hook, and later plugins' hooks would come before this one.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item], config: pytest.Config) -> None:
    """For several test processes: a file's tests stay together, for their fixtures train, but for those that are done
    once for each engine; so does tests/tools/nodes, which waits more than it computes. Groups with slow tests come
    first, so that no process works alone at the end: of these, each engine's first group, which trains what others
    read, and these others last. Then the cluster, whose time limits do not suit the busiest minutes."""
    leave_out_nightly(items, config)
    cluster, of, rank, first = REPO_ROOT / "tests" / "tools" / "nodes", dict[pytest.Item, str](), dict[str, int](), {}
    trains, slow, reads, is_cluster, fast = range(5)
    for item in items:
        engine = item.callspec.params.get("engine", "") if hasattr(item, "callspec") else ""
        fixtures = set(getattr(item, "fixturenames", ()))
        engine = engine or "megatron" * ("megatron_runs" in fixtures)
        of[item] = group = "cluster" if cluster in item.path.parents else f"{item.path} {engine}"
        item.add_marker(pytest.mark.xdist_group(group))
        own = is_cluster if group == "cluster" else fast
        if own == fast and item.get_closest_marker("slow"):
            is_first = engine and first.setdefault(engine, group) == group
            own = trains if is_first else reads if engine or "quickstart" in fixtures else slow
        rank[group] = min(own, rank.get(group, fast))
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: rank[of[item]])
