"""A setting that a record claims and the run did not have: every setting of every strategy, one at a time."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest

from t5bench.plan.help import lacks
from t5bench.plan.launchers import declared
from t5bench.plan.planner import plan
from t5bench.record.plan import Plan
from t5bench.record.reader import UNFORESEEN
from t5bench.record.settings import BY_NAME, Decimal, Integer, OneOf
from t5bench_verify import implied

# Of these a plan says nothing else; docs/records.md lists them.
SAID_ONCE = {
    "MODEL_PRESET", "SHARE_GPUS", "RESUME", "RESUME_CHANGES", "SAMPLE_INTERVAL", "PEAK_TFLOPS", "WATCHDOG_SECONDS",
    "T5_RUN_SECRET", "WANDB_API_KEY", "WANDB_MODE", "MEGATRON_DIR",
}  # fmt: skip
# Values that are right beside the same command: what "auto" and "default" would have decided too.
ALSO_RIGHT = {"FLASH_ATTENTION": "off", "OVERLAP_COMM": "off", "DEVICE": "auto"}
# What the engine, or this schedule, does not read.
UNREAD = {"native": {"FLASH_ATTENTION", "VIRTUAL_PIPELINE_STAGES"}, "megatron": {"VIRTUAL_PIPELINE_STAGES"}}


def faults(record: Plan) -> list[str]:
    found: Iterator[str] = chain(
        implied.contradictions_of_command(record),
        implied.contradictions_of_ds_config(record),
        implied.contradictions_of_environment(record),
        implied.contradictions_of_choices(record),
    )
    try:
        return list(found)
    except UNFORESEEN as error:  # settings of another family are missing, or a model is no JSON: the relation says so
        return [str(error)]


def others(name: str, value: str) -> Iterator[str]:
    """Other values of a setting."""
    kind = BY_NAME[name].kind
    if isinstance(kind, OneOf):
        yield from (choice for choice in kind.choices if choice not in (value, ALSO_RIGHT.get(name)))
    elif name == "RAMPUP_BATCH_SIZE":
        yield "8 8 1600"
    elif isinstance(kind, Integer):
        yield str(3 * int(value or "1") + 4)
    elif isinstance(kind, Decimal):
        yield str(2 * float(value or "1") + 1)
    else:
        yield f"{value}x"


STRATEGIES = ("ddp", "zero1", "zero3_offload", "pipeline", "tensor", "hybrid")


@pytest.mark.parametrize(
    ("engine", "strategy"),
    [("native", "fsdp2"), *(("native", name) for name in STRATEGIES), *(("megatron", name) for name in STRATEGIES)],
)
def test_a_claimed_setting_is_noticed(engine: str, strategy: str, tmp_path: Path):
    declaration = declared(strategy)
    settings = {"MODEL_PRESET": "tiny", "DEVICE": "cpu", "HOSTS": "", "NNODES": "1", "PATH": "/usr/bin"}
    settings |= {"ENGINE": engine, "MEGATRON_DATA_DIR": str(tmp_path), "MODEL_FAMILY": declaration.families[0]}
    record = plan(settings, declaration)
    assert record.layout
    assert faults(record) == []
    unnoticed = []
    for role, values in record.settings_by_role.items():
        for name, value in values.items():
            if name in SAID_ONCE | UNREAD[engine] or lacks(declaration, name):
                continue
            for other in others(name, value):
                roles = {**record.settings_by_role, role: {**values, name: other}}
                if not faults(replace(record, settings_by_role=roles)):
                    unnoticed.append((name, other))
    assert unnoticed == []
