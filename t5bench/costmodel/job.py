"""What is trained and how, for every part of the cost model: an architecture, its layout on GPUs, software, and a job.

Sizes are in tokens, layers and elements; names of arguments are those of Megatron without dashes.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from t5bench.costmodel.schedule import INTERLEAVED, ONE_F_ONE_B, puts_off_weights

REDUCE_ONCE_RELEASE = "0.19.2"  # of DeepSpeed, from which on ZeRO-2 and 3 can reduce once an iteration
MOST = 10**9  # of a size or a number of a model
LENGTHS = ("encoder_length", "decoder_length")  # of a run, not of a model
BYTES = {"bf16": 2, "fp16": 2, "fp8": 2, "fp32": 4, "tf32": 4}


@dataclass(frozen=True)
class Architecture:
    """A transformer. Without an encoder it is a GPT, without a decoder a BERT."""

    encoder_layers: int
    decoder_layers: int
    hidden: int
    heads: int
    head_size: int
    ffn: int
    encoder_length: int
    decoder_length: int
    padded_vocabulary: int  # rows of the embedding on all tensor-parallel ranks together
    family: str = "t5"
    kv_heads: int = 0  # key and value heads, as many as heads unless queries are grouped
    gated: bool = False
    activation: str = "gelu"  # or "gelu_tanh", which is its usual approximation, "relu", "silu"
    tied: bool = True  # the head shares the embedding
    positions: str = "learned"  # or "relative" (a table of buckets x heads in each stack), "rotary", "none"
    position_rows: int = 0  # of the learned table, the longest length unless given
    relative_buckets: int = 32
    biases: bool = True  # of the linear layers
    query_biases: bool = False  # of queries, keys and values alone
    output_biases: bool = False  # of attention's output too, without the feed-forward's
    ffn_biases: bool = False  # of the feed-forward alone
    head_bias: bool = True  # the output has a bias for every word
    norm: str = "layer"  # weight and bias; or "rms"
    final_norm: bool = True  # each stack ends with one
    post_norms: bool = False  # each block's output is normalised, then added to the residual stream
    one_norm: bool = False  # attention and FFN have the same input, and one norm
    query_key_norms: bool = False  # of every head's queries and keys, with the same weights for all heads
    merged_attention: bool = False  # the decoder's own keys and the encoder's: the same projections and one softmax
    window: int = 0  # tokens of its own stack that a token sees in layers with local attention; 0: there are none
    global_every: int = 1  # every so many layers, one has global attention
    special_words: int = 0  # vectors of the embedding that are not in its table
    predicted: int = 0  # tokens of a sample that have logits, such as a BERT's masked ones; 0 for all
    # What no cost depends on, but an engine that computes the model must know.
    kind: str = ""  # Transformers' model_type; "" for a model of the launchers' own settings
    parallel_residual: bool = False  # attention and FFN, each with a norm, have the same input
    norm_epsilon: float = 1e-5
    rotary_base: float = 10000.0
    rotary_columns: int = 0  # of each head that rotary positions turn; 0: all
    rotary_scaling: tuple[float, ...] = ()  # a factor; or Llama 3's: factor, low and high frequency factor, old length
    relative_distance: int = 128  # from which on all distances are in one bucket
    scaled_scores: bool = True  # attention's, by the square root of the head size
    scaled_head: bool = False  # the output's hidden states, by the square root of the hidden size
    initial: str = "scaled"  # weights that add to the residual stream: smaller by the depth; or "plain", or "t5"
    initial_std: float = 0.02

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        longest = max(self.encoder_length, self.decoder_length)
        object.__setattr__(self, "position_rows", self.position_rows or longest)

    @property
    def layers(self) -> int:
        return self.encoder_layers + self.decoder_layers

    @property
    def keys_apart(self) -> bool:
        """Whether grouped heads have their queries' weight apart from their keys' and values', as in native/."""
        return self.kind != "" and self.kv_heads < self.heads

    def copies_of_keys(self, tensor: int) -> int:
        """How many tensor-parallel ranks hold the same keys and values: several if there are fewer groups than
        ranks."""
        return max(1, tensor // self.kv_heads)

    def keys_of_all(self, tensor: int) -> int:
        """Columns of the key projections of so many tensor-parallel ranks, of which several may hold the same."""
        return self.key * self.copies_of_keys(tensor)

    @property
    def cross_attention(self) -> bool:
        """Whether the decoder attends to an encoder."""
        return bool(self.encoder_layers and self.decoder_layers)

    def length(self, decoder: bool) -> int:
        return self.decoder_length if decoder else self.encoder_length

    def attended(self, decoder: bool) -> tuple[int, ...]:
        """Tokens of a sample to which each attention of a layer attends: its own stack's, then the encoder's.

        A merged attention attends to both. A window hides some of them, but a masked kernel computes with all.
        """
        own = self.length(decoder)
        if not (decoder and self.cross_attention):
            return (own,)
        return (own + self.encoder_length,) if self.merged_attention else (own, self.encoder_length)

    @property
    def output_length(self) -> int:
        """Tokens of a sample that have logits."""
        return self.predicted or self.length(bool(self.decoder_layers))

    @property
    def query(self) -> int:
        """Columns of the query projection."""
        return self.heads * self.head_size

    @property
    def key(self) -> int:
        """Columns of the key projection, and of the value projection."""
        return self.kv_heads * self.head_size

    def description(self) -> str:
        """The model without its lengths, from which of_arguments() makes it again: JSON of what is not a default."""
        defaults = {entry.name: entry.default for entry in fields(self)}
        own = LENGTHS if self.positions in ("learned", "rotary") else (*LENGTHS, "position_rows")
        values = {name: getattr(self, name) for name in defaults if name not in own}
        return json.dumps({name: value for name, value in values.items() if value != defaults[name]})

    @classmethod
    def of_description(cls, content: Any) -> "Architecture":
        """The model of a description that json has read, with lengths of 0. Raises ValueError for anything else."""
        if not isinstance(content, Mapping):
            raise ValueError("a model's description is not a JSON object")
        kinds = {entry.name: entry.type for entry in fields(cls) if entry.name not in LENGTHS}
        for name, value in content.items():
            if name not in kinds:
                raise ValueError(f"a model's description has an unknown part '{name}'")
            if not _fits(value, kinds[name]):
                raise ValueError(f"a model's description has {name}={value!r}, which is not possible")
        needed = ("encoder_layers", "decoder_layers", "hidden", "heads", "head_size", "ffn", "padded_vocabulary")
        for name in needed:
            if name not in content:
                raise ValueError(f"a model's description lacks {name}")
        scaling = tuple(content.get("rotary_scaling", ()))
        return cls(**{**content, "rotary_scaling": scaling, "encoder_length": 0, "decoder_length": 0})

    @classmethod
    def of_arguments(cls, arguments: Mapping[str, Any], padded_vocabulary: int) -> "Architecture":
        """The model of an engine's arguments, by name without dashes (``encoder_num_layers``), as text or values.

        A description (``description()``) says all but the lengths; else the arguments are Megatron's.
        """

        def number(name: str, otherwise: int = 0) -> int:
            return int(arguments.get(name) or otherwise)

        t5 = number("decoder_num_layers") > 0
        if arguments.get("model_description"):
            model = cls.of_description(json.loads(arguments["model_description"]))
            length = number("decoder_seq_length" if t5 else "seq_length")
            return replace(model, encoder_length=number("encoder_seq_length") if t5 else 0, decoder_length=length)
        hidden = number("hidden_size")
        heads = number("num_attention_heads")
        gated = _given(arguments, "swiglu")
        positions = "learned"
        if _given(arguments, "use_rotary_position_embeddings"):
            positions = "rotary"
        elif _given(arguments, "no_position_embedding"):
            positions = "none"
        return cls(
            encoder_layers=number("encoder_num_layers") if t5 else 0,
            decoder_layers=number("decoder_num_layers" if t5 else "num_layers"),
            hidden=hidden,
            heads=heads,
            head_size=number("kv_channels", hidden // heads),
            ffn=number("ffn_hidden_size", usual_ffn(hidden, gated)),
            kv_heads=number("num_key_value_heads"),
            encoder_length=number("encoder_seq_length") if t5 else 0,
            decoder_length=number("decoder_seq_length" if t5 else "seq_length"),
            padded_vocabulary=padded_vocabulary,
            head_bias=t5,
            family="t5" if t5 else "gpt",
            gated=gated,
            activation="silu" if gated else "gelu" if _given(arguments, "no_bias_gelu_fusion") else "gelu_tanh",
            initial_std=float(arguments.get("init_method_std", 0.02)),
            biases=not _given(arguments, "disable_bias_linear"),
            tied=not _given(arguments, "untie_embeddings_and_output_weights"),
            positions=positions,
            position_rows=number("max_position_embeddings"),
            norm="rms" if arguments.get("normalization") == "rmsnorm" else "layer",
        )


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value from JSON can be a part's."""
    if kind in (bool, str):
        return isinstance(value, kind)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST
    numbers = value if isinstance(value, list) and kind is not float else [value]
    return all(isinstance(each, (int, float)) and not isinstance(each, bool) and 0 <= each <= MOST for each in numbers)


@dataclass(frozen=True)
class Parallel:
    """How many GPUs and in which groups. Ranks go through tensor first, then data, then pipeline, as Megatron's do."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    split_rank: int | None = None  # where the decoder begins, see decoder_stage; at half unless given
    sequence_parallel: bool = False
    virtual_stages: int = 1  # model chunks on each GPU under the interleaved schedule
    schedule: str = ONE_F_ONE_B  # one of schedule.SCHEDULES
    devices_per_node: int = 8
    shards: int = 0  # FSDP2: data-parallel GPUs that share one copy of the states; 0 if all do
    deepspeed: bool = False  # its pipeline engine, whose last stage copies the whole tied embedding, positions too

    def __str__(self) -> str:
        return f"{self.tensor}/{self.pipeline}/{self.data}"

    @property
    def world(self) -> int:
        return self.tensor * self.pipeline * self.data

    @property
    def decoder_stage(self) -> int:
        """The first stage with decoder layers of an encoder-decoder; of virtual stages, the first chunk with them."""
        return self.split_rank if self.split_rank is not None else self.chunks // 2

    @property
    def chunks(self) -> int:
        """Parts of the model: each stage has one, or as many as it has virtual stages: every p-th, from its own number
        on."""
        return self.pipeline * self.virtual_stages

    def chunks_of(self, stage: int) -> range:
        return range(stage, self.chunks, self.pipeline)

    def puts_off_weights(self, stage: int) -> bool:
        """Whether a stage computes the gradients of its layers' weights apart from the rest of the backward pass."""
        return puts_off_weights(stage, self.schedule)

    @property
    def states_over(self) -> int:
        """The number of GPUs over which ZeRO or FSDP2 divides the states."""
        return self.shards or self.data

    @property
    def sequence(self) -> int:
        """The number of GPUs over which sequence parallelism divides what tensor parallelism repeats."""
        return self.tensor if self.sequence_parallel else 1


@dataclass(frozen=True)
class Zero:
    """DeepSpeed's ZeRO; stage 0 is the engine's own data parallelism. Sizes are in elements, defaults DeepSpeed's."""

    stage: int = 0
    offload_optimizer: bool = False
    offload_parameters: bool = False
    overlap: bool = False
    reduction: str = ""  # the dtype in which gradients are sent, "" for the training precision
    reduce_once: bool = False  # stages 2 and 3: whole gradients add up, and are reduced after the last micro-batch
    reduce_bucket: int = 500_000_000
    prefetch_bucket: int = 50_000_000
    live_parameters: int = 1_000_000_000
    reuse_distance: int = 1_000_000_000
    persistence_threshold: int = 100_000

    @classmethod
    def of_config(cls, config: Mapping[str, Any] | None) -> "Zero":
        """From a DeepSpeed JSON; None means no DeepSpeed."""
        zero = (config or {}).get("zero_optimization", {})
        stage = int(zero.get("stage", 0))
        offloads = (zero.get(name) or {} for name in ("offload_optimizer", "offload_param"))
        sizes = {
            "reduce_bucket": "reduce_bucket_size",
            "prefetch_bucket": "stage3_prefetch_bucket_size",
            "live_parameters": "stage3_max_live_parameters",
            "reuse_distance": "stage3_max_reuse_distance",
            "persistence_threshold": "stage3_param_persistence_threshold",
        }
        return cls(
            stage,
            *(offload.get("device", "none") != "none" for offload in offloads),
            overlap=bool(zero.get("overlap_comm", stage == 3)),
            reduction=(config or {}).get("communication_data_type") or "",
            **{field: int(float(zero[name])) for field, name in sizes.items() if name in zero},
        )


@dataclass(frozen=True)
class FullySharded:
    """PyTorch's FSDP2 in the native engine, in place of ZeRO; Parallel.shards says over how many GPUs."""

    keeps_parameters: bool = False  # they are gathered once an iteration and kept until its last backward pass


@dataclass(frozen=True)
class Software:
    """What software keeps in memory, and whether its operators are fused."""

    norm_tensors: int = 2  # hidden states that a norm keeps
    stream: int = 0  # bytes of an element of these, 0 for the training precision
    casts: bool = False  # each linear layer keeps its own 16-bit copy of its input (autocast caches parameters alone)
    softmax: int = 0  # bytes of a kept probability, 0 for the training precision
    score_copies: int = 0  # further tensors of attention scores, in the training precision
    keeps_masks: bool = False  # unfused attention keeps a mask of its scores in every layer unless that is causal
    scores_buffer: bool = False  # it has a buffer of scores for ever
    repeats_keys: bool = False  # keys and values are kept for every query head, even if heads share them
    copies_flash: bool = False  # and flash attention's output in another order, or with padding put back
    mlp_dropout: bool = False  # dropout inside the MLP too
    fused_gate: bool = True  # a gated MLP keeps its product and two inputs alone
    rotates_apart: bool = False  # what is rotated is kept beside what it was, of which the values are a part
    logits: int = 6  # bytes of a logit at the most, while the loss is computed
    logit_gradients: int = 2  # and while the head's gradients are
    tensor_mask: int = 1  # bytes of a dropout's mask under tensor parallelism; elsewhere one
    cast_parameters: bool = False  # parameters are fp32, and cast to 16 bits in every iteration
    keeps_inputs: bool = False  # of pipeline stages, and fp16's fp32 gradients, until the next iteration (memory.py)
    fused_softmax: bool = True  # of stored scores: scale, mask and softmax in one kernel
    softmax_of_16_bits: bool = False  # which has no fp32: is_kernel_available, megatron/model/fused_softmax.py
    eager: bool = False  # norms, activations and softmax run as PyTorch's operators one by one (time.py)
    eager_rms_norm: bool = False  # an RMS norm does, whatever the rest is
    eager_norm_bytes: int = 8  # of a hidden state, what such a norm keeps besides a fused one's input and output
    fused_rotary: bool = False  # rotary positions are one kernel
    divides_head: bool = True  # tensor parallelism divides the logits, not the head's weight alone


# Of these, what is kept in memory was not read in code.
UNREAD_MEMORY = ("unknown", "compiled")
# Each figure cites the source code: Megatron-LM at a53107c006, Megatron-DeepSpeed at 4efb479d, Hetu-Galvatron at
# 498bcadeb6, transformers 4.49.
SOFTWARE = {
    # lm_logits.float() and its difference to the maximum are both there: core/tensor_parallel/cross_entropy.py:26.
    # RMSNorm.forward converts to fp32 and back: megatron/model/rmsnorm.py.
    "megatron": Software(
        logits=10,
        scores_buffer=True,
        fused_gate=False,
        keeps_inputs=True,
        softmax_of_16_bits=True,
        eager_rms_norm=True,
        eager_norm_bytes=4,
    ),
    # native/: bf16 logits, and fp32 ones of which the loss and then their gradient take the place; SharedDropout's mask
    # has 16 bits. The gate is one operator and the product another; rotate() makes new queries and keys.
    "native": Software(cast_parameters=True, tensor_mask=2, fused_gate=False, rotates_apart=True),
    # Megatron-LM: vocab_parallel_cross_entropy computes in place on the fp32 copy of the logits and keeps it for
    # backward: core/tensor_parallel/cross_entropy.py:28-120. DotProductAttention's scores go to a global buffer:
    # core/transformer/dot_product_attention.py:189.
    "megatron-core": Software(scores_buffer=True, keeps_inputs=True, softmax_of_16_bits=True, fused_rotary=True),
    # The same without the fused softmax: FusedScaleMaskSoftmax.forward_torch_softmax computes in fp32, and autograd
    # keeps its result: core/fusions/fused_softmax.py:313.
    "megatron-core-softmax": Software(
        softmax=4, scores_buffer=True, keeps_inputs=True, fused_softmax=False, fused_rotary=True
    ),
    # Software that is not known. What its separate operators keep is not read in code but found: these figures tell 354
    # published layouts that ran from those that ran out of memory best (packages/costmodel-evidence/EVIDENCE.md).
    "unknown": Software(
        score_copies=2,
        scores_buffer=True,
        fused_gate=False,
        keeps_inputs=True,
        fused_softmax=False,
        logits=14,
        divides_head=False,
        eager_rms_norm=True,
    ),
    # torch.compile writes norms, rotary positions and softmax as one kernel each. What it keeps in memory is not known.
    "compiled": Software(fused_rotary=True),
    # Megatron-LM with it: UnfusedDotProductAttention fills padded rows of the probabilities, which keeps each layer's
    # mask, if "padding" is in the mask's type (transformer_engine/pytorch/attention/dot_product_attention/backends.py,
    # masked_fill). GPT's and T5's decoders have "causal".
    "transformer-engine": Software(
        keeps_masks=True, copies_flash=True, keeps_inputs=True, softmax_of_16_bits=True, fused_rotary=True
    ),
    # FlashSelfOrCrossAttention's output is kept, and its rearranged copy:
    # core/runtime/tensor_parallel/transformer.py:846. swiglu is silu(x) * y in separate operators (:121), and
    # repeat_interleave copies keys and values for every query head (:825).
    "galvatron": Software(copies_flash=True, fused_gate=False, repeats_keys=True),
    # Hetu's first Galvatron: HF's T5LayerNorm in fp32 around Megatron's attention, which masks scores out of place.
    "galvatron-1": Software(norm_tensors=3, score_copies=1),
    # HF's T5LayerNorm keeps its input, the normalised input and the output; relu or gelu and dropout are in the MLP.
    "huggingface": Software(
        norm_tensors=3, mlp_dropout=True, fused_gate=False, logits=12, logit_gradients=12, eager=True
    ),
    # Under autocast the residual stream is fp32, softmax too, and the loss: T5ForConditionalGeneration's logits in
    # 16 bits, log_softmax's output and two gradients in fp32.
    "autocast": Software(
        2, 4, True, softmax=4, mlp_dropout=True, fused_gate=False, logits=14, logit_gradients=8, eager=True
    ),
}


@dataclass(frozen=True)
class Job:
    """One training. Batches are in samples."""

    architecture: Architecture
    parallel: Parallel = Parallel()
    micro_batch: int = 1  # one GPU's
    global_batch: int = 1
    zero: Zero = Zero()
    fully_sharded: FullySharded | None = None
    distributed_optimizer: bool = False  # Megatron's own
    precision: str = "bf16"
    recompute: str = "none"  # "selective" (attention's core) or "full" (each layer keeps its input)
    partitions_inputs: bool = False  # of full recomputation: each tensor-parallel rank keeps a slice of them
    attention: str = "unfused"  # "fused" (one kernel, PyTorch's or Transformer Engine's) or "flash"
    causal_attention: str = ""  # the same in the decoder's self-attention, which attends to earlier tokens alone
    norm_kernel: str = ""  # "fused" (one kernel) or "eager" (separate operators); "" for what the software has
    dropout: float = 0.1
    engine: str = "megatron"  # Megatron-DeepSpeed, or another of SOFTWARE
    dummy_gradients: bool = False  # a 16-bit gradient of each shape of weight stays (fused gradient accumulation)
    # Sequence parallelism's collectives and those of Megatron's optimizer go in pieces, while the GPU computes.
    overlaps: bool = False
    moments: tuple[int, ...] = (4, 4)  # bytes per parameter of each optimizer state besides the master weights

    def __post_init__(self) -> None:
        object.__setattr__(self, "causal_attention", self.causal_attention or self.attention)

    @property
    def micro_batches(self) -> int:
        """Per iteration on one data-parallel rank."""
        return max(1, self.global_batch // (self.micro_batch * self.parallel.data))

    @property
    def reduces_once(self) -> bool:
        """Whether a ZeRO that divides gradients keeps them whole until the last of several micro-batches."""
        return self.zero.reduce_once and self.zero.stage > 1 and self.micro_batches > 1

    @property
    def forgets_gradients(self) -> bool:
        """Whether gradients go after an iteration, instead of being set to 0: the native engine's without replicas."""
        is_divided = self.zero.stage > 0 or self.fully_sharded is not None
        return self.engine == "native" and self.parallel.data == 1 and not is_divided

    @property
    def casts_weights(self) -> bool:
        """Whether an iteration computes with 16-bit copies of fp32 weights."""
        is_16_bit = self.software.cast_parameters and self.element == 2
        return is_16_bit and not self.zero.stage and self.fully_sharded is None

    @property
    def has_eager_norms(self) -> bool:
        """Whether norms run as separate operators where the software's figures are of fused ones."""
        if self.norm_kernel:
            return self.norm_kernel == "eager" and not self.software.eager
        return self.software.eager_rms_norm and self.architecture.norm == "rms"

    @property
    def element(self) -> int:
        """Bytes of a parameter and of an activation."""
        return BYTES[self.precision]

    @property
    def software(self) -> Software:
        return SOFTWARE[self.engine]

    def tokens(self, decoder: bool) -> int:
        """Tokens of a micro-batch in the encoder or the decoder."""
        return self.micro_batch * self.architecture.length(decoder)

    def attentions(self, decoder: bool) -> list[tuple[int, str]]:
        """For each attention of a layer, the tokens of a sample to which it attends, and its kernel."""
        first, *cross = self.architecture.attended(decoder)
        is_causal = decoder and not self.architecture.merged_attention
        attentions = [(first, self.causal_attention if is_causal else self.attention)]
        return attentions + [(length, self.attention) for length in cross]

    @classmethod
    def of_plan(cls, plan: Any, padded_vocabulary: int, batch: int = 0) -> "Job":
        """The job of a launcher's or a stored run's plan, a ``t5bench.record.plan.Plan`` that has a layout.

        batch: samples of an iteration; 0 for the plan's own.
        """
        arguments = plan.named_arguments
        layout = plan.layout
        zero = replace(Zero.of_config(plan.ds_config), reduce_once=_given(arguments, "zero_reduce_once"))
        fully_sharded = None
        if plan.strategy.has_fsdp2:
            fully_sharded = FullySharded(keeps_parameters=_given(arguments, "fsdp2_keep_parameters"))
        chunks = int(arguments.get("virtual_pipeline_stages") or 1)
        layers_of_a_chunk = int(arguments.get("num_layers_per_virtual_pipeline_stage") or 0)
        if layers_of_a_chunk:  # Megatron's words for it
            chunks = int(arguments["num_layers"]) // (layout.pp * layers_of_a_chunk)
        flash = plan.engine == "megatron" and _given(arguments, "use_flash_attn_v2")
        return cls(
            architecture=Architecture.of_arguments(arguments, padded_vocabulary),
            parallel=Parallel(
                tensor=layout.tp,
                pipeline=layout.pp,
                data=layout.dp,
                split_rank=layout.split_rank,
                sequence_parallel=_given(arguments, "sequence_parallel"),
                devices_per_node=layout.nproc_per_node,
                virtual_stages=chunks,
                schedule=arguments.get("pipeline_schedule") or (INTERLEAVED if chunks > 1 else ONE_F_ONE_B),
                shards=int(arguments.get("fsdp2_shard_size") or 0),
                deepspeed=layout.pp > 1 and zero.stage > 0,
            ),
            micro_batch=int(arguments["micro_batch_size"]),
            global_batch=batch or int(arguments["global_batch_size"]),
            zero=zero,
            fully_sharded=fully_sharded,
            precision=next((name for name in ("bf16", "fp16") if _given(arguments, name)), "fp32"),
            recompute=arguments.get("recompute_granularity") or "none",
            attention="fused" if plan.engine == "native" else "unfused",
            causal_attention="flash" if flash else "",
            dropout=float(arguments.get("hidden_dropout") or 0),
            engine=plan.engine,
        )

    @cached_property
    def apart(self) -> "Job":
        """The same job with every chunk of the model as the only one of a stage."""
        stage_of_each = replace(self.parallel, pipeline=self.parallel.chunks, virtual_stages=1)
        return replace(self, parallel=stage_of_each)

    def on(self, **sizes: Any) -> "Job":
        """The same job in another layout: fields of Parallel."""
        return replace(self, parallel=replace(self.parallel, **sizes))


def usual_ffn(hidden: int, gated: bool) -> int:
    """Megatron's default (megatron/arguments.py): gated, as many parameters as without, in multiples of 64."""
    return 8 * hidden // 192 * 64 if gated else 4 * hidden


def padded(vocabulary: int, multiple: int, tensor: int = 1) -> int:
    """Rows of the embedding as Megatron pads it: a multiple of `multiple` on every tensor-parallel rank."""
    step = multiple * tensor
    return -(-vocabulary // step) * step


# Transformers' kinds of models of which every part is trained by the native engine, and compared with Transformers.
TRAINED_KINDS = ("llama", "mistral", "qwen2", "qwen3", "gpt2", "gpt_neox", "t5", "mt5")


def beyond_parts(a: Architecture) -> str:
    """Why the native engine cannot compute this model at these lengths; "" if it can."""
    if a.kind and a.kind not in TRAINED_KINDS:
        return f"the native engine does not train models of the type '{a.kind}', but of: {' '.join(TRAINED_KINDS)}"
    lacks = {
        "norms of each block's output": a.post_norms,
        "an attention that is merged with the encoder's": a.merged_attention,
        "one norm for attention and feed-forward": a.one_norm,
        "vectors besides its table of words": a.special_words > 0,
        f"a sliding window of {a.window} tokens": 0 < a.window < a.length(bool(a.decoder_layers)),
        f"{a.heads} heads in {a.kv_heads} groups": a.heads % a.kv_heads > 0,
    }
    for part, is_so in lacks.items():
        if is_so:
            return f"it has {part}, which the native engine does not compute"
    return ""


def beyond_native(
    tensor: int, pipeline: int, has_zero: bool, micro_batches: int, is_fp16: bool = False, has_fsdp2: bool = False
) -> str:
    """Why the native engine cannot train in this layout and precision; "" if it can."""
    if is_fp16:
        return "the native engine does not train in fp16, because it has no loss scaling"
    if has_zero and tensor * pipeline > 1:
        return "the native engine's ZeRO shards only over data-parallel ranks, without TP and PP"
    if has_fsdp2 and pipeline > 1:
        return "the native engine has no FSDP2 with pipeline stages"
    if micro_batches < pipeline:
        return f"the native engine's pipeline needs at least {pipeline} micro-batches, found {micro_batches}"
    return ""


def _given(arguments: Mapping[str, Any], switch: str) -> bool:
    """A switch has the value "" in a list of words and True in a namespace."""
    return arguments.get(switch, False) not in (False, None)
