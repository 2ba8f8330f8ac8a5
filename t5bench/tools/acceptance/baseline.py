"""What a user would pick instead: a plain PyTorch loop over Hugging Face's T5 of the same dimensions.

    python -m t5bench.tools.acceptance.baseline FILE WAY...     WAY: eager, or compiled, in this order

The settings are the launchers', from the environment. The matrix products are those of the engines' model: as deep, as
wide, an ungated feed-forward, tied embeddings. It differs in its relative position bias instead of learned positions,
RMS norms without biases, and random tokens that fill every sample, so that nothing is masked. It has fp32 weights, bf16
autocast, PyTorch's fused AdamW, dropout and clipping. It is measured as it is or with every block compiled. Each
measurement is a line of FILE, with the keys of a comparison's rows.
"""

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.nn.utils import clip_grad_norm_
from transformers import T5Config, T5ForConditionalGeneration

from t5bench.compare.statistics import median_with_interval
from t5bench.costmodel import flops
from t5bench.costmodel.job import Architecture
from t5bench.costmodel.machine import peak_tflops
from t5bench.plan.planner import plan
from t5bench.profile import parts as profile
from t5bench.profile.step import ProfiledStretch
from t5bench.record.plan import Plan
from t5bench.record.status import COMPLETE, CRASHED, OUT_OF_MEMORY
from t5bench.sweep.launch import BASELINE
from t5bench.text import guard_streams
from t5bench.tools.acceptance.results import attention_kernels

# Iterations of TRAIN_ITERS; one more is profiled.
WARM_UPS = 3


class Loop:
    """The model, its optimizer, and random tokens for one iteration, in micro-batches [b, s_enc] and [b, s_dec]."""

    def __init__(self, plan: Plan) -> None:
        # PyTorch prefers cuDNN's attention on Hopper, but it has no gradient for the position bias.
        torch.backends.cuda.enable_cudnn_sdp(False)
        self.plan = plan
        self.device = plan.device
        self.global_batch = plan.number("GLOBAL_BATCH_SIZE")
        # The sample's own vocabulary is smaller.
        vocabulary = plan.number("VOCABULARY_MULTIPLE")
        self.shape = Architecture.of_arguments(plan.named_arguments, vocabulary)
        config = T5Config(
            vocab_size=self.shape.padded_vocabulary,
            d_model=self.shape.hidden,
            d_kv=self.shape.head_size,
            d_ff=self.shape.ffn,
            num_layers=self.shape.encoder_layers,
            num_decoder_layers=self.shape.decoder_layers,
            num_heads=self.shape.heads,
            dropout_rate=plan.decimal("DROPOUT"),
            feed_forward_proj="gelu_pytorch_tanh",
            tie_word_embeddings=True,
            use_cache=False,
            decoder_start_token_id=0,
        )
        with torch.device(self.device):
            self.model = T5ForConditionalGeneration(config).train()
            self.batches = self._random_batches(plan.number("MICRO_BATCH_SIZE"))
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=plan.decimal("LR"),
            weight_decay=plan.decimal("WEIGHT_DECAY"),
            fused=True,
        )

    def _random_batches(self, micro_batch: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Tokens and labels of each micro-batch of an iteration."""
        batches = []
        for _ in range(self.global_batch // micro_batch):
            size_of_tokens = (micro_batch, self.shape.encoder_length)
            size_of_labels = (micro_batch, self.shape.decoder_length)
            tokens = torch.randint(1, self.shape.padded_vocabulary, size_of_tokens)
            labels = torch.randint(1, self.shape.padded_vocabulary, size_of_labels)
            batches.append((tokens, labels))
        return batches

    def compile(self) -> None:
        """Each block of the stacks separately; on a CPU torch.compile without a compiler."""
        # PyTorch 2.4 recompiles every block, more often than its default limit allows.
        torch._dynamo.config.cache_size_limit = 256
        backend = "inductor" if self.device == "cuda" else "aot_eager"
        for block in (*self.model.encoder.block, *self.model.decoder.block):
            block.compile(dynamic=False, backend=backend)

    def iterate(self) -> tuple[float, float]:
        """Trains one update; returns its milliseconds and its loss, for which it waits for the device."""
        begun = time.perf_counter()
        total = torch.zeros((), device=self.device)
        for tokens, labels in self.batches:
            with torch.autocast(self.device, torch.bfloat16, enabled=self.plan.precision == "bf16"):
                loss = self.model(input_ids=tokens, labels=labels).loss / len(self.batches)
            loss.backward()
            total += loss.detach()
        clip_grad_norm_(self.model.parameters(), self.plan.decimal("CLIP_GRAD"))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        loss = total.item()
        return 1000 * (time.perf_counter() - begun), loss

    def measure(self, peak: float | None) -> dict[str, Any]:
        """peak: TFLOP/s. Raises torch.cuda.OutOfMemoryError."""
        iterations = self.plan.number("TRAIN_ITERS")
        on_gpu = self.device == "cuda"
        self.optimizer.zero_grad(set_to_none=True)  # an attempt that ran out of memory left some
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()  # as the engines do before their first iteration
        milliseconds = []
        for _ in range(iterations - 1):
            duration, _ = self.iterate()
            milliseconds.append(duration)
        timing = median_with_interval(milliseconds[WARM_UPS:])
        compile_ms = max(0.0, milliseconds[0] - timing.median)
        tflops = flops.flops_per_iteration(self.shape, self.global_batch) / timing.median / 1e9
        memory = {"0": torch.cuda.max_memory_allocated() / 2**20} if on_gpu else {}
        stretch = ProfiledStretch(self.device)
        stretch.begin()
        _, loss = self.iterate()
        profiled, events = stretch.end(iterations)
        return {
            "milliseconds_per_iteration": asdict(timing),
            "samples_per_second": asdict(timing.per(1000.0 * self.global_batch)),
            "tflops_per_gpu": tflops,
            "mfu": peak and tflops / peak,
            "peak_memory_mib": memory,
            "compile_seconds": compile_ms / 1000,
            "final_loss": loss,
            "profile": profiled,
            "limits": profile.limits(msgspec.convert(profiled, profile.Profile).ranks),
            "attention": attention_kernels(event["name"] for event in events),
        }


def main(output: Path, ways: Sequence[str]) -> int:
    planned = plan(os.environ, BASELINE)
    gpu = torch.cuda.get_device_name() if planned.device == "cuda" else ""
    peak = float(planned.value("PEAK_TFLOPS") or 0) or peak_tflops(gpu, "bf16")
    common = {"gpu": gpu, "micro_batch": planned.number("MICRO_BATCH_SIZE")}
    loop = Loop(planned)
    points = []
    for way in ways:
        if way == "compiled":
            loop.compile()
        try:
            point = {"status": COMPLETE, "reason": "", **loop.measure(peak)}
        except Exception as error:  # a compiler may fail in any way
            status = OUT_OF_MEMORY if isinstance(error, torch.cuda.OutOfMemoryError) else CRASHED
            point = {"status": status, "reason": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
        points.append(common | {"what": f"Hugging Face, {way}"} | point)
        output.write_text("".join(json.dumps(point) + "\n" for point in points))
    has_crashed = any(point["status"] == CRASHED for point in points)
    return 1 if has_crashed else 0


if __name__ == "__main__":
    guard_streams()
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
