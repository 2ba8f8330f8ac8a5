"""The state of an engine's checkout: which files belong to the engine, and which are only in its folder; and a CUDA
toolkit that is only a compiler, completed so that the engines' kernels can be compiled."""

import hashlib
import os
import py_compile
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support import Project

from t5bench import Problem
from t5bench.plan import engine, toolkit
from t5bench.record.plan import by_name

OWN = ("pretrain_t5.py", "tools/__init__.py", "megatron/__init__.py", "megatron/model/t5.py", "megatron/fused/soft.cu")


def record(checkout: Path, checksums: Path, state: str) -> None:
    """Declare what the checkout holds to be that state."""
    lines = [f"{hashlib.sha256((checkout / name).read_bytes()).hexdigest()}  {name}\n" for name in OWN]
    (checksums / f"{state}.sha256").write_text("".join(lines))


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A patched engine, with what training and working there leave in it."""
    root, checksums = tmp_path / "an engine", tmp_path / "checksums"
    checksums.mkdir()
    monkeypatch.setattr(engine, "CHECKSUMS", checksums)
    built = ("megatron/data/helpers.cpython-311-x86_64-linux-gnu.so", "megatron/fused/__pycache__/x.cpython-311.pyc")
    built += ("megatron/fused_kernels/build/soft.so", "logs/train.log", "pytest/run.py", "my-env/__init__.txt")
    built += ("megatron_core.egg-info/PKG-INFO",)
    for name in (*OWN, *built):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("one = 1\n")
    for state in ("unpatched", "megatron_t5_fixes", "series"):
        (root / "pretrain_t5.py").write_text(f"state = '{state}'\n")
        record(root, checksums, state)
    return root


def test_states_of_a_checkout(checkout: Path, tmp_path: Path):
    assert engine.state_of(tmp_path) == engine.MISSING
    for state in ("unpatched", "megatron_t5_fixes", "series"):
        (checkout / "pretrain_t5.py").write_text(f"state = '{state}'\n")
        assert engine.state_of(checkout) == state
    assert engine.differences(checkout) == []
    for change in ((lambda path: path.write_text("mine\n")), Path.unlink):
        change(checkout / "pretrain_t5.py")
        assert engine.state_of(checkout) in (engine.CHANGED, engine.MISSING)
    assert engine.differences(checkout) == ["pretrain_t5.py is missing"]


def write(name: str) -> Callable[[Path], None]:
    def plant(root: Path) -> None:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        with (root / name).open("a") as file:
            file.write("# mine\n")

    return plant


def linked(root: Path) -> None:
    (root / "not-a-name").mkdir()
    write("not-a-name/inner/__init__.py")(root)
    (root / "apex").symlink_to("not-a-name/inner")


def compiled(root: Path) -> None:
    unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
    py_compile.compile(str(root / "megatron/model/t5.py"), invalidation_mode=unchecked)


@pytest.mark.parametrize(
    ("plant", "named"),
    [
        (write("megatron/fused/soft.cu"), "megatron/fused/soft.cu differs"),
        (write("deepspeed/__init__.py"), "deepspeed/ would be imported"),
        (linked, "apex/ would be imported"),
        (write("torch/__init__.cpython-311-x86_64-linux-gnu.so"), "torch/ would be imported"),
        (write("apex/setup.py"), "apex/ would be imported"),  # a clone of its repository
        (write("mpl_toolkits/mplot3d/__init__.py"), "mpl_toolkits/ would be imported"),  # installed without __init__.py
        (write("wandb.py"), "wandb.py would be imported"),
        (write("numpy.pyc"), "numpy.pyc would be imported"),
        (write("deepspeed-0.17.6.dist-info/METADATA"), "deepspeed-0.17.6.dist-info/ would be mistaken"),
        (write("megatron/model/t5/__init__.py"), "megatron/model/t5/__init__.py does not belong"),
        (write("megatron/model/t5.abi3.so"), "megatron/model/t5.abi3.so does not belong"),
        (write("megatron/data/GNUmakefile"), "megatron/data/GNUmakefile does not belong"),
        (lambda root: (root / "megatron/more").symlink_to("/"), "megatron/more is a symbolic link"),
        (compiled, "megatron/model/__pycache__/t5.cpython"),
    ],
)
def test_files_that_change_training_are_named(checkout: Path, plant: Callable[[Path], None], named: str):
    plant(checkout)
    assert engine.state_of(checkout) == engine.CHANGED
    assert [line[: len(named)] for line in engine.differences(checkout)] == [named]


def test_files_of_the_user_that_training_never_imports_are_left_alone(checkout: Path):
    for name in ("my_convert.py", "conftest.py", "experiments/sweep.py", "experiments/__init__.py", "build/lib/x.py"):
        write(name)(checkout)
    # What editors and notebooks leave beside the engine's own files has names that Python cannot import.
    for name in (".ipynb_checkpoints/training-checkpoint.py", "model/.ipynb_checkpoints/t5.py", "model/t5 (copy).py"):
        write(f"megatron/{name}")(checkout)
    for name in (
        ".ipynb_checkpoints/pretrain_t5-checkpoint.py",
        "megatron/.#training.py",
        "megatron/.vscode/launch.py",
    ):
        write(name)(checkout)
    write("megatron_deepspeed_of_mine.egg-info/PKG-INFO")(checkout)
    assert engine.differences(checkout) == []
    assert engine.state_of(checkout) != engine.CHANGED


def test_only_locks_of_what_a_strategy_compiles_count(making, tmp_path: Path):
    """DDP compiles nothing of DeepSpeed's, ZeRO without offload no cpu_adam, and another project's extension is
    nobody's business."""
    for name in ("their_own_extension", "cpu_adam", "fused_adam"):
        lock = tmp_path / "torch_extensions" / "py311_cpu" / name / "lock"
        lock.parent.mkdir(parents=True)
        lock.touch()
        os.utime(lock, (0, 0))
    own = {"TORCH_EXTENSIONS_DIR": str(tmp_path / "torch_extensions")}
    for strategy, engine_name in (("ddp", "megatron"), ("zero1", "megatron"), ("zero3_offload", "native")):
        assert "stale-lock" not in making(strategy, ENGINE=engine_name, **own).codes
    assert making("zero3_offload", **own).codes.count("stale-lock") == 1
    assert making("zero3_offload", XDG_CACHE_HOME=str(tmp_path)).codes.count("stale-lock") == 1
    lock = tmp_path / "torch_extensions" / "deepspeed_shm_comm" / "lock"  # of every ZeRO on a CPU
    lock.parent.mkdir()
    lock.touch()
    os.utime(lock, (0, 0))
    assert making("zero1", ENGINE="native", **own).codes.count("stale-lock") == 1


NVCC = """#!/bin/sh
[ "$1" = --version ] && echo "Cuda compilation tools, release 13.0, V13.0.88" && exit
echo '#$ _HERE_={home}/bin' >&2; echo '#$ TOP={home}/bin/..' >&2
"""


@pytest.fixture
def cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A toolkit without libraries, nvcc on PATH through a wrapper, and torch's nvidia packages, all of CUDA 13."""
    home, contents = tmp_path / "toolkit", {"nvidia/cu13/include/cusparse.h": "", "nvidia/cu13/lib/libcurand.so.10": ""}
    contents["toolkit/bin/nvcc"] = NVCC.format(home=home)
    contents["bin/nvcc"] = f'#!/bin/sh\nexec {home}/bin/nvcc "$@"\n'
    for name, content in contents.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(toolkit, "versions", lambda: {"cuda": "13.0"})
    return tmp_path


def complete(cuda: Path, **environment: str) -> dict[str, str]:
    searched = {"PATH": f"{cuda / 'bin'}:/usr/bin:/bin"} | environment
    return toolkit.completions(searched, cuda / "links", [cuda / "nvidia"])


def test_a_toolkit_behind_a_wrapper_is_found_and_completed(cuda: Path):
    link = cuda / "links" / "libcurand.so"
    link.parent.mkdir()
    link.symlink_to("/gone/libcurand.so.10")  # of another environment
    assert complete(cuda, LIBRARY_PATH="/own") == {
        "CUDA_HOME": str(cuda / "toolkit"),
        "CPATH": str(cuda / "nvidia" / "cu13" / "include"),
        "LIBRARY_PATH": f"/own:{cuda / 'links'}",
    }
    assert link.resolve() == cuda / "nvidia" / "cu13" / "lib" / "libcurand.so.10"


def test_complete_missing_or_other_toolkits_are_left_alone(cuda: Path, monkeypatch: pytest.MonkeyPatch):
    assert complete(cuda, PATH="/nonexistent") == {}
    with monkeypatch.context() as patch:
        patch.setattr(toolkit, "versions", lambda: {"cuda": "12.4"})
        assert complete(cuda).keys() == {"CUDA_HOME"}
    (cuda / "toolkit" / "include").mkdir()
    (cuda / "toolkit" / "include" / "cusparse.h").touch()
    assert complete(cuda).keys() == {"CUDA_HOME"}
    assert complete(cuda, CUDA_HOME=str(cuda / "toolkit")) == {}
    assert complete(cuda, PATH=f"{cuda / 'toolkit' / 'bin'}:/usr/bin:/bin") == {}


def test_only_a_minor_version_of_cuda_may_differ(cuda: Path, monkeypatch: pytest.MonkeyPatch):
    """DeepSpeed refuses nvcc 13.0 with a PyTorch for CUDA 13.2, although these are compatible."""
    for torchs, added in (("13.0", None), ("13.2", "1"), ("12.9", None)):
        monkeypatch.setattr(toolkit, "versions", lambda torchs=torchs: {"cuda": torchs})
        assert complete(cuda).get("DS_SKIP_CUDA_CHECK") == added
    monkeypatch.setattr(toolkit, "versions", lambda: {"cuda": "13.2"})
    assert complete(cuda, DS_SKIP_CUDA_CHECK="0")["DS_SKIP_CUDA_CHECK"] == "0"  # the user's own value is kept


def test_a_missing_curand_is_named_before_a_compiler_needs_it(cuda: Path, monkeypatch: pytest.MonkeyPatch):
    path, library = f"{cuda / 'bin'}:/usr/bin:/bin", cuda / "nvidia" / "cu13" / "lib" / "libcurand.so.10"
    builder = cuda / "deepspeed" / "ops" / "op_builder" / "builder.py"
    builder.parent.mkdir(parents=True)
    (cuda / "deepspeed" / "__init__.py").touch()
    monkeypatch.syspath_prepend(cuda)
    monkeypatch.delitem(sys.modules, "deepspeed", raising=False)
    builder.write_text("ld_flags = ['-lcurand']\n")
    toolkit.check_curand({"PATH": path}, [cuda / "nvidia"])
    library.unlink()
    with pytest.raises(Problem, match="cuRAND, which neither") as raised:
        toolkit.check_curand({"PATH": path}, [cuda / "nvidia"])
    assert raised.value.remedy.endswith("pip install nvidia-curand")
    toolkit.check_curand({"PATH": "/nonexistent"}, [])
    (cuda / "libcurand.so").touch()
    toolkit.check_curand({"PATH": path, "LIBRARY_PATH": str(cuda)}, [])
    (cuda / "libcurand.so").unlink()
    builder.write_text("ld_flags = []\n")  # newer releases do not link it
    toolkit.check_curand({"PATH": path}, [cuda / "nvidia"])


def test_a_package_that_cannot_be_imported_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "made_for_another_torch.py").write_text("raise ImportError('undefined symbol: _ZN2at4_ops')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    fault = toolkit.import_fault("made_for_another_torch")
    assert fault == "made_for_another_torch cannot be imported: ImportError: undefined symbol: _ZN2at4_ops"
    assert toolkit.import_fault("json") == ""


def test_a_gpu_run_gets_cuda_home_and_nccl_and_a_cpu_run_does_not(project: Project, cuda: Path):
    project.set_gpus(2)
    for device, home, backend in (("cuda", str(cuda / "toolkit"), "nccl"), ("cpu", None, "gloo")):
        path = f"{cuda / 'bin'}:{project.environment['PATH']}"
        assert project.launch("ddp", PATH=path, DEVICE=device, OUTPUT_DIR=device).returncode == 0
        environment = project.recorded_environment()
        assert (environment.get("CUDA_HOME"), "DS_ACCELERATOR" in environment) == (home, device == "cpu")
        assert by_name(project.recorded_arguments())["--distributed-backend"] == backend
