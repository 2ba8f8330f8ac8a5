"""Every command of every document is run by a test, or listed here with the reason why it cannot be.

The README's own commands are run as they stand by test_readme.py, and those of docs/learn.md below.
"""

import re
import subprocess
from pathlib import Path

import pytest
from harness import REPO_ROOT
from real_runs import environment, make_clone

# The beginning of a command, and the file of tests that runs it, which contains the command's last word.
TESTED = {
    "bash scripts/quickstart.sh": "sweep/test_quickstart.py",
    "bash scripts/setup_megatron.sh": "megatron/test_setup.py",
    "bash scripts/prepare_xsum_megatron.sh": "corpus/corpus_files.py",
    "bash scripts/run_megatron_t5_all.sh": "sweep/test_run_all.py",
    "bash scripts/run_megatron_t5_ddp.sh": "plan/test_launchers.py",
    "bash scripts/run_megatron_t5_3d.sh": "plan/test_families.py",
    "bash scripts/check_parity.sh": "sweep/test_check_parity.py",
    "bash scripts/check_cluster.sh": "cluster/test_check.py",
    "bash scripts/gpu_acceptance.sh": "acceptance/test_gpu_acceptance.py",
    "bash scripts/run_tests.sh": "sweep/test_run_tests.py",
    "python -m t5bench compare": "docs/test_readme.py",
    "python -m t5bench pack": "docs/test_readme.py",
    "python -m t5bench verify": "docs/test_readme.py",
    "python -m t5bench settings": "docs/test_readme.py",
    "python -m t5bench parity": "compare/test_parity.py",
    "python -m t5bench predict": "predict/test_predict.py",
    "python -m t5bench plan": "predict/test_predict.py",
    "python -m t5bench layout": "predict/test_predict.py",
    "python -m t5bench merge-data": "corpus/test_dataset.py",
    "python -m t5bench merge": "run/test_merge.py",
    "python -m tests.compare.simulations": "compare/test_intervals.py",
    "python -m docs.make_slides": "docs/test_slides.py",
    "python MEGATRON_DIR/tools/preprocess_data.py": "corpus/test_dataset.py",
    "srun": "cluster/test_slurm.py",
    "git apply": "megatron/test_setup.py",
}
# The beginning of a command, and why no test runs it.
UNTESTED = {
    "python -m pytest": "it runs the tests",
    "bash tests/cluster/lab/cluster.sh packages": "it installs system packages",
    "git clone": "it needs the network",
    "git checkout": "it follows a clone from the network",
    "git diff": "it makes a patch from your own change",
    "pip install": "it needs the network, and for Apex and flash-attn a CUDA compiler",
    "ds_report": "it describes the machine, and nothing depends on it",
    "sha256sum --check": "it is not this project's",
    "python pretrain_gpt.py": "it shows what a launcher replaces",
    "python -m t5bench.corpus.sample_tokenizer": "it overwrites the bundled tokenizer",
    "python tests/native/honest_runs.py": "it takes hours",
    "python tests/predict/compare_estimators.py": "it needs llm-analysis, which is no requirement",
    "python tests/cluster/measure_network.py": "it needs root and an idle machine for an hour",
}
PROGRAMS = "bash|python|pip|git|srun|sha256sum|ds_report"
README, SLIDES = REPO_ROOT / "README.md", REPO_ROOT / "docs" / "slides.md"
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
    found = {command: page for page in PAGES for command in commands(page)}
    known = (*TESTED, *UNTESTED)
    for command, page in found.items():
        assert page == README or command.startswith(known), f"{page}: {command}"
    for beginning in known:
        assert any(command.startswith(beginning) for command in found), f"no document has {beginning}"
    for beginning, file in TESTED.items():
        word = re.findall(r"[\w-]+", re.sub(r"\.(sh|py)$", "", beginning))[-1].removeprefix("run_megatron_t5_")
        assert word in (REPO_ROOT / "tests" / file).read_text(), f"{file} does not run {beginning}"


@pytest.mark.slow
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
    assert result.stdout.count("PASS: all train the same model") == 3
