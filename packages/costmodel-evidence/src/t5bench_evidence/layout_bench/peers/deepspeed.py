"""DeepSpeed's estimators of model states, estimate_zero2 and estimate_zero3_model_states_mem_needs."""

from functools import cache
from pathlib import Path
from typing import Any

from t5bench.costmodel.parameters import tensors
from t5bench_evidence.layout_bench.cases import Case
from t5bench_evidence.layout_bench.peers.checkout import imported_from
from t5bench_evidence.layout_bench.planners import Answer, parameters_of

NAME = "DeepSpeed"
ABOUT = "its estimators of model states under ZeRO-2 and ZeRO-3"


@cache
def _estimators(checkout: Path) -> tuple[Any, Any]:
    two = imported_from(checkout, "deepspeed.runtime.zero.stage_1_and_2")
    three = imported_from(checkout, "deepspeed.runtime.zero.stage3")
    return two.estimate_zero2_model_states_mem_needs, three.estimate_zero3_model_states_mem_needs


def fault(case: Case) -> str:
    """What of a case it cannot express; "" if it can express all."""
    job = case.job
    parallel = job.parallel
    faults = {
        "states that are not divided by ZeRO-2 or ZeRO-3": job.zero.stage < 2,
        "tensor or pipeline parallelism": parallel.tensor * parallel.pipeline > 1,
        "a precision other than bf16 and fp16": job.element != 2,
    }
    return next((words for words, is_so in faults.items() if is_so), "")


def answer(case: Case, checkout: Path) -> Answer:
    """Of a case without a fault. Raises Inexpressible where the program refuses it."""
    job = case.job
    parallel = job.parallel
    zero_2, zero_3 = _estimators(checkout)
    total = parameters_of(job)
    per_node = min(parallel.world, parallel.devices_per_node)
    nodes = max(1, parallel.world // per_node)
    if job.zero.stage == 2:
        _, states = zero_2(total, per_node, nodes, cpu_offload=job.zero.offload_optimizer)
    else:
        largest = largest_layer(case)
        _, states, _ = zero_3(
            total,
            largest,
            num_gpus_per_node=per_node,
            num_nodes=nodes,
            cpu_offload=job.zero.offload_optimizer,
            cpu_offload_params=job.zero.offload_parameters,
        )
    return Answer(allocated=float(states), fits=states <= case.machine.device.memory)


def largest_layer(case: Case) -> int:
    """Parameters of the largest layer: the table of words, or a layer of the transformer."""
    job = case.job
    model = job.architecture
    by_part = tensors(model, job.on(tensor=1, pipeline=1, split_rank=None).parallel, 0)
    encoder = sum(by_part["encoder"]) // max(1, model.encoder_layers)
    decoder = sum(by_part["decoder"]) // max(1, model.decoder_layers)
    return max(encoder, decoder, *by_part["embedding"])
