"""Compares our errors on published points with those of DeepSpeed's estimators and of llm-analysis, if installed.

python -m tests.predict.compare_estimators, with DeepSpeed; llm-analysis is installed separately.
Both are asked what they can answer: DeepSpeed's for states alone, llm-analysis for a stack of equal layers of one
length, so that it sees an encoder-decoder as that many decoder layers at the encoder's length.
"""

import logging
from collections.abc import Iterator
from math import prod
from pathlib import Path
from statistics import mean

from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs
from tabulate import tabulate

from t5bench.model.job import Job
from t5bench.model.parameters import layer_shapes, parameters
from t5bench.predict import check, published

FILE = Path(__file__).parents[2] / "docs" / "published_training_measurements.json"
GB = {"GB": 1e9, "MiB": 2**20}


def deepspeed(job: Job, what: str) -> float | None:
    """Bytes of states: of a layer under ZeRO-3, else of a rank as under ZeRO-2, on one GPU where nothing is divided."""
    a, data = job.architecture, job.parallel.data
    if what.endswith(" layer"):
        size = sum(map(prod, layer_shapes(a, job.parallel.tensor, what.startswith("decoder"))))
        return estimate_zero3_model_states_mem_needs(size, 0, data, 1, cpu_offload=False)[1]
    if what == "allocated":
        size, gpus = parameters(a, job.parallel, job.parallel.pipeline - 1), data if job.distributed_optimizer else 1
        return estimate_zero2_model_states_mem_needs(size, gpus, 1, cpu_offload=False)[1]
    return None


def llm_analysis(job: Job, what: str) -> float | None:
    try:
        from llm_analysis import analysis, config
    except ImportError:
        return None
    logging.disable(logging.CRITICAL)
    keys = {"allocated": "(weight+op_state+grad)_memory_per_gpu", "peak - allocated": "activation_memory_per_gpu"}
    keys["peak allocated"] = "(weight+op_state+grad+act)_memory_per_gpu"
    if what not in keys:
        return None
    a, p = job.architecture, job.parallel
    length = a.encoder_length or a.decoder_length
    model = config.ModelConfig(
        "", a.layers, a.heads, a.hidden, a.padded_vocabulary, length,
        num_key_value_heads=a.kv_heads, ffn_embed_dim=a.ffn, expansion_ratio=a.ffn / a.hidden,
    )  # fmt: skip
    layout = config.ParallelismConfig(p.tensor, p.pipeline, p.data, sp_size=p.sequence)
    gpu, dtype = config.get_gpu_config_by_name("a100-sxm-80gb"), config.get_dtype_config_by_name("w16a16e16")
    found = analysis.LLMAnalysis(model, gpu, dtype, layout).training(
        batch_size_per_gpu=job.micro_batch, global_batch_size=job.global_batch, seq_len=length, total_num_tokens=1e9,
        ds_zero=analysis.DSZeRO.STAGE_1 if job.distributed_optimizer else analysis.DSZeRO.NONE,
        flash_attn=job.attention != "unfused", softmax_dropout=bool(job.dropout),
    )  # fmt: skip
    return found[keys[what]]


def errors() -> Iterator[tuple[str, str, float, float | None, float | None]]:
    points = {point.id: point for point in published.read(FILE)[0]}
    for row in check.compare_all(list(points.values())):
        if isinstance(row, check.Comparison) and row.use in ("memory", "peak", "states", "activation"):
            if " layer, TP" in row.what or row.what == "device memory in use":
                continue
            job = published.job_of(points[row.point])
            states = row.use in ("memory", "states")
            others = deepspeed(job, row.what) if states else None, llm_analysis(job, row.what)
            yield row.use, row.point, row.error, *(x and x / GB[row.unit] / row.measured - 1 for x in others)


if __name__ == "__main__":
    rows = list(errors())
    print(tabulate([row for row in rows if any(row[3:])], ("", "point", "ours", "DeepSpeed", "llm-analysis"), "plain",
                   floatfmt="+.1%"))  # fmt: skip
    for column, name in ((3, "DeepSpeed's estimators"), (4, "llm-analysis")):
        for use in dict.fromkeys(row[0] for row in rows if row[column] is not None):
            pairs = [(abs(row[2]), abs(row[column])) for row in rows if row[0] == use and row[column] is not None]
            own, theirs = zip(*pairs, strict=True)
            print(f"{name}, {use}, {len(pairs)} figures: mean {mean(theirs):.1%}, worst {max(theirs):.1%};"
                  f" ours mean {mean(own):.1%}, worst {max(own):.1%}")  # fmt: skip
