"""The commands of docs/learn.md, as they stand; test_readme.py runs the README's."""

import re
import subprocess
from pathlib import Path

import pytest
from real_runs import environment, make_clone


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
