"""Published measurements, in the format of published_training_measurements.json in this folder.

Most fields are optional, because sources state what they state. A field that is None was not stated.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from t5bench import Problem
from t5bench.given_files import read_json

Count = Annotated[int, msgspec.Meta(ge=0)]
Layers = Annotated[int, msgspec.Meta(ge=0, le=100_000)]  # the model lists layers one by one
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Figure = Annotated[float, msgspec.Meta(gt=0)]
ByTensorSize = dict[Annotated[int, msgspec.Meta(gt=0, lt=10**6)], Figure]
"""Figures by tensor-parallel size."""

USES = {"memory", "activation", "bound", "throughput", "ratio"}
# Fields for people, which are not read.
NOTES = {"line", "config", "note", "caveats", "confidence", "parameters_stated", "decoder_pp"}


class Publication(msgspec.Struct):
    """Where a point was published."""

    repo: str | None = None
    commit: str | None = None
    path: str | None = None
    url: str | None = None
    date: str | None = None
    """Year and month, perhaps with the day: 2025-08."""


class PublishedModel(msgspec.Struct):
    """The model that was trained."""

    architecture: str
    """As the source calls it: T5, BERT, GPT-3, llama ..."""
    name: str | None = None
    activation: str | None = None
    position: str | None = None
    encoder_layers: Layers | None = None
    decoder_layers: Layers | None = None
    hidden: Count | None = None
    ffn: Count | None = None
    heads: Count | None = None
    kv_channels: Count | None = None
    """The size of an attention head."""
    vocab: Count | None = None
    query_groups: Count | None = None
    """Heads of keys and values."""
    gated: bool | None = None
    tied: bool | None = None
    """The head has the embedding's weights."""


class Lengths(msgspec.Struct):
    """Tokens of a sample."""

    encoder: Count | None = None
    decoder: Count | None = None


class PublishedLayout(msgspec.Struct):
    """How the model and its states were divided."""

    tp: Count | str | None = None
    """A text where a point has figures for several tensor-parallel sizes."""
    pp: Count | None = None
    dp: Count | None = None
    cp: Count | None = None
    ep: Count | None = None
    layers_per_virtual_stage: Count | None = None
    encoder_pp: Count | None = None
    """The pipeline stage with which the decoder begins."""
    zero_stage: Literal[0, 1, 2, 3] | None = None
    sp: bool | None = None
    """Sequence parallelism."""
    offload: str | None = None
    other: str | None = None
    """Names of fields that this format does not have."""


class Hardware(msgspec.Struct):
    """What it ran on."""

    gpu: str | None = None
    interconnect: str | None = None
    count: Count | None = None
    """GPUs on all nodes."""
    nodes: Count | None = None


class MeasuredFigures(msgspec.Struct):
    """The measured figures that the model predicts; a point's other figures are for people."""

    memory_allocated_bytes: Figure | None = None
    peak_memory_allocated_bytes: Figure | None = None
    peak_minus_allocated_bytes: Figure | None = None
    memory_in_use_mib: Figure | None = None
    samples_per_second: Figure | None = None
    samples_per_second_derived: Figure | None = None
    sequences_per_second_derived: Figure | None = None
    tokens_per_second: Figure | None = None
    seconds_per_iteration_median: Figure | None = None
    seconds_per_iteration: Figure | None = None
    seconds_per_iteration_derived: Figure | None = None
    encoder_layer_model_states_mib: Figure | None = None
    decoder_layer_model_states_mib: Figure | None = None
    encoder_layer_activation_mib: Figure | None = None
    decoder_layer_activation_mib: Figure | None = None
    encoder_layer_activation_mb: ByTensorSize | None = None
    """Mebibytes, although the source's files call them MB."""
    decoder_layer_activation_mb: ByTensorSize | None = None


class Point(msgspec.Struct):
    """One published measurement."""

    id: str
    source: Publication
    model: PublishedModel
    lengths: Lengths
    precision: str
    parallel: PublishedLayout
    hardware: Hardware
    measured: MeasuredFigures
    use: Sequence[str]
    """What it can be compared with: some of USES."""
    how_counted: str | None = None
    optimizer: str | None = None
    attention_kernel: str | None = None
    norm_kernel: str | None = None
    """"fused" or "eager" (separate operators); not stated where it is None."""
    activation_checkpointing: str | None = None
    software: str | None = None
    micro_batch: Count | None = None
    """Samples of one GPU."""
    global_batch: Count | None = None
    global_batch_inferred: Count | None = None
    dropout: Share | None = None

    @property
    def batch(self) -> int | None:
        """Samples of an iteration."""
        return self.global_batch or self.global_batch_inferred

    @property
    def origin(self) -> str:
        return self.source.repo or self.source.url or ""


def read(path: Path) -> tuple[list[Point], list[str], list[str]]:
    """The points of a file, and a sentence for each invalid entry and each unknown field. Raises Problem."""
    entries = read_json(path, Any, "Give a file of published measurements")
    if not isinstance(entries, list):
        raise Problem(
            f"{path} holds no list of measurements",
            "See packages/costmodel-evidence/src/t5bench_evidence/published_training_measurements.json",
        )
    points: list[Point] = []
    invalid: list[str] = []
    unknown: list[str] = []
    for number, entry in enumerate(entries, 1):
        name = entry.get("id", f"entry {number}") if isinstance(entry, dict) else f"entry {number}"
        try:
            point = msgspec.convert(entry, Point, str_keys=True)
            fields = list(_unknown_fields(entry, Point))
        except msgspec.ValidationError as error:
            invalid.append(f"{name} is invalid and left out: {error}")
            continue
        points.append(point)
        # An unknown field of the layout that is in use makes the point unpredictable.
        divisions = [field for field in fields if field.startswith("parallel.") and _is_used(entry, field)]
        point.parallel.other = ", ".join(filter(None, [point.parallel.other, *divisions]))
        unknown += [f"{name}: the field {field} is unknown and ignored" for field in fields if field not in divisions]
        unknown += [f"{name}: the use {use} is unknown and ignored" for use in sorted(set(point.use) - USES)]
    return points, invalid, unknown


def _unknown_fields(entry: Mapping[str, Any], form: type[msgspec.Struct], prefix: str = "") -> Iterator[str]:
    known = {field.name: field.type for field in msgspec.structs.fields(form)}
    for name, value in entry.items():
        if name not in known and name not in NOTES:
            yield prefix + name
        elif name in ("source", "model", "lengths", "parallel", "hardware"):
            yield from _unknown_fields(value, known[name], f"{name}.")


def _is_used(entry: Mapping[str, Any], field: str) -> bool:
    """Whether a field of a point's layout says more than that something is off or not divided."""
    return entry["parallel"][field.removeprefix("parallel.")] not in (None, 0, 1, "", "none")
