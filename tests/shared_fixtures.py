"""Fixtures of all tests."""

import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
from filelock import FileLock
from hypothesis import settings
from real_runs import CLONE, COLD, EXACT, WATCHED, run_quickstart, train
from support import NATIVE_STRATEGIES, REPO_ROOT, STRATEGIES, Project, make_project

from t5bench import SIGNALS

# Tests run at the same time, and a library's threads that wait for each other by spinning would slow all of them down
# many times over. A test may set its own number of threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Else a run on two nodes would make one in the home directory of whoever tests.
os.environ.setdefault("T5_RUN_SECRET", "what the nodes of the tests' runs share")
# Many tests name hosts that nobody knows, and where no name server answers, each name would take five seconds.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
# On a busy machine any example may take long.
settings.register_profile("busy", deadline=None)
settings.load_profile("busy")

Once = Callable[[str, Callable[[Path], None]], Path]


# LONG_TESTS is what it was called first.
IS_NIGHTLY = "1" in (os.environ.get("NIGHTLY"), os.environ.get("LONG_TESTS"))


def pytest_report_header() -> str:
    if IS_NIGHTLY:
        return "nightly tests: included"
    return "nightly tests: left out; NIGHTLY=1 includes them, and with --collect-only lists them"


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


@pytest.fixture(autouse=True)
def signals_as_before() -> Iterator[None]:
    """What a test starts inherits the signals that this process ignores, and the tests after it would wait for it."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        if handler is not None and signal.getsignal(number) != handler:
            signal.signal(number, handler)


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
        directory = root / name
        made = root / f"{name}.made"
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


def engine_checkout() -> Path | None:
    """Megatron-DeepSpeed's checkout, in whatever state; None if there is none."""
    cache = Path.home() / ".cache" / "t5-parallelism" / "Megatron-DeepSpeed"
    candidates = [os.environ.get("MEGATRON_DIR"), REPO_ROOT.parent / "Megatron-DeepSpeed", cache]
    return next((Path(path).resolve() for path in candidates if path and (Path(path) / ".git").exists()), None)


def clone_engine(directory: Path, checkout: Path) -> None:
    """Makes a patched clone of a checkout, directory/Megatron-DeepSpeed."""
    settings = {"MEGATRON_DIR": str(directory / "Megatron-DeepSpeed"), "MEGATRON_REPO": str(checkout), "INSTALL": "0"}
    setup = ["bash", str(REPO_ROOT / "scripts" / "setup_megatron.sh")]
    subprocess.run(setup, env=os.environ | settings, check=True, timeout=120)


@pytest.fixture(scope="session")
def megatron_dir(once: Once) -> Path:
    """A patched clone of the checkout that was found."""
    found = engine_checkout()
    if not found:
        pytest.skip("no git checkout of Megatron-DeepSpeed: set MEGATRON_DIR, or run scripts/setup_megatron.sh")
    if not shutil.which("g++"):
        pytest.skip("Megatron-DeepSpeed compiles its index builder, and there is no g++")
    return once("patched engine", partial(clone_engine, checkout=found)) / "Megatron-DeepSpeed"


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


# Runs of these start a new interpreter for every process, as a user's do: one of DeepSpeed's with the native engine,
# and one on two nodes, whose processes differ, with Megatron-DeepSpeed. The nightly quick start starts all so.
STARTED_COLD = {"native": "zero1", "megatron": "pipeline"}
# The engine is one commit, so a change here can only hand it something else: one strategy of each way to hand it over.
MEGATRON_DAILY = ("ddp", "zero3", "zero3_offload", "pipeline", "hybrid")
# Logged to W&B, which costs a training of this size as much time again: one on one node and one on two.
LOGGED = ("zero3", "pipeline")


def train_all(directory: Path, strategies: Sequence[str], **settings: str) -> None:
    """A run of each strategy in directory/<strategy>. Megatron-DeepSpeed's hybrid has three dimensions, TP 2 x PP 2 x
    DP 2, and the stages of its pipeline are on two nodes that share a file system."""
    for strategy in strategies:
        own = dict(settings)
        if strategy == STARTED_COLD[settings["ENGINE"]]:
            own |= COLD
        watched = dict(WATCHED)
        if strategy not in LOGGED:
            watched["WANDB_MODE"] = "disabled"
        nodes = 1
        if settings["ENGINE"] == "megatron" and strategy == "hybrid":
            own["NPROC_PER_NODE"] = "8"
        if settings["ENGINE"] == "megatron" and strategy == "pipeline":
            nodes = 2
        train(strategy, *[directory / strategy] * nodes, **EXACT, **watched, **own)


@pytest.fixture(scope="session")
def native_runs(once: Once, sample_data: Path) -> Path:
    """The native engine's run of every strategy, by the strategy's name."""
    settings = {"ENGINE": "native", "MEGATRON_DATA_DIR": str(sample_data)}
    return once("runs of the native engine", partial(train_all, strategies=NATIVE_STRATEGIES, **settings))


@pytest.fixture(scope="session")
def megatron_runs(once: Once, megatron_dir: Path, sample_data: Path) -> Path:
    """The real engine's runs with the same settings, by the strategy's name: every night of every strategy."""
    strategies = STRATEGIES if IS_NIGHTLY else MEGATRON_DAILY
    settings = {"ENGINE": "megatron", "MEGATRON_DIR": str(megatron_dir), "MEGATRON_DATA_DIR": str(sample_data)}
    return once("runs of Megatron-DeepSpeed", partial(train_all, strategies=strategies, **settings))


def engine_of(item: pytest.Item) -> str:
    """The engine whose shared runs a test reads, or that its parameter names; empty for neither."""
    if hasattr(item, "callspec") and item.callspec.params.get("engine"):
        return item.callspec.params["engine"]
    fixtures = getattr(item, "fixturenames", ())
    if "megatron_runs" in fixtures:
        return "megatron"
    return "native" if "native_runs" in fixtures else ""


CLUSTER = REPO_ROOT / "tests" / "tools" / "nodes"
# In which order groups begin. Each engine's first group trains what others read.
TRAINS, SLOW, READS, WAITS, FAST = range(5)


def order_of(item: pytest.Item, group: str, first_of_engine: dict[str, str]) -> int:
    if group == "cluster":
        return WAITS
    if not item.get_closest_marker("slow"):
        return FAST
    engine = engine_of(item)
    if not engine:
        return SLOW
    return TRAINS if first_of_engine.setdefault(engine, group) == group else READS


# First: pytest-xdist reads the groups in the same hook, and later plugins' hooks would come before this one.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item], config: pytest.Config) -> None:
    """For several test processes: a file's tests stay together, for their fixtures train, but for those of each engine;
    so does tests/tools/nodes, which waits more than it computes. A file's fast tests are a group of their own, because
    the smallest groups come last, so that no process works alone at the end. Groups that train come first; the cluster
    begins after them, for its time limits do not suit the busiest minutes."""
    leave_out_nightly(items, config)
    group_of: dict[pytest.Item, str] = {}
    order_of_group: dict[str, int] = {}
    first_of_engine: dict[str, str] = {}
    for item in items:
        pace = "slow" if item.get_closest_marker("slow") else "fast"
        group = "cluster" if CLUSTER in item.path.parents else f"{item.path} {engine_of(item)} {pace}"
        group_of[item] = group
        item.add_marker(pytest.mark.xdist_group(group))
        order = order_of(item, group, first_of_engine)
        order_of_group[group] = min(order, order_of_group.get(group, FAST))
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: order_of_group[group_of[item]])
