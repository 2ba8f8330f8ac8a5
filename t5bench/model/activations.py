"""What a forward pass keeps for the backward pass, in bytes on one GPU.

Korthikanti et al. (https://arxiv.org/abs/2205.05198), extended to any FFN size, cross-attention, grouped queries,
attention kernels and what software keeps. n: tokens of a micro-batch, h: hidden size, t: tensor-parallel size.
"""

from dataclasses import replace

from t5bench.model.job import Job
from t5bench.model.parameters import Stage, stage_of

NORM_STATISTICS = {"layer": 8, "rms": 4}  # bytes of a token: the fp32 mean and reciprocal deviation


def layer_bytes(job: Job, decoder: bool = False) -> float:
    """What one layer keeps of one micro-batch; with full recomputation only its input."""
    a = job.architecture
    if job.recompute == "full":
        return job.tokens(decoder) * a.hidden * (job.software.stream or job.element) / job.parallel.sequence
    attentions = sum(_attention(job, decoder, place > 0, *each) for place, each in enumerate(job.attentions(decoder)))
    return attentions + _mlp(job, job.tokens(decoder))


def _norm(job: Job, tokens: int, readers: int = 1) -> float:
    """A norm's tensors. readers: linear layers that take its output, each with its own copy under autocast."""
    a, kept = job.architecture, job.software
    each = kept.norm_tensors * (kept.stream or job.element) + 2 * readers * kept.casts
    return tokens * (a.hidden * each + NORM_STATISTICS[a.norm]) / job.parallel.sequence


def _dropped(job: Job, elements: float) -> float:
    """The mask of a dropout that tensor parallelism does not divide."""
    mask = (job.parallel.tensor > 1 and job.software.tensor_mask) or job.software.mask
    return elements * mask / job.parallel.sequence if job.dropout else 0.0


def _attention(job: Job, decoder: bool, cross: bool, length: int, kernel: str) -> float:
    """Norm, projections, core and dropout. length: of a sample's keys and values, the encoder's under `cross`.

    For every score, unfused attention keeps the probability and, with dropout, its mask and its value after dropout.
    """
    a, kept, e = job.architecture, job.software, job.element
    tokens, keys = job.tokens(decoder), job.micro_batch * length
    projections = e * (2 * tokens * a.query + 2 * keys * (a.query if kept.repeats_keys else a.key))
    copied = 2 * 2 * keys * a.hidden if cross and kept.casts else 0
    core, masks = 0.0, 0
    if job.recompute != "selective" and kernel == "unfused":
        probability = kept.softmax or e
        each = probability + (kept.mask + e if job.dropout else e * (probability != e)) + kept.score_copies * e
        padded = cross or not decoder  # a decoder's own mask is causal
        core, masks = a.heads * tokens * length * each, tokens * length * (kept.keeps_masks and padded)
    elif job.recompute != "selective":
        again = kernel == "flash" and kept.copies_flash and job.micro_batch > 1
        core = 4 * a.heads * tokens + again * e * tokens * a.query
    kept_whole = copied + masks + _dropped(job, tokens * a.hidden)
    return _norm(job, tokens, readers=1 if cross else 3) + (projections + core) / job.parallel.tensor + kept_whole


def _mlp(job: Job, tokens: int) -> float:
    a, kept, e = job.architecture, job.software, job.element
    tensors = 4 - kept.fused_gate if a.gated else 2 - (a.activation == "relu")
    dropped = e + kept.mask if kept.mlp_dropout and job.dropout else 0
    inside = (e * tensors + dropped) * tokens * a.ffn / job.parallel.tensor
    return _norm(job, tokens, readers=1 + a.gated) + inside + _dropped(job, tokens * a.hidden)


def in_flight(job: Job, stage: int) -> int:
    """The largest number of chunks of layers between their forward and their backward pass, on a stage under 1F1B.

    Interleaved (https://arxiv.org/abs/2104.04473, section 2.2): Megatron-LM core/pipeline_parallel/schedules.py:839.
    """
    p, v = job.parallel.pipeline, job.parallel.virtual_stages
    if v > 1:
        return min(2 * (p - stage - 1) + (v - 1) * p + 1, v * job.micro_batches)
    return min(p - stage, job.micro_batches)


def activation_bytes(job: Job, stage: int = 0) -> dict[str, float]:
    """What a stage keeps of all micro-batches in flight, by component, after a forward pass and before the loss."""
    part = stage_of(job.architecture, job.parallel, stage)
    chunks, v = in_flight(job, stage), job.parallel.virtual_stages
    layers = {"encoder": part.encoder_layers, "decoder": part.decoder_layers}
    found = {name: n and n * layer_bytes(job, name == "decoder") * chunks / v for name, n in layers.items()}
    found["ends of stacks"] = chunks / v * _ends(job, part) if v == 1 else _ends(job, part)
    found["pipeline's buffers"] = chunks * _buffers(job, stage) if job.parallel.deepspeed else 0.0
    if job.recompute != "none":  # of one layer at a time: all of it, or attention's scores
        plain, full = replace(job, recompute="none"), job.recompute == "full"
        stacks = [name == "decoder" for name, n in layers.items() if n]
        again = [layer_bytes(plain, stack) - (0 if full else layer_bytes(job, stack)) for stack in stacks]
        found["recomputed layer"] = max(again, default=0.0)
    return found


def _buffers(job: Job, stage: int) -> float:
    """What DeepSpeed's pipeline engine keeps of a micro-batch in flight, in addition: its output, and its input, of
    which the first layer has a clone. Under tensor parallelism: a slice of the output, and the first layer's own input.

    deepspeed 0.18.3, runtime/pipe/engine.py:712-764.
    """
    part, t = stage_of(job.architecture, job.parallel, stage), job.parallel.tensor
    tensors = (not part.head) / t + (stage > 0 and t == 1)
    return tensors * job.tokens(part.decoder_layers > 0) * job.architecture.hidden * job.element


def _ends(job: Job, part: Stage) -> float:
    """Embedding dropout, final norms with their outputs, dense masks of padding, BERT's transform."""
    a, has_encoder, has_decoder = job.architecture, part.encoder_layers > 0, part.decoder_layers > 0
    tokens = has_encoder * job.tokens(False) + has_decoder * job.tokens(True)
    found = _dropped(job, tokens * a.hidden) if part.embedding else 0.0
    if a.final_norm and (part.head or (a.cross_attention and has_encoder)):
        found += _norm(job, tokens)
    if a.cross_attention and has_decoder and not has_encoder:
        found += job.tokens(False) * a.hidden * job.element  # the encoder's output, received
    if a.family == "bert" and part.head:
        found += 8 * job.tokens(False) * a.hidden  # dense, gelu and norm of the transform
    if a.family != "gpt" and "unfused" in (job.attention, job.causal_attention):
        s, d = a.encoder_length * has_encoder, a.decoder_length * has_decoder
        found += job.micro_batch * (s * s + d * d + d * a.encoder_length)
    return found


def logits_bytes(job: Job, stage: int = 0) -> tuple[float, float]:
    """What a last stage needs besides activations, while it computes the loss and while it computes head gradients.

    The gradient of the head's weight stays in the training precision until backward has reached the embedding too.
    """
    a, kept, t = job.architecture, job.software, job.parallel.tensor
    if not stage_of(a, job.parallel, stage).head:
        return 0.0, 0.0
    tokens = job.micro_batch * a.output_length
    logits = tokens * a.padded_vocabulary / t
    gradients = logits * kept.logit_gradients + word_gradient(job) + 2 * tokens * a.hidden * job.element
    return logits * ((t > 1 and kept.tensor_logits) or kept.logits), gradients


def word_gradient(job: Job) -> float:
    """The word embedding's gradient in autograd: fp32 in addition to 16 bits if parameters are cast."""
    a, cast = job.architecture, job.software.cast_parameters and job.element == 2 and not job.zero.stage
    return a.padded_vocabulary / job.parallel.tensor * a.hidden * (4 if cast else job.element)
