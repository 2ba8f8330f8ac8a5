"""What planning needs to know about a model family; t5bench/record/settings.py has its settings and presets. To
add a third family, add an entry here and there."""

from collections.abc import Mapping
from dataclasses import dataclass

from t5bench.plan.draft import Draft


@dataclass(frozen=True)
class Family:
    """A model family."""

    title: str
    """Its name in a sentence."""
    program: str
    """The engine's program."""
    vocabulary: int
    """The words of its usual tokenizer, with special ones."""
    tokenizer_type: str
    """The engine's name for that tokenizer, where the data's record names none."""
    flash: str
    """Which attention flash-attn serves."""
    stacks: tuple[str, ...]
    """The settings of its stacks of layers, of which pipeline stages divide each among their share."""
    lengths: tuple[str, ...]
    """The settings of its sequences' lengths."""

    @property
    def has_encoder(self) -> bool:
        return len(self.stacks) > 1


# T5's vocabulary is that of google-t5/t5-large's tokenizer with its sentinels.
FAMILIES: Mapping[str, Family] = {
    "t5": Family(
        title="T5",
        program="pretrain_t5.py",
        vocabulary=32101,
        tokenizer_type="HFTokenizer",
        flash="the decoder's self-attention, standard in encoder and cross-attention",
        stacks=("ENCODER_NUM_LAYERS", "DECODER_NUM_LAYERS"),
        lengths=("ENCODER_SEQ_LENGTH", "DECODER_SEQ_LENGTH"),
    ),
    "gpt": Family(
        title="GPT",
        program="pretrain_gpt.py",
        vocabulary=50257,
        tokenizer_type="GPT2BPETokenizer",
        flash="all attention",
        stacks=("NUM_LAYERS",),
        lengths=("SEQ_LENGTH",),
    ),
}


def family_of(draft: Draft) -> Family:
    return FAMILIES[draft.value("MODEL_FAMILY")]


def check_family(draft: Draft) -> None:
    """Checks that the strategy and the engine support the family and the settings."""
    strategy = draft.strategy
    name = draft.value("MODEL_FAMILY")
    if name not in strategy.families:
        served = " and ".join(FAMILIES[each].title for each in strategy.families)
        found = f"{strategy.name} supports only {served}, but MODEL_FAMILY is {name}"
        remedy = f"Set MODEL_FAMILY={strategy.families[0]}, or use run_megatron_t5_hybrid.sh"
        draft.refuse("strategy-family", found, remedy)
    engine = draft.value("ENGINE")
    if draft.value("MODEL") and engine != "native":
        draft.refuse("strategy-engine", f"MODEL needs ENGINE=native, but ENGINE is {engine}", "Set ENGINE=native")
    if engine not in strategy.engines:
        found = f"{strategy.name} needs ENGINE={strategy.engines[0]}, but ENGINE is {engine}"
        draft.refuse("strategy-engine", found, f"Unset ENGINE, or set ENGINE={strategy.engines[0]}")
    if engine == "native" and draft.value("RAMPUP_BATCH_SIZE"):
        found = f"the native engine does not support RAMPUP_BATCH_SIZE='{draft.value('RAMPUP_BATCH_SIZE')}'"
        draft.refuse("native-engine", found, "Use ENGINE=megatron")
