"""What a user would pick instead: a plain PyTorch loop over Hugging Face's T5 of the same dimensions.

The same matrix products as the engines' model: as deep, as wide, an ungated feed-forward, tied embeddings. Different
are the relative position bias in place of learned positions, RMS norms without biases, and random tokens that fill
every sample, so that nothing is masked. fp32 weights under bf16 autocast, PyTorch's fused AdamW, dropout, clipping.
Each micro-batch size is one line of the output file as soon as it is measured; what is there is not measured again.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_
from transformers import T5Config, T5ForConditionalGeneration

from t5bench.acceptance import launchers
from t5bench.acceptance.plan import VOCABULARY
from t5bench.acceptance.steps import EXIT_TIME
from t5bench.compare.statistics import median_with_interval
from t5bench.model import flops, peaks
from t5bench.record import machine as environment
from t5bench.record.status import COMPLETE, CONFIGURATION, CRASHED, EXIT_CODES, OUT_OF_MEMORY
from t5bench.run.profile_step import ProfiledStretch

WARM_UPS, ITERATIONS = 3, 10


def make_model(shape: flops.Shape, dropout: float) -> T5ForConditionalGeneration:
    config = T5Config(
        vocab_size=shape.padded_vocabulary,
        d_model=shape.hidden,
        d_kv=shape.kv_channels,
        d_ff=shape.ffn,
        num_layers=shape.encoder_layers,
        num_decoder_layers=shape.decoder_layers,
        num_heads=shape.heads,
        dropout_rate=dropout,
        feed_forward_proj="gelu_pytorch_tanh",
        tie_word_embeddings=True,
        use_cache=False,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config).train()


class Loop:
    """The model, its optimizer, and one iteration of them."""

    def __init__(self, shape: flops.Shape, settings: dict[str, str], device: torch.device, global_batch: int) -> None:
        self.shape, self.device, self.global_batch = shape, device, global_batch
        self.clip = float(settings["CLIP_GRAD"])
        self.model = make_model(self.shape, float(settings["DROPOUT"])).to(device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=float(settings["LR"]),
            weight_decay=float(settings["WEIGHT_DECAY"]),
            fused=True,
        )
        self.run: Callable[..., Any] = self.model

    def compile(self, what: str, backend: str) -> None:
        """Each "blocks" of the stacks for itself, or the whole "model"; every micro-batch size anew."""
        options: dict[str, Any] = {"dynamic": False, "backend": backend}
        if what == "model":
            self.run = torch.compile(self.model, **options)
        elif what == "blocks":
            for stack in (self.model.encoder, self.model.decoder):
                for block in stack.block:
                    block.compile(**options)

    def samples(self, micro_batch: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """An iteration's micro-batches of random tokens, [b, s_enc] and [b, s_dec]."""
        return [
            tuple(
                torch.randint(1, self.shape.padded_vocabulary, (micro_batch, length), device=self.device)
                for length in (self.shape.encoder_length, self.shape.decoder_length)
            )
            for _ in range(self.global_batch // micro_batch)
        ]

    def iterate(self, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """The mean loss, [] on the device."""
        total = torch.zeros((), device=self.device)
        for tokens, labels in batches:
            with torch.autocast(self.device.type, torch.bfloat16):
                loss = self.run(input_ids=tokens, labels=labels).loss / len(batches)
            loss.backward()
            total += loss.detach()
        clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total

    def synchronise(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def measure(self, micro_batch: int) -> dict[str, Any]:
        """The figures of one micro-batch size. Raises torch.cuda.OutOfMemoryError."""
        batches = self.samples(micro_batch)
        begun = self.synchronise()
        self.iterate(batches)
        first = self.synchronise() - begun
        for _ in range(WARM_UPS - 1):
            self.iterate(batches)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        times, loss = [], torch.zeros(())
        for _ in range(ITERATIONS):
            begun = self.synchronise()
            loss = self.iterate(batches)
            times.append(1000 * (self.synchronise() - begun))
        found = median_with_interval(times)
        memory = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()) if self.on_gpu else (None, None)
        return {
            "milliseconds": asdict(found),
            "iterations": ITERATIONS,
            "samples_per_second": 1000 * self.global_batch / found.median,
            "tflops": flops.flops_per_iteration(self.shape, self.global_batch) / (found.median / 1000) / 1e12,
            "peak_allocated_mib": memory[0] and memory[0] / 2**20,
            "peak_reserved_mib": memory[1] and memory[1] / 2**20,
            "compile_seconds": max(0.0, first - found.median / 1000),
            "final_loss": loss.item(),
            "profile": self.profile(batches),
        }

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def profile(self, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, Any]:
        stretch = ProfiledStretch(self.device.type)
        stretch.begin()
        self.iterate(batches)
        return stretch.end(iteration=WARM_UPS + ITERATIONS + 1)

    def forget(self) -> None:
        """After an out-of-memory, and between sizes: their kernels and memory."""
        self.optimizer.zero_grad(set_to_none=True)
        torch.compiler.reset()
        if self.on_gpu:
            torch.cuda.empty_cache()


def done(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.read_text().splitlines()] if output.exists() else []


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", required=True, help="a launcher's MODEL_PRESET")
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--micro-batch-sizes", required=True, help="for example 1,2,4; until memory is full")
    parser.add_argument("--global-batch-size", type=int, required=True)
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY, help="tokens (default: %(default)s)")
    parser.add_argument("--compile", choices=("", "blocks", "model"), default="", help="each block, or the whole")
    parser.add_argument("--backend", default="inductor", help="torch.compile's")
    parser.add_argument("--seconds", type=float, required=True, help="after these no further size is begun")
    parser.add_argument("--output", type=Path, required=True)
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    begun = time.monotonic()
    # In PyTorch 2.4 every block is compiled for itself, more of them than it takes by default.
    torch._dynamo.config.cache_size_limit = 256
    device = torch.device(arguments.device)
    settings = launchers.settings("ddp", arguments.preset)
    shape = flops.Shape.of_settings(lambda name: int(settings[name]), arguments.vocabulary)
    loop = Loop(shape, settings, device, arguments.global_batch_size)
    loop.compile(arguments.compile, arguments.backend)
    known, failed = done(arguments.output), False
    device_name = torch.cuda.get_device_name(device) if loop.on_gpu else "cpu"
    common = {
        "global_batch": arguments.global_batch_size,
        "compile": arguments.compile,
        "attention": loop.model.config._attn_implementation,
        "device_name": device_name,
        "peak_tflops": float(settings["PEAK_TFLOPS"] or 0) or peaks.peak_tflops(device_name, peaks.BF16),
        "shape": asdict(loop.shape),
        "versions": environment.versions(),
    }
    for size in map(int, arguments.micro_batch_sizes.split(",")):
        if any(point["micro_batch"] == size for point in known):
            continue
        if arguments.global_batch_size % size:
            print(f"{arguments.global_batch_size} samples are no multiple of micro-batches of {size}", file=sys.stderr)
            return EXIT_CODES[CONFIGURATION]
        if time.monotonic() - begun > arguments.seconds:
            print(f"no time is left for micro-batches of {size} and what follows", file=sys.stderr)
            return EXIT_TIME
        try:
            point = loop.measure(size) | {"status": COMPLETE, "reason": ""}
        except Exception as error:  # a compiler may fail in any way, and the other sizes are worth having
            status = OUT_OF_MEMORY if isinstance(error, torch.cuda.OutOfMemoryError) else CRASHED
            point = {"status": status, "reason": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
            failed |= status == CRASHED
        loop.forget()
        with arguments.output.open("a") as file:
            file.write(json.dumps({"micro_batch": size, **common, **point}) + "\n")
        print(
            json.dumps({key: point.get(key) for key in ("status", "samples_per_second", "tflops", "compile_seconds")})
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
