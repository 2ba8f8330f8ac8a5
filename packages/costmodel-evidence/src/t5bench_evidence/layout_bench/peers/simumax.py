"""SimuMax (MooreThreads/SimuMax), from a checkout, with the systems that it ships.

It ships none of an A100 with NVLink: the A100 PCIe's, with the networks of the template in docs/system.md.
"""

import contextlib
import io
import json
import logging
import os
import re
import tempfile
import warnings
from functools import cache
from pathlib import Path
from typing import Any

from t5bench_evidence.layout_bench.cases import Case
from t5bench_evidence.layout_bench.peers.checkout import imported_from
from t5bench_evidence.layout_bench.planners import Answer, Inexpressible

NAME = "SimuMax"
ABOUT = "times and memory of decoders on Megatron-LM, with operators that its authors measured"
SYSTEMS = {"a100": "a100_pcie.json", "a100-pcie": "a100_pcie.json", "b200": "b200_bf16_ceperm.json"}
DUMMY_GRADIENTS = "2.11.0"  # a release of Transformer Engine that keeps them
TEMPLATE = r"## Minimal viable template.*?```json\n(.*?)```"


@cache
def _modules(checkout: Path) -> tuple[Any, Any]:
    os.environ.setdefault("SIMUMAX_TMP_PATH", tempfile.mkdtemp(prefix="simumax."))
    return imported_from(checkout, "simumax.core.config"), imported_from(checkout, "simumax.core.perf_llm")


@cache
def _system(checkout: Path, device: str) -> str:
    content = json.loads((checkout / "configs" / "system" / SYSTEMS[device]).read_text())
    if device == "a100":
        template = re.search(TEMPLATE, (checkout / "docs" / "system.md").read_text(), re.DOTALL)
        assert template, f"{checkout}/docs/system.md has no template"
        content["networks"] = json.loads(template[1])["networks"]
    return json.dumps(content)


def fault(case: Case) -> str:
    """What of a case it cannot express; "" if it can express all."""
    job = case.job
    model = job.architecture
    parallel = job.parallel
    device = case.machine.device.name
    faults = {
        "a GPU of which no system is shipped": device not in SYSTEMS,
        "an encoder": model.encoder_layers,
        "a precision other than 16 bits": job.element != 2 or job.precision == "fp8",
        "ZeRO-2, ZeRO-3 or FSDP": job.zero.stage > 1 or job.fully_sharded,
        "recomputation of attention's core alone": job.recompute == "selective",
        "pipeline stages of unequal layers": model.decoder_layers % parallel.pipeline,
        "an optimizer other than Adam": case.is_last_stage and job.moments != (4, 4),
    }
    return next((words for words, is_so in faults.items() if is_so), "")


def answer(case: Case, checkout: Path) -> Answer:
    """Of a case without a fault. Raises Inexpressible where the program refuses it."""
    job = case.job
    model = job.architecture
    parallel = job.parallel
    device = case.machine.device.name
    config, perf = _modules(checkout)
    is_unfused = job.attention == "unfused"
    strategy = {
        "seq_len": model.decoder_length,
        "micro_batch_size": job.micro_batch,
        "micro_batch_num": job.micro_batches,
        "dtype": job.precision,
        "world_size": parallel.world,
        "tp_size": parallel.tensor,
        "pp_size": parallel.pipeline,
        "interleaving_size": parallel.virtual_stages,
        "pp_comm_async": parallel.virtual_stages == 1,  # it has times of interleaved pipelines without it alone
        "enable_sequence_parallel": parallel.sequence_parallel,
        "zero_state": int(job.zero.stage == 1 or job.distributed_optimizer),
        "use_fused_norm": not job.has_eager_norms,
        "cross_entropy_loss_fusion": case.has_fused_loss,
        "te_version": DUMMY_GRADIENTS if job.dummy_gradients else None,
        "use_math_sdp": is_unfused,
        "use_flash_sdp": not is_unfused,
        "enable_recompute": job.recompute == "full",
        "recompute_granularity": "full_block" if job.recompute == "full" else None,
        "recompute_layer_num": model.decoder_layers if job.recompute == "full" else 0,
    }
    shape = {
        "model_type": "dense",
        "model_name": case.choice or case.name,
        "hidden_size": model.hidden,
        "head_num": model.heads,
        "kv_head_num": model.kv_heads,
        "head_size": model.head_size,
        "intermediate_size": model.ffn,
        "layer_num": model.decoder_layers,
        "vocab_size": model.padded_vocabulary,
        "use_swiglu": model.gated,
    }
    program = perf.PerfLLM()
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            program.configure(
                strategy_config=config.StrategyConfig.init_from_dict(strategy),
                model_config=config.ModelConfig.init_from_dict(shape),
                system_config=config.SystemConfig.init_from_dict(json.loads(_system(checkout, device))),
            )
            program.run_estimate()
            cost = program.analysis_cost().data
            memory = program.analysis_mem()
        except (AssertionError, ValueError, KeyError, RuntimeError) as error:
            raise Inexpressible(f"a layout that it refuses: {error}") from error
        finally:
            logging.disable(logging.NOTSET)
    rate = cost["throughput_per_accelerator"] * parallel.world
    tokens = job.global_batch * model.decoder_length
    peaks = program.get_pp_stage_peak_mem(memory, "peak_mem")
    peak = list(peaks.values())[-1] if case.is_last_stage else max(peaks.values())
    reserved = program.get_pp_stage_peak_mem(memory, "peak_mem_with_reserved")
    return Answer(tokens / rate, peak=peak, fits=max(reserved.values()) <= case.machine.device.memory)
