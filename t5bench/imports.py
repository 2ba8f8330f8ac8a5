"""How the engines' libraries are imported: they would load and compile much that no training here uses."""

import os

# Without its PyTorch models transformers loads in one second, not in four; release 5 has no such choice.
FASTER_TRANSFORMERS = {"USE_TORCH": "0", "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"}


def import_deepspeed() -> None:
    """Raises ImportError."""
    os.environ.update(FASTER_TRANSFORMERS | os.environ)
    import deepspeed

    # Its all-reduce on a CPU is for inference alone, and would first be compiled for a minute.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def leave_out_compiler() -> None:
    """Keeps DeepSpeed from loading PyTorch's compiler for an optimizer that nothing here uses."""
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
