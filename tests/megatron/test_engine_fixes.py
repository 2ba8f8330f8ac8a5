"""Every bug that the patches mend has a test here that fails without its fix; engine_probes.py asks the engine."""

import hashlib
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import REPO_ROOT

from t5bench.plan.ports import free_port

PROBES = Path(__file__).with_name("engine_probes.py")
TOKENIZER = REPO_ROOT / "megatron_data" / "sample" / "tokenizer"
LAYERS, HIDDEN, VOCABULARY = 1, 32, 4224


class Group:
    """The answers of one group of probes, rank by rank."""

    def __init__(self, name: str, engine: Path, directory: Path, world_size: int = 1) -> None:
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "WANDB_", "TORCHELASTIC_"))}
        environment |= {
            "PYTHONPATH": str(engine),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PROBE_PORT": str(free_port()),
        }
        self.logs = [directory / f"{name}-{rank}.log" for rank in range(world_size)]
        processes = []
        for rank, log in enumerate(self.logs):
            command = [sys.executable, str(PROBES), name, str(directory), str(TOKENIZER), str(rank)]
            with log.open("wb") as output:
                processes.append(
                    subprocess.Popen(command, env=environment, cwd=directory, stdout=output, stderr=subprocess.STDOUT)
                )
        try:
            self.statuses = [process.wait(timeout=300) for process in processes]
        finally:
            for process in processes:
                process.kill()
        answers = [directory / f"{name}-{rank}.json" for rank in range(world_size)]
        self.answers = [json.loads(path.read_text()) if path.exists() else {} for path in answers]

    def ask(self, question: str, rank: int = 0) -> Any:
        assert question in self.answers[rank], self.logs[rank].read_text(errors="replace")[-4000:]
        found = self.answers[rank][question]
        assert "error" not in found, found["error"]
        return found["answer"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engine fixes")


@pytest.fixture(scope="module")
def alone(megatron_dir: Path, directory: Path) -> Group:
    """One process."""
    return Group("alone", megatron_dir, directory)


@pytest.fixture(scope="module")
def tensor(megatron_dir: Path, directory: Path) -> Group:
    """Two tensor parallel processes."""
    return Group("tensor", megatron_dir, directory, world_size=2)


@pytest.fixture(scope="module")
def pipeline(megatron_dir: Path, directory: Path) -> Group:
    """Two pipeline stages."""
    return Group("pipeline", megatron_dir, directory, world_size=2)


@pytest.fixture(scope="module")
def nodes(megatron_dir: Path, directory: Path) -> Group:
    """Two data parallel processes that think they are on two nodes, each with room for two."""
    return Group("nodes", megatron_dir, directory, world_size=2)


@pytest.fixture(scope="module")
def training(megatron_dir: Path, directory: Path) -> Group:
    """pretrain_t5.py for two iterations in fp16."""
    return Group("training", megatron_dir, directory)


@pytest.fixture(scope="module")
def training_lines(training: Group) -> list[str]:
    return training.logs[0].read_text(errors="replace").splitlines()


# ---- megatron_t5_fixes.patch ---------------------------------------------------------------------------------------


def test_vocabulary_counts_the_sentinels(alone: Group):
    found = alone.ask("vocabulary")
    assert found["vocab_size"] == found["length"]
    assert found["largest_sentinel"] < found["vocab_size"] <= found["padded"] == VOCABULARY


def test_special_tokens_that_t5_lacks_fall_back(alone: Group):
    cls, sep, mask, pad, eos = alone.ask("special_tokens")
    assert [cls, sep, mask] == [pad, eos, pad]
    assert pad != eos


@pytest.mark.parametrize(
    ("question", "shape"),
    [
        ("whole_model_returns", [2, 16]),
        ("encoder_stage_returns", [32, 2, HIDDEN]),
        ("decoder_stage_returns", [16, 2, HIDDEN]),
        ("last_decoder_stage_returns", [2, 16]),
    ],
)
def test_every_stage_returns_one_tensor(alone: Group, question: str, shape: list[int]):
    """A tuple from the whole model or the encoder; encoder_moe_losses unbound in a decoder stage."""
    assert alone.ask(question) == shape


def test_decoder_does_not_attend_to_padding(alone: Group):
    first, second = alone.ask("loss_with_padding_tokens")
    assert first == pytest.approx(second, rel=1e-6)


def test_head_bias_is_marked_tensor_parallel(alone: Group):
    assert alone.ask("language_model_head_bias") == [True, 0, 1]


def test_tensor_parallel_gradient_norm_counts_every_parameter_once(alone: Group, tensor: Group):
    for rank in range(2):
        assert tensor.ask("gradient_norm", rank) == pytest.approx(alone.ask("gradient_norm"), rel=1e-5)


def test_error_in_self_attention_is_not_buried(alone: Group):
    assert alone.ask("self_attention_that_raises") == {"calls": 1, "error": "a real error inside", "context": False}


def test_decoder_deeper_than_encoder(alone: Group):
    assert alone.ask("layers_of_a_deeper_decoder") == LAYERS + 1


def test_no_evaluation(alone: Group):
    found = alone.ask("datasets_without_evaluation")
    assert found["none"] == [False, True, True]
    assert {"text_enc", "text_dec", "labels", "enc_dec_mask"} <= set(found["sample"])


def test_one_process_needs_no_cuda_connection_limit(alone: Group):
    assert alone.ask("async_allreduce_of_one_process") is False


def test_device_is_that_of_the_local_rank(nodes: Group):
    assert [nodes.ask("device", rank) for rank in range(2)] == [[0], [0]]


def test_zero_finds_gradient_nodes_in_hooks(alone: Group):
    """PyTorch 2.4's function needs gradients to be on, and ZeRO stopped in its first backward pass."""
    assert alone.ask("gradient_node_in_a_hook") == "AccumulateGrad"


def test_zero3_builds_the_model_partitioned(alone: Group):
    found = alone.ask("zero3_builds_partitioned")
    assert found["whole"] == []
    assert found["head_bias"] == [VOCABULARY]
    assert found["decayed"] == found["matrices"] > 0


def test_installed_deepspeed_accumulates_all_micro_batches_in_zero2(alone: Group):
    """Not a patch: DeepSpeed 0.17.6 and 0.18.0 to 0.18.2 keep the last micro-batch alone (6 / 4 instead of 12 / 4)."""
    assert alone.ask("zero2_accumulates_all_micro_batches") == pytest.approx(3.0)


def test_loss_is_scaled_before_gradients_are_unscaled(training_lines: list[str]):
    """In fp16 outside DeepSpeed: without the scaling the norm is 1024 times too small."""
    norms = [float(norm) for line in training_lines for norm in re.findall(r"grad norm: (\S+)", line)]
    assert len(norms) == 2
    assert all(0.2 < norm < 20 for norm in norms)


# ---- 0001: pipeline parallelism ------------------------------------------------------------------------------------


def test_layers_of_later_stages_are_dense(alone: Group):
    assert alone.ask("experts_of_later_stages") == [[1], [1, 1], [1, 1, 1]]


def test_decoder_stage_embeds_decoder_tokens_alone(alone: Group):
    assert alone.ask("embeddings_by_decoder_stage") == [16]


# ---- 0002: metrics -------------------------------------------------------------------------------------------------


def t5_large_macs() -> dict[str, float]:
    """Forward multiply-accumulates of T5-Large's parts for one sample, written out part by part."""
    h, f, s, d, layers, vocabulary = 1024, 2816, 512, 128, 24, 32128
    return {
        "encoder": layers * (4 * h * h * s + 2 * h * s * s + 2 * f * h * s),
        "decoder": layers * (4 * h * h * d + 2 * h * d * d)
        + layers * (2 * h * h * d + 2 * h * h * s + 2 * h * d * s)
        + layers * 2 * f * h * d,
        "head": vocabulary * h * d,
        "core attention": layers * 2 * h * (s * s + d * d + s * d),
    }


def test_flops_of_an_encoder_decoder(alone: Group):
    found, parts = alone.ask("tflop_per_iteration"), t5_large_macs()
    forward = parts["encoder"] + parts["decoder"] + parts["head"]
    unit = 2 * 16 / 1e12
    assert found["plain"] == pytest.approx(3 * forward * unit) == pytest.approx(19.81, abs=0.005)
    assert found["half_the_world"] == pytest.approx(found["plain"] / 2)
    layers = parts["encoder"] + parts["decoder"]
    assert found["full"] - found["plain"] == pytest.approx(layers * unit)
    assert found["full_stages"] - found["plain"] == pytest.approx(layers * unit / 2)
    assert found["selective"] - found["plain"] == pytest.approx(parts["core attention"] * unit)


def test_flops_of_other_models_are_left_alone(alone: Group):
    assert alone.ask("tflop_per_iteration")["decoder_only"] == pytest.approx(14.61, abs=0.005)


def test_loss_that_is_not_a_number_shows(alone: Group):
    line = alone.ask("loss_that_is_not_a_number")
    assert "| lm loss: NAN |" in line
    assert "| grad norm: 1.250000E+00 |" in line


def test_time_of_evaluation_and_checkpoint_is_not_iteration_time(training_lines: list[str]):
    """Each iteration is followed by two seconds of evaluation and two of saving."""
    times = [float(ms) for line in training_lines for ms in re.findall(r"per iteration \(ms\): (\S+)", line)]
    assert len(times) == 2
    assert times[1] < 1900


def test_tokens_of_both_sides_are_counted(training_lines: list[str]):
    (line,) = [line for line in training_lines if "iteration        2/" in line]
    assert re.search(r"consumed tokens: +(\d+)", line)[1] == str(2 * 4 * (32 + 16))
    per_second, tokens = (float(re.search(rf"{name}: (\S+)", line)[1]) for name in ("samples per second", r"\(tgs\)"))
    assert tokens == pytest.approx(per_second * (32 + 16), rel=1e-2)


def test_log_line_is_the_documented_one(training_lines: list[str]):
    (line,) = [line for line in training_lines if "iteration        2/" in line]
    names = [part.split(":")[0].strip() for part in line.split("|")[1:-1]]
    expected = [
        "consumed samples", "elapsed time per iteration (ms)", "learning rate", "global batch size", "lm loss",
        "number of skipped iterations", "number of nan iterations", "samples per second", "TFLOPs",
    ]  # fmt: skip
    assert [name for name in names if name in expected] == expected


def test_peak_memory_and_clean_end(training: Group, training_lines: list[str]):
    """Also after --exit-interval, which ends training by sys.exit()."""
    assert training.statuses == [0]
    pattern = (
        r" peak memory \| rank (\d+) \| host \S+ \| device cpu \| allocated MiB 0\.0 \| reserved MiB 0\.0"
        r" \| host rss MiB (\d+\.\d)"
    )
    found = [re.fullmatch(pattern, line) for line in training_lines if "peak memory" in line]
    assert [match and match[1] for match in found] == ["0"]
    assert float(found[0][2]) > 50


def test_tensorboard_has_the_shared_names(training: Group, directory: Path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(directory / "tensorboard"))
    events.Reload()
    names = ["lm loss", "samples per second", "elapsed time per iteration", "learning rate", "loss scale"]
    steps = {name: [event.step for event in events.Scalars(name)] for name in names}
    assert steps == {name: [1, 2] for name in names}
    assert [event.value for event in events.Scalars("loss scale")] == [1024.0] * 2
    assert training.statuses == [0]


def test_wandb_without_a_key_does_not_stop_the_run(alone: Group):
    found = alone.ask("wandb_without_key")
    assert [call.get("mode") for call in found["calls"]] == [None, "offline"]
    # Without a name it is for WANDB_NAME to say.
    assert all(call["project"] == "project" and "name" not in call and call["config"] > 100 for call in found["calls"])
    assert found["directory"]
    assert found["finished"] == 1


def test_wandb_has_the_shared_names_beside_the_old_ones(alone: Group):
    found = alone.ask("wandb_without_key")["logged"]
    assert {"lm-loss-training/lm loss", "throughput/samples_per_sec", "grad-norm/grad-norm"} <= set(found)
    assert [found[key] for key in ("lm loss", "learning rate", "loss scale")] == [2.0, 0.1, 1.0]
    assert found["samples per second"] == found["throughput/samples_per_sec"]
    milliseconds = pytest.approx(1000 * found["throughput/iteration-time"])
    assert found["elapsed time per iteration"] == found["throughput/elapsed_ms_per_iteration"] == milliseconds


# ---- 0003: data ----------------------------------------------------------------------------------------------------


def test_every_node_builds_its_index_maps(nodes: Group):
    for rank in range(2):
        found = nodes.ask("index_maps_of_a_node", rank)
        assert found["samples"] >= 16
        assert len(found["files"]) == 1


def test_nodes_may_share_a_directory(nodes: Group):
    for rank in range(2):
        found = nodes.ask("index_maps_in_a_shared_directory", rank)
        assert found["samples"] >= 16
        assert len(found["files"]) == 1, "a temporary file was left behind"


def test_damaged_index_maps_are_built_again(alone: Group):
    found = alone.ask("damaged_index_maps")
    assert len(found.pop("files")) == 3
    assert found == {"empty": True, "half": True, "no header": True, "zeroes": True}


def test_index_map_of_older_data_is_built_again(alone: Group):
    assert alone.ask("index_map_of_older_data") == 5


def test_index_map_of_a_larger_split_is_built_again(alone: Group):
    assert alone.ask("index_map_of_another_split") == 10


def test_index_map_is_written_at_once(alone: Group):
    ((source, target, columns),) = alone.ask("index_map_written_at_once")
    assert source.startswith(target) and source != target
    assert columns == 3, "the file was not complete when it got its name"


def test_index_builder_is_for_the_python_that_runs(alone: Group):
    assert alone.ask("index_builder") == {"status": 0, "own_headers": True, "to_temporary": True, "files": ["helpers"]}


def test_failed_compilation_leaves_no_module(alone: Group):
    assert alone.ask("index_builder_that_fails") == {"status": 1, "module": False}


def test_missing_compiler_is_named(alone: Group):
    assert alone.ask("index_builder_without_compiler") == 1
    assert "no C++ compiler: /nonexistent/c++ is not installed" in alone.logs[0].read_text()


def test_compiled_index_builder_needs_no_make(alone: Group):
    assert alone.ask("index_builder_that_is_there") is None


# ---- 0004: CPU and newer libraries ---------------------------------------------------------------------------------


def test_what_nothing_needs_is_not_imported(alone: Group):
    """torchvision, DeepSpeed's compression (gone from 0.19) and, on a CPU, apex."""
    assert alone.ask("imported_without_need") == []


def test_adam_decouples_weight_decay(alone: Group):
    assert alone.ask("optimizer_class") == ["AdamW", 0.01]


def test_gradient_clipping(alone: Group):
    assert alone.ask("clipping") == pytest.approx([5.0, 5.0, 0.6, 0.8], rel=1e-5)


def test_layer_norm_takes_the_fused_kernels_options(alone: Group):
    assert alone.ask("layer_norm") == {"same": True, "sequence_parallel": [True, True], "centered_weight": [0.0] * 4}


def test_fusions_that_need_cuda_are_off(alone: Group):
    assert alone.ask("gradient_accumulation_fusion") is False
    assert alone.ask("masked_softmax_fusion") is False


def test_every_group_has_the_time_limit(alone: Group):
    assert alone.ask("group_timeouts") == [7 * 60.0] * 3


@pytest.mark.parametrize("question", ["exchange_through_host", "exchange_of_shapes_through_host"])
def test_stages_exchange_through_the_host(pipeline: Group, question: str):
    """Each gets what the other sent (2 (rank + 1)), in a tensor of its own that was filled from a copy."""
    for rank in range(2):
        found = pipeline.ask(question, rank)
        assert found == {"values": [2.0 * (2 - rank)], "shape": [3, 2, 4], "is_leaf": True, "copied": [True]}


def test_sentinels_of_transformers_5(alone: Group):
    assert alone.ask("sentinels_of_newer_tokenizers") == [5, 4, 3]


def test_checkpoint_with_arguments_loads(alone: Group):
    assert alone.ask("checkpoint_with_arguments") == HIDDEN


def test_damaged_checkpoint_is_a_failure(alone: Group):
    assert alone.ask("checkpoint_that_is_damaged") == 1


def test_data_loader_leaves_dropout_alone(alone: Group):
    assert alone.ask("data_loader_leaves_random_state") is True


# ---- 0005: initial weights -----------------------------------------------------------------------------------------


def drawn(name: str, shape: list[int], std: float) -> list[float]:
    """The first values of a parameter as the flag defines it."""
    import torch

    seed = int.from_bytes(hashlib.sha256(f"1234:{name}".encode()).digest()[:8], "big") >> 1
    generator = torch.Generator().manual_seed(seed)
    return torch.empty(shape).normal_(0.0, std, generator=generator).flatten()[:4].tolist()


def test_initial_weights_are_as_defined(alone: Group):
    found = alone.ask("initial_weights")
    scaled = 0.02 / math.sqrt(2 * LAYERS)
    for name, std in {
        "language_model.embedding.word_embeddings.weight": 0.02,
        "language_model.embedding.position_embeddings.weight": 0.02,
        "language_model.decoder.layers.1.self_attention.query_key_value.weight": 0.02,
        "language_model.decoder.layers.1.inter_attention.key_value.weight": 0.02,
        "language_model.decoder.layers.1.inter_attention.dense.weight": scaled,
        "language_model.decoder.layers.1.mlp.dense_4h_to_h.weight": scaled,
    }.items():
        shape, values, spread = found[name]
        assert values == drawn(name, shape, std)
        assert spread == pytest.approx(std, rel=0.1)
    biases = [values for name, (_, values, _) in found.items() if name.endswith("bias")]
    assert len(biases) > 10
    assert not any(any(values) for values in biases)
    assert found["language_model.decoder.layers.1.input_layernorm.weight"][1] == [1.0] * 4


def test_shards_keep_heads_together(alone: Group):
    """[q|k|v] is cut within each part; key_value and the rest are cut in two."""
    halves = [[float(i) for i in range(6)], [float(i) for i in range(6, 12)]]
    assert alone.ask("shards") == {
        "query_key_value.weight": [[0.0, 1.0, 4.0, 5.0, 8.0, 9.0], [2.0, 3.0, 6.0, 7.0, 10.0, 11.0]],
        "key_value.weight": halves,
        "dense_h_to_4h.weight": halves,
    }


def test_heads_copy_of_the_embedding_is_the_embedding(alone: Group):
    assert alone.ask("name_of_the_heads_copy") == "language_model.embedding.word_embeddings.weight"


def test_same_loss_in_another_layout(alone: Group, tensor: Group):
    for rank in range(2):
        assert tensor.ask("loss", rank) == pytest.approx(alone.ask("loss"), rel=1e-6)
