"""What planning needs to know about a model family; scripts/families/ has the shell's part. To add a third family, add
an entry here and a file there."""

from collections.abc import Mapping
from dataclasses import dataclass

from t5bench.plan.launchers import Request


@dataclass(frozen=True)
class Family:
    """title: its name in a sentence. vocabulary: words of its usual tokenizer, with special ones.

    tokenizer_type: the engine's name for it, where the data's record names none. flash: which attention flash-attn
    serves. stacks: the settings of its stacks of layers, of which pipeline stages divide each among their share.
    """

    title: str
    vocabulary: int
    tokenizer_type: str
    flash: str
    stacks: tuple[str, ...]

    @property
    def has_encoder(self) -> bool:
        return len(self.stacks) > 1


# T5's vocabulary is that of google-t5/t5-large's tokenizer with its sentinels.
FAMILIES: Mapping[str, Family] = {
    "t5": Family(
        title="T5",
        vocabulary=32101,
        tokenizer_type="HFTokenizer",
        flash="the decoder's self-attention, standard in encoder and cross-attention",
        stacks=("ENCODER_NUM_LAYERS", "DECODER_NUM_LAYERS"),
    ),
    "gpt": Family("GPT", 50257, "GPT2BPETokenizer", flash="all attention", stacks=("NUM_LAYERS",)),
}


def family_of(request: Request) -> Family:
    return FAMILIES[request.value("MODEL_FAMILY")]


def check_family(request: Request) -> None:
    """Checks that the strategy and the engine support the family and the settings."""
    strategy, name = request.strategy, request.value("MODEL_FAMILY")
    if name not in strategy.families:
        served = " and ".join(FAMILIES[each].title for each in strategy.families)
        found = f"{strategy.name} supports only {served}, but MODEL_FAMILY is {name}"
        remedy = f"Set MODEL_FAMILY={strategy.families[0]}, or use run_megatron_t5_hybrid.sh"
        request.findings.refuse("strategy-family", found, remedy)
    if (engine := request.value("ENGINE")) not in strategy.engines:
        found = f"{strategy.name} needs ENGINE={strategy.engines[0]}, but ENGINE is {engine}"
        request.findings.refuse("strategy-engine", found, f"Unset ENGINE, or set ENGINE={strategy.engines[0]}")
    if request.value("RAMPUP_BATCH_SIZE") and request.value("ENGINE") == "native":
        found = f"the native engine does not support RAMPUP_BATCH_SIZE='{request.value('RAMPUP_BATCH_SIZE')}'"
        request.findings.refuse("native-engine", found, "Use ENGINE=megatron")
