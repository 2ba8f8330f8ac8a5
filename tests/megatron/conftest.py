"""Where the tests of the real engine find it."""

import os
from pathlib import Path

import pytest

REPO_ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def megatron_dir() -> Path:
    """A Megatron-DeepSpeed checkout: MEGATRON_DIR, the sibling of the repository, or the one in the user's cache."""
    candidates = [
        os.environ.get("MEGATRON_DIR"),
        REPO_ROOT.parent / "Megatron-DeepSpeed",
        Path.home() / ".cache" / "t5-parallelism" / "Megatron-DeepSpeed",
    ]
    for candidate in candidates:
        if candidate and (Path(candidate) / "pretrain_t5.py").is_file():
            return Path(candidate).resolve()
    pytest.skip("no Megatron-DeepSpeed checkout: set MEGATRON_DIR, or run scripts/setup_megatron.sh")
