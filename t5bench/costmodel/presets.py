"""Models by their published dimensions, for predictions. The launchers' own presets are settings.

GPTs end in their size; they have learned positions, biases and a tied head, as GPT-2. T5 v1.1 and UL2 have gated FFNs,
relative positions, RMS norms, no biases and a head of their own. T5Gemma 2 is the text part, without the vision
encoder, at the launchers' lengths.
"""

from dataclasses import replace

from t5bench.costmodel.job import Architecture, padded

GPT2_VOCABULARY = padded(50257, 128)
T5_VOCABULARY = 32128
GEMMA_VOCABULARY = 262144


def gpt(layers: int, hidden: int, heads: int, length: int) -> Architecture:
    return Architecture(
        encoder_layers=0,
        decoder_layers=layers,
        hidden=hidden,
        heads=heads,
        head_size=hidden // heads,
        ffn=4 * hidden,
        encoder_length=0,
        decoder_length=length,
        padded_vocabulary=GPT2_VOCABULARY,
        family="gpt",
        head_bias=False,
    )


def t5_v1_1(layers: int, hidden: int, heads: int, ffn: int, head_size: int = 64) -> Architecture:
    return Architecture(
        encoder_layers=layers,
        decoder_layers=layers,
        hidden=hidden,
        heads=heads,
        head_size=head_size,
        ffn=ffn,
        encoder_length=512,
        decoder_length=128,
        padded_vocabulary=T5_VOCABULARY,
        gated=True,
        tied=False,
        positions="relative",
        biases=False,
        head_bias=False,
        norm="rms",
    )


def t5gemma2(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, window: int) -> Architecture:
    return Architecture(
        encoder_layers=layers,
        decoder_layers=layers,
        hidden=hidden,
        heads=heads,
        head_size=256,
        ffn=ffn,
        encoder_length=512,
        decoder_length=128,
        padded_vocabulary=GEMMA_VOCABULARY,
        kv_heads=kv_heads,
        gated=True,
        positions="rotary",
        biases=False,
        head_bias=False,
        norm="rms",
        post_norms=True,
        query_key_norms=True,
        merged_attention=True,
        window=window,
        global_every=6,
        special_words=1,  # the end of an image
    )


_ZERO = "ZeRO, https://arxiv.org/abs/1910.02054, appendix"
_T5_V1_1 = "the published configuration of google/t5-v1_1-*"
_T5GEMMA_2 = (
    "T5Gemma 2, https://arxiv.org/abs/2512.14856; jax-ml/bonsai, bonsai/models/t5gemma2/modeling.py, which loads"
    " google/t5gemma-2-*"
)
_T5GEMMA_2_NAMES = ("t5gemma2-270m", "t5gemma2-1b", "t5gemma2-4b")
PRESETS = {
    "t5-v1.1-small": t5_v1_1(8, 512, 6, 1024),
    "t5-v1.1-base": t5_v1_1(12, 768, 12, 2048),
    "t5-v1.1-large": t5_v1_1(24, 1024, 16, 2816),
    "t5-v1.1-xl": t5_v1_1(24, 2048, 32, 5120),
    "t5-v1.1-xxl": t5_v1_1(24, 4096, 64, 10240),
    # One FFN matrix without a gate, ReLU, tied embeddings.
    "t5-11b": replace(t5_v1_1(24, 1024, 128, 65536, head_size=128), gated=False, activation="relu", tied=True),
    "ul2-20b": replace(t5_v1_1(32, 4096, 16, 16384, head_size=256), activation="silu"),
    "t5gemma2-270m": t5gemma2(18, 640, 4, 1, 2048, 512),
    "t5gemma2-1b": t5gemma2(26, 1152, 4, 1, 6912, 512),
    "t5gemma2-4b": t5gemma2(34, 2560, 8, 4, 10240, 1024),
    "gpt-1.5b": gpt(48, 1600, 25, 1024),
    "gpt-8.3b": gpt(72, 3072, 24, 1024),
    "gpt-13b": gpt(40, 5120, 40, 2048),  # the paper rounds 40 heads of 128 to 5140
    "gpt-17b": gpt(78, 4256, 28, 1024),
    "gpt-100b": gpt(125, 8192, 64, 1024),
    "gpt-170b": gpt(212, 8192, 64, 1024),
    "gpt-175b": gpt(96, 12288, 96, 2048),
}
# Where each preset's dimensions are published.
SOURCES = {
    **dict.fromkeys(("t5-v1.1-small", "t5-v1.1-base", "t5-v1.1-large", "t5-v1.1-xl", "t5-v1.1-xxl"), _T5_V1_1),
    "t5-11b": "T5, https://arxiv.org/abs/1910.10683, section 3.7",
    "ul2-20b": "the published configuration of google/ul2",
    **dict.fromkeys(_T5GEMMA_2_NAMES, _T5GEMMA_2),
    "gpt-1.5b": "GPT-2, the published configuration of openai-community/gpt2-xl",
    "gpt-8.3b": "Megatron-LM, https://arxiv.org/abs/1909.08053, table 2",
    "gpt-13b": "GPT-3, https://arxiv.org/abs/2005.14165, table 2.1",
    "gpt-17b": "Turing-NLG, https://www.microsoft.com/en-us/research/blog/turing-nlg-a-17-billion-parameter-language-model-by-microsoft/",
    "gpt-100b": f"{_ZERO}; microsoft/DeepSpeedExamples, Megatron-LM/scripts/ds_zero2_pretrain_gpt2_model_parallel.sh",
    "gpt-170b": _ZERO,
    "gpt-175b": "GPT-3, https://arxiv.org/abs/2005.14165, table 2.1",
}
# What a reader of a preset's predictions must know.
NOTES = dict.fromkeys(
    _T5GEMMA_2_NAMES,
    "the text part, without the vision encoder; layers with a window compute the scores outside of it too, as"
    " transformers' own do",
)
