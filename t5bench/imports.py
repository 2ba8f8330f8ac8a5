"""How the engines' libraries are imported: they would load and compile much that no training here uses."""

import os
from typing import Any

# Without its PyTorch models transformers loads in one second, not in four; release 5 has no such choice.
FASTER_TRANSFORMERS = {"USE_TORCH": "0", "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"}


def import_transformers() -> Any:
    """Transformers with its models, which the trainings leave out. It never asks the hub."""
    os.environ["USE_TORCH"] = "1"
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def import_deepspeed() -> None:
    """Raises ImportError."""
    os.environ.update(FASTER_TRANSFORMERS | os.environ)
    import deepspeed

    # Its all-reduce on a CPU is for inference alone, and would first be compiled for a minute.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def leave_out_compiler() -> None:
    """Keeps DeepSpeed from loading PyTorch's compiler for an optimizer that nothing here uses."""
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
