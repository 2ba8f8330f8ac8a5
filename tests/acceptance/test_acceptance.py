"""What gpu_acceptance.sh does, as far as it can be seen without a GPU; the rehearsal goes through all of it."""

import json
import os
import subprocess
import sys
import tarfile
import time
import zipfile
from dataclasses import asdict
from pathlib import Path

import pytest
from harness import REPO_ROOT, STRATEGIES, processes_with, wait_for
from made_runs import LARGE, make_run

sys.path.append(str(REPO_ROOT / "scripts"))

from t5bench.acceptance import __main__ as acceptance
from t5bench.acceptance import packages, results, summary, toolkit
from t5bench.acceptance.machine import describe, name_of
from t5bench.acceptance.plan import Plan, large, out_of_memory, parity, points, refusals
from t5bench.acceptance.steps import FAILED, NOT_RUN, OUT_OF_TIME, PASSED, Outcome, Runner, Step
from t5bench.model import flops

SCRIPT = REPO_ROOT / "scripts" / "gpu_acceptance.sh"


def shell(name: str, text: str, **options) -> Step:
    return Step(name, f"step {name}", ["sh", "-c", text], **options)


def run_steps(tmp_path: Path, *steps: Step, seconds: float = 60, **options) -> dict[str, Outcome]:
    runner = Runner(tmp_path, time.monotonic() + seconds)
    runner.run(steps, **options)
    return runner.outcomes


# ---- steps -----------------------------------------------------------------------------------------------------------


def test_a_step_passes_by_its_exit_status_and_leaves_a_log(tmp_path: Path):
    outcomes = run_steps(
        tmp_path,
        shell("good", "echo $WORD", environment={"WORD": "spoken"}),
        shell("bad", "exit 3"),
        shell("wanted", "exit 5", expects=(0, 5)),
    )
    assert {name: outcome.result for name, outcome in outcomes.items()} == {
        "good": PASSED, "bad": FAILED, "wanted": PASSED,
    }  # fmt: skip
    assert outcomes["bad"].exit_status == 3
    assert Path(outcomes["good"].log).read_text() == "spoken\n"


def test_a_step_that_takes_too_long_is_ended_in_order(tmp_path: Path):
    text = "trap 'echo tidied; exit 0' TERM; echo begun; while true; do sleep 0.1; done"
    outcome = run_steps(tmp_path, shell("long", text, seconds=2))["long"]
    assert (outcome.result, outcome.exit_status) == (OUT_OF_TIME, None)
    assert Path(outcome.log).read_text() == "begun\ntidied\n"


def test_what_a_step_started_ends_with_it(tmp_path: Path):
    begin = time.monotonic()
    mark = f"ACCEPTANCE_TEST={tmp_path}"
    environment = {"ACCEPTANCE_TEST": str(tmp_path)}
    run_steps(tmp_path, shell("parent", "sleep 1000 & echo begun; wait", environment=environment, seconds=2))
    assert time.monotonic() - begin < 20
    assert (tmp_path / "logs" / "parent.log").read_text() == "begun\n"
    wait_for(lambda: processes_with(mark) == [])


def test_no_step_begins_without_the_time_for_it(tmp_path: Path):
    outcome = run_steps(tmp_path, shell("late", "touch begun", least=5), seconds=3)["late"]
    assert outcome.result == NOT_RUN
    assert not outcome.log


def test_the_next_call_goes_on_where_this_one_stopped(tmp_path: Path):
    count = tmp_path / "count"
    text = f"echo x >>{count}"
    steps = (shell("first", text), shell("second", f"{text}; [ -e {tmp_path}/mended ]"))
    assert run_steps(tmp_path, *steps)["second"].result == FAILED
    (tmp_path / "mended").touch()
    outcomes = run_steps(tmp_path, *steps)
    assert [outcome.result for outcome in outcomes.values()] == [PASSED, PASSED]
    assert count.read_text().count("x") == 3  # the first passed and did not run again


def test_steps_together_take_the_time_of_the_longest(tmp_path: Path):
    # Each waits for the other, so one after another they would not end.
    begun = [tmp_path / "a", tmp_path / "b"]
    steps = [
        shell(mine.name, f"touch {mine}; while [ ! -e {other} ]; do sleep 0.05; done", seconds=30)
        for mine, other in (begun, begun[::-1])
    ]
    outcomes = run_steps(tmp_path / "work", *steps, at_once=2)
    assert [outcome.result for outcome in outcomes.values()] == [PASSED, PASSED]


# ---- the plan --------------------------------------------------------------------------------------------------------


def make_plan(tmp_path: Path, gpus: int, **options) -> Plan:
    return Plan(work=tmp_path, engine_directory=tmp_path / "engine", gpus=gpus, **{"strategies": STRATEGIES} | options)


@pytest.mark.parametrize(
    ("gpus", "processes", "too_large"),
    [(1, 1, ["tensor", "pipeline", "hybrid"]), (2, 2, ["hybrid"]), (3, 2, ["hybrid"]), (4, 4, []), (8, 8, [])],
)
def test_every_strategy_that_the_devices_suffice_for(tmp_path: Path, gpus: int, processes: int, too_large: list[str]):
    plan = make_plan(tmp_path, gpus)
    assert (plan.processes, plan.too_large()) == (processes, too_large)
    names = [step.name for step in large(plan)]
    assert len(names) == 2 * (8 - len(too_large))
    assert "large-megatron-zero3_offload" in names
    assert {step.environment["NPROC_PER_NODE"] for step in large(plan)} == {str(processes)}


def test_large_runs_leave_the_benchmark_as_it_is(tmp_path: Path):
    """Only what a launcher's defaults do not know of this machine is set: not batch, precision, dropout or sizes."""
    environment = large(make_plan(tmp_path, 1))[0].environment
    assert environment["MODEL_PRESET"] == "large"
    assert not environment.keys() & {
        "GLOBAL_BATCH_SIZE", "MICRO_BATCH_SIZE", "PRECISION_FLAG", "DROPOUT", "HIDDEN_SIZE", "LR", "CLIP_GRAD",
    }  # fmt: skip


def test_what_needs_a_gpu_is_not_rehearsed(tmp_path: Path):
    assert out_of_memory(make_plan(tmp_path, 0)) == []
    assert [step.expects for step in out_of_memory(make_plan(tmp_path, 1))] == [(5,), (5,)]


def test_every_point_does_the_same_work_and_is_profiled_at_its_end(tmp_path: Path):
    steps = points(make_plan(tmp_path, 1, engines=["native"]))
    assert [step.environment["MICRO_BATCH_SIZE"] for step in steps] == ["1", "2", "4", "8", "16", "32"]
    assert {step.environment["GLOBAL_BATCH_SIZE"] for step in steps} == {"32"}
    assert all(step.environment["PROFILE_ITERATION"] == step.environment["TRAIN_ITERS"] for step in steps)
    assert all(set(step.expects) == {0, 5} for step in steps)  # that memory is full is an answer


def test_parity_covers_every_strategy(tmp_path: Path):
    steps = parity(make_plan(tmp_path, 1), "native")
    assert {word for step in steps for word in step.command[2:]} == {
        "zero1", "zero2", "zero3", "zero3_offload", "tensor", "pipeline", "hybrid",
    }  # fmt: skip
    assert all(step.environment["SHARE_GPUS"] == "1" for step in steps)


def test_refusals_are_refused(tmp_path: Path):
    plan = make_plan(tmp_path, 0)
    outcomes = run_steps(tmp_path, *refusals(plan))
    assert {outcome.result for outcome in outcomes.values()} == {PASSED}
    for outcome in outcomes.values():
        assert "visible GPU" in Path(outcome.log).read_text()


# ---- packages --------------------------------------------------------------------------------------------------------


def make_wheel(directory: Path, name: str) -> Path:
    path = directory / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name}.py", "here = True\n")
        wheel.writestr(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{name}-1.0.dist-info/RECORD", "")
    return path


def test_only_what_is_lacking_is_installed_beside_the_python_that_is_there(tmp_path: Path):
    make_wheel(tmp_path, "quite_unheard_of")
    make_wheel(tmp_path, "numpy")  # of any version: what is there was made for this machine
    site = tmp_path / "site"
    assert packages.install(tmp_path, site) == ["quite-unheard-of"]
    assert (site / "quite_unheard_of.py").exists()
    assert not (site / "numpy.py").exists()
    assert packages.install(tmp_path, site) == ["quite-unheard-of"]  # again, for it is on no path here


def test_nothing_that_the_engines_need_is_left_to_chance(monkeypatch: pytest.MonkeyPatch):
    """Of requirements.txt a machine with torch's usual companions gets the rest from the bundle."""
    image = {"torch", "numpy", "transformers", "tokenizers", "tensorboard", "setuptools"}
    monkeypatch.setattr(packages, "installed", lambda: image | {packages.normal(name) for name in packages.CARRIED})
    assert packages.missing() == [packages.required()["deepspeed"]]
    assert packages.required()["deepspeed"].startswith("deepspeed==")


# ---- the CUDA toolkit ------------------------------------------------------------------------------------------------


@pytest.fixture
def cuda(tmp_path: Path) -> Path:
    """A toolkit that is a compiler alone, reached through a link, and torch's nvidia packages."""
    for name in ("toolkit/bin/nvcc", "nvidia/cu13/include/cusparse.h", "nvidia/cu13/lib/libcurand.so.10"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").symlink_to(tmp_path / "toolkit" / "bin" / "nvcc")
    return tmp_path


def test_a_bare_toolkit_is_completed(cuda: Path):
    found = toolkit.completions(cuda / "links", str(cuda / "bin" / "nvcc"), [cuda / "nvidia"])
    assert found == {
        "CUDA_HOME": str(cuda / "toolkit"),
        "CPATH": str(cuda / "nvidia" / "cu13" / "include"),
        "LIBRARY_PATH": str(cuda / "links"),
    }
    assert (cuda / "links" / "libcurand.so").resolve() == cuda / "nvidia" / "cu13" / "lib" / "libcurand.so.10"


def test_a_whole_toolkit_is_left_alone(cuda: Path):
    (cuda / "toolkit" / "include").mkdir()
    (cuda / "toolkit" / "include" / "cusparse.h").touch()
    assert toolkit.completions(cuda / "links", str(cuda / "toolkit" / "bin" / "nvcc"), [cuda / "nvidia"]) == {}
    assert toolkit.completions(cuda / "links", str(cuda / "bin" / "nvcc"), []).keys() == {"CUDA_HOME"}


@pytest.mark.parametrize(("nvcc", "completed"), [("13.1", True), ("12.4", False), (None, False)])
def test_headers_of_another_cuda_are_not_mixed_in(
    cuda: Path, monkeypatch: pytest.MonkeyPatch, nvcc: str | None, completed: bool
):
    monkeypatch.setenv("PATH", f"{cuda / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(toolkit, "_nvidia_packages", lambda: [cuda / "nvidia"])
    for name in ("CPATH", "LIBRARY_PATH", "CUDA_HOME"):
        monkeypatch.setenv(name, "")
    machine = {"nvcc": nvcc, "versions": {"cuda": "13.0"}}
    acceptance.complete_toolkit(machine, cuda / "links")
    assert (str(cuda / "nvidia" / "cu13" / "include") in os.environ["CPATH"]) == completed


# ---- results ---------------------------------------------------------------------------------------------------------

MACHINE = {
    "gpus": [{"index": 0, "name": "NVIDIA H100 80GB HBM3", "memory_mib": 81559.0, "driver": "580.1", "uuid": "GPU-0"}],
    "cpu": {"model": "a CPU", "cores": 16, "memory_mib": 131072},
    "kernel": "6.1",
    "driver_cuda": "13.0",
    "nvcc": "13.0",
    "gxx": "13.3.0",
    "ninja": None,
    "nccl": "2.28.9",
    "versions": dict.fromkeys(("apex", "flash_attn", "deepspeed", "transformers", "torch", "cuda"), None)
    | {"python": "3.12.3"},
    "commits": {"repository": None, "repository_changed": None, "engine": None},
}  # fmt: skip


def test_files_without_their_history_are_told_by_their_bundle():
    commit = dict(describe(MACHINE | {"packed_at": "abc-dirty"}))["commit"]
    assert commit == "not known (no git checkout); the bundle was packed at abc-dirty"
    known = {"commits": {"repository": "def", "repository_changed": True}}
    assert dict(describe(MACHINE | known))["commit"] == "def, with changes"


def test_the_device_names_its_directory():
    assert name_of(MACHINE) == "nvidia-h100-80gb-hbm3"
    assert name_of(MACHINE | {"gpus": MACHINE["gpus"] * 2}) == "2x-nvidia-h100-80gb-hbm3"


H100 = "NVIDIA H100 80GB HBM3"
SHAPE = flops.Shape(24, 24, 1024, 16, 64, 2816, 512, 128, 32128)
FLOOR = {"device": H100, "matmul_tflops": 800.0, "matmul_shapes": [], "copy_gb_per_s": 3000.0}
# T5-Large at 512 and 128 tokens, 16 samples an iteration: 19.81 TFLOP (MEGATRON.md).
ITERATION_TFLOP = 19.81


@pytest.fixture
def measured(tmp_path: Path) -> dict:
    """What two T5-Large runs on a GPU, one of them failed, and a throughput's point would leave."""
    plan = make_plan(tmp_path, 1, engines=["native"], micro_batch_sizes=[8, 16], strategies=["ddp", "zero1", "tensor"])
    gpu = {"gpu": H100, "world_size": 1, "engine": "native", "sample_seconds": 0.1, "sent_per_iteration": 0.0}
    gpu |= {"padded_vocab_size": 32128, "memory_mib": [20_000.0]}
    settings = LARGE | {"MICRO_BATCH_SIZE": "1"}
    make_run(plan.runs / "large" / "native" / "ddp", elapsed_ms=[1000.0] * 12, settings=settings, **gpu)
    make_run(plan.runs / "large" / "native" / "zero1", "zero1", elapsed_ms=[1000.0] * 3, settings=settings,
             status="out-of-memory", reason="rank 0 ran out of GPU memory", **gpu)  # fmt: skip
    point = plan.runs / "throughput" / "native" / "micro-batch-8"
    settings = LARGE | {"MICRO_BATCH_SIZE": "8", "GLOBAL_BATCH_SIZE": "32", "PROFILE_ITERATION": "12"}
    make_run(point, elapsed_ms=[200.0] * 10 + [900.0, 5000.0], settings=settings, **gpu)
    profile = {"device": "cuda", "iteration": 12, "wall_ms": 200.0, "busy_ms": 190.0, "kernels": 9}
    profile["by_name"] = [{"name": f"kernel {number}", "ms": 99.0 - number} for number in range(30)]
    (point / "profile.json").write_text(json.dumps(profile | {"by_category": {"matrix products": 150.0}}))
    make_run(plan.runs / "throughput" / "native" / "micro-batch-16", elapsed_ms=[200.0], settings=settings, **gpu,
             status="out-of-memory", reason="rank 0 ran out of GPU memory")  # fmt: skip
    (tmp_path / "floor.json").write_text(json.dumps(FLOOR))
    log = tmp_path / "parity.log"
    log.write_text("run directories: here\nrun     engine   verdict\nddp     native   PASS\n\nPASS: all\n")
    outcomes = {
        "large-native-ddp": Outcome("large-native-ddp", "T5-Large, native ddp", PASSED, 0, 30.0),
        "large-native-zero1": Outcome("large-native-zero1", "T5-Large, native zero1", FAILED, 5, 30.0),
        "parity-native-zero": Outcome("parity-native-zero", "parity, native: zero1", PASSED, 0, 9.0, str(log)),
        "late": Outcome("late", "what there was no time for", NOT_RUN),
    }
    return results.gather(plan, MACHINE, outcomes)


def test_figures_are_the_runs_own(measured: dict):
    ddp, zero1 = measured["large"]
    assert ddp["samples_per_second"] == pytest.approx(16)
    assert ddp["tflops"] == pytest.approx(ITERATION_TFLOP, rel=1e-3)
    assert ddp["mfu"] == pytest.approx(ITERATION_TFLOP / 989.4, rel=1e-3)
    assert ddp["of_measured_rate"] == pytest.approx(ITERATION_TFLOP / 800, rel=1e-3)
    assert ddp["peak_mib"] == 20_000
    assert (zero1["status"], zero1.get("milliseconds")) == ("out-of-memory", None)


def test_a_profiled_iteration_is_in_no_median(measured: dict):
    eight = measured["points"][0]
    assert eight["milliseconds"]["median"] == 200
    assert eight["iterations"][-1] == 10
    assert eight["limits"].startswith("matrix products and attention, 100%")
    assert [entry["name"] for entry in eight["profile"]["by_name"]] == [f"kernel {number}" for number in range(10)]


def test_the_plain_loop_is_rated_as_the_engines_are():
    point = {"micro_batch": 8, "global_batch": 32, "tflops": 400.0, "shape": asdict(SHAPE), "profile": None}
    known = results.baseline_figures(point | {"peak_tflops": 989.4}, FLOOR)
    assert (known["mfu"], known["of_measured_rate"]) == (pytest.approx(400 / 989.4), 0.5)
    assert results.baseline_figures(point | {"peak_tflops": None}, FLOOR)["mfu"] is None


def test_what_failed_and_what_was_not_run_is_said(measured: dict):
    assert measured["failed"] == ["T5-Large, native zero1"]
    assert results.not_run(measured) == ["what there was no time for"]
    sentence = summary.verdict(measured)
    assert "failed: T5-Large, native zero1" in sentence
    assert "not run to the end: what there was no time for" in sentence


def test_the_summary_is_for_people(measured: dict, tmp_path: Path):
    summary.write(measured, tmp_path / "results")
    text = (tmp_path / "results" / "README.md").read_text()
    assert text.startswith(f"# T5-Large on 1 x {H100}\n")
    assert "rehearsal" not in text
    assert "out-of-memory: rank 0 ran out of GPU memory" in text
    assert "Too few devices for tensor" in text
    assert "ninja, g++ " in text and "not found, 13.3.0" in text
    assert "run directories" not in text and "ddp     native   PASS" in text
    assert "Medians of iterations 4 to 12." in text
    assert (tmp_path / "results" / "throughput.png").stat().st_size > 10_000
    assert json.loads((tmp_path / "results" / "results.json").read_text())["machine"]["nccl"] == "2.28.9"


# ---- the order of things on a GPU ------------------------------------------------------------------------------------


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The steps of both parts on a machine with one GPU, none of them run, with how many went on at once."""
    seen: list[tuple[str, int]] = []

    def run(self: Runner, steps: list[Step], at_once: int = 1) -> None:
        seen.extend((step.name, at_once) for step in steps if step.name not in self.outcomes)
        self.outcomes |= {step.name: Outcome(step.name, step.title, PASSED, 0) for step in steps}

    monkeypatch.setattr(Runner, "run", run)
    monkeypatch.setattr(acceptance, "look", lambda engine: MACHINE | {"torch_sees": [{"name": H100}], "patches": {}})
    monkeypatch.setattr(toolkit, "completions", lambda links: {})
    monkeypatch.setattr(sys, "argv", [
        "acceptance", "--work", str(tmp_path / "work"), "--results", str(tmp_path / "results"), "--gpus", "1",
        "--engine-directory", "/engine", "--minutes", "10", "--engines", "megatron native",
        "--strategies", " ".join(STRATEGIES), "--micro-batch-sizes", "1 32", "--", "acceptance", "throughput",
    ])  # fmt: skip
    assert acceptance.main() == 0
    return seen


def test_nothing_is_timed_while_something_else_goes_on(ran: list[tuple[str, int]]):
    timed = [(name, at_once) for name, at_once in ran if name.startswith(("large", "throughput", "baseline", "floor"))]
    assert {at_once for _, at_once in timed} == {1}
    assert len(timed) == 2 * 5 + 2 * 2 + 2 + 1  # five strategies need one GPU


def test_what_is_needed_comes_before_what_needs_it(ran: list[tuple[str, int]]):
    names = [name for name, _ in ran]
    assert names[:2] == ["floor", "data"]
    first = names.index("large-megatron-ddp")
    assert {"compile-deepspeed", "compile-megatron", "parity-native-zero"} <= set(names[:first])
    assert names.index("parity-megatron-model-parallel") > first
    assert {"out-of-memory-megatron", "out-of-memory-native", "refuses-too-many"} <= set(names)
    assert len(names) == len(set(names))


def test_results_are_where_they_were_asked_for(ran: list[tuple[str, int]], tmp_path: Path):
    assert (tmp_path / "results" / "README.md").read_text().startswith(f"# T5-Large on 1 x {H100}")
    assert (tmp_path / "work" / "nvidia-h100-80gb-hbm3").is_dir()


# ---- the script ------------------------------------------------------------------------------------------------------


def accept(*arguments: str, timeout: float = 60, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments],
        env=os.environ | {"PYTHON": sys.executable} | environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        ([], {}, "there is no GPU here"),
        (["trough"], {}, "unknown argument 'trough'"),
        (["--pack"], {}, "--pack needs a directory"),
        (["--pack", "bundle"], {"MEGATRON_DIR": "/nonexistent"}, "there is no Megatron-DeepSpeed checkout"),
        (["--rehearse"], {"MEGATRON_DIR": "/nonexistent"}, "or ENGINES=native"),
        (["--rehearse"], {"MINUTES": "ten"}, "MINUTES must be a number"),
        (["--rehearse"], {"ENGINES": "native megatron-lm"}, "found 'native megatron-lm'"),
        (["--rehearse"], {"STRATEGIES": "ddp zero9"}, "there is no strategy 'zero9'"),
        (["--rehearse"], {"MICRO_BATCH_SIZES": "1 2x"}, "MICRO_BATCH_SIZES must be whole numbers"),
    ],
)
def test_what_cannot_be_done_is_said_first(
    tmp_path: Path, arguments: list[str], environment: dict[str, str], message: str
):
    result = accept(*arguments, CUDA_VISIBLE_DEVICES="", WORK_DIR=str(tmp_path / "work"), **environment)
    assert result.returncode == 2
    assert message in result.stderr


def test_a_torch_that_sees_no_gpu_is_told_apart_from_a_machine_without_one(tmp_path: Path):
    (tmp_path / "nvidia-smi").write_text(
        "#!/bin/sh\n"
        'case "$*" in\n'
        '  -L) echo "GPU 0: NVIDIA Stub (UUID: GPU-0)" ;;\n'
        '  *memory.total*) echo "0, NVIDIA Stub, 81559, 470.1, GPU-0" ;;\n'
        '  *) echo "| NVIDIA-SMI 470.1  Driver Version: 470.1  CUDA Version: 11.4 |" ;;\n'
        "esac\n"
    )
    (tmp_path / "nvidia-smi").chmod(0o755)
    environment = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
    result = subprocess.run(
        ["bash", str(SCRIPT)],
        env=environment
        | {"PYTHON": sys.executable, "PATH": f"{tmp_path}:{os.environ['PATH']}", "ENGINES": "native"}
        | {"WORK_DIR": str(tmp_path / "work")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 2
    assert "sees none" in result.stderr and "the driver serves up to 11.4" in result.stderr


@pytest.mark.slow
def test_the_rehearsal_goes_through_everything(tmp_path: Path):
    """One engine, strategy and size: what differs on a GPU are the device, the sizes and the compilers."""
    work = tmp_path / "a path with spaces"
    chosen = {"ENGINES": "native", "STRATEGIES": "zero1", "MICRO_BATCH_SIZES": "8", "WORK_DIR": str(work)}
    result = accept("--rehearse", timeout=590, MINUTES="8", **chosen)
    assert result.returncode == 0, result.stderr
    output = work / "rehearsal" / "results"
    text = (output / "README.md").read_text()
    assert "No figure here means anything" in text
    found = json.loads((output / "results.json").read_text())
    assert {row["strategy"] for row in found["large"]} == {"zero1"}
    assert {row["micro_batch"] for row in found["points"]} == {8}
    assert {(row["micro_batch"], bool(row["compile"])) for row in found["baseline"]} == {(8, False), (8, True)}
    assert all(row["limits"] for row in [*found["points"], *found["baseline"]])
    assert found["floor"]["matmul_tflops"] > 0
    with tarfile.open(output / "records.tar.xz") as archive:
        names = archive.getnames()
    assert "records/runs/large/native/zero1/node0.log" in names
    assert not any(name.endswith((".bin", ".pt")) for name in names)
    # Nothing is left to do, so nothing is done again.
    again = accept("--rehearse", timeout=120, MINUTES="8", **chosen)
    assert again.returncode == 0
    assert "passed already" in again.stderr and "passed, " not in again.stderr
