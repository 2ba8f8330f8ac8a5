"""A trained model: the newest intact checkpoint of a run, with what is needed to rebuild the model from it."""

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from native.pieces import WEIGHTS
from t5bench import Problem
from t5bench.checkpoint_form import TRACKER
from t5bench.costmodel.job import Architecture
from t5bench.record.checkpoints import RESHAPED_FROM, Checkpoints, is_of_an_earlier_release
from t5bench.record.records import load, load_settings
from t5bench.record.run import Run
from t5bench.tools.convert.checkpoint_file import read_checkpoint_file
from t5bench.tools.convert.foreign import arguments_of, of_this_model
from t5bench.tools.convert.shards import Sharding, Weights, whole_weights
from t5bench.tools.convert.stored import StoredTensors, is_stored
from training_comparison.given_files import read_text

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
IMPORTED = "release"  # Megatron's name for a checkpoint of no iteration
INTERLEAVED = "Of earlier releases and of Megatron-DeepSpeed, only checkpoints of other schedules can be converted"
NO_CHECKPOINT = "Train with SAVE_INTERVAL=100, for example"


@dataclass(frozen=True)
class TrainedModel:
    directory: Path
    engine: str  # megatron or native
    iteration: int
    folder: Path  # of the checkpoint's files
    args: Namespace  # the engine's arguments
    head: Mapping[str, Any] = field(repr=False)  # one of Megatron's files; empty for the native engine
    architecture: Architecture
    dtype: torch.dtype  # what the engine computes with
    tokenizer: Path
    record: Run | None = field(repr=False)  # None if only the checkpoint is here, as after reshape and import

    @property
    def weights(self) -> Weights:
        """All parameters by the engine's names, each read when it is asked for."""
        if is_stored(self.folder):
            return StoredTensors(self.folder, WEIGHTS)
        return whole_weights(self.folder, self.args)

    @property
    def activation(self) -> str:
        """The feed-forward's, by its name in Transformers: Megatron's fused kernel is the tanh form of GELU."""
        if self.architecture.kind:
            return self.architecture.activation
        if getattr(self.args, "squared_relu", False):
            raise Problem("the model's activation is the squared ReLU, which GPT-2 and Blenderbot lack")
        is_tanh = self.args.bias_gelu_fusion or getattr(self.args, "openai_gelu", False)
        return "gelu_new" if is_tanh else "gelu"

    @classmethod
    def of_run(cls, directory: Path, iteration: int | None = None) -> "TrainedModel":
        """iteration: of the checkpoint, unless it is to be the newest. Raises Problem."""
        if not any(directory.glob("node*.json")) and (directory / "checkpoints" / TRACKER).is_file():
            return cls._without_record(directory, iteration)
        record = load(directory)
        # The directory may have been moved, or copied to this machine.
        plan = replace(record.plan, output_dir=str(directory))
        checkpoints = Checkpoints(plan)
        wanted = iteration or next(iter(checkpoints.iterations()), 0)
        if plan.engine == "native" and is_of_an_earlier_release(checkpoints.folder(wanted)):
            iteration = wanted  # whose files are checked when they are read
        elif iteration is None:
            iteration, faults = checkpoints.newest()
            if not iteration:
                remedy = "\n".join([*faults.values(), NO_CHECKPOINT])
                raise Problem(f"{directory} has no intact checkpoint", remedy)
        elif fault := checkpoints.fault(iteration):
            saved = ", ".join(map(str, checkpoints.iterations())) or "none"
            raise Problem(f"{fault} in {checkpoints.directory}", f"Checkpoints were saved at these iterations: {saved}")
        folder = checkpoints.folder(iteration)
        tokenizer = Path(plan.tokenizer)
        if plan.engine == "megatron":
            return cls._of_head(directory, iteration, folder, tokenizer, record)
        args = native_arguments(record, folder)
        dtype = DTYPES[plan.precision]
        return cls(directory, plan.engine, iteration, folder, args, {}, record.architecture, dtype, tokenizer, record)

    @classmethod
    def _without_record(cls, directory: Path, wanted: int | None) -> "TrainedModel":
        """A directory that reshape or import has written."""
        written = read_text(directory / "checkpoints" / TRACKER).strip()
        is_imported = written == IMPORTED
        if not (is_imported or written.isdecimal()):
            tracker = directory / "checkpoints" / TRACKER
            raise Problem(f"{tracker} names no iteration, but '{written[:40]}'", "Copy it again")
        iteration = 0 if is_imported else int(written)
        if wanted not in (None, iteration):
            raise Problem(f"{directory} has no checkpoint of iteration {wanted}", f"It has only that of {iteration}")
        folder = directory / "checkpoints" / (IMPORTED if is_imported else f"iter_{iteration:07d}")
        settings = settings_of(directory)
        if not is_stored(folder) and (settings is None or is_of_megatron(folder)):
            return cls._of_head(directory, iteration, folder, None, None)
        if settings is None:
            raise Problem(f"{directory} has a checkpoint, but no record of the run", "Copy the whole run directory")
        args = reshaped_arguments(settings, folder)
        dtype = DTYPES[settings.plan.precision]
        tokenizer = Path(settings.plan.tokenizer)
        return cls(directory, "native", iteration, folder, args, {}, settings.architecture, dtype, tokenizer, None)

    @classmethod
    def _of_head(
        cls, directory: Path, iteration: int, folder: Path, tokenizer: Path | None, record: Run | None
    ) -> "TrainedModel":
        files = [*folder.glob("mp_rank_00*/*.pt"), *folder.glob("*mp_rank_00_model_states.pt")]
        if not files:
            raise Problem(f"{folder} has no file of rank 0", "Copy every node's checkpoint files there")
        head = read_checkpoint_file(min(files))
        args = arguments_of(head, min(files))
        if getattr(args, "virtual_pipeline_model_parallel_size", None):
            raise Problem(f"{directory} was trained with an interleaved pipeline", INTERLEAVED)
        with of_this_model(folder):
            architecture = Architecture.of_arguments(vars(args), args.padded_vocab_size)
            tokenizer = tokenizer or Path(args.tokenizer_model or Path(args.vocab_file).parent)
            dtype = args.params_dtype
        return cls(directory, "megatron", iteration, folder, args, head, architecture, dtype, tokenizer, record)


def is_of_megatron(folder: Path) -> bool:
    """Whether a checkpoint's files have Megatron's arguments; those of the native engine's earlier releases do not."""
    first = min(folder.glob("mp_rank_00*/*.pt"), default=None)
    return first is not None and "args" in read_checkpoint_file(first)


def settings_of(directory: Path) -> Run | None:
    """The settings of the run itself, or of the one that was reshaped to this directory; None if it has neither."""
    for place in (directory, directory / RESHAPED_FROM):
        if any(place.glob("node*.json")):
            return load_settings(place)
    return None


def reshaped_arguments(settings: Run, folder: Path) -> Namespace:
    """As native_arguments, of a checkpoint that reshape has cut for another layout; its files' names say for which."""
    parts = [path.name.removeprefix("mp_rank_") for path in folder.glob("mp_rank_*")]  # 00, or 00_000 with stages
    tensor_parallel_ranks = {part.partition("_")[0] for part in parts}
    tp = len(tensor_parallel_ranks)
    pp = len(parts) // tp if tp else 0
    args = native_arguments(settings, folder)
    if is_stored(folder):
        return args
    args.native_sharding = Sharding.of(args, tp, pp)
    args.tensor_model_parallel_size = tp
    args.pipeline_model_parallel_size = pp
    args.deepspeed = False
    args.zero_stage = 0
    return args


def native_arguments(record: Run, folder: Path) -> Namespace:
    """The native engine's checkpoint has no arguments; these are what its plan says, under Megatron's names.

    folder: of the checkpoint. Raises Problem.
    """
    if not record.padded_vocab_size:
        raise Problem(f"the record of {record.directory} does not say how large the model's vocabulary is")
    plan = record.plan
    architecture = record.architecture
    if "virtual_pipeline_stages" in plan.named_arguments and not is_stored(folder):
        raise Problem(f"{record.directory} was trained with an interleaved pipeline", INTERLEAVED)
    given = plan.named_arguments
    is_t5 = architecture.family == "t5"
    encoder_layers = architecture.encoder_layers if is_t5 else architecture.decoder_layers
    layers = {"encoder": encoder_layers}
    if is_t5:
        layers["decoder"] = architecture.decoder_layers
    return Namespace(
        native_sharding=Sharding(record.layout.tp, record.layout.pp, record.layout.split_rank or 0, layers),
        encoder_num_layers=encoder_layers,
        num_layers=encoder_layers,
        decoder_num_layers=architecture.decoder_layers if is_t5 else None,
        num_attention_heads=architecture.heads,
        num_key_value_heads=architecture.kv_heads,
        ffn_hidden_size=architecture.ffn,
        padded_vocab_size=architecture.padded_vocabulary,
        swiglu=architecture.gated,
        untie_embeddings_and_output_weights=not architecture.tied,
        tensor_model_parallel_size=record.layout.tp,
        pipeline_model_parallel_size=record.layout.pp,
        deepspeed=plan.zero_stage > 0,
        ds_pipeline_enabled=False,
        zero_stage=plan.zero_stage,
        params_dtype=DTYPES[plan.precision],
        bias_gelu_fusion="no_bias_gelu_fusion" not in given,
        layernorm_epsilon=1e-5,
        init_method_std=float(given.get("init_method_std") or 0.02),
        hidden_dropout=float(given.get("hidden_dropout") or 0.1),
        attention_dropout=float(given.get("attention_dropout") or 0.1),
    )
