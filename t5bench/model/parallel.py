"""What a parallel layout costs one GPU: memory, bytes sent in an iteration, and when a pipeline's stages compute.

The formulas are those of bf16 training with Adam under Megatron-DeepSpeed, without recomputation or fused attention.
"""

from dataclasses import dataclass

from t5bench.model.flops import Shape, components, of_stage, parameters

# DeepSpeed's stage3_max_reuse_distance, in parameters: what is needed again sooner stays gathered.
REUSE_DISTANCE = 10**9

# By ZeRO stage (https://arxiv.org/abs/1910.02054): a kind of state, its bytes per parameter on every data-parallel
# rank, and those divided among the ranks. Optimizer states are fp32 master parameters and Adam's two moments; gradients
# are fp32, but ZeRO-1 first reduces them in bf16.
STATES = {
    0: (("parameters", 2, 0), ("gradients", 4, 0), ("optimizer states", 12, 0)),
    1: (("parameters", 2, 0), ("gradients", 2, 4), ("optimizer states", 0, 12)),
    2: (("parameters", 2, 0), ("gradients", 0, 6), ("optimizer states", 0, 12)),
    3: (("parameters", 0, 2), ("gradients", 0, 4), ("optimizer states", 0, 12)),
}


@dataclass(frozen=True)
class Training:
    """A model and how it is trained. zero is DeepSpeed's stage, 0 for Megatron's own DDP; batches are in samples."""

    shape: Shape
    global_batch: int
    micro_batch: int = 1
    tp: int = 1
    pp: int = 1
    dp: int = 1
    zero: int = 0
    offload: bool = False

    @property
    def gathered_again(self) -> float:
        """The share of the parameters that ZeRO-3 lets go after forward and gathers again for backward."""
        return max(0.0, 1 - REUSE_DISTANCE / (2 * parameters(self.shape)))

    def state_bytes(self, stage: int = 0) -> dict[str, float]:
        """Training states by kind, of a GPU on pipeline stage `stage`; with offload they are in CPU memory."""
        count = parameters(self.shape, self.tp, self.pp, stage)
        return {kind: count * (whole + divided / self.dp) for kind, whole, divided in STATES[self.zero]}

    def memory_bytes(self, stage: int = 0) -> dict[str, float]:
        """What a GPU holds by kind, without communication buckets, fragmentation and the CUDA context."""
        found = {} if self.offload else self.state_bytes(stage)
        if self.zero == 3:
            found["gathered"] = 2 * min(parameters(self.shape), REUSE_DISTANCE / 2)
        # Under 1F1B a stage has as many micro-batches in flight as there are stages from it to the end.
        samples = self.micro_batch * (self.pp - stage)
        return found | {"activations": samples * of_stage(activation_bytes(self.shape, self.tp), self.pp, stage)}

    def sent_bytes(self, stage: int = 0) -> dict[str, float]:
        """What a GPU sends in an iteration, by what is sent. Collectives count as rings.

        DDP reduces gradients in fp32, ZeRO in bf16; ZeRO-2 all-reduces every micro-batch (DeepSpeed issue 2252). Tensor
        parallelism (https://arxiv.org/abs/1909.08053) has two all-reduces a layer each way, three in decoders, and one
        of the gradient of the encoder's output. The masks are int64.
        """
        shape, m = self.shape, self.global_batch // (self.micro_batch * self.dp)
        s, d, token = shape.encoder_length, shape.decoder_length, 2 * self.micro_batch * shape.hidden
        whole = parameters(shape, self.tp, self.pp, stage) * (self.dp - 1) / self.dp
        reduced = {
            "encoder": shape.encoder_layers * 4 * s * token + s * token,
            "decoder": shape.decoder_layers * (6 * d + s) * token + 2 * d * token,
        }
        return {
            "gradients": whole * {0: 8, 1: 4, 2: 4 * m, 3: 2 * m}[self.zero],
            "gathered": whole * {0: 0, 1: 2, 2: 2, 3: 2 * m * (1 + self.gathered_again)}[self.zero],
            "layers": m * of_stage(reduced, self.pp, stage) * 2 * (self.tp - 1) / self.tp,
            "masks": (self.tp > 1) * m * 8 * self.micro_batch * (s * s + d * d + s * d),
            "stages": (self.pp > 1) * m * s * token,  # the encoder's output, or its gradient
            "tied embedding": (self.pp > 1) * 4 * components(shape, self.tp)["embedding"],
        }


def activation_bytes(shape: Shape, tp: int = 1) -> dict[str, float]:
    """What one sample keeps for backward in encoder, decoder and head.

    Korthikanti et al. (https://arxiv.org/abs/2205.05198), derived again for any FFN size and for cross-attention.
    """
    h, f, a, s, d = shape.hidden, shape.ffn, shape.heads, shape.encoder_length, shape.decoder_length
    encoder = 10 * s * h + (8 * s * h + 4 * s * f + 5 * a * s * s) / tp
    decoder = 15 * d * h + (12 * d * h + 4 * d * f + 5 * a * d * d + 4 * s * h + 5 * a * d * s) / tp
    head = 10 * d * shape.padded_vocabulary / tp
    return {"encoder": shape.encoder_layers * encoder, "decoder": shape.decoder_layers * decoder, "head": head}


def one_f_one_b(forward: tuple[float, float], micro_batches: int) -> list[tuple[int, str, int, float, float]]:
    """1F1B (https://arxiv.org/abs/2104.04473) on two stages: (stage, "F" or "B", micro-batch, start, end).

    `forward` is the time of a forward on each stage. A backward takes twice that, and sending takes no time.
    """
    rounds = [((1, "F", k), (1, "B", k), (0, "F", k + 1), (0, "B", k)) for k in range(micro_batches)]
    order = [(0, "F", 0), *(job for jobs in rounds for job in jobs if job[2] < micro_batches)]
    free, ends, schedule = [0.0, 0.0], {}, []
    for stage, way, k in order:
        start = max(free[stage], ends.get((1 - stage, way, k), 0.0))
        free[stage] = ends[stage, way, k] = start + forward[stage] * (1 if way == "F" else 2)
        schedule.append((stage, way, k, start, free[stage]))
    return schedule
