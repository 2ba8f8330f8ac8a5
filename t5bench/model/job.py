"""What is trained and how, for every part of the cost model: an architecture, its layout on GPUs, and a job.

Sizes are in tokens, layers and elements; names of arguments are those of Megatron without dashes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from t5bench.model.software import SOFTWARE, Software

BYTES = {"bf16": 2, "fp16": 2, "fp8": 2, "fp32": 4, "tf32": 4}


@dataclass(frozen=True)
class Architecture:
    """A transformer. Without an encoder it is a GPT, without a decoder a BERT.

    head_size: of one attention head. kv_heads: key and value heads, as many as heads unless queries are grouped.
    padded_vocabulary: rows of the embedding on all tensor-parallel ranks together. positions: "learned", "relative"
    (one table of relative_buckets x heads in each stack), "rotary" or "none". position_rows: rows of the
    learned table. tied: the head shares the embedding. biases: of the linear layers. norm: "layer" (weight and bias)
    or "rms". head_bias: the output has a bias for every word. final_norm: each stack ends with a norm.
    """

    encoder_layers: int
    decoder_layers: int
    hidden: int
    heads: int
    head_size: int
    ffn: int
    encoder_length: int
    decoder_length: int
    padded_vocabulary: int
    family: str = "t5"
    kv_heads: int = 0
    gated: bool = False
    activation: str = "gelu"
    tied: bool = True
    positions: str = "learned"
    position_rows: int = 0
    relative_buckets: int = 32
    biases: bool = True
    head_bias: bool = True
    norm: str = "layer"
    final_norm: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        longest = max(self.encoder_length, self.decoder_length)
        object.__setattr__(self, "position_rows", self.position_rows or longest)

    @property
    def layers(self) -> int:
        return self.encoder_layers + self.decoder_layers

    @property
    def cross_attention(self) -> bool:
        """Whether the decoder attends to an encoder."""
        return bool(self.encoder_layers and self.decoder_layers)

    def length(self, decoder: bool) -> int:
        return self.decoder_length if decoder else self.encoder_length

    def attended(self, decoder: bool) -> tuple[int, ...]:
        """Tokens of a sample to which each attention of a layer attends: its own stack's, then the encoder's."""
        own = self.length(decoder)
        return (own, self.encoder_length) if decoder and self.cross_attention else (own,)

    @property
    def output_length(self) -> int:
        """Tokens of a sample that have logits."""
        return self.length(bool(self.decoder_layers))

    @property
    def query(self) -> int:
        """Columns of the query projection."""
        return self.heads * self.head_size

    @property
    def key(self) -> int:
        """Columns of the key projection, and of the value projection."""
        return self.kv_heads * self.head_size

    @classmethod
    def of_arguments(cls, arguments: Mapping[str, Any], padded_vocabulary: int) -> "Architecture":
        """The model of Megatron's arguments, by name without dashes (``encoder_num_layers``), as text or values."""

        def number(name: str, otherwise: int = 0) -> int:
            return int(arguments.get(name) or otherwise)

        hidden, heads = number("hidden_size"), number("num_attention_heads")
        t5, gated = number("decoder_num_layers") > 0, _given(arguments, "swiglu")
        return cls(
            encoder_layers=number("encoder_num_layers") if t5 else 0,
            decoder_layers=number("decoder_num_layers" if t5 else "num_layers"),
            hidden=hidden, heads=heads, head_size=number("kv_channels", hidden // heads),
            ffn=number("ffn_hidden_size", usual_ffn(hidden, gated)), kv_heads=number("num_key_value_heads", heads),
            encoder_length=number("encoder_seq_length") if t5 else 0,
            decoder_length=number("decoder_seq_length" if t5 else "seq_length"),
            padded_vocabulary=padded_vocabulary, head_bias=t5, family="t5" if t5 else "gpt",
            gated=gated, activation="silu" if gated else "gelu", biases=not _given(arguments, "disable_bias_linear"),
            tied=not _given(arguments, "untie_embeddings_and_output_weights"),
            positions="rotary" if _given(arguments, "use_rotary_position_embeddings")
            else "none" if _given(arguments, "no_position_embedding") else "learned",
            position_rows=number("max_position_embeddings"),
            norm="rms" if arguments.get("normalization") == "rmsnorm" else "layer",
        )  # fmt: skip


@dataclass(frozen=True)
class Parallel:
    """How many GPUs and in which groups. Ranks go through tensor first, then data, then pipeline, as Megatron's do.

    split_rank: the pipeline stage at which the decoder begins, half of the stages unless given. virtual_stages: model
    chunks on each GPU under the interleaved schedule. deepspeed: DeepSpeed's pipeline engine, whose last stage has a
    copy of the whole tied embedding, positions included.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    split_rank: int | None = None
    sequence_parallel: bool = False
    virtual_stages: int = 1
    devices_per_node: int = 8
    deepspeed: bool = False

    def __str__(self) -> str:
        return f"{self.tensor}/{self.pipeline}/{self.data}"

    @property
    def world(self) -> int:
        return self.tensor * self.pipeline * self.data

    @property
    def decoder_stage(self) -> int:
        """The first stage with decoder layers of an encoder-decoder."""
        return self.split_rank if self.split_rank is not None else self.pipeline // 2

    @property
    def sequence(self) -> int:
        """The number of GPUs over which sequence parallelism divides what tensor parallelism repeats."""
        return self.tensor if self.sequence_parallel else 1


@dataclass(frozen=True)
class Zero:
    """DeepSpeed's ZeRO; stage 0 is the engine's own data parallelism. Sizes are in elements, defaults DeepSpeed's.

    reduction: the dtype in which gradients are sent, "" for the training precision.
    """

    stage: int = 0
    offload_optimizer: bool = False
    offload_parameters: bool = False
    overlap: bool = False
    reduction: str = ""
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
class Job:
    """One training. Batches are in samples; micro_batch is one GPU's.

    engine: "megatron" (Megatron-DeepSpeed) or "native" here; published measurements name others, see software.py.
    attention: "unfused", "fused" (one kernel, PyTorch's or Transformer Engine's) or "flash", in encoder self-attention
    and cross-attention; causal_attention: in decoder self-attention, the same unless given. recompute: "none",
    "selective" (attention's core) or "full" (each layer keeps its input). distributed_optimizer: Megatron's own.
    moments: bytes per parameter of each of the optimizer's states besides the master weights; Adam has two in fp32.
    dummy_gradients: a 16-bit gradient of each shape of weight stays (Megatron-LM's fused gradient accumulation).
    """

    architecture: Architecture
    parallel: Parallel = Parallel()
    micro_batch: int = 1
    global_batch: int = 1
    zero: Zero = Zero()
    distributed_optimizer: bool = False
    precision: str = "bf16"
    recompute: str = "none"
    attention: str = "unfused"
    causal_attention: str = ""
    dropout: float = 0.1
    engine: str = "megatron"
    dummy_gradients: bool = False
    moments: tuple[int, ...] = (4, 4)

    def __post_init__(self) -> None:
        object.__setattr__(self, "causal_attention", self.causal_attention or self.attention)

    @property
    def micro_batches(self) -> int:
        """Per iteration on one data-parallel rank."""
        return max(1, self.global_batch // (self.micro_batch * self.parallel.data))

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
        kernels = self.causal_attention if decoder else self.attention, self.attention
        return list(zip(self.architecture.attended(decoder), kernels, strict=False))

    @classmethod
    def of_plan(cls, plan: Any, padded_vocabulary: int) -> "Job":
        """The job of a launcher's or a stored run's plan, a ``t5bench.record.plan.Plan`` that has a layout."""
        arguments, layout, zero = plan.named_arguments, plan.layout, Zero.of_config(plan.ds_config)
        flash = plan.engine == "megatron" and _given(arguments, "use_flash_attn_v2")
        return cls(
            architecture=Architecture.of_arguments(arguments, padded_vocabulary),
            parallel=Parallel(
                layout.tp, layout.pp, layout.dp, layout.split_rank, _given(arguments, "sequence_parallel"),
                devices_per_node=layout.nproc_per_node, deepspeed=layout.pp > 1 and zero.stage > 0,
            ),
            micro_batch=int(arguments["micro_batch_size"]),
            global_batch=int(arguments["global_batch_size"]),
            zero=zero,
            precision=next((name for name in ("bf16", "fp16") if _given(arguments, name)), "fp32"),
            recompute=arguments.get("recompute_granularity") or "none",
            attention="fused" if plan.engine == "native" else "unfused",
            causal_attention="flash" if flash else "",
            dropout=float(arguments.get("hidden_dropout") or 0),
            engine=plan.engine,
        )  # fmt: skip

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


def _given(arguments: Mapping[str, Any], switch: str) -> bool:
    """A switch has the value "" in a list of words and True in a namespace."""
    return arguments.get(switch, False) not in (False, None)
