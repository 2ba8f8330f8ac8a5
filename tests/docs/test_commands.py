"""Every command of every document is run by a test, or listed here with the reason why it is not.

test_readme.py runs the README's commands unchanged, and the last test here those of docs/learn.md.
"""

import re
import subprocess
from pathlib import Path

import pytest
from real_runs import environment, make_clone
from support import REPO_ROOT

from t5bench.__main__ import COMMANDS, main

# The beginning of a command, and the file of tests that runs it, which contains the command's last word.
TESTED = {
    "bash scripts/quickstart.sh": "sweep/test_quickstart.py",
    "bash scripts/setup_megatron.sh": "megatron/test_setup.py",
    "bash scripts/prepare_xsum_megatron.sh": "conftest.py",
    "bash scripts/run_megatron_t5_all.sh": "sweep/test_run_all.py",
    "bash scripts/search.sh": "tools/search/test_search.py",
    "bash scripts/run_megatron_t5_ddp.sh": "plan/test_launchers.py",
    "bash scripts/run_megatron_t5_hybrid.sh": "engines/test_gpt.py",
    "bash scripts/run_megatron_t5_zero1.sh": "support.py",
    "bash scripts/run_megatron_t5_zero2.sh": "profile/test_explain.py",
    "bash scripts/run_megatron_t5_zero3.sh": "engines/test_engines.py",
    "bash scripts/run_megatron_t5_fsdp2.sh": "engines/test_engines.py",
    "bash scripts/run_megatron_t5_tensor.sh": "tools/convert/test_reshape.py",
    "bash scripts/run_megatron_t5_pipeline.sh": "engines/test_gpt.py",
    "python -m t5bench explain": "profile/test_explain.py",
    "python -m t5bench judge": "tools/judge/test_judge.py",
    "python -m t5bench prove": "tools/predict/test_prove.py",
    "bash scripts/check_parity.sh": "sweep/test_check_parity.py",
    "bash scripts/check_cluster.sh": "tools/nodes/test_check.py",
    "bash scripts/gpu_acceptance.sh": "tools/acceptance/test_gpu_acceptance.py",
    "python -m t5bench compare": "docs/test_readme.py",
    "python -m t5bench pack": "docs/test_readme.py",
    "python -m t5bench verify": "docs/test_readme.py",
    "python -m t5bench history": "tools/verify/test_history.py",
    "python -m t5bench settings": "docs/test_generated.py",
    "python -m t5bench support": "docs/test_generated.py",
    "python -m t5bench parity": "compare/test_parity.py",
    "python -m t5bench predict": "tools/predict/test_predict.py",
    "python -m t5bench layouts": "tools/predict/test_predict.py",
    "python -m t5bench ranks": "tools/predict/test_predict.py",
    "python tests/unchanged": "docs/test_unchanged.py",
    "python -m t5bench merge-data": "corpus/test_dataset.py",
    "python -m t5bench reshape": "tools/convert/test_reshape.py",
    "python -m t5bench export": "tools/convert/test_export.py",
    "python -m t5bench import": "tools/convert/megatron_logits.py",
    "python -m t5bench generate": "tools/convert/test_generate_and_evaluate.py",
    "python -m t5bench evaluate": "tools/convert/test_generate_and_evaluate.py",
    "python -m tests.compare.simulations": "compare/test_intervals.py",
    "python -m tests.compare.order_simulations": "compare/test_intervals.py",
    "python -m docs.make_slides": "docs/test_slides.py",
    "python -m docs.make_generated": "docs/test_generated.py",
    "srun": "tools/nodes/test_slurm.py",
    "git apply": "megatron/test_setup.py",
}
# The beginning of a command, and why no test runs it.
UNTESTED = {
    "bash -p": "it is how the scripts start themselves",
    "python -m torch.distributed.run": "it is torchrun, which every launcher starts",
    "python -m pytest": "it runs the tests",
    "bash scripts/run_tests.sh": "it runs the tests",
    "bash tests/tools/nodes/lab/cluster.sh packages": "it installs system packages",
    "git clone": "it needs the network",
    "git checkout": "it follows a clone from the network",
    "git diff": "it makes a patch from your own change",
    "pip install": "it needs the network, and for Apex and flash-attn a CUDA compiler",
    "ds_report": "it describes the machine, and nothing depends on it",
    "python -m native.pretrain_t5": "every training runs it; --help is argparse's",
    "sha256sum --check": "it is not this project's",
    "python pretrain_gpt.py": "it shows what a launcher replaces",
    "python tests/native/honest_runs.py": "it takes hours",
    "python -m t5bench ledger": "it installs releases from the package index; tests/tools/ledger runs its parts",
    "python -m t5bench.corpus.speed": "it times for minutes, and needs the engine",
}
PROGRAMS = "bash|python|pip|git|srun|sha256sum|ds_report"
README, COURSE, SLIDES = (REPO_ROOT / name for name in ("README.md", "docs/learn.md", "docs/slides.md"))
FOLDERS = ("*.md", "docs/**/*.md", "native/*.md", "patches/*.md", "megatron_data/*/*.md")
PAGES = [page for pattern in FOLDERS for page in REPO_ROOT.glob(pattern) if page != SLIDES]


def commands(page: Path) -> set[str]:
    """The commands of a page's code blocks and of its text, without settings and comments."""
    text = page.read_text()
    blocks = re.findall(r"^```(?:bash)?\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    lines += re.findall(rf"`((?:\w+=\S+ )*(?:{PROGRAMS}) [^`]+)`", text)
    plain = (re.sub(r"^(\w+=(\"[^\"]*\"|\S*) +|env( -u \w+)* )*", "", line.strip()) for line in lines)
    return {line for line in plain if re.match(rf"({PROGRAMS})\b", line)}


def test_every_command_is_accounted_for_and_the_lists_are_true():
    found = {page: commands(page) for page in PAGES}
    known = (*TESTED, *UNTESTED)
    for page, own in found.items():
        unknown = [command for command in own if not command.startswith(known)]
        assert page in (README, COURSE) or not unknown, f"{page}: {unknown}"
    for beginning in known:
        assert any(command.startswith(beginning) for own in found.values() for command in own), beginning
    for beginning, file in TESTED.items():
        word = re.findall(r"[\w-]+", re.sub(r"\.(sh|py)$", "", beginning))[-1].removeprefix("run_megatron_t5_")
        assert word in (REPO_ROOT / "tests" / file).read_text(), f"{file} does not run {beginning}"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0 and "show this help message" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.nightly
def test_the_course_runs_as_it_stands(tmp_path: Path):
    """docs/learn.md in a fresh clone. Its quick start is run by test_quickstart.py; here its data are enough."""
    clone = make_clone(tmp_path)
    blocks = re.findall(r"^```bash\n(.*?)^```", (clone / "docs/learn.md").read_text(), re.MULTILINE | re.DOTALL)
    quickstart = "SAMPLE=1 MEGATRON_DATA_DIR=outputs/quickstart/data bash scripts/prepare_xsum_megatron.sh"
    script = "\n".join(blocks).replace("bash scripts/quickstart.sh", quickstart)
    command = ["bash", "-euo", "pipefail", "-c", script]
    options = {"cwd": clone, "env": environment(), "capture_output": True, "text": True, "timeout": 580}
    result = subprocess.run(command, check=False, **options)
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.count("PASS: all train the same model") == 5
