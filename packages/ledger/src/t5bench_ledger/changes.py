"""What the libraries' developers changed under these strategies, as their history has it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from packaging.version import Version

from t5bench_ledger.judge import DOES_NOT_RUN, ROUNDS, WRONG
from t5bench_ledger.modes import (
    DEEPSPEED_PIPELINE,
    FSDP2_TENSOR,
    PIPELINE_STAGE_0,
    STAGE_0,
    TRAINER,
    Mode,
    library_of,
)
from t5bench_ledger.show import is_shown
from t5bench_ledger.spans import public

ISSUES = "https://github.com/deepspeedai/DeepSpeed/issues"  # leads to pull requests too
PYTORCH_ISSUES = "https://github.com/pytorch/pytorch/issues"
TRANSFORMERS_ISSUES = "https://github.com/huggingface/transformers/issues"
ACCELERATE_ISSUES = "https://github.com/huggingface/accelerate/issues"
LLAMAFACTORY_ISSUES = "https://github.com/hiyouga/LlamaFactory/issues"


@dataclass(frozen=True)
class Change:
    """A change upstream. pulls: the numbers of its issues and pull requests. strategies: whose numbers it changed."""

    pulls: tuple[int, ...]
    what: str
    strategies: tuple[str, ...]
    first_wrong: str = ""  # "": before the oldest release of the ledger
    first_right: str = ""  # "": none yet
    precision: str = ""  # "": any
    offload: bool | None = None
    clipping: bool | None = None
    fp32_accumulation: bool | None = None
    several_micro_batches: bool = False  # it shows with more than one only
    verdict: str = WRONG  # of the cells that it explains
    shapes: tuple[str, ...] = ()  # (): any
    issues: str = ISSUES  # where the numbers lead

    def concerns(self, release: str, strategy: str, mode: Mode, verdict: str = WRONG) -> bool:
        """Whether it says why a cell is not right."""
        is_later = self.first_right and Version(release) >= Version(self.first_right)
        is_earlier = self.first_wrong and Version(release) < Version(self.first_wrong)
        if is_later or is_earlier or strategy not in self.strategies or verdict != self.verdict:
            return False
        if self.shapes and mode.shape not in self.shapes:
            return False
        if self.precision not in ("", mode.precision) or (self.several_micro_batches and mode.micro_batches < 2):
            return False
        return all(
            wanted in (None, has)
            for wanted, has in (
                (self.offload, mode.offload),
                (self.clipping, mode.clipping),
                (self.fp32_accumulation, mode.fp32_accumulation),
            )
        )

    @property
    def names(self) -> list[str]:
        """As releases.json names them: deepspeed#7718."""
        library = self.issues.split("/")[-2].lower().replace("pytorch", "torch")
        return [f"{library}#{pull}" for pull in self.pulls]

    def address(self, name: str) -> str:
        return f"{self.issues}/{name.partition('#')[2]}"


SHARDED = ("zero1", "zero2", "zero3", "zero3_offload")
CHANGES = (
    Change(
        (7718,), "ZeRO-2 overwrites the gradients of each micro-batch with those of the next", ("zero2",),
        first_wrong="0.17.6", first_right="0.18.3", offload=False, several_micro_batches=True,
    ),
    Change((7724,), "the scale of accumulated gradients", SHARDED, first_right="0.18.4", several_micro_batches=True),
    Change((7829,), "ZeRO-2 reduces gradients before they are ready", ("zero2",), first_right="0.18.6"),
    Change(
        (7839,), "gradients are divided by 65536 and not zeroed", (STAGE_0,), first_right="0.18.6", precision="bf16",
    ),
    Change(
        (8393,), "gradients are divided by a scale by which the loss was not multiplied", (STAGE_0,), precision="fp16",
    ),
    Change(
        (7967, 7981), "the gradients of later micro-batches are dropped", ("zero1", "zero2"), first_wrong="0.15.2",
        first_right="0.19.0", offload=True, several_micro_batches=True,
    ),
    Change(
        (7985,), "the last micro-batch is not all-reduced", ("zero1",), first_wrong="0.18.5", first_right="0.19.0",
        precision="bf16", fp32_accumulation=True,
    ),
    Change(
        (8068,), "gradient_clipping, if unset, is 1.0 instead of 0", SHARDED, first_wrong="0.19.3", clipping=False,
    ),
    Change(
        (8154,), "the pipeline gives the gradients of several micro-batches a wrong scale",
        (DEEPSPEED_PIPELINE, PIPELINE_STAGE_0),
        first_wrong="0.16.0", first_right="0.19.3", several_micro_batches=True,
    ),
    Change(
        (8158,), "a padded fetch overlaps the memory next to it", ("zero3", "zero3_offload"), first_right="0.19.4",
    ),
    Change(
        (7568, 7580), "one process does not learn of an overflow in another's partition", ("zero1",),
        first_wrong="0.17.1", first_right="0.18.0", precision="fp16", verdict=DOES_NOT_RUN,
    ),
    Change(
        (7607, 7636), "a parameter's bucket is looked up by the wrong data type", ("zero1", "zero2"),
        first_wrong="0.17.2", first_right="0.18.1", verdict=DOES_NOT_RUN, shapes=("large parameter",),
    ),
    Change(
        (7653, 7660), "a parameter larger than the bucket does not get a larger one", ("zero1", "zero2"),
        first_wrong="0.18.1", first_right="0.18.2", verdict=DOES_NOT_RUN, shapes=("large parameter",),
    ),
    Change(
        (8279, 8280), "a parameter without elements at the end of a group has no partition", ("zero1", "zero2"),
        first_right="0.19.6", verdict=DOES_NOT_RUN, shapes=("empty last",),
    ),
    Change(
        (8297,), "a parameter without elements inside a partition cannot be mapped", ("zero1", "zero2"),
        first_right="0.19.6", verdict=DOES_NOT_RUN, shapes=("empty inside",),
    ),
    Change(
        (988, 2103), "a recomputed layer that is used twice has its gradient reduced twice", ("zero2",),
        verdict=DOES_NOT_RUN, shapes=("checkpointed twice",),
    ),
    Change(
        (8382,), "on a CPU, gradients outside of a contiguous buffer are not reduced", ("zero1", "zero2"),
        first_right="0.19.8", shapes=("scattered gradients",),
    ),
    Change(
        (162338,), "gloo adds gradients up where FSDP2 asks for their mean", ("fsdp2", FSDP2_TENSOR),
        first_right="2.9.0", issues=PYTORCH_ISSUES,
    ),
    Change(
        (34191,), "the mean of each micro-batch's mean, not of all tokens", (TRAINER,),
        first_right="4.46.0", shapes=("unequal targets",), issues=TRANSFORMERS_ISSUES,
    ),
    Change(
        (34242, 39395), "the mean of each process's mean, unless average_tokens_across_devices is set",
        (TRAINER,), first_right="4.54.0", shapes=("unequal targets", "unequal at once"), issues=TRANSFORMERS_ISSUES,
    ),
    Change(
        (34373,), "average_tokens_across_devices does not exist yet", (TRAINER,), first_right="4.46.2",
        shapes=("averaged tokens",), verdict=DOES_NOT_RUN, issues=TRANSFORMERS_ISSUES,
    ),
    Change(
        (46204,), "a sample's first token is counted as a target", (TRAINER,), first_wrong="4.46.2",
        first_right="5.10.1", shapes=("all targets",), issues=TRANSFORMERS_ISSUES,
    ),
    Change(
        (46731, 47261), "label smoothing takes the mean of each micro-batch, and the Trainer does not divide their sum",
        (TRAINER,), first_wrong="4.46.0", first_right="5.15.0", shapes=("smoothed targets",),
        issues=TRANSFORMERS_ISSUES,
    ),
    Change(
        (35438,), "the loss of models like T5, which divide it on their own, is not divided by the micro-batches",
        (TRAINER,), first_wrong="4.46.0", first_right="4.48.0",
        shapes=("encoder-decoder", "unequal encoder-decoder"), issues=TRANSFORMERS_ISSUES,
    ),
    Change(
        (37766,), "T5 takes the mean of each micro-batch, whatever the Trainer counts", (TRAINER,),
        first_right="5.0.0", shapes=("unequal encoder-decoder",), issues=TRANSFORMERS_ISSUES,
    ),
    Change(
        (47688,), "models take the Trainer's count of tokens and drop it; found here in T5, BART and a classifier",
        (TRAINER,), first_wrong="5.0.0",
        shapes=(
            "encoder-decoder", "unequal encoder-decoder", "bart", "classifier", "encoder-decoder on one process",
            "classifier on one process",
        ),
        issues=TRANSFORMERS_ISSUES,
    ),
    Change(
        (6639,), "the window at the end of an epoch goes on in the next, with the next one's count of tokens",
        (TRAINER,), first_wrong="4.46.0", first_right="4.47.0", shapes=("last window",), issues=LLAMAFACTORY_ISSUES,
    ),
    Change(
        (34631,), "torch.load refuses the saved state of the random numbers since torch 2.6", (TRAINER,),
        first_right="4.47.0", shapes=("continued",), verdict=DOES_NOT_RUN, issues=TRANSFORMERS_ISSUES,
    ),
    Change(
        (3481,), "accumulate() asks for no_sync, which DeepSpeed refuses since 0.16",
        ("accelerate zero2", "accelerate zero3"), verdict=DOES_NOT_RUN, issues=ACCELERATE_ISSUES,
    ),
    Change(
        (190626,), "FSDP2 lets tensor parallelism reduce gradients in bf16, whatever reduce_dtype says",
        (FSDP2_TENSOR,), first_right="2.15.0", precision="bf16", verdict=ROUNDS, issues=PYTORCH_ISSUES,
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Withdrawn:
    """What was called wrong once and cannot be shown by plain PyTorch and the library alone, or is no fault."""

    strategies: tuple[str, ...]
    mode: str
    first: str
    why: str
    before: str = ""
    """A release from which on it would count; "" for none."""

    @property
    def concerned(self) -> str:
        """The releases in words."""
        return f"before {self.before}" if self.before else self.first

    def concerns(self, cell: Mapping[str, Any]) -> bool:
        if cell["verdict"] != WRONG or cell["strategy"] not in self.strategies or cell["mode"] != self.mode:
            return False
        release = Version(cell["release"])
        return release >= Version(self.first) and (not self.before or release < Version(self.before))


WITHDRAWN = (
    Withdrawn(
        (PIPELINE_STAGE_0,), "pipeline clipping", "0",
        "its loss is off by 0.43 %, and no file of plain PyTorch and DeepSpeed alone has shown it",
    ),
    Withdrawn(
        SHARDED, "clipping unset", "0.19.3",
        "gradient_clipping, if unset, is 1.0 since 0.19.3 (deepspeed#8068), as its documentation says: another recipe,"
        " no fault",
    ),
    Withdrawn(
        ("zero3",), "fp16 overflow", "0",
        "some of many trainings differ, over gloo and not on CUDA: weights are read before they are gathered"
        " (deepspeed#8539)", before="0.19.8",
    ),
)  # fmt: skip


def is_withdrawn(cell: Mapping[str, Any]) -> bool:
    """Whether a cell that was called wrong is no fault."""
    return any(each.concerns(cell) for each in WITHDRAWN)


def lacks_file(cell: Mapping[str, Any]) -> bool:
    """Whether a cell differs, and no file shows it in its release: it may not be called wrong."""
    release = cell["release"] or public(cell["torch"])
    strategy = cell["strategy"]
    return cell["verdict"] == WRONG and not is_shown(library_of(strategy), strategy, cell["mode"], release)


def standing(cells: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The cells that the ledger speaks of. Those that are withdrawn, or wrong and not shown, count as not tried."""
    return [cell for cell in cells if not is_withdrawn(cell) and not lacks_file(cell)]
