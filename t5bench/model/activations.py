"""What a forward pass keeps for backward, in bytes of one GPU.

Korthikanti et al. (https://arxiv.org/abs/2205.05198) derived again for any FFN size, cross-attention, grouped queries,
attention kernels and what software keeps. n: tokens of a micro-batch, h: hidden size, t: tensor-parallel size.
"""

from dataclasses import dataclass

from t5bench.model.job import Job
from t5bench.model.parameters import Stage, stage_of
from t5bench.model.software import SOFTWARE, Software

NORM_STATISTICS = {"layer": 8, "rms": 4}  # bytes of a token: the fp32 mean and reciprocal deviation


@dataclass(frozen=True)
class Lengths:
    """Tokens of a micro-batch in encoder and decoder, and of one sample."""

    encoder: int
    decoder: int
    samples: int

    @property
    def encoder_tokens(self) -> int:
        return self.encoder * self.samples

    @property
    def decoder_tokens(self) -> int:
        return self.decoder * self.samples


def lengths(job: Job) -> Lengths:
    a = job.architecture
    return Lengths(a.encoder_length, a.decoder_length, job.micro_batch)


def layer_bytes(job: Job, decoder: bool = False) -> float:
    """What one layer keeps of one micro-batch; under full recomputation its input alone."""
    a, kept, size = job.architecture, SOFTWARE[job.engine], lengths(job)
    tokens = size.decoder_tokens if decoder else size.encoder_tokens
    if job.recompute == "full":
        return tokens * a.hidden * (kept.stream or job.element) / _sequence(job)
    length = size.decoder if decoder else size.encoder
    kernel = job.causal_attention if decoder else job.attention
    found = _attention(job, kept, tokens, tokens, (length, length), kernel) + _mlp(job, kept, tokens)
    if decoder and a.cross_attention:
        lengths_of_cross = (size.decoder, size.encoder)
        found += _attention(job, kept, tokens, size.encoder_tokens, lengths_of_cross, job.attention, cross=True)
    return found


def _sequence(job: Job) -> int:
    """Among how many GPUs sequence parallelism divides what tensor parallelism repeats."""
    return job.parallel.tensor if job.parallel.sequence_parallel else 1


def _norm(job: Job, kept: Software, tokens: int, readers: int = 1) -> float:
    """A norm's tensors. readers: linear layers that take its output, each with a copy of its own under autocast."""
    a, element = job.architecture, kept.stream or job.element
    copies = 2 * readers if kept.casts else 0
    whole = tokens * (a.hidden * (kept.norm_tensors * element + copies) + NORM_STATISTICS[a.norm])
    return whole / _sequence(job)


def _dropped(job: Job, kept: Software, elements: float) -> float:
    mask = kept.tensor_mask or kept.mask if job.parallel.tensor > 1 else kept.mask
    return elements * mask if job.dropout else 0.0


def _attention(
    job: Job, kept: Software, tokens: int, keys: int, size: tuple[int, int], kernel: str, cross: bool = False
) -> float:
    """Norm, projections, core and dropout. keys: tokens of keys and values; size: a sample's queries and keys."""
    a, t, e = job.architecture, job.parallel.tensor, job.element
    norm = _norm(job, kept, tokens, readers=1 if cross else 3)
    projections = e * (2 * tokens * a.query + 2 * keys * a.key)
    copied = 2 * 2 * keys * a.hidden if cross and kept.casts else 0
    if kernel == "unfused":
        core = _scores(job, kept, size)
    else:
        again = kernel == "flash" and kept.copies_flash and job.micro_batch > 1 and a.family != "gpt"
        core = 4 * a.heads * tokens + again * e * tokens * a.query
    dropout = _dropped(job, kept, tokens * a.hidden) / _sequence(job)
    masks = job.micro_batch * size[0] * size[1] if kept.keeps_masks and kernel == "unfused" else 0
    if job.recompute == "selective":
        core = masks = 0
    return norm + (projections + core) / t + copied + masks + dropout


def _scores(job: Job, kept: Software, size: tuple[int, int]) -> float:
    """Of every attention score: the probability, and with dropout its mask and what is left of it."""
    e = job.element
    probability = kept.softmax or e
    each = probability + (kept.mask + e if job.dropout else e * (probability != e)) + kept.score_copies * e
    return job.architecture.heads * job.micro_batch * size[0] * size[1] * each


def _mlp(job: Job, kept: Software, tokens: int) -> float:
    a, e = job.architecture, job.element
    tensors = 1 if a.activation == "relu" else 2
    if a.gated:
        tensors = 3 if kept.fused_gate else 4
    inside = e * tensors * tokens * a.ffn
    if kept.mlp_dropout and job.dropout:
        inside += (e + kept.mask) * tokens * a.ffn
    dropout = _dropped(job, kept, tokens * a.hidden) / _sequence(job)
    return _norm(job, kept, tokens, readers=2 if a.gated else 1) + inside / job.parallel.tensor + dropout


def in_flight(job: Job, stage: int) -> int:
    """Chunks of layers whose forward is done and whose backward is not, at the most, on a stage under 1F1B.

    Interleaved (https://arxiv.org/abs/2104.04473, section 2.2): Megatron-LM core/pipeline_parallel/schedules.py:839.
    """
    p, v = job.parallel.pipeline, job.parallel.virtual_stages
    if v > 1:
        return min(2 * (p - stage - 1) + (v - 1) * p + 1, v * job.micro_batches)
    return min(p - stage, job.micro_batches)


def activation_bytes(job: Job, stage: int = 0) -> dict[str, float]:
    """What a stage keeps of all micro-batches in flight, by component, at the end of a forward before its loss."""
    part = stage_of(job.architecture, job.parallel, stage)
    chunks, v = in_flight(job, stage), job.parallel.virtual_stages
    layers = {"encoder": part.encoder_layers * layer_bytes(job) if part.encoder_layers else 0.0}
    layers["decoder"] = part.decoder_layers * layer_bytes(job, decoder=True) if part.decoder_layers else 0.0
    found = {name: size * chunks / v for name, size in layers.items()}
    found["ends of stacks"] = chunks / v * _ends(job, part) if v == 1 else _ends(job, part)
    if job.recompute == "full" and part.layers:
        plain = Job(**{**vars(job), "recompute": "none"})
        found["recomputed layer"] = layer_bytes(plain, decoder=bool(part.decoder_layers))
    return found


def _ends(job: Job, part: Stage) -> float:
    """Embedding dropout, final norms with their outputs, dense masks of padding, BERT's transform."""
    a, kept, size = job.architecture, SOFTWARE[job.engine], lengths(job)
    decoder_alone = part.decoder_layers and not part.encoder_layers
    tokens = (part.encoder_layers > 0) * size.encoder_tokens + (part.decoder_layers > 0) * size.decoder_tokens
    found = _dropped(job, kept, tokens * a.hidden) / _sequence(job) if part.embedding else 0.0
    if part.head or (a.cross_attention and part.encoder_layers):
        found += _norm(job, kept, tokens) if a.final_norm else 0.0
    if decoder_alone and a.cross_attention:
        found += size.encoder_tokens * a.hidden * job.element  # the encoder's output, received
    if a.family == "bert" and part.head:
        found += 8 * size.encoder_tokens * a.hidden  # dense, gelu and norm of the transform
    if a.family != "gpt" and "unfused" in (job.attention, job.causal_attention):
        s, d = size.encoder * (part.encoder_layers > 0), size.decoder * (part.decoder_layers > 0)
        found += size.samples * (s * s + d * d + d * size.encoder * (d > 0))
    return found


def logits_bytes(job: Job, stage: int = 0) -> tuple[float, float]:
    """Beside the activations of a last stage: while the loss is computed, and while the head's gradients are.

    The head's weight has its gradient in the training precision until backward has reached the embedding too.
    """
    a, kept, size = job.architecture, SOFTWARE[job.engine], lengths(job)
    if not stage_of(a, job.parallel, stage).head:
        return 0.0, 0.0
    tokens = size.decoder_tokens if a.decoder_layers else size.encoder_tokens
    logits = tokens * a.padded_vocabulary / job.parallel.tensor
    hidden = 2 * tokens * a.hidden * job.element
    each = kept.tensor_logits or kept.logits if job.parallel.tensor > 1 else kept.logits
    return logits * each, logits * kept.logit_gradients + word_gradient(job) + hidden


def word_gradient(job: Job) -> float:
    """The gradient of the words as autograd has it: in fp32 beside its 16 bits where parameters are cast."""
    cast = SOFTWARE[job.engine].cast_parameters and job.element == 2 and not job.zero.stage
    return (
        job.architecture.padded_vocabulary
        / job.parallel.tensor
        * job.architecture.hidden
        * (4 if cast else job.element)
    )
