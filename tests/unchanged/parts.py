"""The parts: each yields the names of files and the texts that they hold."""

import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

from look import Look, Question

HERE = Path(__file__).resolve().parent
Texts = Iterator[tuple[str, str]]
ENGINES = ("megatron", "native")
FAMILIES = ("t5", "gpt")

# ---- help ------------------------------------------------------------------------------------------------------------


def help_texts(look: Look) -> Texts:
    listed = look.run(*look.t5bench("--help")).stdout
    commands = re.findall(r"^ {2,4}([a-z][a-z-]+)(?: {2}|$)", listed, re.MULTILINE)
    questions = [Question("commands.txt", look.t5bench("--help"))]
    for command in commands:
        questions.append(Question(f"{command}.txt", look.t5bench(command, "--help")))
    for path in sorted((look.tree / "scripts").glob("*.*")):
        # What other scripts source has no help of its own.
        if not path.name.endswith("common.sh"):
            program = sys.executable if path.suffix == ".py" else "bash"
            questions.append(Question(f"{path.name}.txt", [program, str(path), "--help"]))
    return look.answers(questions)


# ---- plans -----------------------------------------------------------------------------------------------------------

EIGHT_GPUS = "#!/usr/bin/env bash\n" + "".join(f"echo 'GPU {i}: NVIDIA Stub (UUID: GPU-{i})'\n" for i in range(8))
TINY = {"DEVICE": "cpu", "MODEL_PRESET": "tiny", "PRECISION_FLAG": "", "DROPOUT": "0", "GLOBAL_BATCH_SIZE": "8"}
# Of the run that the plan of a resumed one continues; it ends halfway, as planned.
SAVED = TINY | {"TRAIN_ITERS": "4", "SAVE_INTERVAL": "2", "LOG_INTERVAL": "1", "WANDB_MODE": "disabled"}
# Each reaches other arguments, checks and notes. GPUs are a stub's, and there are eight, but where DEVICE is cpu.
SETTINGS = {
    "defaults": {},
    "tiny-fp32": TINY,
    "fp16-full-recompute": {"PRECISION_FLAG": "--fp16", "RECOMPUTE": "full", "MICRO_BATCH_SIZE": "4",
        "GLOBAL_BATCH_SIZE": "64", "MODEL_PRESET": "base"},
    "methods": {"RECOMPUTE": "selective", "GRADIENT_REDUCTION": "fp32", "OVERLAP_COMM": "on", "FLASH_ATTENTION": "off",
        "CUDA_DEVICE_MAX_CONNECTIONS": "8", "FSDP_KEEP_PARAMETERS": "1", "FSDP_SHARD_SIZE": "4"},
    "four-by-two": {"TENSOR_PARALLEL_SIZE": "4", "PIPELINE_PARALLEL_SIZE": "2", "MODEL_PRESET": "small"},
    "interleaved": {"PIPELINE_SCHEDULE": "interleaved", "VIRTUAL_PIPELINE_STAGES": "3", "GLOBAL_BATCH_SIZE": "32"},
    "zero-bubble": {"PIPELINE_SCHEDULE": "zero-bubble", "PIPELINE_PARALLEL_SIZE": "4"},
    "sequence-parallel": {"SEQUENCE_PARALLEL": "1", "VOCABULARY_MULTIPLE": "1024"},
    "reduce-once": {"ZERO_REDUCE_ONCE": "1", "NPROC_PER_NODE": "4"},
    "resume": SAVED | {"RESUME": "1"},
    "two-nodes": {"HOSTS": "127.0.0.1 127.0.0.2", "NPROC_PER_NODE": "4", "MASTER_PORT": "29900",
        "RENDEZVOUS_TIMEOUT": "60", "DISTRIBUTED_TIMEOUT_MINUTES": "3", "WANDB_API_KEY": "0123456789" * 4,
        "WANDB_PROJECT": "a project", "WANDB_RUN_GROUP": "a group", "WANDB_RUN_NAME": "a name"},
    "recipe": {"RAMPUP_BATCH_SIZE": "8 8 800", "LR": "0.001", "MIN_LR": "0.0001", "LR_WARMUP_ITERS": "20",
        "WEIGHT_DECAY": "0.1", "CLIP_GRAD": "2", "SEED": "7", "TRAIN_ITERS": "200", "EVAL_ITERS": "4",
        "EVAL_INTERVAL": "50", "SAVE_INTERVAL": "100", "PROFILE_ITERATION": "30", "WANDB_MODE": "disabled"},
}  # fmt: skip
ARGUMENTS = {"two-nodes": ["127.0.0.1", "0"], "recipe": ["--", "--num-workers", "0", "--init-method-std", "0.01"]}


def plans(look: Look) -> Texts:
    stubs = look.scratch / "stubs"
    stubs.mkdir(exist_ok=True)
    (stubs / "nvidia-smi").write_text(EIGHT_GPUS)
    (stubs / "nvidia-smi").chmod(0o755)
    saved = look.scratch / "saved"
    first_half = look.script("run_megatron_t5_ddp.sh", "--", "--exit-interval", "2")
    look.prepare(*first_half, **look.job("t5", "native"), **SAVED, OUTPUT_DIR=str(saved))
    questions = []
    for family, engine, (name, settings), strategy in product(FAMILIES, ENGINES, SETTINGS.items(), look.launchers()):
        place = saved if name == "resume" else look.scratch / "runs" / strategy
        path = f"{stubs}:{look.environment()['PATH']}"
        chosen = look.job(family, engine) | {"OUTPUT_DIR": str(place), "PATH": path} | settings
        for option in ("--dry-run", "--dry-run=json"):
            script = look.script(f"run_megatron_t5_{strategy}.sh", option, *ARGUMENTS.get(name, []))
            file = f"{family}-{engine}/{name}/{strategy}{option.removeprefix('--dry-run').replace('=', '.')}.txt"
            questions.append(Question(file, script, chosen))
    return look.answers(questions)


# ---- predictions -----------------------------------------------------------------------------------------------------

DEVICES = ("v100", "rtx5000-ada", "a100", "h100", "mi250x")
NODES = ((1, 4, 10), (2, 1, 10), (2, 8, 100), (16, 8, 400))  # nodes, GPUs of each, Gbit/s of each
MODELS = ("large", "gpt-1.5b")


def predictions(look: Look) -> Texts:
    questions = []
    for device, (nodes, per_node, link), model in product(DEVICES, NODES, MODELS):
        name = f"{device}-{nodes}x{per_node}-{link}-{model}"
        machine = ["--device", device, "--link", str(link), "--model", model, "--json"]
        batch = str(max(16, 2 * nodes * per_node))
        environment = {"NNODES": str(nodes), "NPROC_PER_NODE": str(per_node), "GLOBAL_BATCH_SIZE": batch}
        questions.append(Question(f"{name}.predict.txt", look.t5bench("predict", *machine), environment))
        gpus = ["--gpus", str(nodes * per_node), "--per-node", str(per_node)]
        questions.append(Question(f"{name}.layouts.txt", look.t5bench("layouts", *gpus, *machine)))
    return look.answers(questions)


# ---- records ---------------------------------------------------------------------------------------------------------


def make_records(look: Look, directory: Path) -> None:
    """Makes the records that every checkout reads, with the makers of this one's tests, and packs some of them."""
    shutil.rmtree(directory, ignore_errors=True)
    maker = [sys.executable, str(HERE / "make_records.py")]
    path = f"{look.tree}:{look.tree / 'tests'}"
    look.prepare(*maker, str(directory), PYTHONPATH=path)
    for name in ("strategies", "repeats", "later"):
        look.prepare(*look.t5bench("pack", str(directory / name), "-o", str(directory / f"{name}.tar.gz")))
    look.prepare(*maker, "--forge", str(directory / "repeats.tar.gz"), PYTHONPATH=path)


def records(look: Look) -> Texts:
    questions = []
    comparisons = sorted(path for path in look.made.iterdir() if path.is_dir())
    for runs in comparisons:
        name = runs.name
        directories = sorted(str(path.parent) for path in runs.rglob("node0.json"))
        for option in ("terminal", "markdown", "json"):
            written = str(look.scratch / "comparisons" / f"{name}.{option}")
            words = ["compare", str(runs), "--wide", "--format", option, "--output", written]
            questions.append(Question(f"compare/{name}.{option}.txt", look.t5bench(*words)))
        questions.append(Question(f"parity/{name}.txt", look.t5bench("parity", *directories)))
        for directory in directories:
            short = Path(directory).relative_to(look.made)
            questions.append(Question(f"explain/{short}.txt", look.t5bench("explain", directory)))
        packed = str(look.scratch / f"{name}.packed.tar.gz")
        questions.append(Question(f"pack/{name}.txt", look.t5bench("pack", str(runs), "-o", packed)))
    for package in sorted(look.made.glob("*.tar.gz")):
        questions.append(Question(f"verify/{package.name}.txt", look.t5bench("verify", str(package))))
    histories = [str(look.made / f"{name}.tar.gz") for name in ("repeats", "later")]
    questions.append(Question("history/packages.txt", look.t5bench("history", *histories)))
    questions.append(Question("history/packages.json.txt", look.t5bench("history", *histories, "--json")))
    directories = [str(path) for path in comparisons]
    questions.append(Question("history/runs.txt", look.t5bench("history", *directories, "--price", "2")))
    return look.answers(questions)


# ---- faults and hosts ------------------------------------------------------------------------------------------------


def faults(look: Look) -> Texts:
    """The tests that docs/failure_table.md names play its rows; the plugin ``said`` keeps what was said meanwhile."""
    document = (look.tree / "docs" / "failure_table.md").read_text()
    named = re.findall(r"\| `(\S+::test_\w+)`(?: \(mount\))? \|$", document, re.MULTILINE)
    return said_by_tests(look, [f"tests/{name}" for name in dict.fromkeys(named)])


def hosts(look: Look) -> Texts:
    (file,) = (look.tree / "tests").rglob("test_failures.py")
    return said_by_tests(look, [f"{file}::test_what_happens"])


def said_by_tests(look: Look, names: list[str]) -> Texts:
    """A text for each test function: of each of its cases the outcome, and what programs and problems said."""
    kept = look.scratch / "said"
    kept.unlink(missing_ok=True)
    options = ["-q", "-n2", "--dist=loadgroup", "-p", "said", f"--basetemp={look.scratch / 'pytest'}"]
    print(f"  {len(names)} tests, most of several cases", file=sys.stderr)
    environment = {"PYTHONPATH": str(HERE), "SAID": str(kept), "MEGATRON_DIR": str(look.engine), "NIGHTLY": "1"}
    pytest = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
    result = look.run(*pytest, *options, *names, has_own_network=False, **environment)
    if not kept.exists():
        raise RuntimeError(f"pytest ran no test in {look.tree}:\n{result.stdout}{result.stderr}")
    cases: dict[str, list[tuple[str, str]]] = {}
    for line in kept.read_text().splitlines():
        case = json.loads(line)
        cases.setdefault(case["test"], []).append((case["case"], case["text"]))
    for test, found in sorted(cases.items()):
        yield f"{test}.txt", "".join(f"==== {case}\n{text}\n" for case, text in sorted(found))


# ---- digits ----------------------------------------------------------------------------------------------------------

SHORT = TINY | {"TRAIN_ITERS": "4", "LOG_INTERVAL": "1", "MICRO_BATCH_SIZE": "2", "LR": "0.001", "CLIP_GRAD": "1.14",
    "WANDB_MODE": "disabled"}  # fmt: skip
# T5 is trained by every strategy; a GPT by one that is its alone, and by the one that the others are compared with.
GPT_STRATEGIES = ("3d", "ddp")


def digits(look: Look) -> Texts:
    for family, engine, strategy in product(FAMILIES, ENGINES, look.launchers()):
        if family == "gpt" and strategy not in GPT_STRATEGIES:
            continue
        name = f"{family}-{engine}-{strategy}"
        print(f"  {name}", file=sys.stderr)
        output = look.scratch / "trained" / name
        script = look.script(f"run_megatron_t5_{strategy}.sh")
        result = look.run(*script, **look.job(family, engine), **SHORT, OUTPUT_DIR=str(output))
        lines = [f"exit status {result.returncode}"]
        if result.returncode:
            lines += re.findall(r"^error: .*", result.stderr, re.MULTILINE)
        else:
            log = (output / "node0.log").read_text()
            pattern = r" iteration +(\d+)/.* lm loss: (\S+) .*grad norm: (\S+) "
            for iteration, loss, norm in re.findall(pattern, log):
                lines.append(f"iteration {iteration}: lm loss {loss}, gradient norm {norm}")
        yield f"{name}.txt", "\n".join(lines) + "\n"


PARTS: dict[str, Callable[[Look], Texts]] = {
    "help": help_texts,
    "plans": plans,
    "predictions": predictions,
    "records": records,
    "faults": faults,
    "digits": digits,
    "hosts": hosts,
}
