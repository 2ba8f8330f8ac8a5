"""Megatron-LM's theoretical memory report (megatron/training/theoretical_memory_usage.py), from a checkout.

The module is loaded alone: of its package it needs two functions, whether a model has state-space layers and how rank 0
prints, which stand here, so that neither CUDA nor Transformer Engine is needed.
"""

import contextlib
import io
import sys
from argparse import Namespace
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

from t5bench.costmodel.machine import MIB
from t5bench_evidence.layout_bench.cases import Case
from t5bench_evidence.layout_bench.planners import Answer

NAME = "Megatron-LM"
ABOUT = "its report of the theoretical memory"
PACKAGE = "layout_bench_megatron"


@cache
def _module(checkout: Path) -> ModuleType:
    package = ModuleType(PACKAGE)
    package.__path__ = [str(checkout / "megatron" / "training")]
    utils = ModuleType(f"{PACKAGE}.utils")
    utils.is_hybrid_model = lambda args: False  # type: ignore[attr-defined]
    utils.print_rank_0 = print  # type: ignore[attr-defined]
    sys.modules |= {PACKAGE: package, utils.__name__: utils}
    return import_module(f"{PACKAGE}.theoretical_memory_usage")


def fault(case: Case) -> str:
    """What of a case it cannot express; "" if it can express all."""
    job = case.job
    model = job.architecture
    parallel = job.parallel
    faults = {
        "an encoder and a decoder": model.cross_attention,
        "full recomputation": job.recompute == "full",
        "a precision other than bf16": job.precision != "bf16",
        "ZeRO-2, ZeRO-3 or FSDP": job.zero.stage > 1 or job.fully_sharded,
        "another pipeline stage than the first": case.is_last_stage and parallel.pipeline > 1,
        "an optimizer other than Adam": job.moments != (4, 4),
    }
    return next((words for words, is_so in faults.items() if is_so), "")


def answer(case: Case, checkout: Path) -> Answer:
    """Of a case without a fault. Raises Inexpressible where the program refuses it."""
    job = case.job
    model = job.architecture
    parallel = job.parallel
    args = Namespace(
        kv_channels=model.head_size,
        num_attention_heads=model.heads,
        hidden_size=model.hidden,
        group_query_attention=model.kv_heads < model.heads,
        num_query_groups=model.kv_heads,
        num_experts=None,
        moe_shared_expert_intermediate_size=None,
        moe_latent_size=None,
        mtp_num_layers=None,
        multi_latent_attention=False,
        swiglu=model.gated,
        add_bias_linear=model.biases,
        num_layers=model.layers,
        normalization="RMSNorm" if model.norm == "rms" else "LayerNorm",
        padded_vocab_size=model.padded_vocabulary,
        untie_embeddings_and_output_weights=not model.tied,
        ffn_hidden_size=model.ffn,
        expert_tensor_parallel_size=1,
        expert_model_parallel_size=1,
        world_size=parallel.world,
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_stages if parallel.virtual_stages > 1 else None,
        data_parallel_size=parallel.data,
        use_distributed_optimizer=job.distributed_optimizer or job.zero.stage == 1,
        seq_length=max(model.encoder_length, model.decoder_length),
        micro_batch_size=job.micro_batch,
        sequence_parallel=parallel.sequence_parallel,
        recompute_granularity=None if job.recompute == "none" else job.recompute,
    )
    with contextlib.redirect_stdout(io.StringIO()):
        states, _, total = _module(checkout).report_theoretical_memory(args, num_microbatches=job.micro_batches)
    return Answer(allocated=states * MIB, peak=total * MIB, fits=total * MIB <= case.machine.device.memory)
