"""Inside the engine, in one process: what the patches mend. Each test fails without its fix; patches/README.md names
them in the same order."""

import json
import math
import os
import shutil
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import deepspeed
import megatron.utils
import numpy as np
import pytest
import torch
from megatron import checkpointing, get_tokenizer, global_vars, layout_independent_init, training
from megatron.core import mpu
from megatron.core.enums import ModelType
from megatron.data import dataset_utils, gpt_dataset
from megatron.data.data_samplers import build_pretraining_data_loader
from megatron.model import LayerNorm
from megatron.model.transformer import get_num_experts_per_layer
from megatron.optimizer import get_megatron_optimizer, get_param_groups
from megatron.optimizer.clip_grads import clip_grad_norm_fp32
from models import make_model, run_model
from started_engine import DECODER_LENGTH, ENCODER_LENGTH, HIDDEN, LAYERS, TIME_LIMIT, VOCABULARY, write_data

Patch = pytest.MonkeyPatch


# ---- megatron_t5_fixes.patch ---------------------------------------------------------------------------------------


def test_vocabulary_counts_the_sentinels_and_special_tokens_fall_back(args):
    tokenizer = get_tokenizer()
    assert tokenizer.vocab_size == len(tokenizer.tokenizer)
    assert max(tokenizer.additional_special_tokens_ids) < tokenizer.vocab_size <= args.padded_vocab_size == VOCABULARY
    assert [tokenizer.cls, tokenizer.sep, tokenizer.mask] == [tokenizer.pad, tokenizer.eos, tokenizer.pad]
    assert tokenizer.pad != tokenizer.eos


def decoder_stage(**parts: bool):
    model = make_model(add_encoder=False, **parts)
    model.set_input_tensor([torch.zeros(ENCODER_LENGTH, 2, HIDDEN)])
    return model


def test_every_stage_returns_one_tensor():
    """A tuple from the whole model or the encoder; encoder_moe_losses unbound in a decoder stage. The last stage embeds
    only the decoder's tokens."""
    stages = [make_model(), make_model(add_decoder=False), decoder_stage(post_process=False), decoder_stage()]
    looked_up = []
    lengths = [DECODER_LENGTH, ENCODER_LENGTH, DECODER_LENGTH, DECODER_LENGTH]
    stages[-1].language_model.embedding.register_forward_pre_hook(lambda _, given: looked_up.append(given[0].shape[1]))
    shapes = [run_model(stage).shape for stage in stages]
    assert shapes == [(2, lengths[0]), *((length, 2, HIDDEN) for length in lengths[1:3]), (2, lengths[3])]
    assert looked_up == [DECODER_LENGTH]


def test_decoder_does_not_attend_to_padding_and_the_heads_bias_is_marked_tensor_parallel():
    model = make_model()
    torch.testing.assert_close(run_model(model, padding_token=0), run_model(model, padding_token=77))
    assert len(model.language_model.decoder.layers) == LAYERS + 1, "it may be deeper than the encoder"
    bias = model.lm_head.bias
    assert (bias.tensor_model_parallel, bias.partition_dim, bias.partition_stride) == (True, 0, 1)


def test_error_in_self_attention_is_not_hidden():
    layer = make_model().language_model.encoder.layers[0]
    calls = []

    class Broken(torch.nn.Module):
        def forward(self, *inputs, **kwargs):
            calls.append(inputs)
            raise TypeError("a real error inside")

    layer.self_attention = Broken()
    with pytest.raises(TypeError, match="a real error inside") as error:
        layer(torch.zeros(4, 2, HIDDEN))
    assert error.value.__context__ is None
    assert len(calls) == 1


def test_no_evaluation(args):
    found = dataset_utils.build_train_valid_test_datasets(
        args.data_path, "mmap", "949,50,1", [16, 0, 0], ENCODER_LENGTH, 0.15, 0.1, 1234, True,
        max_seq_length_dec=DECODER_LENGTH, dataset_type="t5",
    )  # fmt: skip
    assert [dataset is None for dataset in found] == [False, True, True]
    assert {"text_enc", "text_dec", "labels", "enc_dec_mask"} <= found[0][0].keys()


def test_zero_finds_gradient_nodes_in_hooks():
    """PyTorch 2.4's function needs gradients to be on, and ZeRO stopped in its first backward pass."""
    with torch.no_grad():
        node = torch.autograd.graph._get_grad_fn_or_grad_acc(torch.nn.Parameter(torch.zeros(1)))
    assert type(node).__name__ == "AccumulateGrad"


# ---- 0001: pipeline parallelism ------------------------------------------------------------------------------------


def test_layers_of_later_stages_have_no_experts():
    found = [get_num_experts_per_layer([1], layers, 2, offset) for layers, offset in ((1, 1), (2, 2), (3, 9))]
    assert found == [[1], [1, 1], [1, 1, 1]]


# ---- 0002: metrics -------------------------------------------------------------------------------------------------

LARGE = {
    "micro_batch_size": 1, "hidden_size": 1024, "ffn_hidden_size": 2816, "num_attention_heads": 16,
    "num_key_value_heads": 16, "kv_channels": 64, "num_layers": 24, "encoder_num_layers": 24, "decoder_num_layers": 24,
    "seq_length": 512, "decoder_seq_length": 128, "padded_vocab_size": 32128,
    "model_type": ModelType.encoder_and_decoder,
}  # fmt: skip


def test_flops_of_an_encoder_decoder(args, monkeypatch: Patch):
    """Against T5-Large's multiply-accumulates of one sample, written out part by part."""
    h = 1024
    f = 2816
    s = 512
    d = 128
    layers = 24
    encoder = layers * (4 * h * h * s + 2 * h * s * s + 2 * f * h * s)
    self_attention = 4 * h * h * d + 2 * h * d * d
    cross_attention = 2 * h * h * d + 2 * h * h * s + 2 * h * d * s
    decoder = layers * (self_attention + cross_attention + 2 * f * h * d)
    core_attention = layers * 2 * h * (s * s + d * d + s * d)
    plain = 3 * (encoder + decoder + 32128 * h * d)

    def tflop(**changes) -> float:
        return megatron.utils.throughput_calculator(None, SimpleNamespace(**vars(args) | LARGE | changes), 1.0, 1)[1]

    def of_macs(macs: float) -> float:
        return pytest.approx(macs * 2 * 16 / 1e12)

    monkeypatch.setattr(megatron.utils, "get_num_microbatches", lambda: 16)
    assert tflop() == of_macs(plain)
    assert tflop() == pytest.approx(19.81, abs=0.005)
    full = {"recompute_granularity": "full", "recompute_method": "uniform"}
    assert tflop(**full) == of_macs(plain + encoder + decoder)
    blocks = {"recompute_method": "block", "recompute_num_layers": 6, "pipeline_model_parallel_size": 4}
    blocks |= {"pipeline_model_parallel_split_rank": 2}
    assert tflop(**full | blocks) == of_macs(plain + (encoder + decoder) / 2)
    assert tflop(recompute_granularity="selective") == of_macs(plain + core_attention)
    assert tflop(model_type=ModelType.encoder_or_decoder) == pytest.approx(14.61, abs=0.005)


def log_loss(loss: float) -> None:
    """One call of training_log(), as after the first iteration."""
    timer = training.get_timers()("interval-time", log_level=0)
    timer.start()
    try:
        losses = {"lm loss": torch.tensor(loss)}
        norm = torch.tensor(1.25)
        training.training_log(losses, {}, 0.1, 1, None, False, 0, norm, None, None, None)
    finally:
        timer.reset()


def test_a_loss_that_is_not_a_number_and_wandb_without_a_key(
    args, monkeypatch: Patch, capfd: pytest.CaptureFixture, tmp_path: Path
):
    """The line has the loss, and W&B goes on offline. Upstream's keys remain, in addition to the shared ones."""
    wandb = Mock()
    directory = tmp_path / "wandb"
    wandb.init.side_effect = [RuntimeError("No API key configured"), wandb]
    given = {"wandb_project": "project", "wandb_exp_name": "", "wandb_save_dir": str(directory)}
    given |= {"model_type": ModelType.encoder_and_decoder, "actual_seq_length": ENCODER_LENGTH}
    for name, value in given.items():
        monkeypatch.setattr(args, name, value, raising=False)
    log_loss(math.nan)
    line = capfd.readouterr().out
    assert "| lm loss: NAN |" in line and "| grad norm: 1.250000E+00 |" in line
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setattr(training, "wandb", wandb)
    monkeypatch.setattr(global_vars, "_GLOBAL_WANDB_WRITER", None)
    global_vars._set_wandb_writer(args)
    log_loss(2.0)
    global_vars.close_writers()
    calls = [call.kwargs for call in wandb.init.call_args_list]
    assert [call.get("mode") for call in calls] == [None, "offline"]
    assert all(call["project"] == "project" and "name" not in call for call in calls)  # WANDB_NAME decides
    assert all(len(json.loads(json.dumps(call["config"]))) > 100 for call in calls)
    assert directory.is_dir()
    wandb.finish.assert_called_once()
    found = {key: value for call in wandb.log.call_args_list for key, value in call.args[0].items()}
    assert {"lm-loss-training/lm loss", "grad-norm/grad-norm"} <= found.keys()
    assert [found[key] for key in ("lm loss", "learning rate", "loss scale")] == [2.0, 0.1, 1.0]
    assert found["samples per second"] == found["throughput/samples_per_sec"]
    milliseconds = pytest.approx(1000 * found["throughput/iteration-time"])
    assert found["elapsed time per iteration"] == found["throughput/elapsed_ms_per_iteration"] == milliseconds


# ---- 0003: data ----------------------------------------------------------------------------------------------------


def get_map(prefix: str, documents: slice = slice(None)) -> list[list[int]]:
    """The sample map of these documents: from its file, or built."""
    dataset = dataset_utils.get_indexed_dataset_(prefix, "mmap", True)
    dataset.set_doc_idx(dataset.get_doc_idx()[documents])
    options = (None, 16, ENCODER_LENGTH - 2, 0.1, 1234, "train", False)
    return np.array(dataset_utils.get_samples_mapping(dataset, prefix, *options)).tolist()


def get_gpt_samples(prefix: str) -> list[list[int]]:
    dataset, *unasked = gpt_dataset.build_train_valid_test_datasets(
        [prefix], "mmap", "949,50,1", [16, 0, 0], 16, 1234, True
    )
    assert unasked == [None, None] and len(dataset) >= 16
    return [dataset[number]["text"].tolist() for number in range(16)]


DAMAGE = {
    "empty": lambda whole: b"",
    "half": lambda whole: whole[: len(whole) // 2],
    "no header": lambda whole: b"x" * 300,
    "zeroes": lambda whole: whole[:128] + bytes(len(whole) - 128),
}


@pytest.mark.parametrize("get", [get_map, get_gpt_samples])
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_index_map_is_built_again(tmp_path: Path, get: Callable, damage: Callable[[bytes], bytes]):
    prefix = write_data(tmp_path)
    good = get(prefix)
    paths = sorted(tmp_path.rglob("*.npy"))
    assert len(paths) == (1 if get is get_map else 3)
    for path in paths:
        whole = path.read_bytes()
        path.write_bytes(damage(whole))
        assert get(prefix) == good
        assert path.read_bytes() == whole
    assert not [*tmp_path.rglob("*.tmp")]


@pytest.mark.parametrize("family", [dataset_utils, gpt_dataset])
def test_corpora_are_blended_and_one_that_is_too_small_is_named(tmp_path: Path, family):
    prefixes = [write_data(tmp_path / name, documents) for name, documents in (("a", 30), ("b", 40), ("c", 3))]

    def blend(second: int, samples: list[int]) -> list:
        lengths = {"max_seq_length_dec": DECODER_LENGTH, "dataset_type": "t5"} if family is dataset_utils else {}
        options = (ENCODER_LENGTH, 0.15, 0.1, 1234, True) if lengths else (16, 1234, True)
        paths = ["0.3", prefixes[0], "0.7", prefixes[second]]
        return family.build_train_valid_test_datasets(paths, "mmap", "900,100,0", samples, *options, **lengths)

    dataset, *unasked = blend(1, [20, 0, 0])
    assert unasked == [None, None]
    assert sorted(sample["dataset_idx"] for sample in dataset).count(0) == pytest.approx(0.3 * len(dataset), abs=2)
    with pytest.raises(ValueError, match="1 of the 2 datasets of --data-path are too small for --split"):
        blend(2, [20, 4, 0])


@pytest.mark.parametrize("get", [get_map, get_gpt_samples])
def test_index_map_of_other_data_is_not_used(tmp_path: Path, get: Callable):
    """Not even if it is newer than the data, as after cp -p or rsync -a; nor is that of another split."""
    own = get(write_data(tmp_path / "own", documents=30))
    get(write_data(tmp_path / "shared", documents=20))
    prefix = write_data(tmp_path / "shared", documents=30)
    assert get(prefix) == own
    ends = [max(end for _, end, _ in get_map(prefix, slice(limit))) for limit in (11, None)]
    assert ends[0] == 10 < ends[1]


def test_index_map_is_written_atomically(tmp_path: Path, monkeypatch: Patch):
    renamed = []
    replace = os.replace

    def spy(source, target):
        renamed.append((Path(source).name, Path(target).name, np.load(source).shape[1]))
        replace(source, target)

    monkeypatch.setattr(os, "replace", spy)
    get_map(write_data(tmp_path))
    ((source, target, columns),) = renamed
    assert source.startswith(target) and source != target
    assert columns == 3, "the file was not complete when it got its name"


SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
WRITES_OUTPUT = 'while [ "$1" != -o ]; do shift; done; echo module > "$2"\n'


@pytest.fixture
def builder(monkeypatch: Patch, tmp_path: Path) -> Callable[..., tuple[int, list[str]]]:
    """compile_helper() on a copy of its sources, where a script is the compiler: its exit status, and the modules."""
    for source in ("helpers.cpp", "Makefile"):
        shutil.copy(Path(dataset_utils.__file__).parent / source, tmp_path)
    monkeypatch.setattr(dataset_utils, "__file__", str(tmp_path / "dataset_utils.py"))

    def script(name: str, text: str) -> None:
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}")
        (tmp_path / name).chmod(0o755)

    def build(compiler: str, **environment: str) -> tuple[int, list[str]]:
        script("compiler", f"echo \"$@\" > '{tmp_path}/arguments'\n{compiler}")
        for name in ("python3", "python3-config"):  # another Python, which comes first on PATH
            script(name, "exit 1\n")
        for name, value in ({"CXX": "compiler", "PATH": f"{tmp_path}:{os.environ['PATH']}"} | environment).items():
            monkeypatch.setenv(name, value)
        status = 0
        try:
            dataset_utils.compile_helper()
        except SystemExit as stop:
            status = stop.code
        return status, [path.name.removesuffix(SUFFIX) for path in tmp_path.glob(f"helpers*{SUFFIX}*")]

    return build


def test_index_builder_is_for_the_python_that_runs(builder: Callable, tmp_path: Path, capfd: pytest.CaptureFixture):
    """One that cannot be compiled is named, and one that is there needs no make."""
    status, modules = builder(WRITES_OUTPUT + "exit 3\n")
    assert (status, "helpers" in modules) == (1, False)
    assert builder("", CXX="/nonexistent/c++")[0] == 1
    assert "no C++ compiler: /nonexistent/c++ is not installed" in "".join(capfd.readouterr())
    status, modules = builder(WRITES_OUTPUT)
    assert status == 0 and "helpers" in modules
    arguments = (tmp_path / "arguments").read_text().split()
    assert f"-I{sysconfig.get_path('include')}" in arguments
    assert any(argument.endswith(".tmp") for argument in arguments)
    assert builder("exit 3", PATH="/nonexistent")[0] == 0


# ---- 0004: CPU and newer libraries ---------------------------------------------------------------------------------


def test_unneeded_packages_are_not_imported():
    """torchvision, DeepSpeed's compression (gone from 0.19) and, on a CPU, apex."""
    assert not {"megatron.model.vision.knn_monitor", "apex"} & sys.modules.keys()
    assert not {"compute_feature_bank", "init_compression"} & vars(training).keys()


def test_adam_decouples_weight_decay():
    optimizer = get_megatron_optimizer([make_model()]).optimizer
    assert (type(optimizer).__name__, optimizer.param_groups[0]["weight_decay"]) == ("AdamW", 0.01)


def test_gradient_clipping():
    parameters = [torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(3))]
    for parameter, value in zip(parameters, (3.0, 4.0), strict=True):
        parameter.grad = torch.tensor([value, *[0.0] * (len(parameter) - 1)])
    norms = [clip_grad_norm_fp32(parameters, [p.grad for p in parameters], limit) for limit in (100.0, 1.0)]
    assert norms == pytest.approx([5.0, 5.0])
    assert [p.grad[0].item() for p in parameters] == pytest.approx([0.6, 0.8], rel=1e-5)


def test_layer_norm_takes_the_fused_kernels_options():
    values = torch.arange(8.0).view(2, 4)
    plain = LayerNorm(4, eps=1e-5, no_persist_layer_norm=True, sequence_parallel=True, mem_efficient_ln=True)
    centered = LayerNorm(4, eps=1e-5, apply_layernorm_1p=True)
    assert torch.equal(plain(values), centered(values))
    assert plain.weight.sequence_parallel and plain.bias.sequence_parallel
    assert centered.weight.tolist() == [0.0] * 4


def test_what_needs_cuda_is_off(args):
    assert (args.gradient_accumulation_fusion, args.masked_softmax_fusion) == (False, False)
    assert args.async_tensor_model_parallel_allreduce is False  # of one process; it needs a limit on connections


def test_every_group_has_the_time_limit():
    for name in ("data_parallel", "model_parallel", "pipeline_model_parallel"):
        backend = getattr(mpu, f"get_{name}_group")()._get_backend(torch.device("cpu"))
        assert backend.options._timeout.total_seconds() == TIME_LIMIT * 60


def test_sentinels_of_transformers_5():
    newer = SimpleNamespace(tokenizer=SimpleNamespace(extra_special_tokens_ids=[5, 4, 3]))
    assert type(get_tokenizer()).additional_special_tokens_ids.fget(newer) == [5, 4, 3]


def test_checkpoints_load_with_arguments_and_a_damaged_one_is_a_failure(args, tmp_path: Path):
    path = Path(checkpointing.get_checkpoint_name(str(tmp_path), 7))
    path.parent.mkdir(parents=True)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    torch.save({"args": args, "iteration": 7}, path)
    assert checkpointing._load_base_checkpoint(str(tmp_path))[0]["args"].hidden_size == HIDDEN
    path.write_bytes(b"PK\x03\x04 half of a file")
    with pytest.raises(SystemExit) as stop:
        checkpointing._load_base_checkpoint(str(tmp_path))
    assert stop.value.code == 1


def test_data_loading_does_not_change_dropout(args, monkeypatch: Patch):
    monkeypatch.setattr(args, "consumed_train_samples", 0)
    before = torch.get_rng_state()
    iter(build_pretraining_data_loader(list(range(16)), 0))
    assert torch.equal(before, torch.get_rng_state())


# ---- 0005: initial weights (beside_native.py has more) ---------------------------------------------------------------


def test_shards_keep_heads_together():
    """[q|k|v] is cut within each part; key_value and the rest are cut in two. The head's copy of the embedding has its
    name."""
    whole = torch.arange(12.0)
    cut_in_two = [0, 1, 2, 3, 4, 5]
    for name in ("query_key_value", "key_value", "dense_h_to_4h"):
        first = [0, 1, 4, 5, 8, 9] if name == "query_key_value" else cut_in_two
        halves = [layout_independent_init.shard(f"x.{name}.weight", whole, 0, rank, 2).tolist() for rank in range(2)]
        assert halves == [first, sorted(set(range(12)) - set(first))]
    name = layout_independent_init.whole_model_name(None, "word_embeddings.weight")
    assert name == "language_model.embedding.word_embeddings.weight"


# ---- DeepSpeed, last: what it starts changes what the others rely on -------------------------------------------------


def zero_config(stage: int, micro_batches: int) -> dict:
    # Its compilation takes minutes where it is not cached, and one process needs none.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed()
    return {
        "train_batch_size": micro_batches,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "overlap_comm": False},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def test_installed_deepspeed_accumulates_all_micro_batches_in_zero2():
    """Not a patch: DeepSpeed 0.17.6 and 0.18.0 to 0.18.2 keep only the last micro-batch (6 / 4 instead of 12 / 4)."""
    layer = torch.nn.Linear(1, 1, bias=False)
    before = layer.weight.item()
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    engine, *_ = deepspeed.initialize(model=layer, optimizer=optimizer, config=zero_config(2, 4))
    for value in (1.0, 2.0, 3.0, 6.0):  # the gradient of a micro-batch is its input
        engine.backward(engine(torch.full((1, 1), value)).sum())
        engine.step()
    assert before - engine.module.weight.item() == pytest.approx(3.0)


def test_zero3_builds_the_model_partitioned(args):
    from pretrain_t5 import model_provider

    args.model_type = ModelType.encoder_and_decoder
    args.deepspeed = True
    args.zero_stage = 3
    args.deepspeed_config_dict = zero_config(3, 1)
    model = model_provider()
    shapes = {name: tuple(getattr(parameter, "ds_shape", ())) for name, parameter in model.named_parameters()}
    assert all(shapes.values())
    assert shapes["lm_head.bias"] == (VOCABULARY,)
    decayed = [group["params"] for group in get_param_groups([model], None, None, 1.0) if group["wd_mult"] == 1.0]
    assert sum(map(len, decayed)) == sum(len(shape) == 2 for shape in shapes.values()) > 0
