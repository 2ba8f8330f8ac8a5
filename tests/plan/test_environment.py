"""The environment of a run: what the launcher passes on, removes and refuses."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support import REPO_ROOT, Project

from t5bench.plan import interpreter
from t5bench.plan.environment import rule_for
from t5bench.plan.interpreter import needs_link, plain_caches, plain_link, with_plain_engine
from t5bench.plan.ports import free_port

# What a child of the launcher would read behind the plan's back.
REMOVED = {
    "PET_REDIRECTS": "3",
    "PET_RDZV_BACKEND": "c10d",
    "PET_MAX_RESTARTS": "3",
    "PET_NNODES": "7",
    "PET_LOG_DIR": "/elsewhere",
    "TORCHELASTIC_RUN_ID": "another",
    "WANDB_RUN_ID": "abc",
    "WANDB_RESUME": "must",
    "WANDB_SWEEP_ID": "abc",
    "WANDB_RESUME_FROM": "abc?_step=3",
    "PYTHON_EXEC": "/elsewhere/python",
    "PYTHONOPTIMIZE": "2",
}
PASSED = {"NCCL_DEBUG": "INFO", "GLOO_SOCKET_IFNAME": "lo", "WANDB_BASE_URL": "http://127.0.0.1:9", "MY_OWN": "1"}


@pytest.fixture(autouse=True)
def _own_port(project: Project) -> None:
    """Other tests may hold the launchers' ports."""
    project.environment["MASTER_PORT"] = str(free_port())


def test_a_run_does_not_get_what_would_change_it_and_the_record_names_it(project: Project):
    result = project.launch("ddp", **REMOVED, **PASSED)
    assert result.returncode == 0, result.stderr
    environment = project.recorded_environment()
    assert not REMOVED.keys() & environment.keys()
    assert environment.items() >= PASSED.items()
    plan = json.loads((project.root / "outputs" / "ddp" / "run.json").read_text())["plan"]
    assert REMOVED.keys() <= set(plan["removed_environment"])
    assert all(f"{name} (" in result.stderr for name in REMOVED)


NUMBERS = {
    "NVIDIA_TF32_OVERRIDE": "1",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1",  # as NVIDIA's PyTorch containers have it
    "ONEDNN_DEFAULT_FPMATH_MODE": "BF16",
    "DNNL_DEFAULT_FPMATH_MODE": "ANY",
}


@pytest.mark.parametrize(("name", "value"), NUMBERS.items())
def test_what_changes_numbers_is_unset_for_the_run(making, name: str, value: str):
    made = making("ddp", **{name: value})
    assert "environment" not in made.codes and name in made.plan.removed_environment


WORDS = [
    ({"RESUME": "true"}, "RESUME", "1"),
    ({"RESUME": "No"}, "RESUME", "0"),
    ({"DEVICE": "CPU"}, "DEVICE", "cpu"),
    ({"PRECISION_FLAG": "--BF16"}, "PRECISION_FLAG", "--bf16"),
    ({"MODEL_FAMILY": "T5", "MODEL_PRESET": "Tiny"}, "HIDDEN_SIZE", "64"),
    ({"WANDB_MODE": "dryrun"}, "WANDB_MODE", "offline"),
    ({"WANDB_DISABLED": "true"}, "WANDB_MODE", "disabled"),
    ({"WANDB_DISABLED": "false"}, "WANDB_MODE", ""),
    ({"WANDB_DISABLED": "true", "WANDB_MODE": "online"}, "WANDB_MODE", "online"),
]


@pytest.mark.parametrize(("given", "name", "value"), WORDS)
def test_usual_words_for_a_value_are_understood(making, given: dict[str, str], name: str, value: str):
    made = making("ddp", **given)
    assert "setting-value" not in made.codes
    assert made.plan.value(name) == value


SLOW = {
    "CUDA_LAUNCH_BLOCKING": ("1", "0"),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "OFF"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": ("1", ""),
    "PYTORCH_JIT": ("0", "1"),
    "TORCHDYNAMO_DISABLE": ("1", "0"),
}


@pytest.mark.parametrize(("name", "values"), SLOW.items())
def test_what_slows_a_run_passes_with_a_warning(making, name: str, values: tuple[str, str]):
    slows, does_nothing = values
    made = making("ddp", **{name: slows})
    assert f"warning: {name}='{slows}' slows the run" in "\n".join(made.plan.notes)
    assert name not in made.plan.removed_environment
    assert name not in "\n".join(making("ddp", **{name: does_nothing}).plan.notes)


def test_packages_come_from_this_checkout(project: Project):
    """PYTHONPATH may have another one first."""
    other = project.root.parent / "other"
    (other / "t5bench").mkdir(parents=True)
    (other / "t5bench" / "__init__.py").write_text("raise SystemExit('another checkout')\n")
    result = project.launch("ddp", PYTHONPATH=f"{other}:{project.root}:{project.environment.get('PYTHONPATH', '')}")
    assert result.returncode == 0, result.stderr
    paths = project.recorded_environment()["PYTHONPATH"].split(":")
    assert paths.index(str(project.root)) < paths.index(str(other))


def test_the_environment_that_was_planned_runs(project: Project, tmp_path: Path):
    """PATH has another one's programs, and the current directory another torch."""
    other = tmp_path / "other"
    (other / "torch").mkdir(parents=True)
    (other / "torch" / "__init__.py").write_text("raise SystemExit('another torch')\n")
    for name in ("python3", "torchrun", "ninja"):
        (other / name).write_text("#!/bin/sh\nexit 9\n")
        (other / name).chmod(0o755)
    path = f"{other}:{project.stubs}:/usr/bin:/bin"
    result = project.launch("ddp", cwd=other if sys.version_info >= (3, 11) else None, PATH=path)
    assert result.returncode == 0, result.stderr
    programs, _, rest = project.recorded_environment()["PATH"].partition(":")
    # A link leads to an environment whose path has a blank.
    assert Path(programs).resolve() == Path(sys.executable).parent.resolve()
    assert rest.removeprefix(f"{Path(sys.executable).parent}:") == path
    plan = json.loads((project.root / "outputs" / "ddp" / "run.json").read_text())["plan"]
    assert Path(plan["python"]).parent.resolve() == Path(sys.executable).parent.resolve()
    (project.root / "outputs").rename(tmp_path / "outputs")
    # Where it is active, what the user put before it stays there.
    path = f"{project.stubs}:{Path(sys.executable).parent}:/usr/bin:/bin"
    assert project.launch("ddp", PATH=path, PYTHON="python").returncode == 0
    recorded = project.recorded_environment()["PATH"]
    assert (recorded.partition(":")[2] if needs_link() else recorded) == path


@pytest.mark.parametrize(
    "options",
    [
        {"BASHOPTS": "nullglob"},
        {"BASHOPTS": "failglob"},
        {"SHELLOPTS": "noclobber"},
        {"SHELLOPTS": "noglob"},
        {"SHELLOPTS": "monitor"},
        {"SHELLOPTS": "nounset:errexit"},
        {"SHELLOPTS": "allexport:keyword:physical"},
        {"TMOUT": "1", "GLOBIGNORE": "*", "CDPATH": "/tmp:/", "IFS": "_/"},
        {"BASH_FUNC_cd%%": "() { echo mine; }"},
        {"BASH_FUNC_printf%%": "() { echo mine; }"},
        {"BASH_FUNC_read%%": "() { echo mine; }"},
    ],
    ids=str,
)
def test_options_and_functions_of_the_users_shell_change_nothing(project: Project, options: dict[str, str]):
    """Also with files in the current directory whose names are patterns of a setting's kind."""
    for name in ("text1", "secret1", "secret2", "whole:10", "path?"):
        (project.root / name).touch()
    result = project.launch("zero1", OUTPUT_DIR="run", **options)
    assert result.returncode == 0, result.stderr
    assert json.loads((project.root / "run" / "run.json").read_text())["status"] == "complete"


SITES = {
    "Lmod": {
        "BASH_FUNC_module%%": '() { eval $($LMOD_CMD bash "$@"); }',
        "BASH_FUNC_ml%%": '() { module "$@"; }',
        "BASH_FUNC_which%%": '() { alias | /usr/bin/which "$@"; }',
        "BASH_ENV": "/usr/share/lmod/lmod/init/bash",
        "ENV": "/etc/profile.d/modules.sh",
        "MODULEPATH": "/usr/share/modulefiles",
    },
    "an image of Python": {"PYTHON_VERSION": "3.12.8", "PYTHON_SHA256": "0" * 64, "GPG_KEY": "0" * 40},
    "people": {"PYTHONSTARTUP": "/root/.pythonrc", "PYTHONWARNINGS": "ignore", "PYTHONUNBUFFERED": "1", "TMOUT": "900"},
}


@pytest.mark.parametrize("site", SITES)
def test_what_sites_and_images_set_is_not_warned_of(project: Project, site: str):
    result = project.launch("ddp", **SITES[site], WANDB_MODE="disabled")
    assert result.returncode == 0, result.stderr
    assert not [
        line
        for line in result.stderr.splitlines()
        if "checksum of the data's tokenizer" not in line and "warning" in line
    ]
    assert SITES[site].keys() <= project.recorded_environment().keys()


def test_a_site_that_prints_when_python_starts(project: Project):
    with (project.stubs / "site" / "sitecustomize.py").open("a") as file:
        file.write("print('Welcome to the cluster')\nprint('OUTPUT_DIR=/')\n")
    result = project.launch("ddp")
    assert result.returncode == 0 and "Welcome to the cluster" in result.stderr
    assert project.launch("ddp", "--dry-run=json", OUTPUT_DIR="x").stdout.startswith("{")


def test_every_rule_has_an_example():
    assert rule_for("PET_ANYTHING") and rule_for("WANDB_RUN_ID") and not rule_for("NCCL_DEBUG")


@pytest.mark.parametrize("name", ["my folder", "it's", "a$HOME", "Übung", "plain"])
def test_an_environment_whose_path_compilers_cannot_read_is_started_through_a_link(tmp_path: Path, name: str):
    """PyTorch gives -L<path> to the linker without quotes; Python in the link sees no other path."""
    environment = tmp_path / name
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    program = "import sys; from t5bench.plan.interpreter import *; from pathlib import Path; print(needs_link())"
    python = environment / "bin" / "python"
    asked = subprocess.run([python, "-c", program], cwd=REPO_ROOT, capture_output=True, text=True, check=True)
    assert asked.stdout.strip() == str(name != "plain")
    link = plain_link(str(environment), tmp_path / "links")
    assert plain_link(str(environment), tmp_path / "links") == link and re.fullmatch("python-[0-9a-f]{12}", link.name)
    said = subprocess.run(
        [link / "bin" / "python", "-c", "import sys; print(sys.prefix)"], capture_output=True, text=True
    )
    assert said.stdout.strip() == str(link)
    link.unlink()
    link.symlink_to("/")
    with pytest.raises(FileExistsError):
        plain_link(str(environment), tmp_path / "links")


def test_an_engine_whose_kernels_are_compiled_is_started_through_a_link(
    making, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """ninja would take a $ in its path for a variable."""
    monkeypatch.setattr(interpreter, "plain_folder", lambda: tmp_path)
    plan = replace(making("ddp", gpus=2).plan, engine_directory="/home/a$HOME/engine")
    plan = replace(plan, program=["/repository/worker.py", "stacks", "/home/a$HOME/engine/pretrain_t5.py"])
    *_, program = with_plain_engine(plan).program
    assert Path(program).parent.is_symlink() and str(Path(program).parent.readlink()) == "/home/a$HOME/engine"
    assert interpreter.is_plain(program) and Path(program).name == "pretrain_t5.py"
    for same in (replace(plan, device="cpu"), replace(plan, engine="native")):
        assert with_plain_engine(same) == same


def test_what_needs_another_environments_pytorch_cannot_be_compiled_from_an_unreadable_path(
    project: Project, tmp_path: Path
):
    """A venv on top of an environment in "my folder" sees that one's PyTorch, which no link to the venv can rename."""
    site = tmp_path / "my folder" / "site-packages"
    (site / "torch").mkdir(parents=True)
    (site / "torch" / "__init__.py").touch()
    settings = {"PYTHONPATH": f"{site}:{REPO_ROOT}", "DEVICE": "cpu"}
    refused = project.launch("zero3_offload", **settings)
    assert refused.returncode == 2 and "DeepSpeed's cpu_adam cannot be compiled" in refused.stderr, refused.stderr
    assert str(site / "torch") in refused.stderr
    assert "cannot be compiled" not in project.launch("ddp", **settings).stderr


@pytest.mark.parametrize("name", ["TORCH_EXTENSIONS_DIR", "TORCHINDUCTOR_CACHE_DIR", "XDG_CACHE_HOME", "HOME"])
def test_pytorch_compiles_where_compilers_can_read_the_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str):
    monkeypatch.setattr(interpreter, "plain_folder", lambda: tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    assert plain_caches({name: "/home/me/x"}) == {}
    monkeypatch.setenv(name, "/home/my own")
    (where,) = plain_caches(os.environ).values()
    assert where.startswith(f"{tmp_path}/") and interpreter.is_plain(where)
