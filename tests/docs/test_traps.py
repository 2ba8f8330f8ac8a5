"""The traps of the course: each still applies, and plants a mistake that the gate's own tests plant."""

import subprocess

import pytest
from support import REPO_ROOT

TRAPS = sorted((REPO_ROOT / "docs" / "traps").glob("*.patch"))
MISTAKES = (REPO_ROOT / "tests" / "engines" / "mistakes.txt").read_text()


@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: trap.name)
def test_a_trap_can_be_set_and_is_one_that_the_gate_names(trap):
    subprocess.run(["git", "apply", "--check", trap], cwd=REPO_ROOT, check=True)
    lines = trap.read_text().splitlines()
    removed = [line[1:].strip() for line in lines if line.startswith("-") and not line.startswith("---")]
    added = [line[1:].strip() for line in lines if line.startswith("+") and not line.startswith("+++")]
    (right,) = removed
    wrong = added[0] if added else "pass"
    # A planted mistake is a part of the line and what stands there instead.
    plants = [line.split(" | ")[-1].split(" => ") for line in MISTAKES.splitlines() if line.startswith("native ")]
    assert any(part in right and right.replace(part, instead) == wrong for part, instead in plants)
