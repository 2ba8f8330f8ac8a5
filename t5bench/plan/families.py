"""What planning needs to know about a model family; scripts/families/ has the shell's part. To add a third family, add
an entry here and a file there."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from t5bench.corpus.index import read_index
from t5bench.plan.request import Request
from t5bench.record.plan import MOST_RAMP_ITERATIONS, Plan, by_name


@dataclass(frozen=True)
class Family:
    """title: its name in a sentence. vocabulary: words of its usual tokenizer, with special ones.

    tokenizer_type: the engine's name for it, where the data's record names none. flash: which attention flash-attn
    serves. check_pipeline: refuses a number of stages that its layers do not divide over.
    """

    title: str
    vocabulary: int
    tokenizer_type: str
    flash: str
    has_encoder: bool
    check_pipeline: Callable[[Request, int], None]


def _check_t5(request: Request, stages: int) -> None:
    refuse = request.findings.refuse
    encoder, decoder = request.number("ENCODER_NUM_LAYERS"), request.number("DECODER_NUM_LAYERS")
    if stages % 2:
        found = f"the pipeline-parallel size must be even (half encoder, half decoder), found {stages}"
        refuse("pipeline-size", found)
    elif encoder % (stages // 2) or decoder % (stages // 2):
        found = f"{encoder} encoder and {decoder} decoder layers do not divide over {stages // 2} stages each"
        refuse("pipeline-size", found)


def _check_gpt(request: Request, stages: int) -> None:
    layers = request.number("NUM_LAYERS")
    if layers % stages:
        request.findings.refuse("pipeline-size", f"{layers} layers do not divide over {stages} stages")


# T5's vocabulary is that of google-t5/t5-large's tokenizer with its sentinels.
FAMILIES: Mapping[str, Family] = {
    "t5": Family(
        title="T5",
        vocabulary=32101,
        tokenizer_type="HFTokenizer",
        flash="the decoder's self-attention, standard in encoder and cross-attention",
        has_encoder=True,
        check_pipeline=_check_t5,
    ),
    "gpt": Family(
        title="GPT",
        vocabulary=50257,
        tokenizer_type="GPT2BPETokenizer",
        flash="all attention",
        has_encoder=False,
        check_pipeline=_check_gpt,
    ),
}


def validation_samples(plan: Plan, wanted: int) -> int:
    """How many samples the engine prepares if this many are wanted: whole epochs of its validation documents.

    megatron/data/dataset_utils.py and gpt_dataset.py; a T5 has one sample of each document.
    """
    index, parts = read_index(plan.data_prefix), [float(part) for part in plan.engine_arguments["--split"].split(",")]
    documents = len(index.doc_idx) - 1
    shares = [round(part / sum(parts) * documents) for part in parts]
    begin = shares[0] - (sum(shares) - documents)
    if not shares[1]:
        return 0
    if FAMILIES[plan.value("MODEL_FAMILY")].has_encoder:
        return -(-wanted // shares[1]) * shares[1]
    tokens = sum(index.sizes[index.doc_idx[begin] : index.doc_idx[begin + shares[1]]])
    epochs = -(-(wanted * plan.number("SEQ_LENGTH") + 1) // tokens)
    return (epochs * tokens - 1) // plan.number("SEQ_LENGTH")


def family_of(request: Request) -> Family:
    return FAMILIES[request.value("MODEL_FAMILY")]


def check_family(request: Request) -> None:
    """Checks that the strategy and the engine support the family and the settings."""
    strategy, name, refuse = request.strategy, request.value("MODEL_FAMILY"), request.findings.refuse
    if name not in strategy.families:
        served = " and ".join(FAMILIES[each].title for each in strategy.families)
        found = f"{strategy.name} supports only {served}, but MODEL_FAMILY is {name}"
        refuse("strategy-family", found, f"Set MODEL_FAMILY={strategy.families[0]}, or use run_megatron_t5_hybrid.sh")
    if name != "t5":
        needs_megatron(request, "MODEL_FAMILY")
    if request.value("RECOMPUTE") != "none":
        needs_megatron(request, "RECOMPUTE")


def needs_megatron(request: Request, setting: str) -> None:
    """Refuses a setting that the native engine does not support."""
    if request.value("ENGINE") == "native":
        found = f"the native engine does not support {setting}='{request.value(setting)}'"
        request.findings.refuse("native-engine", found, "Use ENGINE=megatron")


def check_rampup(request: Request, data_parallel: int) -> None:
    """Checks RAMPUP_BATCH_SIZE: the first batch size, the step, and the samples over which the batch grows."""
    given, full = request.value("RAMPUP_BATCH_SIZE"), request.number("GLOBAL_BATCH_SIZE")
    words = given.split()
    if not given:
        return
    needs_megatron(request, "RAMPUP_BATCH_SIZE")
    for name in by_name(request.extra).keys() & {"--train-iters", "--lr-warmup-iters", "--lr-decay-iters"}:
        found = f"{name} cannot be given after -- with RAMPUP_BATCH_SIZE: the engine counts such a run in samples"
        request.findings.refuse("rampup", found, "Set TRAIN_ITERS and LR_WARMUP_ITERS, or give --lr-decay-samples")
    if len(words) != 3 or not all(word.isascii() and word.isdigit() and int(word) for word in words):
        found = f"RAMPUP_BATCH_SIZE must be three whole numbers (start, step, samples), found '{given}'"
        request.findings.refuse("rampup", found)
        return
    if int(words[2]) > (samples := request.number("TRAIN_ITERS") * full):
        found = f"RAMPUP_BATCH_SIZE='{given}' makes the batch grow for longer than the run, which has {samples} samples"
        remedy = "Raise TRAIN_ITERS, or make the batch grow faster; -- --exit-interval 50 tries the first 50 iterations"
        request.findings.refuse("rampup", found, remedy)
    if int(words[2]) > int(words[0]) * MOST_RAMP_ITERATIONS:
        found = f"RAMPUP_BATCH_SIZE='{given}' may make the batch grow for more than {MOST_RAMP_ITERATIONS} iterations"
        request.findings.refuse("rampup", found, "Make the batch grow faster, or start with a larger one")
    start, step, together = int(words[0]), int(words[1]), request.number("MICRO_BATCH_SIZE") * data_parallel
    if start > full or (full - start) % step or start % together or step % together:
        found = f"RAMPUP_BATCH_SIZE='{given}' does not reach GLOBAL_BATCH_SIZE={full} in steps of {together} samples"
        sizes = f"multiples of {together} (micro-batch x data-parallel size)"
        remedy = f"Start and step must be {sizes}, and the steps must end at {full}"
        request.findings.refuse("rampup", found, remedy)
