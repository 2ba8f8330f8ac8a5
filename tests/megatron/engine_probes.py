"""Questions to the real engine, asked inside it: `engine_probes.py GROUP DIRECTORY TOKENIZER [RANK]`.

Importing the engine takes seconds, so one process answers all questions of a group. Each answer goes to
DIRECTORY/GROUP-RANK.json under the question's name, as {"answer": ...} or {"error": traceback}.
"""

import json
import os
import shutil
import struct
import sys
import time
import traceback
from pathlib import Path
from types import ModuleType, SimpleNamespace

GROUP, DIRECTORY, TOKENIZER = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
RANK = int(sys.argv[4]) if len(sys.argv) > 4 else 0
WORLD_SIZE = {"alone": 1, "training": 1, "nodes": 2, "tensor": 2, "pipeline": 2}[GROUP]

# Two "nodes" of one process each, on a machine that has room for two.
LOCAL_RANK = 0 if GROUP == "nodes" else RANK
os.environ |= {
    "DS_ACCELERATOR": "cpu",
    "LOCAL_SIZE": "2",
    "RANK": str(RANK),
    "LOCAL_RANK": str(LOCAL_RANK),
    "WORLD_SIZE": str(WORLD_SIZE),
    "OMP_NUM_THREADS": "1",
}

PIPELINE = "--pipeline-model-parallel-size 2 --pipeline-model-parallel-split-rank 1" if GROUP == "pipeline" else ""

ENCODER_LENGTH, DECODER_LENGTH, VOCABULARY = 32, 16, 4224
ARGUMENTS = f"""
    --tensor-model-parallel-size {2 if GROUP == "tensor" else 1} --encoder-num-layers 1 --decoder-num-layers 2
    --hidden-size 32 --num-attention-heads 2 --kv-channels 16 --ffn-hidden-size 64
    --encoder-seq-length {ENCODER_LENGTH} --decoder-seq-length {DECODER_LENGTH} --max-position-embeddings 32
    --attention-dropout 0 --hidden-dropout 0 --micro-batch-size 2 --global-batch-size 4 --train-iters 4
    --lr 0.001 --min-lr 0 --lr-decay-style cosine --weight-decay 0.01 --clip-grad 1.0 --seed 1234
    --data-impl mmap --split 949,50,1 --num-workers 0 --tokenizer-type HFTokenizer
    --make-vocab-size-divisible-by {64 if GROUP == "tensor" else 128} --log-interval 1 --eval-iters 0
    --distributed-timeout-minutes 7 --DDP-impl local --layout-independent-init {PIPELINE}
""".split()

ANSWERS: dict[str, dict] = {}


def answer(question):
    """Run a question at once and keep its answer, or what it died of."""
    try:
        ANSWERS[question.__name__] = {"answer": question()}
    except BaseException as error:
        ANSWERS[question.__name__] = {"error": "".join(traceback.format_exception(error))}
        if isinstance(error, KeyboardInterrupt):
            raise
    return question


def write_data(prefix: Path, documents: int = 40, length: int = 60) -> str:
    """An indexed dataset of one-sentence documents that end in </s> (id 1)."""
    tokens = [[3 + (7 * d + 13 * i) % 3000 for i in range(length - 1)] + [1] for d in range(documents)]
    prefix.parent.mkdir(parents=True, exist_ok=True)
    prefix.with_suffix(".bin").write_bytes(b"".join(struct.pack(f"<{length}H", *document) for document in tokens))
    prefix.with_suffix(".idx").write_bytes(
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, 8, documents, documents + 1)
        + struct.pack(f"<{documents}i", *[length] * documents)
        + struct.pack(f"<{documents}q", *range(0, 2 * length * documents, 2 * length))
        + struct.pack(f"<{documents + 1}q", *range(documents + 1))
    )
    # Older than whatever is built from them now.
    for suffix in (".bin", ".idx"):
        os.utime(prefix.with_suffix(suffix), (time.time() - 100,) * 2)
    return str(prefix)


def start_engine():
    """The engine initialized as pretrain_t5.py would, with the processes meeting in a file."""
    import torch
    from deepspeed.accelerator import get_accelerator

    chosen = []
    choose = get_accelerator().set_device
    get_accelerator().set_device = lambda device: (chosen.append(device), choose(device))
    join = torch.distributed.init_process_group
    meeting = f"file://{DIRECTORY}/{GROUP}-meet"
    torch.distributed.init_process_group = lambda **kwargs: join(init_method=meeting, **kwargs)

    from megatron.initialize import initialize_megatron

    data = write_data(DIRECTORY / f"data-{RANK}" / "text")
    sys.argv = ["pretrain_t5.py", *ARGUMENTS, "--tokenizer-model", TOKENIZER, "--data-path", data]
    initialize_megatron(args_defaults={})
    return chosen


def main():
    if GROUP == "training":
        return train()
    devices = start_engine()
    globals()[f"ask_{GROUP}"](devices)
    (DIRECTORY / f"{GROUP}-{RANK}.json").write_text(json.dumps(ANSWERS))
    return None


# ---- a batch and models --------------------------------------------------------------------------------------------


def make_batch(padding_token: int = 0):
    """Two samples of which the encoder's last ten tokens are padding, with some token in its place."""
    import torch

    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 3000, (2, ENCODER_LENGTH), generator=generator)
    tokens[:, -10:] = padding_token
    decoder_tokens = torch.randint(3, 3000, (2, DECODER_LENGTH), generator=generator)
    labels = torch.randint(3, 3000, (2, DECODER_LENGTH), generator=generator)
    seen = torch.arange(ENCODER_LENGTH) < ENCODER_LENGTH - 10
    encoder_mask = ~seen.expand(2, ENCODER_LENGTH, ENCODER_LENGTH)
    cross_mask = ~seen.expand(2, DECODER_LENGTH, ENCODER_LENGTH)
    decoder_mask = torch.ones(2, DECODER_LENGTH, DECODER_LENGTH).triu(1).bool()
    return tokens, decoder_tokens, encoder_mask, decoder_mask, cross_mask, labels


def make_model(**parts):
    """A T5Model as get_model leaves it before it is wrapped: initialized, with its attributes."""
    import torch
    from megatron import get_args, layout_independent_init
    from megatron.arguments import core_transformer_config_from_args
    from megatron.core.enums import ModelType
    from megatron.model import T5Model

    args = get_args()
    args.model_type = ModelType.encoder_and_decoder
    torch.manual_seed(1)
    model = T5Model(core_transformer_config_from_args(args), **parts)
    layout_independent_init.initialize(model, args)
    return model.eval()


def run_model(model, batch):
    *inputs, labels = batch
    return model(*inputs, lm_labels=labels)


# ---- one process ---------------------------------------------------------------------------------------------------


def ask_alone(_devices):
    import torch
    from megatron import get_args, get_tokenizer

    args, tokenizer = get_args(), get_tokenizer()

    @answer
    def vocabulary():
        return {
            "vocab_size": tokenizer.vocab_size,
            "length": len(tokenizer.tokenizer),
            "largest_sentinel": max(tokenizer.additional_special_tokens_ids),
            "padded": args.padded_vocab_size,
        }

    @answer
    def special_tokens():
        return [tokenizer.cls, tokenizer.sep, tokenizer.mask, tokenizer.pad, tokenizer.eos]

    @answer
    def sentinels_of_newer_tokenizers():
        newer = SimpleNamespace(extra_special_tokens_ids=[5, 4, 3])
        return type(tokenizer).additional_special_tokens_ids.fget(SimpleNamespace(tokenizer=newer))

    @answer
    def whole_model_returns():
        return list(run_model(make_model(), make_batch()).shape)

    @answer
    def encoder_stage_returns():
        return list(run_model(make_model(add_decoder=False), make_batch()).shape)

    def decoder_stage(**parts):
        model = make_model(add_encoder=False, **parts)
        model.set_input_tensor([torch.zeros(ENCODER_LENGTH, 2, 32)])
        return model

    @answer
    def decoder_stage_returns():
        return list(run_model(decoder_stage(post_process=False), make_batch()).shape)

    @answer
    def last_decoder_stage_returns():
        return list(run_model(decoder_stage(), make_batch()).shape)

    @answer
    def embeddings_by_decoder_stage():
        model, looked_up = decoder_stage(), []
        model.language_model.embedding.register_forward_pre_hook(lambda _, inputs: looked_up.append(inputs[0].shape[1]))
        run_model(model, make_batch())
        return looked_up

    @answer
    def loss_with_padding_tokens():
        model = make_model()
        return [run_model(model, make_batch(token)).sum().item() for token in (0, 77)]

    @answer
    def language_model_head_bias():
        bias = make_model().lm_head.bias
        return [bias.tensor_model_parallel, bias.partition_dim, bias.partition_stride]

    @answer
    def self_attention_that_raises():
        layer = make_model().language_model.encoder.layers[0]
        calls = []

        class Broken(torch.nn.Module):
            def forward(self, *inputs, **kwargs):
                calls.append(sorted(kwargs))
                raise TypeError("a real error inside")

        layer.self_attention = Broken()
        try:
            layer(torch.zeros(4, 2, 32))
        except TypeError as error:
            return {"calls": len(calls), "error": str(error), "context": error.__context__ is not None}

    @answer
    def layers_of_a_deeper_decoder():
        return len(make_model().language_model.decoder.layers)

    @answer
    def experts_of_later_stages():
        from megatron.model.transformer import get_num_experts_per_layer

        return [get_num_experts_per_layer([1], layers, 2, offset) for layers, offset in ((1, 1), (2, 2), (3, 9))]

    @answer
    def datasets_without_evaluation():
        from megatron.data.dataset_utils import build_train_valid_test_datasets

        datasets = build_train_valid_test_datasets(
            args.data_path, "mmap", "949,50,1", [16, 0, 0], ENCODER_LENGTH, 0.15, 0.1, 1234, True,
            max_seq_length_dec=DECODER_LENGTH, dataset_type="t5",
        )  # fmt: skip
        return {"none": [dataset is None for dataset in datasets], "sample": sorted(datasets[0][0])}

    @answer
    def imported_without_need():
        from megatron import training

        modules = [name for name in ("megatron.model.vision.knn_monitor", "apex") if name in sys.modules]
        return modules + [name for name in ("compute_feature_bank", "init_compression") if hasattr(training, name)]

    @answer
    def gradient_accumulation_fusion():
        return args.gradient_accumulation_fusion

    @answer
    def masked_softmax_fusion():
        return args.masked_softmax_fusion

    @answer
    def async_allreduce_of_one_process():
        return args.async_tensor_model_parallel_allreduce

    @answer
    def gradient_node_in_a_hook():
        """What DeepSpeed 0.18.3 asks of PyTorch where gradients are off."""
        with torch.no_grad():
            node = torch.autograd.graph._get_grad_fn_or_grad_acc(torch.nn.Parameter(torch.zeros(1)))
        return type(node).__name__

    @answer
    def group_timeouts():
        from megatron.core import mpu

        names = ("data_parallel", "model_parallel", "pipeline_model_parallel")
        groups = [getattr(mpu, f"get_{name}_group")() for name in names]
        return [g._get_backend(torch.device("cpu")).options._timeout.total_seconds() for g in groups]

    ask_optimizer(args)
    ask_metrics(args)
    ask_index_maps(args)
    ask_index_builder()
    ask_checkpoints(args)
    ask_wandb(args)
    ask_initialization(args)
    # These change what the others rely on, and come last.
    ask_zero(args)


def ask_optimizer(args):
    import torch
    from megatron.model import LayerNorm
    from megatron.optimizer import get_megatron_optimizer
    from megatron.optimizer.clip_grads import clip_grad_norm_fp32

    @answer
    def optimizer_class():
        optimizer = get_megatron_optimizer([make_model()]).optimizer
        return [type(optimizer).__name__, optimizer.param_groups[0]["weight_decay"]]

    @answer
    def clipping():
        parameters = [torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(3))]
        for parameter, value in zip(parameters, (3.0, 4.0), strict=True):
            parameter.grad = torch.zeros_like(parameter)
            parameter.grad[0] = value
        norms = [clip_grad_norm_fp32(parameters, [p.grad for p in parameters], limit) for limit in (100.0, 1.0)]
        return [*norms, *(p.grad[0].item() for p in parameters)]

    @answer
    def layer_norm():
        values = torch.arange(8.0).view(2, 4)
        plain = LayerNorm(4, eps=1e-5, no_persist_layer_norm=True, sequence_parallel=True, mem_efficient_ln=True)
        centered = LayerNorm(4, eps=1e-5, apply_layernorm_1p=True)
        return {
            "same": torch.equal(plain(values), centered(values)),
            "sequence_parallel": [plain.weight.sequence_parallel, plain.bias.sequence_parallel],
            "centered_weight": centered.weight.tolist(),
        }

    @answer
    def data_loader_leaves_random_state():
        from megatron.data.data_samplers import build_pretraining_data_loader

        args.consumed_train_samples = 0
        before = torch.get_rng_state()
        iter(build_pretraining_data_loader(list(range(16)), 0))
        return torch.equal(before, torch.get_rng_state())


def log_loss(loss: float):
    """One call of training_log(), as after the first iteration."""
    import torch
    from megatron import training

    timer = training.get_timers()("interval-time", log_level=0)
    timer.start()
    try:
        losses, norm = {"lm loss": torch.tensor(loss)}, torch.tensor(1.25)
        training.training_log(losses, {}, 0.1, 1, None, False, 0, norm, None, None, None)
    finally:
        timer.reset()


def ask_metrics(args):
    import megatron.utils
    from megatron.core.enums import ModelType

    large = {
        "micro_batch_size": 1, "data_parallel_size": 1, "world_size": 1, "hidden_size": 1024, "ffn_hidden_size": 2816,
        "num_attention_heads": 16, "num_key_value_heads": 16, "kv_channels": 64, "num_layers": 24,
        "encoder_num_layers": 24, "decoder_num_layers": 24, "seq_length": 512, "decoder_seq_length": 128,
        "padded_vocab_size": 32128, "swiglu": False, "topk": 1, "checkpoint_activations": False,
        "recompute_granularity": None, "recompute_method": None, "recompute_num_layers": 1,
        "pipeline_model_parallel_size": 1, "pipeline_model_parallel_split_rank": None,
        "model_type": ModelType.encoder_and_decoder,
    }  # fmt: skip

    def tflop(**changes):
        count = megatron.utils.get_num_microbatches
        megatron.utils.get_num_microbatches = lambda: 16
        try:
            return megatron.utils.throughput_calculator(None, SimpleNamespace(**large | changes), 1.0, 1)[1]
        finally:
            megatron.utils.get_num_microbatches = count

    @answer
    def tflop_per_iteration():
        return {
            "plain": tflop(),
            "half_the_world": tflop(world_size=2),
            "full": tflop(recompute_granularity="full", recompute_method="uniform"),
            "full_stages": tflop(
                recompute_granularity="full", recompute_method="block", recompute_num_layers=6,
                pipeline_model_parallel_size=4, pipeline_model_parallel_split_rank=2,
            ),
            "selective": tflop(recompute_granularity="selective"),
            "decoder_only": tflop(model_type=ModelType.encoder_or_decoder),
        }  # fmt: skip

    @answer
    def loss_that_is_not_a_number():
        from megatron import training

        lines, printed = [], training.print_rank_last
        training.print_rank_last = lines.append
        args.model_type, args.actual_seq_length = ModelType.encoder_and_decoder, ENCODER_LENGTH
        try:
            log_loss(float("nan"))
        finally:
            training.print_rank_last = printed
        return lines[0]


def ask_index_maps(args):
    import numpy as np
    from megatron.data import dataset_utils

    def get_map(prefix, samples=16):
        dataset = dataset_utils.get_indexed_dataset_(prefix, "mmap", True)
        mapping = dataset_utils.get_samples_mapping(
            dataset, prefix, None, samples, ENCODER_LENGTH - 2, 0.1, 1234, "train", False
        )
        return np.array(mapping).tolist()

    def map_file(prefix):
        (path,) = Path(prefix).parent.glob("*_indexmap_*")
        return path

    @answer
    def damaged_index_maps():
        prefix = write_data(DIRECTORY / "damaged" / "text")
        good = get_map(prefix)
        path, outcomes = map_file(prefix), {}
        whole = path.read_bytes()
        for name, content in {
            "empty": b"",
            "half": whole[: len(whole) // 2],
            "no header": b"x" * 300,
            "zeroes": whole[:128] + bytes(len(whole) - 128),
        }.items():
            path.write_bytes(content)
            outcomes[name] = get_map(prefix) == good and path.read_bytes() == whole
        outcomes["files"] = sorted(p.name for p in path.parent.iterdir())
        return outcomes

    @answer
    def index_map_of_older_data():
        prefix = write_data(DIRECTORY / "renewed" / "text", documents=40)
        get_map(prefix)
        write_data(Path(prefix), documents=5)
        for suffix in (".bin", ".idx"):
            os.utime(prefix + suffix)
        os.utime(map_file(prefix), (time.time() - 50,) * 2)
        return max(end for _, end, _ in get_map(prefix))

    @answer
    def index_map_of_another_split():
        prefix = write_data(DIRECTORY / "split" / "text", documents=40)
        get_map(prefix)
        dataset = dataset_utils.get_indexed_dataset_(prefix, "mmap", True)
        dataset.set_doc_idx(dataset.get_doc_idx()[:11])
        mapping = dataset_utils.get_samples_mapping(
            dataset, prefix, None, 16, ENCODER_LENGTH - 2, 0.1, 1234, "train", False
        )
        return int(mapping[:, 1].max())

    @answer
    def index_map_written_at_once():
        prefix = write_data(DIRECTORY / "atomic" / "text")
        names, replace = [], os.replace

        def spy(source, target):
            names.append([Path(source).name, Path(target).name, np.load(source).shape[1]])
            replace(source, target)

        os.replace = spy
        try:
            get_map(prefix)
        finally:
            os.replace = replace
        return names


def ask_index_builder():
    import sysconfig

    from megatron.data import dataset_utils

    def build(name, compiler, **environment):
        """compile_helper() on a copy of its sources; the compiler is a script."""
        directory = DIRECTORY / name
        directory.mkdir()
        here = Path(dataset_utils.__file__).parent
        for source in ("helpers.cpp", "Makefile"):
            shutil.copy(here / source, directory)
        script = directory / "stub-compiler"
        script.write_text(f"#!/bin/sh\necho \"$@\" > '{directory}/arguments'\n{compiler}")
        script.chmod(0o755)
        original, previous = dataset_utils.__file__, dict(os.environ)
        dataset_utils.__file__ = str(directory / "dataset_utils.py")
        os.environ |= {"CXX": script.name, "PATH": f"{directory}:{os.environ['PATH']}"} | environment
        try:
            dataset_utils.compile_helper()
            status = 0
        except SystemExit as stop:
            status = stop.code
        finally:
            dataset_utils.__file__ = original
            os.environ.clear()
            os.environ |= previous
        arguments = (directory / "arguments").read_text().split() if (directory / "arguments").exists() else []
        return status, arguments, sorted(p.name for p in directory.glob("helpers*") if p.suffix != ".cpp")

    writes_output = 'while [ "$1" != -o ]; do shift; done; echo module > "$2"\n'

    @answer
    def index_builder():
        broken = DIRECTORY / "broken-python"
        broken.mkdir()
        for name in ("python3", "python3-config"):
            (broken / name).write_text("#!/bin/sh\nexit 1\n")
            (broken / name).chmod(0o755)
        path = f"{broken}:{DIRECTORY / 'building'}:{os.environ['PATH']}"
        status, arguments, files = build("building", writes_output, PATH=path)
        return {
            "status": status,
            "own_headers": f"-I{sysconfig.get_path('include')}" in arguments,
            "to_temporary": any(a.endswith(".tmp") for a in arguments),
            "files": [name.removesuffix(sysconfig.get_config_var("EXT_SUFFIX")) for name in files],
        }

    @answer
    def index_builder_that_fails():
        status, _, files = build("failing", writes_output + "exit 3\n")
        return {"status": status, "module": "helpers" + sysconfig.get_config_var("EXT_SUFFIX") in files}

    @answer
    def index_builder_without_compiler():
        return build("compilerless", "", CXX="/nonexistent/c++")[0]

    @answer
    def index_builder_that_is_there():
        directory = DIRECTORY / "built"
        directory.mkdir()
        (directory / "helpers.cpp").touch()
        (directory / f"helpers{sysconfig.get_config_var('EXT_SUFFIX')}").touch()
        original, path = dataset_utils.__file__, os.environ["PATH"]
        dataset_utils.__file__, os.environ["PATH"] = str(directory / "x.py"), "/nonexistent"
        try:
            return dataset_utils.compile_helper()
        finally:
            dataset_utils.__file__, os.environ["PATH"] = original, path


def ask_checkpoints(args):
    import torch
    from megatron import checkpointing

    def checkpoint(name, write):
        directory = DIRECTORY / name
        path = Path(checkpointing.get_checkpoint_name(str(directory), 7))
        path.parent.mkdir(parents=True)
        write(path)
        (directory / "latest_checkpointed_iteration.txt").write_text("7")
        return str(directory)

    @answer
    def checkpoint_with_arguments():
        directory = checkpoint("whole", lambda path: torch.save({"args": args, "iteration": 7}, path))
        state, _ = checkpointing._load_base_checkpoint(directory)
        return state["args"].hidden_size

    @answer
    def checkpoint_that_is_damaged():
        directory = checkpoint("torn", lambda path: path.write_bytes(b"PK\x03\x04 half of a file"))
        try:
            checkpointing._load_base_checkpoint(directory)
        except SystemExit as stop:
            return stop.code
        return "loaded"


def ask_wandb(args):
    from megatron import global_vars, training

    class Wandb(ModuleType):
        """Stands in for wandb: remembers what it is given, and has no key."""

        def __init__(self):
            super().__init__("wandb")
            self.calls, self.logged, self.finished = [], {}, 0

        def init(self, **kwargs):
            self.calls.append({k: v for k, v in kwargs.items() if k != "config"} | {"config": len(kwargs["config"])})
            json.dumps(kwargs["config"])
            if kwargs.get("mode") != "offline":
                raise RuntimeError("No API key configured")
            return self

        def log(self, values, step=None):
            self.logged |= {key: float(value) for key, value in values.items() if value is not None}

        def define_metric(self, *_args, **_kwargs):
            pass

        def finish(self):
            self.finished += 1

    @answer
    def wandb_without_key():
        wandb, previous = Wandb(), sys.modules.get("wandb")
        directory = DIRECTORY / "wandb"
        args.wandb_project, args.wandb_exp_name, args.wandb_save_dir = "project", "", str(directory)
        sys.modules["wandb"] = wandb
        training.wandb, imported = wandb, training.wandb
        try:
            global_vars._set_wandb_writer(args)
            log_loss(2.0)
            global_vars.close_writers()
        finally:
            global_vars._GLOBAL_WANDB_WRITER = None
            training.wandb = imported
            args.wandb_project = args.wandb_save_dir = ""
            if previous is None:
                del sys.modules["wandb"]
            else:
                sys.modules["wandb"] = previous
        return {
            "calls": wandb.calls,
            "directory": directory.is_dir(),
            "logged": wandb.logged,
            "finished": wandb.finished,
        }


def ask_initialization(args):
    import torch
    from megatron import layout_independent_init

    @answer
    def initial_weights():
        model = make_model()
        return {
            name: [list(parameter.shape), parameter.flatten()[:4].tolist(), parameter.std().item()]
            for name, parameter in model.named_parameters()
            if "layers.1" in name or "embedding" in name or "bias" in name
        }

    @answer
    def shards():
        whole = torch.arange(12.0)
        return {
            name: [layout_independent_init.shard(f"x.{name}", whole, 0, rank, 2).tolist() for rank in range(2)]
            for name in ("query_key_value.weight", "key_value.weight", "dense_h_to_4h.weight")
        }

    @answer
    def name_of_the_heads_copy():
        return layout_independent_init.whole_model_name(None, "word_embeddings.weight")

    ask_loss_and_norm()


def ask_loss_and_norm():
    import torch
    from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate

    @answer
    def loss():
        return run_model(make_model(), make_batch()).sum().item()

    @answer
    def gradient_norm():
        """The norm over the parameters that the optimizer counts, summed over the ranks as the optimizer does."""
        model = make_model().train()
        run_model(model, make_batch()).sum().backward()
        counted = [p.grad for p in model.parameters() if param_is_not_tensor_parallel_duplicate(p)]
        square = torch.stack([grad.square().sum() for grad in counted]).sum()
        torch.distributed.all_reduce(square)
        return square.sqrt().item()


def ask_zero(args):
    import deepspeed
    import torch
    from megatron.optimizer import get_param_groups

    # Its compilation takes minutes where it is not cached, and one process needs none.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed()

    def config(stage, micro_batches):
        return {
            "train_batch_size": micro_batches,
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": stage, "overlap_comm": False},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }

    @answer
    def zero2_accumulates_all_micro_batches():
        """How far one step of SGD with rate 1 moves a weight whose gradient is the micro-batch's input."""
        torch.manual_seed(1)
        layer = torch.nn.Linear(1, 1, bias=False)
        before = layer.weight.item()
        optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
        engine, *_ = deepspeed.initialize(model=layer, optimizer=optimizer, config=config(2, 4))
        for value in (1.0, 2.0, 3.0, 6.0):
            engine.backward(engine(torch.full((1, 1), value)).sum())
            engine.step()
        return before - engine.module.weight.item()

    @answer
    def zero3_builds_partitioned():
        from megatron.core.enums import ModelType
        from pretrain_t5 import model_provider

        args.model_type = ModelType.encoder_and_decoder
        args.deepspeed, args.zero_stage, args.deepspeed_config_dict = True, 3, config(3, 1)
        model = model_provider()
        shapes = {name: getattr(p, "ds_shape", None) for name, p in model.named_parameters()}
        groups = get_param_groups([model], None, None, 1.0)
        return {
            "whole": [name for name, shape in shapes.items() if shape is None],
            "head_bias": list(shapes["lm_head.bias"] or ()),
            "decayed": sum(len(group["params"]) for group in groups if group["wd_mult"] == 1.0),
            "matrices": sum(len(shape or (0, 0)) == 2 for shape in shapes.values()),
        }


# ---- two processes -------------------------------------------------------------------------------------------------


def ask_nodes(devices):
    """Two nodes without a shared file system: every process has its own data directory."""
    from megatron import get_args
    from megatron.data.dataset_utils import build_train_valid_test_datasets

    def build(prefix):
        return build_train_valid_test_datasets(
            [prefix], "mmap", "949,50,1", [16, 0, 0], ENCODER_LENGTH, 0.15, 0.1, 1234, True,
            max_seq_length_dec=DECODER_LENGTH, dataset_type="t5",
        )[0]  # fmt: skip

    @answer
    def device():
        return devices

    @answer
    def index_maps_of_a_node():
        dataset = build(get_args().data_path[0])
        return {
            "samples": len(dataset),
            "files": sorted(path.name for path in (DIRECTORY / f"data-{RANK}").glob("*indexmap*")),
        }

    @answer
    def index_maps_in_a_shared_directory():
        import torch

        if RANK == 0:
            write_data(DIRECTORY / "shared" / "text")
        torch.distributed.barrier()
        dataset = build(str(DIRECTORY / "shared" / "text"))
        torch.distributed.barrier()
        return {
            "samples": len(dataset),
            "files": sorted(path.name for path in (DIRECTORY / "shared").glob("*indexmap*")),
        }


def ask_tensor(_devices):
    """Two tensor parallel ranks."""
    ask_loss_and_norm()


def ask_pipeline(_devices):
    """Two stages whose tensors go through the host, as where processes share a GPU; here the GPU is the host too."""
    import torch
    from megatron import get_args
    from megatron.arguments import core_transformer_config_from_args
    from megatron.core.pipeline_parallel import p2p_communication

    p2p_communication._goes_through_host = lambda: True
    shape, exchange, exchanged = (3, 2, 4), p2p_communication._batched_p2p_ops, []

    def spy(**kwargs):
        exchanged.append({key: value for key, value in kwargs.items() if isinstance(value, torch.Tensor)})
        return exchange(**kwargs)

    p2p_communication._batched_p2p_ops = spy

    def send_and_receive(config):
        mine = torch.full(shape, RANK + 1.0, requires_grad=True) * 2
        if RANK == 0:
            received = p2p_communication.send_forward_recv_backward(mine, shape, config)
        else:
            received = p2p_communication.send_backward_recv_forward(mine, shape, config)
        copies = [value for values in exchanged for key, value in values.items() if key.startswith("tensor_recv")]
        return {
            "values": received.unique().tolist(),
            "shape": list(received.shape),
            "is_leaf": received.is_leaf and received.requires_grad,
            "copied": [copy is not received and not copy.requires_grad for copy in copies],
        }

    @answer
    def exchange_through_host():
        return send_and_receive(core_transformer_config_from_args(get_args()))

    @answer
    def exchange_of_shapes_through_host():
        config = core_transformer_config_from_args(get_args())
        config.variable_seq_lengths = True
        exchanged.clear()
        return send_and_receive(config)


# ---- a training run ------------------------------------------------------------------------------------------------


def train():
    """Two iterations of pretrain_t5.py itself in fp16, each with two seconds of evaluation and of saving after it."""
    import runpy

    from megatron import training

    training.evaluate_and_print_results = lambda *_args, **_kwargs: time.sleep(2)
    training.save_checkpoint_and_time = lambda *_args, **_kwargs: time.sleep(2)
    script = str(Path(training.__file__).parent.parent / "pretrain_t5.py")
    arguments = [*ARGUMENTS, "--tokenizer-model", TOKENIZER, "--data-path", write_data(DIRECTORY / "run" / "text")]
    arguments += ["--eval-interval", "1", "--save", str(DIRECTORY / "checkpoints"), "--save-interval", "1"]
    arguments += ["--tensorboard-dir", str(DIRECTORY / "tensorboard"), "--exit-interval", "2"]
    arguments += ["--fp16", "--initial-loss-scale", "1024"]
    arguments[arguments.index("--eval-iters") + 1] = "1"
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": os.environ["PROBE_PORT"]}
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
