"""``python -m t5bench support``: docs/generated/support.md, which strategies combine with what.

Nothing here is a list of what works: each cell is the answer of the planner, which a launcher would give.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from t5bench import REPOSITORY, Problem
from t5bench.given_files import read_object
from t5bench.plan.help import lacks
from t5bench.plan.launchers import ENGINES, all_declarations
from t5bench.plan.planner import plan
from t5bench.record.plan import Strategy
from t5bench.record.settings import MODEL_FAMILIES

# Eight GPUs on one node, so that every layout below has its processes. What this machine lacks refuses nothing.
MACHINE: Mapping[str, str] = {
    **{"DEVICE": "cuda", "PATH": "/usr/bin:/bin", "HOME": "/nonexistent"},
    **{"NNODES": "1", "NPROC_PER_NODE": "8"},
    **dict.fromkeys(("MEGATRON_DIR", "MEGATRON_DATA_DIR"), "/nonexistent"),
    "OUTPUT_DIR": "/nonexistent",
}
ENGINE_NAMES = {"megatron": "Megatron-DeepSpeed", "native": "The native engine"}
FAMILY_NAMES = {"t5": "T5", "gpt": "GPT-2"}
HEAD = """# Which strategies combine with what

Find your engine and model, then the strategy's column. **yes**: the launcher starts it. **no**: it refuses, for the
reason of that number [below](#reasons). **-**: the setting changes nothing there.
[parity.md](../parity.md) says which combinations are proven to train the same model.

`python -m t5bench support` generates this page: it plans each combination on eight GPUs, with a global batch of 16, as
`--dry-run` does."""


@dataclass(frozen=True)
class Addition:
    """What one adds to a strategy."""

    title: str
    settings: Mapping[str, str]

    @property
    def shown(self) -> str:
        words = [f"{name}={repr(value) if ' ' in value else value}" for name, value in self.settings.items()]
        return f"{self.title} (`{' '.join(words)}`)" if words else self.title


SIZES = ("TENSOR_PARALLEL_SIZE", "PIPELINE_PARALLEL_SIZE")  # the planner says why a strategy has no other
STAGES_TO_INTERLEAVE = {"PIPELINE_PARALLEL_SIZE": "4"}
ADDITIONS: Sequence[Addition] = (
    Addition("alone, in bf16", {}),
    Addition("fp16", {"PRECISION_FLAG": "--fp16"}),
    Addition("fp32", {"PRECISION_FLAG": ""}),
    Addition("tensor parallelism", {"TENSOR_PARALLEL_SIZE": "2"}),
    Addition("sequence parallelism", {"SEQUENCE_PARALLEL": "1"}),
    Addition("pipeline stages", {"PIPELINE_PARALLEL_SIZE": "2"}),
    Addition("GPipe", {"PIPELINE_SCHEDULE": "gpipe"}),
    Addition("interleaved", {"PIPELINE_SCHEDULE": "interleaved", **STAGES_TO_INTERLEAVE}),
    Addition("zero-bubble", {"PIPELINE_SCHEDULE": "zero-bubble"}),
    Addition("zero-bubble, sequence parallelism", {"PIPELINE_SCHEDULE": "zero-bubble", "SEQUENCE_PARALLEL": "1"}),
    Addition("recomputed attention", {"RECOMPUTE": "selective"}),
    Addition("recomputed layers", {"RECOMPUTE": "full"}),
    Addition("gradients reduced once", {"ZERO_REDUCE_ONCE": "1"}),
    Addition("gradients reduced in fp32", {"GRADIENT_REDUCTION": "fp32"}),
    Addition("overlapped communication", {"OVERLAP_COMM": "on"}),
    Addition("FSDP2 keeps parameters", {"FSDP_KEEP_PARAMETERS": "1"}),
    Addition("HSDP", {"FSDP_SHARD_SIZE": "2"}),
    Addition("growing batch", {"RAMPUP_BATCH_SIZE": "8 8 1600"}),
)


PROVED = REPOSITORY / "docs" / "generated" / "proved.json"  # by `python -m t5bench prove --all --json`


def proved(family: str, columns: Sequence[Strategy]) -> str:
    """The table's line that says for how many ranks each strategy is proved."""
    remedy = f"python -m t5bench prove --all --json > {PROVED.relative_to(REPOSITORY)}"
    rows = read_object(PROVED, remedy)["rows"]
    cells = []
    for strategy in columns:
        own = [row for row in rows if (row["family"], row["strategy"], row["addition"]) == (family, strategy.name, "")]
        sizes = sorted(row["ranks"] for row in own)
        is_proved = own and not any(row["findings"] for row in own)
        cells.append(f"{sizes[0]} to {sizes[-1]:,} ranks" if is_proved else "-")
    return f"| every gradient summed once ([proved](../parity.md#before-the-first-step)) | {' | '.join(cells)} |"


def refusal(strategy: Strategy, engine: str, family: str, settings: Mapping[str, str]) -> str:
    """Why the strategy's launcher would refuse these settings; "" if it would not."""
    environment = {**MACHINE, "ENGINE": engine, "MODEL_FAMILY": family, **settings}
    refused = [obstacle for obstacle in plan(environment, strategy).obstacles if obstacle.fatal]
    return _reason(refused[0], strategy) if refused else ""


def _reason(obstacle: Problem, strategy: Strategy) -> str:
    """A sentence that is the same for every strategy."""
    without_file = re.sub(r"^.*\.json: ", "", obstacle.found)  # its place depends on the checkout's
    sentence = re.sub(rf"\b{strategy.name}\b", "the strategy", without_file)
    return sentence[0].upper() + sentence[1:] + "."


def table(engine: str, family: str, reasons: list[str]) -> list[str]:
    """The lines of the table of an engine and a model family. New reasons are added to the reasons."""
    alone = {strategy.name: refusal(strategy, engine, family, {}) for strategy in all_declarations()}
    columns = [strategy for strategy in all_declarations() if not alone[strategy.name]]
    lines = [
        f"\n## {ENGINE_NAMES[engine]}, {FAMILY_NAMES[family]}: {len(columns)} strategies\n",
        "| | " + " | ".join(f"`{strategy.name}`" for strategy in columns) + " |",
        "|---|" + "---|" * len(columns),
    ]
    for addition in ADDITIONS:
        cells = [_cell(strategy, engine, family, addition, reasons) for strategy in columns]
        if set(cells) != {"-"}:
            lines.append(f"| {addition.shown} | {' | '.join(cells)} |")
    if engine == "native":
        lines.append(proved(family, columns))
    absent = [f"`{name}` (no, {_number(reason, reasons)})" for name, reason in alone.items() if reason]
    if absent:
        lines.append(f"\nNot here: {', '.join(absent)}.")
    return lines


def _number(reason: str, reasons: list[str]) -> int:
    if reason not in reasons:
        reasons.append(reason)
    return reasons.index(reason) + 1


def _cell(strategy: Strategy, engine: str, family: str, addition: Addition, reasons: list[str]) -> str:
    """One answer. A new reason is added to the reasons."""
    without_effect = [name for name in addition.settings if lacks(strategy, name) and name not in SIZES]
    if without_effect:
        return "-"
    reason = refusal(strategy, engine, family, addition.settings)
    return f"no, {_number(reason, reasons)}" if reason else "yes"


def run(_: object) -> int:
    """Prints the page."""
    lines = [HEAD]
    reasons: list[str] = []
    for engine in ENGINES:
        for family in sorted(MODEL_FAMILIES, reverse=True):
            lines += table(engine, family, reasons)
    lines += ["\n## Reasons\n", *(f"{number}. {reason}" for number, reason in enumerate(reasons, 1))]
    print("\n".join(lines))
    return 0
