"""The model, the machine and the batch that a command line and the environment ask to predict or to search."""

import argparse
import contextlib
import difflib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from t5bench import Problem, note
from t5bench.arguments import at_least
from t5bench.choose.space import EngineJob
from t5bench.costmodel.job import Architecture, Job, Zero, beyond_parts, padded
from t5bench.costmodel.machine import DEVICES, GIB, Device, Host, Link, device_of
from t5bench.costmodel.parameters import parameters
from t5bench.costmodel.prediction import LATENCY
from t5bench.costmodel.presets import PRESETS
from t5bench.costmodel.time import CPU
from t5bench.costmodel.transformers_config import architecture_of, class_of, keys_not_read
from t5bench.costmodel.transformers_defaults import RELEASE
from t5bench.given_files import read_object
from t5bench.plan.families import FAMILIES
from t5bench.plan.forecast import GIGABITS, gpu_here, padded_vocabulary
from t5bench.plan.launchers import ALONE, ENGINES, without_layout
from t5bench.plan.planner import plan
from t5bench.record.host_cost import read_host_cost
from t5bench.record.network import read_network
from t5bench.record.plan import ROLES, Plan
from t5bench.record.settings import BY_NAME, DEFAULT_FAMILY, Integer

# Other names of settings, and what says where a run is.
OTHER_SETTINGS = ("GPUS_PER_NODE", "TP_SIZE", "PP_SIZE", "HOSTS", "MASTER_ADDR", "NODE_RANK", "MEGATRON_DATA_DIR")
SETTINGS_PRESETS = ("tiny", "small", "base", "large")  # values of MODEL_PRESET
ZERO = ("zero1", "zero2", "zero3", "zero3_offload")


def add_machine(parser: argparse.ArgumentParser) -> None:
    """The GPU, its host and its network."""
    parser.add_argument("--device", default="", help="a GPU's name, as in nvidia-smi (default: this machine's)")
    link = f"a node's link in Gbit/s (default: {GIGABITS:g})"
    latency = f"latency between nodes in microseconds (default: {LATENCY * 1e6:g})"
    network = "the file that check_cluster.sh --network wrote, instead of --link and --latency"
    parser.add_argument("--link", type=at_least(1e-6, float), metavar="GBIT", help=link)
    parser.add_argument("--latency", type=at_least(0, float), metavar="US", help=latency)
    parser.add_argument("--network", type=Path, metavar="FILE", help=network)
    host = "the file that check_cluster.sh --host wrote: what an operator costs the hosts"
    parser.add_argument("--host", type=Path, metavar="FILE", help=host)


def add_model(parser: argparse.ArgumentParser) -> None:
    """What is trained, and how it is answered."""
    known = " ".join(PRESETS)
    model = f"a preset (tiny, small, base or large), a config.json of Transformers, or published dimensions: {known}"
    parser.add_argument("--model", help=model)
    length = "tokens of a sample, of an encoder-decoder those of the encoder (default: the setting's, else the model's)"
    parser.add_argument("--length", type=at_least(1), metavar="TOKENS", help=length)
    decoder_length = "of an encoder-decoder: tokens of the decoder"
    parser.add_argument("--decoder-length", type=at_least(1), metavar="TOKENS", help=decoder_length)
    vocabulary = "vocabulary size before padding (default: the data's, else the model family's)"
    parser.add_argument("--vocabulary", type=at_least(1), help=vocabulary)
    defaults = "take no setting from the environment, but the launchers' defaults"
    parser.add_argument("--defaults", action="store_true", help=defaults)
    parser.add_argument("--json", action="store_true", help="for programs")


@contextlib.contextmanager
def settings_left_out(is_asked: bool) -> Iterator[None]:
    """No setting is in the environment in this block, where that is asked."""
    before = dict(os.environ)
    if is_asked:
        left_out = [name for name in (*BY_NAME, *OTHER_SETTINGS) if os.environ.pop(name, "")]
        if left_out:
            note(f"--defaults: ignored, although it is set: {' '.join(left_out)}")
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@dataclass(frozen=True)
class AskedLengths:
    """Tokens of a sample that a command line asks for; 0 where it asks for none."""

    length: int = 0
    """Of an encoder-decoder, the encoder's."""
    decoder_length: int = 0

    @classmethod
    def of(cls, args: argparse.Namespace) -> "AskedLengths":
        return cls(getattr(args, "length", None) or 0, getattr(args, "decoder_length", None) or 0)

    def or_settings(self, family: str) -> "AskedLengths":
        """With the environment's settings where the command line asks for nothing. Raises Problem."""
        lengths = [whole_setting(name) or 0 for name in FAMILIES[family].lengths]
        length = self.length or lengths[0]
        if FAMILIES[family].has_encoder:
            return AskedLengths(length, self.decoder_length or lengths[1])
        if self.decoder_length:
            raise Problem("--decoder-length is of encoder-decoders, and this model has one length", "Give --length")
        return AskedLengths(length)

    def settings(self, family: str) -> dict[str, str]:
        """As settings of the launchers' own models. Raises Problem."""
        asked = replace(self).or_settings(family)
        names = FAMILIES[family].lengths
        values = (asked.length, asked.decoder_length)
        return {name: str(value) for name, value in zip(names, values, strict=False) if value}


def architecture_named(model: str | None, asked: AskedLengths = AskedLengths()) -> Architecture | None:
    """A model by its published dimensions, or by the file of its configuration; None for the launchers' own.

    Raises Problem.
    """
    if not model or not model.endswith(".json"):
        preset = PRESETS.get(model or "")
        return with_lengths(preset, asked) if preset else None
    remedy = "Give a config.json of Transformers that is one model's"
    content = read_object(Path(model), remedy)
    try:
        lengths = asked.or_settings(architecture_of(content).family)
        return architecture_of(content, lengths.length, lengths.decoder_length)
    except ValueError as error:
        raise Problem(f"{model}: {error}", remedy) from error


def with_lengths(preset: Architecture, asked: AskedLengths) -> Architecture:
    """Published dimensions with other tokens of a sample. Raises Problem."""
    lengths = asked.or_settings(preset.family)
    length = lengths.length or (preset.encoder_length if preset.encoder_layers else preset.decoder_length)
    if preset.positions == "learned" and length > preset.position_rows:
        found = f"the model takes {preset.position_rows} tokens, fewer than {length}"
        raise Problem(found, "Ask for fewer tokens with --length")
    if preset.cross_attention:
        decoder_length = lengths.decoder_length or preset.decoder_length
        return replace(preset, encoder_length=length, decoder_length=decoder_length)
    return replace(preset, decoder_length=length)


def settings_of(model: str | None, asked: AskedLengths = AskedLengths()) -> dict[str, str]:
    """The settings that choose a model by its name, and its lengths. Raises Problem."""
    architecture = architecture_named(model, asked)
    if architecture:
        return settings_of_sizes(architecture)
    if model and model not in SETTINGS_PRESETS:
        known = " ".join((*SETTINGS_PRESETS, *PRESETS))
        near = difflib.get_close_matches(model.lower(), known.split(), n=1)
        meant = f"Did you mean {near[0]}? " if near else ""
        remedy = f"{meant}Choose from: {known}, or give a config.json of Transformers"
        raise Problem(f"the model '{model}' is unknown", remedy)
    family = os.environ.get("MODEL_FAMILY") or DEFAULT_FAMILY
    lengths = asked.settings(family) if family in FAMILIES else {}
    return lengths | ({"MODEL_PRESET": model} if model else {})


def model_in_words(args: argparse.Namespace, job: Job) -> str:
    """The model of an answer: its name, parameters, tokens of a sample and precision. Raises Problem."""
    a = job.architecture
    name = args.model or f"the settings' {FAMILIES[a.family].title}"
    if name.endswith(".json"):
        name = f"{name} ({class_of(read_object(Path(name)))})"
    elif not args.model and os.environ.get("MODEL"):
        name = f"MODEL ({a.kind})"
    tokens = f"{a.decoder_length:,}"
    if a.cross_attention:
        tokens = f"{a.encoder_length:,} + {a.decoder_length:,}"
    return f"{name}: {parameters(a):,} parameters, samples of {tokens} tokens, {job.precision}"


def device_in_words(device: Device) -> str:
    """Its name, with its memory where that is known."""
    return f"{device.name} ({device.memory / GIB:.0f} GiB)" if device.memory else device.name


def name_keys_not_read(model: str | None) -> None:
    """Notes what a model's file says to nobody, such as a name that is misspelt. Raises Problem."""
    if not model or not model.endswith(".json"):
        return
    architecture_named(model)  # refuses a file that is no model's
    unread = keys_not_read(read_object(Path(model)))
    if unread:
        note(f"{model}: transformers {RELEASE} reads no such key, so it changes nothing: {' '.join(unread)}")


def settings_of_sizes(a: Architecture) -> dict[str, str]:
    """The settings that have a model's sizes, so that the launchers' checks read these and not their defaults.

    Where the launchers cannot describe its heads, the hidden size is one that they divide.
    """
    settings = {
        "MODEL_FAMILY": a.family,
        "HIDDEN_SIZE": a.query if a.hidden % a.heads else a.hidden,
        "NUM_ATTENTION_HEADS": a.heads,
        "FFN_HIDDEN_SIZE": a.ffn,
    }
    family = FAMILIES[a.family]
    depths = (a.encoder_layers, a.decoder_layers) if family.has_encoder else (a.decoder_layers,)
    lengths = (a.encoder_length, a.decoder_length) if family.has_encoder else (a.decoder_length,)
    settings |= zip(family.stacks + family.lengths, depths + lengths, strict=True)
    return {name: str(value) for name, value in settings.items()}


def vocabulary_of(plan: Plan, vocabulary: int | None) -> int:
    """The padded vocabulary: from --vocabulary, else the data's tokenizer, else the family."""
    return padded(vocabulary, plan.number("VOCABULARY_MULTIPLE")) if vocabulary else padded_vocabulary(plan)


def device_for(plan: Plan | None, name: str | None) -> Device:
    """The device of this name, else that of a plan on this machine. Raises Problem."""
    remedy = f"Name one with --device: {' '.join(DEVICES)}"
    if name:
        device = device_of(name)
        if not device:
            letters = {re.sub("[^a-z0-9]", "", known.lower()): known for known in DEVICES}
            near = difflib.get_close_matches(re.sub("[^a-z0-9]", "", name.lower()), letters, n=1)
            meant = f"Did you mean {letters[near[0]]}? " if near else ""
            raise Problem(f"the device '{name}' is unknown", f"{meant}{remedy}")
        return device
    device = CPU if plan and plan.device == "cpu" else gpu_here()
    if not device:
        raise Problem("there is no GPU here to predict for", remedy)
    return device


def link_of(network: Path | None, gigabits: float | None, microseconds: float | None) -> Link:
    """The link between nodes, as it was measured or as it is stated. Raises Problem for both at once."""
    if not network:
        latency = LATENCY if microseconds is None else microseconds * 1e-6
        return Link((gigabits or GIGABITS) * 1e9 / 8, latency)
    if gigabits is not None or microseconds is not None:
        found = f"{network} has the link's rate and latency, and options state them, too"
        raise Problem(found, "Leave out the file, or the options")
    return read_network(network).link


def host_of(path: Path | None) -> Host | None:
    """The hosts as they were measured. Raises Problem."""
    return read_host_cost(path).host if path else None


def default_batch() -> int:
    """The samples of an iteration that the launchers' setting asks for. Raises Problem."""
    return whole_setting("GLOBAL_BATCH_SIZE") or int(BY_NAME["GLOBAL_BATCH_SIZE"].default)


def whole_setting(name: str) -> int | None:
    """A setting in the environment. Raises Problem if it is not a whole number of at least 1."""
    value = os.environ.get(name, "")
    fault = Integer(1).fault(name, value) if value else None
    if fault:
        raise Problem(*fault)
    return int(value) if value else None


def asked_size(name: str, short_name: str) -> int | None:
    """The only parallel size to try, from the setting or from its name in other projects' scripts; None to try all.

    Raises Problem.
    """
    for asked in (name, short_name):
        size = whole_setting(asked)
        if size:
            note(f"{asked}={size}: only such layouts are ranked; unset it to rank all")
            return size
    return None


@dataclass(frozen=True)
class AskedModel:
    """The model to rank, with what a run of it needs."""

    engines: Sequence[EngineJob]
    """The environment's ENGINE; both if it names none."""
    given: Mapping[str, str]
    """The settings that a run must have, too."""
    is_launchable: bool
    """Whether the launchers' settings can describe the model."""


def asked_model(args: argparse.Namespace) -> AskedModel:
    """Raises Problem."""
    asked = os.environ.get("ENGINE")
    engines = []
    kept: dict[str, str] = {}
    is_launchable = True
    for engine in [asked] if asked else ENGINES:
        ddp, *zeros = plans_of_one_gpu(args, engine)
        job = Job.of_plan(ddp, vocabulary_of(ddp, args.vocabulary))
        architecture = architecture_named(args.model, AskedLengths.of(args))
        takes_its_file = engine == "native" and bool(settings_of_file(args))
        if takes_its_file:
            kept = given(ddp) | {"MODEL": args.model}  # as a path: the plan has what is in the file
            is_launchable = False
            engines.append(EngineJob(replace(job, architecture=architecture), zeros_of(zeros), takes_its_file))
            continue
        if architecture:
            is_launchable = replace(job.architecture, padded_vocabulary=architecture.padded_vocabulary) == architecture
            job = replace(job, architecture=architecture)
        kept |= given(ddp)
        engines.append(EngineJob(job, zeros_of(zeros)))
    # fp16 needs the loss scaling that the native engine lacks; it stays where it was asked for.
    able = [each for each in engines if asked or each.job.engine != "native" or each.job.precision != "fp16"]
    return AskedModel(able, kept, is_launchable)


def zeros_of(plans: Sequence[Plan]) -> list[Zero]:
    return [Zero.of_config(planned.ds_config) for planned in plans]


def settings_of_file(args: argparse.Namespace) -> dict[str, str]:
    """The settings by which the native engine trains the model of a file; none if it cannot. Raises Problem."""
    if not args.model or not args.model.endswith(".json"):
        return {}
    architecture = architecture_named(args.model, AskedLengths.of(args))
    if not architecture or beyond_parts(architecture):
        return {}
    names = FAMILIES[architecture.family].lengths
    lengths = (architecture.encoder_length, architecture.decoder_length)
    own = [length for length in lengths if length]
    return {"MODEL": args.model} | {name: str(length) for name, length in zip(names, own, strict=True)}


def plans_of_one_gpu(args: argparse.Namespace, engine: str) -> list[Plan]:
    """The launchers' settings, and those of a preset by its name, as plans of DDP and ZERO for one GPU."""
    one = {"NPROC_PER_NODE": "1", "GLOBAL_BATCH_SIZE": "1", "MICRO_BATCH_SIZE": "1", "ENGINE": engine}
    of_file = settings_of_file(args) if engine == "native" else {}
    settings = without_layout(os.environ | ALONE | one | (of_file or settings_of(args.model, AskedLengths.of(args))))
    plans = [plan(settings, strategy) for strategy in ("ddp", *ZERO)]
    for planned in plans:
        if planned.layout is None or (planned.strategy.ds_config and not planned.ds_config):
            wrong = next(obstacle for obstacle in planned.obstacles if obstacle.fatal)
            raise Problem(f"the model's settings are wrong: {wrong.found}", wrong.remedy)
    return plans


def given(planned: Plan) -> dict[str, str]:
    """The settings of the model and its training that are not at their defaults: a run must have them too."""
    return {
        name: one.value
        for name, one in planned.settings.items()
        if not one.is_default and (ROLES[one.role].kept or name == "MODEL_PRESET")
    }
