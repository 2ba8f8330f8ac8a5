"""Published models' shapes from import to export: trained on by several strategies, and loaded by Transformers again.

    PYTHONPATH=.:tests:packages/judge/src python tests/tools/convert/import_then_train.py [DIRECTORY]

The hub is not needed: Transformers makes random weights of the shapes, and everything after it is what a user does:
`import`, the launchers, `export`, `from_pretrained`. It writes docs/generated/imported.md: losses and gradient norms
of the strategies beside DDP's, the first loss beside Transformers' own of the same samples, and what from_pretrained
says of the exports. The larger model takes 10 GB of memory and some minutes.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
from real_runs import environment
from support import REPO_ROOT
from torch.nn import functional as F

from native.arguments import parse
from native.data import open_data
from native.token_file import TokenFile, Vocabulary
from t5bench.compare.parity import curve
from t5bench.costmodel.parameters import parameters
from t5bench.costmodel.published import PUBLISHED
from t5bench.imports import import_transformers
from t5bench.plan.ports import free_port
from t5bench.record.records import load
from t5bench.record.run import Run

PAGE = REPO_ROOT / "docs" / "generated" / "imported.md"
SAMPLE = REPO_ROOT / "megatron_data" / "sample"
MODELS = ("stories15m", "smollm2-135m")
STRATEGIES = ("ddp", "tensor", "fsdp2")
ITERATIONS = 4
LENGTH = 64
SETTINGS = {
    "ENGINE": "native", "DEVICE": "cpu", "NPROC_PER_NODE": "2", "TRAIN_ITERS": str(ITERATIONS), "LOG_INTERVAL": "1",
    "GLOBAL_BATCH_SIZE": "4", "MICRO_BATCH_SIZE": "2", "SEQ_LENGTH": str(LENGTH), "PRECISION_FLAG": "", "DROPOUT": "0",
    "LR": "0.001", "CLIP_GRAD": "1", "SAVE_INTERVAL": str(ITERATIONS), "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled",
}  # fmt: skip
HEAD = f"""\
# Published models' shapes: imported, trained on, exported, loaded

The weights are random, made by Transformers' `save_pretrained`.
`import` made them the first weights of the native engine, from which each strategy trained {ITERATIONS} iterations
on a CPU (fp32, no dropout, {LENGTH} tokens a sample); `export` gave the last ones back.
`tests/tools/convert/import_then_train.py` does all of it.
Differences are relative, the largest of all iterations, from DDP's; those of logits relative to the largest one.
`from_pretrained` missed no key of any export and found none that it does not know.
The peak learning rate, 0.001, magnifies rounding from iteration to iteration in deep models: in the 135M's shape with
hidden size 144, gradient norms under TP 3 differ by 3e-7, 5e-7, 3e-6 and 9e-6, and with 0.0001 by at most 4e-7.
"""
TABLE = """
## {model}

{count:,} parameters.
The first loss differs by {first:.1e} from that of Transformers' own model on the same samples.

| Strategy | Loss, first to last | Losses differ by | Gradient norms by | Exported model's logits by |
|---|---|--:|--:|--:|
"""


class Trained(NamedTuple):
    """A strategy's run, and what the model that Transformers has loaded from its export computes."""

    run: Run
    logits: torch.Tensor


def run(*words: str, **settings: str) -> str:
    """Standard output. Raises CalledProcessError."""
    command = subprocess.run(
        words, cwd=REPO_ROOT, env=environment(**settings), stdout=subprocess.PIPE, text=True, check=True
    )
    return command.stdout


def published(model: str, folder: Path) -> None:
    """Random weights of a published shape, with the sample's tokenizer, as save_pretrained leaves them."""
    transformers = import_transformers()
    torch.manual_seed(1)
    options = dict(PUBLISHED[model])
    config = transformers.AutoConfig.for_model(options.pop("model_type"), **options)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for path in (SAMPLE / "tokenizer").iterdir():
        shutil.copy(path, folder)


def sizes_of(strategy: str, folder: Path) -> dict[str, str]:
    """The smallest tensor-parallel size that divides the groups of heads, with as many processes."""
    groups = json.loads((folder / "config.json").read_text())["num_key_value_heads"]
    size = "2" if groups % 2 == 0 else str(groups)
    return {"NPROC_PER_NODE": size, "TENSOR_PARALLEL_SIZE": size} if strategy == "tensor" else {}


def trained(strategy: str, folder: Path, directory: Path, data: Path) -> Trained:
    """What a user does after `import`."""
    output = directory / strategy
    weights = directory / "imported" / "checkpoints" / "iter_0000000"
    launcher = f"scripts/run_megatron_t5_{strategy}.sh"
    chosen = (
        SETTINGS
        | sizes_of(strategy, folder)
        | {"MODEL": str(folder), "OUTPUT_DIR": str(output), "MEGATRON_DATA_DIR": str(data)}
        | {"MASTER_PORT": str(free_port())}
    )
    run("bash", launcher, "--", "--initial-weights", str(weights), **chosen, TOKENIZER_MODEL=str(folder))
    exported = directory / f"{strategy}-exported"
    run(sys.executable, "-m", "t5bench", "export", str(output), str(exported))
    shutil.rmtree(output / "checkpoints")
    transformers = import_transformers()
    model, report = transformers.AutoModelForCausalLM.from_pretrained(exported, output_loading_info=True)
    tokens = torch.arange(5, 5 + LENGTH).unsqueeze(0)
    with torch.no_grad():
        logits = model.eval()(input_ids=tokens).logits
    assert not any(report.values()), report
    return Trained(load(output), logits)


def first_loss(one: Run, folder: Path) -> float:
    """Of Transformers' own model, on the samples of a run's first iteration."""
    args = parse(list(one.plan.arguments.words), "gpt")
    args.num_workers = 0
    samples, _ = open_data(args, 0, TokenFile(args.data_path), Vocabulary.of(args))
    tokens, labels = next(samples)
    model = import_transformers().AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        logits = model(input_ids=tokens).logits
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten()).item()


def largest(own: dict[int, float], other: dict[int, float]) -> float:
    """Relative difference."""
    return max(abs(own[step] / other[step] - 1) for step in other)


def row(strategy: str, one: Trained, ddp: Trained) -> str:
    losses = curve(one.run)
    off = largest(losses, curve(ddp.run))
    of_norm = largest(curve(one.run, "grad_norm"), curve(ddp.run, "grad_norm"))
    of_logits = (one.logits - ddp.logits).abs().max() / ddp.logits.abs().max()
    ends = f"{losses[1]:.6f} to {losses[ITERATIONS]:.6f}"
    return f"| {strategy}, {one.run.world_size} processes | {ends} | {off:.1e} | {of_norm:.1e} | {of_logits:.1e} |\n"


def table(model: str, directory: Path) -> str:
    folder = directory / "published"
    published(model, folder)
    data = directory / "data"
    source = {"XSUM_SOURCE": str(SAMPLE / "articles.jsonl"), "TOKENIZER_MODEL": str(folder)}
    run("bash", "scripts/prepare_xsum_megatron.sh", MODEL_FAMILY="gpt", MEGATRON_DATA_DIR=str(data), **source)
    run(sys.executable, "-m", "t5bench", "import", str(folder), str(directory / "imported"))
    found = {strategy: trained(strategy, folder, directory, data) for strategy in STRATEGIES}
    ddp = found["ddp"]
    print(model, json.dumps({strategy: curve(one.run) for strategy, one in found.items()}), file=sys.stderr)
    first_off = abs(curve(ddp.run)[1] / first_loss(ddp.run, folder) - 1)
    head = TABLE.format(model=model, count=parameters(ddp.run.architecture), first=first_off)
    return head + "".join(row(strategy, one, ddp) for strategy, one in found.items())


def main() -> None:
    torch.set_num_threads(2)
    page = HEAD
    for model in MODELS:
        with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as name:
            page += table(model, Path(name))
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
