"""Calculon (calculon-ai/calculon), from a checkout, with the systems that it ships."""

import json
import logging
from functools import cache
from pathlib import Path
from typing import Any

from t5bench_evidence.layout_bench.cases import Case
from t5bench_evidence.layout_bench.peers.checkout import imported_from
from t5bench_evidence.layout_bench.planners import Answer, Inexpressible

NAME = "Calculon"
ABOUT = "times and memory of GPTs"
SYSTEMS = {"a100": "a100_80g.json", "h100": "h100_80g_nvl8.json"}
RECOMPUTE = {"none": "none", "selective": "attn_only", "full": "full"}


@cache
def _modules(checkout: Path) -> tuple[Any, Any]:
    llm = imported_from(checkout, "calculon.llm.llm")
    return llm.Llm, imported_from(checkout, "calculon.system").System


@cache
def _system(checkout: Path, name: str) -> Any:
    return json.loads((checkout / "systems" / name).read_text())


def fault(case: Case) -> str:
    """What of a case it cannot express; "" if it can express all."""
    job = case.job
    model = job.architecture
    parallel = job.parallel
    device = case.machine.device.name
    faults = {
        "a GPU of which no system is shipped": device not in SYSTEMS,
        "an encoder": model.encoder_layers,
        "a gated feed-forward block": model.gated,
        "grouped queries": model.kv_heads < model.heads,
        "a precision other than 16 bits": job.element != 2 or job.precision == "fp8",
        "ZeRO-2, ZeRO-3 or FSDP": job.zero.stage > 1 or job.fully_sharded,
        "attention in one kernel": job.attention != "unfused",
        "another pipeline stage than the first": case.is_last_stage and parallel.pipeline > 1,
    }
    return next((words for words, is_so in faults.items() if is_so), "")


def answer(case: Case, checkout: Path) -> Answer:
    """Of a case without a fault. Raises Inexpressible where the program refuses it."""
    job = case.job
    model = job.architecture
    parallel = job.parallel
    device = case.machine.device.name
    llm, system = _modules(checkout)
    tensor_net, pipeline_net, data_net = networks(case)
    execution = {
        "num_procs": parallel.world,
        "tensor_par": parallel.tensor,
        "pipeline_par": parallel.pipeline,
        "data_par": parallel.data,
        "tensor_par_net": tensor_net,
        "pipeline_par_net": pipeline_net,
        "data_par_net": data_net,
        "batch_size": job.global_batch,
        "microbatch_size": job.micro_batch,
        "datatype": "float16",
        "fused_activation": True,
        "attention_type": "multihead",
        "activation_recompute": RECOMPUTE[job.recompute],
        "pipeline_interleaving": parallel.virtual_stages,
        "optimizer_sharding": parallel.data > 1 and (job.zero.stage == 1 or job.distributed_optimizer),
        "tensor_par_comm_type": "rs_ag" if parallel.sequence_parallel else "ar",
        "tensor_par_overlap": "none",
        "seq_par_ag_redo": False,
        "data_par_overlap": False,
        "weight_offload": False,
        "activations_offload": False,
        "optimizer_offload": False,
        "training": True,
    }
    shape = {
        "hidden": model.hidden,
        "feedforward": model.ffn,
        "seq_size": model.decoder_length,
        "attn_heads": model.heads,
        "attn_size": model.head_size,
        "num_blocks": model.decoder_layers,
    }
    program = llm(llm.Application(shape), logging.getLogger(__name__))
    try:
        on = system(_system(checkout, SYSTEMS[device]))
        program.compile(on, llm.Execution.from_json(execution))
        program.run(on)
    except (llm.Error, AssertionError) as error:
        text = str(error)
        if "memory" in text or "Mem" in text:
            return Answer(fits=False)
        raise Inexpressible(f"a layout that it refuses: {text}") from error
    found = program.get_stats_json(False)
    states = found["weight_space"] + found["weight_grad_space"] + found["optimizer_space"]
    return Answer(found["total_time"], allocated=states, peak=found["proc_mem_tier1_cap_req"], fits=True)


def networks(case: Case) -> tuple[int, int, int]:
    """The tier, 0 in a node and 1 between nodes, of tensor, pipeline and data parallelism; ranks go in this project's
    order, tensor first, then data, then pipeline."""
    parallel = case.job.parallel
    per_node = parallel.devices_per_node
    data = parallel.tensor * parallel.data
    return int(parallel.tensor > per_node), int(parallel.world > per_node), int(data > per_node)
