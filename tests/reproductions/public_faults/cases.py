"""Which public faults faults.py reproduces, where, and what judge should say of them.

PYTHONPATH=. [ACCELERATE_PACKAGES=DIRECTORY] python tests/reproductions/public_faults/cases.py [FAULT ...]
"""

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

PROGRAM = Path(__file__).with_name("faults.py")
LEDGER = Path.home() / ".cache" / "t5-parallelism" / "ledger"


@dataclass(frozen=True)
class Case:
    """A fault as it was reported in public."""

    name: str
    thread: str
    what: str
    likely: str
    """In the line with which judge names its class."""
    bad: str = ""
    """DeepSpeed's release that has it; "" where PyTorch alone or a few lines of a recipe have it."""
    good: str = ""
    processes: int = 2
    precision: str = "fp32"
    mechanism: bool = False
    """The mistake in lines of our own, made as the thread describes it; not the release that had it."""

    def missing(self) -> str:
        """Packages that are not installed; "" if none is."""
        paths = [*packages(self, "bad"), *packages(self, "good")]
        return ", ".join(sorted({str(path) for path in paths if not path.is_dir()}))


MISSING = "gradients of some micro-batches, processes or parameters are missing from bad"
UNREDUCED = "or those of bad.jsonl are not reduced over all processes"
FACTOR = "gradients are summed in one training and averaged in the other"
DEEPSPEED = "https://github.com/deepspeedai/DeepSpeed/issues/"
CASES = (
    Case("deepspeed-7718", f"{DEEPSPEED}7718", "ZeRO-2 keeps the last micro-batch alone", MISSING, "0.17.6", "0.17.5"),
    Case(
        "accelerate-3877",
        "https://github.com/huggingface/accelerate/issues/3877",
        "the same through accelerate",
        MISSING,
        "0.18.0",
        "0.18.3",
    ),
    Case(
        "open-instruct-1498",
        "https://github.com/allenai/open-instruct/pull/1498",
        "ZeRO-2, several backward passes a step, boundary not marked",
        MISSING,
        "0.18.6",
        "0.18.6",
    ),
    Case(
        "deepspeed-7985",
        f"{DEEPSPEED}7985",
        "ZeRO-1, bf16 with fp32 sums: the last micro-batch is not reduced",
        UNREDUCED,
        "0.18.9",
        "0.19.0",
        precision="bf16",
    ),
    Case(
        "deepspeed-8158",
        f"{DEEPSPEED}8158",
        "ZeRO-3's all-reduce fetch reads padding nobody wrote",
        "not a number",
        "0.19.3",
        "0.19.4",
        processes=3,
    ),
    Case(
        "deepspeed-8068",
        f"{DEEPSPEED}8068",
        "clips at 1 if not told",
        "agreement until step 3: the update before it",
        "0.19.3",
        "0.19.2",
    ),
    Case(
        "deepspeed-7967",
        f"{DEEPSPEED}7967",
        "ZeRO-2 with offload keeps the first micro-batch alone",
        MISSING,
        "0.18.9",
        "0.19.0",
    ),
    Case(
        "deepspeed-7981",
        f"{DEEPSPEED}7981",
        "the same by hand: the last backward pass alone",
        MISSING,
        "0.18.9",
        "0.19.0",
    ),
    Case(
        "deepspeed-7839",
        f"{DEEPSPEED}7839",
        "stage 0, bf16: divided by a scale that nothing multiplied",
        "not zeroed",
        "0.18.5",
        "0.18.6",
        precision="bf16",
    ),
    Case(
        "deepspeed-8154",
        f"{DEEPSPEED}8154",
        "pipeline: the first stage's gradients divided twice",
        "gradients of some parameters have another scale",
        "0.19.2",
        "0.19.2",
    ),
    Case("deepspeed-7773", f"{DEEPSPEED}7773", "pipeline: micro-batches summed", FACTOR, "0.17.5", "0.17.5"),
    Case("verl-7493", "https://github.com/verl-project/verl/issues/7493", "fsdp_size=1 synchronises nothing", MISSING),
    Case(
        "torchtitan-2318",
        "https://github.com/pytorch/torchtitan/issues/2318",
        "DDP averages what is already a mean",
        FACTOR,
        mechanism=True,
    ),
    Case(
        "torchtitan-1842",
        "https://github.com/pytorch/torchtitan/issues/1842",
        "mean of ranks' means, not of tokens",
        "another mean",
        mechanism=True,
    ),
    Case(
        "dinov3-250",
        "https://github.com/facebookresearch/dinov3/pull/250",
        "FSDP2 adds gradients up",
        FACTOR,
        mechanism=True,
    ),
    Case(
        "megatron-1685",
        "https://github.com/NVIDIA/Megatron-LM/issues/1685",
        "gradients never reduced",
        UNREDUCED,
        mechanism=True,
    ),
    Case(
        "megatron-7452",
        "https://github.com/NVIDIA/Megatron-LM/issues/7452",
        "a replicated weight's partial gradients not added up",
        MISSING,
        mechanism=True,
    ),
    Case(
        "nemo-rl-3788",
        "https://github.com/NVIDIA-NeMo/RL/pull/3788",
        "the norm counts replicated gradients once a rank",
        "norm alone",
        mechanism=True,
    ),
)


def packages(case: Case, which: str) -> list[Path]:
    """Directories for PYTHONPATH: a release of DeepSpeed as `ledger` installs it, and accelerate."""
    release = case.bad if which == "bad" else case.good
    found = []
    if release:
        found.append(LEDGER / f"deepspeed{release}-python3.{sys.version_info.minor}-torchown")
    if case.name.startswith("accelerate"):
        found.append(Path(os.environ.get("ACCELERATE_PACKAGES", "ACCELERATE_PACKAGES (a directory with accelerate)")))
    return found


def train(case: Case, which: str, log: Path) -> None:
    """Raises RuntimeError with the processes' output."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={case.processes}"]
    command += [str(PROGRAM), case.name, which, str(log)]
    environment = os.environ | {"PYTHONPATH": ":".join(map(str, packages(case, which))), "OMP_NUM_THREADS": "1"}
    environment |= {"TORCHDYNAMO_DISABLE": "1", "DS_ACCELERATOR": "cpu", "LOCAL_SIZE": str(case.processes)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    if result.returncode:
        raise RuntimeError((result.stdout + result.stderr)[-6000:])


def main() -> None:
    for case in CASES:
        if sys.argv[1:] and case.name not in sys.argv[1:]:
            continue
        print(f"== {case.name} {case.missing()}", flush=True)
        if case.missing():
            continue
        with tempfile.TemporaryDirectory() as directory:
            logs = [Path(directory, f"{which}.jsonl") for which in ("bad", "good")]
            for log in logs:
                train(case, log.stem, log)
            command = [sys.executable, "-m", "t5bench", "judge", *map(str, logs), "--precision", case.precision]
            subprocess.run(command, check=False)


if __name__ == "__main__":
    main()
