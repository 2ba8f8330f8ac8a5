"""The README against the code: its tables, its file list, and every command in it."""

import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from made_runs import make_run
from support import REPO_ROOT, Project

from t5bench.choose.support import refusal
from t5bench.plan.launchers import all_declarations
from t5bench.plan.ports import free_port
from t5bench.record.plan import Strategy
from t5bench.record.status import EXIT_CODES

README = (REPO_ROOT / "README.md").read_text()
TROUBLESHOOTING = (REPO_ROOT / "docs" / "troubleshooting.md").read_text()
# Not the badge of the tests, which leads to the page of its host.
LINKED = re.compile(r"\]\((?!https?:|\.\./\.\./actions/)([^)#\s]+)")
BASH_BLOCKS = re.findall(r"^```bash\n(.*?)^```", README, re.MULTILINE | re.DOTALL)

# What a README's reader has and a test machine has not: they record their arguments and succeed.
OUTSIDE_PROGRAMS = ("salloc", "srun", "sbatch", "scontrol", "conda", "pip", "scp", "ssh", "ds_report", "nvidia-smi")
RECORDER = """#!/usr/bin/env bash
printf '%s\\n' "${0##*/} $*" >>"$STUB_DIR/outside"
"""

# A clone makes its directory, as the reader's next command expects.
GIT_STUB = f"""{RECORDER}[[ $1 != clone ]] || mkdir -p "${{3:-$(basename "$2" .git)}}"
"""


def table_rows(first_header: str, page: str = README) -> list[list[str]]:
    """Cells of the table whose first header cell is this one, code marks removed."""
    lines = page.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {first_header} |"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip().strip("`") for cell in line.strip("|").split("|")])
    return rows


def test_strategy_table_is_what_the_launchers_declare():
    rows = [row for row in table_rows("Strategy") if row[1].startswith("run_megatron")]
    declared = {f"run_megatron_t5_{strategy.name}.sh": strategy for strategy in all_declarations()}
    assert {row[1] for row in rows} == declared.keys()
    for name, script, port, parallelism, engine in rows:
        assert engine == engines_of(declared[script])
        assert port == str(declared[script].port)
        title, _, what = declared[script].title.partition(": ")
        assert title == name
        assert what.lower() == parallelism.lower()
        lines = (REPO_ROOT / "scripts" / script).read_text().splitlines()
        assert len([line for line in lines if line and not line.startswith("#")]) <= 12, "a launcher is a declaration"


def engines_of(strategy: Strategy) -> str:
    """What the table says of them, as the planner answers."""
    trains = [
        (engine, family)
        for engine in ("megatron", "native")
        for family in ("t5", "gpt")
        if not refusal(strategy, engine, family, {})
    ]
    shown = {4: "both", 2: "native", 1: "Megatron-DeepSpeed, GPT"}[len(trains)]
    assert shown == "both" or trains in ([("native", "t5"), ("native", "gpt")], [("megatron", "gpt")])
    return shown


def test_seed_settings_keep_their_names_and_defaults():
    """Those of the original README; only HOSTS differs, and the README says why. The page of settings has the same."""
    section = README[README.index("## Settings") : README.index("## Results")]
    named = re.findall(r"`([A-Z_]{2,})(?:=([^`]*))?`", section)
    defaults = {name: default for name, default in named if default}
    original = """
        MEGATRON_DIR=../Megatron-DeepSpeed MEGATRON_DATA_DIR=./megatron_data WANDB_PROJECT=ml710-t5-parallelism
        TRAIN_ITERS=1000 GLOBAL_BATCH_SIZE=16 MICRO_BATCH_SIZE=1 ENCODER_NUM_LAYERS=24 DECODER_NUM_LAYERS=24
        HIDDEN_SIZE=1024 NUM_ATTENTION_HEADS=16 FFN_HIDDEN_SIZE=2816 ENCODER_SEQ_LENGTH=512 DECODER_SEQ_LENGTH=128
        LR=0.0001 PRECISION_FLAG=--bf16
    """
    assert dict(word.split("=") for word in original.split()).items() <= defaults.items()
    assert {"HOSTS", "WANDB_API_KEY", "WANDB_RUN_NAME", "MASTER_PORT", "OUTPUT_DIR"} <= {name for name, _ in named}
    page = (REPO_ROOT / "docs" / "generated" / "settings.md").read_text()
    for name, default in defaults.items():
        assert f"| `{name}` | `{default}` |" in page, name


COMMANDS = [block for block in BASH_BLOCKS if "quickstart.sh" not in block]
COMMANDS += re.findall(r"`(bash scripts/run_megatron_t5_\w+\.sh \${NODE0} 1)`", README)


@pytest.mark.parametrize("block", COMMANDS, ids=lambda block: block.splitlines()[0][:60])
def test_every_command_runs(project: Project, tmp_path: Path, block: str):
    """Runs each block unchanged, in the reader's directory, with only the cluster and the network replaced."""
    for program in OUTSIDE_PROGRAMS:
        project.add_stub(program, RECORDER)
    project.add_stub("git", GIT_STUB)
    project.add_stub(
        "python", f'#!/usr/bin/env bash\nprintf "True 12.4\\n"\nprintf "%s" "$*" >"{project.stubs}/python"\n'
    )
    if "setup_environment.sh" in block:
        clone = project.root / "T5-Parallelism"
        (clone / ".venv" / "bin").mkdir(parents=True)
        (clone / ".venv" / "bin" / "activate").touch()
        (clone / "scripts").symlink_to(project.root / "scripts")
    for name in ("prepare_xsum_megatron.sh", "setup_megatron.sh", "setup_environment.sh"):
        project.script(name).write_text(RECORDER)
    for name in ("README.md", "requirements.txt", "patches/series"):
        (project.root / name).parent.mkdir(exist_ok=True)
        (project.root / name).touch()
    (project.root / "megatron_data" / "tokenizer").mkdir()
    block = block.replace("<your-partition>", "gpu").replace("<this-repo-url>", "url").replace("<your-key>", "key")
    hosts = {"NODE0": "127.0.0.1", "NODE1": "127.0.0.2", "HOSTS": "127.0.0.1 127.0.0.2"}
    port = {"MASTER_PORT": str(free_port())}  # other tests hold the launchers' own
    options = {"cwd": project.root, "env": project.environment | hosts | port, "timeout": 60}
    command = ["bash", "-euo", "pipefail", "-c", block]
    result = subprocess.run(command, **options, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr + result.stdout
    assert "--dry-run" not in block or "repeat3/hybrid" in result.stdout
    if "run_megatron_t5" in block and "--dry-run" not in block:
        assert project.was_started() or "srun" in block


def test_status_table_is_what_a_launcher_exits_with():
    codes = {row[0]: row[1] for row in table_rows("Status", TROUBLESHOOTING)}
    assert codes.pop("cancelled") == "128 + signal"
    assert codes == {status: str(code) for status, code in EXIT_CODES.items()}


def test_troubleshooting_quotes_what_the_launchers_say(project: Project):
    """Compares the table, to the letter, with the messages that a launch on this machine can cause."""
    rows = " ".join(row[0] for row in table_rows("Symptom", TROUBLESHOOTING))
    quoted = re.findall(r"(Unable to infer NODE_RANK|NPROC_PER_NODE is .*?1 visible GPU|port 29800 is .*? node)", rows)
    project.set_gpus(1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        said = project.launch("ddp", MASTER_PORT=port).stderr.replace(port, "29800")
    said += project.launch("tensor", MASTER_PORT=port, DEVICE=None).stderr
    said += project.launch("ddp", HOSTS="192.0.2.7 192.0.2.8").stderr
    project.data_prefix.with_suffix(".idx").unlink()
    said += project.launch("ddp", MASTER_PORT=port).stderr
    missing = "xsum_text_document.idx does not exist"
    assert missing in rows and missing in said and len(quoted) == 3
    assert [text for text in quoted if text not in said] == [], said


def test_commands_that_read_runs(tmp_path: Path):
    """The `python -m t5bench ...` of the text, on runs where the text says they are."""
    commands = re.findall(r"^(python -m t5bench .*)$|`(python -m t5bench [^`]+)`", README, re.MULTILINE)
    words = {
        shlex.split((block or inline).replace("$PWD", str(tmp_path)))[3]: block or inline for block, inline in commands
    }
    # Others run those that need a profile, a checkpoint, several virtual environments or minutes.
    run_elsewhere = {"explain", "prove"}
    assert set(words) == {"compare", "collect", "wandb", "pack", "verify", "layouts"} | run_elsewhere
    for strategy in ("ddp", "zero1"):
        make_run(tmp_path / "outputs" / "all" / "repeat1" / strategy, strategy, elapsed_ms=[100.0] * 30)
    make_run(tmp_path / "outputs" / "ddp", "ddp", elapsed_ms=[100.0] * 3)
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/bash\nexec bash -c "${@: -1}"\n')
    ssh.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "WANDB_MODE": "offline"}
    environment["PYTHONPATH"] = str(REPO_ROOT)
    for command in ("compare", "wandb", "collect", "pack", "verify", "layouts"):
        words_of = ["bash", "-c", words[command].replace("python", shlex.quote(sys.executable), 1)]
        result = subprocess.run(words_of, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout + result.stderr
    assert (tmp_path / "outputs" / "all" / "comparison" / "index.html").is_file()


def test_what_documents_name_exists():
    named = []
    for page in [*REPO_ROOT.glob("*.md"), *REPO_ROOT.glob("docs/**/*.md"), REPO_ROOT / "native" / "README.md"]:
        named += [page.parent / target for target in LINKED.findall(page.read_text())]
    assert len(named) > 50 and not [path for path in named if not path.exists()]
