"""Random jobs on random machines, and all that the model says of one, for Python and for its translation."""

import random
from typing import Any

from t5bench.costmodel.job import SOFTWARE, Architecture, FullySharded, Job, Parallel, Zero
from t5bench.costmodel.machine import DEVICES
from t5bench.costmodel.prediction import Prediction, machine_of

# What JavaScript answers for one Prediction: the same figures in the same order as figures().
FIGURES = """
function figures(prediction) {
  const memory = prediction.memory, flat = [];
  const add = (dict) => { for (const [name, value] of py.method("items", dict)) flat.push([name, value]); };
  add(memory.components); add(memory.cpu);
  flat.push(["peak", memory.peak], ["allocated", memory.allocated], ["in use", prediction.memory_bytes]);
  flat.push(["moment", memory.moment]);
  for (const sent of prediction.node_bytes) flat.push(["sent", sent]);
  add(prediction.time.parts);
  flat.push(["hidden", prediction.time.hidden], ["total", prediction.time.total], ["limit", prediction.time.limit]);
  flat.push(["tflops", prediction.tflops], ["mfu", prediction.mfu]);
  for (const end of prediction.seconds_interval) flat.push(["seconds", end]);
  return flat;
}
"""


def figures(prediction: Prediction) -> list[tuple[str, Any]]:
    memory = prediction.memory
    time = prediction.time
    return [
        *memory.components.items(),
        *memory.cpu.items(),
        ("peak", memory.peak),
        ("allocated", memory.allocated),
        ("in use", prediction.memory_bytes),
        ("moment", memory.moment),
        *(("sent", sent) for sent in prediction.node_bytes),
        *time.parts.items(),
        ("hidden", time.hidden),
        ("total", time.total),
        ("limit", time.limit),
        ("tflops", prediction.tflops),
        ("mfu", prediction.mfu),
        *(("seconds", end) for end in prediction.seconds_interval),
    ]


def prediction(number: int) -> Prediction:
    """The same one for the same number."""
    choose = random.Random(number)
    kind = choose.choice(["t5", "t5", "gpt"])
    tensor = choose.choice([1, 1, 2, 4])
    pipeline = choose.choice([1, 1, 2, 4])
    data = choose.choice([1, 2, 4, 8])
    per_node = choose.choice([1, 2, 4, 8])
    layers = choose.choice([4, 8, 12, 24])
    heads = choose.choice([4, 8, 16, 32])
    head_size = choose.choice([64, 128])
    is_published = choose.random() < 0.3
    is_merged = is_published and choose.random() < 0.5
    architecture = Architecture(
        encoder_layers=layers if kind == "t5" else 0,
        decoder_layers=choose.choice([4, 8, 24]) if kind == "t5" else layers,
        hidden=heads * choose.choice([64, 128]),
        heads=heads,
        head_size=head_size,
        ffn=choose.choice([1024, 2816, 4096, 10240]),
        encoder_length=choose.choice([128, 512, 1024]) if kind == "t5" else 0,
        decoder_length=choose.choice([64, 128, 512, 2048]),
        padded_vocabulary=choose.choice([32128, 50304, 250112]),
        family=kind,
        kv_heads=choose.choice([0, 4]),
        gated=is_published,
        activation=choose.choice(["gelu", "relu"]),
        tied=not is_published or choose.random() < 0.5,
        positions="relative" if is_published else "learned",
        biases=not is_published,
        head_bias=kind == "t5" and not is_published,
        norm="rms" if is_published else "layer",
        post_norms=is_merged,
        query_key_norms=is_merged,
        merged_attention=is_merged,
        window=choose.choice([64, 1024]) if is_merged else 0,
        global_every=6,
        special_words=1 if is_merged else 0,
    )
    stage = choose.choice([0, 0, 1, 2, 3]) if data > 1 else 0
    offloads = stage == 3 and choose.random() < 0.5
    engine = choose.choice(["megatron", "megatron", "native", *SOFTWARE])
    micro_batch = choose.choice([1, 2, 4, 16])
    precision = choose.choice(["bf16", "bf16", "fp16", "fp32"])
    is_sharded = engine == "native" and pipeline == 1 and stage == 0 and data > 1 and choose.random() < 0.3
    job = Job(
        architecture=architecture,
        parallel=Parallel(
            tensor,
            pipeline,
            data,
            sequence_parallel=choose.random() < 0.2,
            devices_per_node=min(per_node, tensor * pipeline * data),
            shards=data // 2 if is_sharded and choose.random() < 0.5 else 0,
            deepspeed=pipeline > 1 and stage > 0,
        ),
        micro_batch=micro_batch,
        global_batch=micro_batch * data * choose.choice([1, 2, 4, 8, 40]),
        zero=Zero(stage, offloads, offloads, overlap=choose.random() < 0.5),
        fully_sharded=FullySharded(choose.random() < 0.5) if is_sharded else None,
        distributed_optimizer=stage == 0 and engine == "megatron-core" and choose.random() < 0.5,
        precision=precision,
        recompute=choose.choice(["none", "none", "selective", "full"]),
        attention=choose.choice(["unfused", "fused", "flash"]),
        causal_attention=choose.choice(["", "flash"]),
        dropout=choose.choice([0.0, 0.1]),
        engine=engine,
        dummy_gradients=choose.random() < 0.1,
        overlaps=choose.random() < 0.3,
    )
    device = DEVICES[choose.choice(sorted(DEVICES))]
    return Prediction(job, machine_of(device, choose.choice([1, 10, 100, 3200]), job.parallel.devices_per_node))
