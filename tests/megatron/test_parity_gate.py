"""The parity gate on the real engine with a mended bug put back: what it is there to catch."""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from parity_gate import copy_project, gate_environment, verdicts

pytestmark = pytest.mark.slow

MODEL = "megatron/model/t5_model.py"
# The mended lines of megatron_t5_fixes.patch, and what stood there.
BIAS_FIX = """        tensor_parallel.set_tensor_model_parallel_attributes(
            self.bias, is_parallel=True, dim=0, stride=1)
"""
BIAS_BUG = """        self.bias.partition_dim = 0
        self.bias.stride = 1
"""
MASK_FIX = "enc_dec_attn_mask=encoder_decoder_attn_mask,"
MASK_BUG = "encoder_decoder_attn_mask,"


def put_back(bug: str, fix: str, megatron_dir: Path, folder: Path) -> tuple[Path, Path]:
    """A project and an engine with the bug, which the project's checksums call patched."""
    root, engine = copy_project(folder), folder / "Megatron-DeepSpeed"
    shutil.copytree(megatron_dir, engine, ignore=shutil.ignore_patterns(".git"))
    text = (engine / MODEL).read_text()
    assert text.count(fix) == 1
    (engine / MODEL).write_text(text.replace(fix, bug))
    checksums = root / "patches" / "checksums" / "series.sha256"
    names = [line.split("  ", 1)[1] for line in checksums.read_text().splitlines()]
    sums = [f"{hashlib.sha256((engine / name).read_bytes()).hexdigest()}  {name}" for name in names]
    checksums.write_text("\n".join(sums) + "\n")
    return root, engine


def gate(root: Path, engine: Path, *strategies: str, **settings: str) -> tuple[int, dict[tuple[str, str], str], str]:
    """The gate's exit status, its verdicts and all that it said."""
    result = subprocess.run(
        ["bash", str(root / "scripts" / "check_parity.sh"), *strategies],
        env=gate_environment() | {"ENGINE": "megatron", "MEGATRON_DIR": str(engine), "TRAIN_ITERS": "8"} | settings,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    return result.returncode, verdicts(result.stdout), result.stdout + result.stderr


@pytest.mark.parametrize(
    ("bug", "fix", "expected", "sentence"),
    [
        pytest.param(
            BIAS_BUG, BIAS_FIX,
            {("ddp", "megatron"): "PASS", ("tensor", "megatron"): "FAIL", ("ddp", "native"): "PASS"},
            "iteration 1's loss agrees, its gradient norm does not",
            id="the output bias, whose shards of the ranks above 0 are not counted in the norm",
        ),
        pytest.param(
            MASK_BUG, MASK_FIX,
            {("ddp", "megatron"): "PASS", ("tensor", "megatron"): "PASS", ("ddp", "native"): "FAIL"},
            "iteration 1's loss differs already",
            id="the cross-attention mask, without which all attend to padding alike",
        ),
    ],
)  # fmt: skip
def test_an_upstream_bug_put_back_is_found(
    megatron_dir: Path, tmp_path: Path, bug: str, fix: str, expected: dict[tuple[str, str], str], sentence: str
):
    """One that a strategy alone has shows beside DDP, one that all have beside the other engine."""
    root, engine = put_back(bug, fix, megatron_dir, tmp_path / "an engine")
    status, found, said = gate(root, engine, "tensor")
    assert status == 1, said
    assert found == expected, said
    assert said.count(sentence) == 1


def test_deepspeed_that_trains_on_the_last_micro_batch(megatron_dir: Path, tmp_path: Path):
    """DeepSpeed 0.17.6's ZeRO-2, which the launcher refuses: in a copy that takes it."""
    folder = os.environ.get("DEEPSPEED_0_17_6")
    if not folder or not (Path(folder) / "deepspeed-0.17.6.dist-info").is_dir():
        pytest.skip(
            "DEEPSPEED_0_17_6 names no folder with that release: "
            "pip install --no-deps --no-build-isolation --target FOLDER deepspeed==0.17.6"
        )
    root = copy_project(tmp_path)
    common = root / "scripts" / "megatron_common.sh"
    text = common.read_text()
    refusal = "check_deepspeed() {\n"
    assert text.count(refusal) == 1
    common.write_text(text.replace(refusal, refusal + "  return 0\n"))
    status, found, said = gate(root, megatron_dir, "zero1", "zero2", PYTHONPATH=folder)
    assert status == 1, said
    assert found == {
        ("ddp", "megatron"): "PASS",
        ("zero1", "megatron"): "PASS",
        ("zero2", "megatron"): "FAIL",
        ("ddp", "native"): "PASS",
    }, said
