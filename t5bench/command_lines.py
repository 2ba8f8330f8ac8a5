"""What each command takes. Only the standard library is needed to explain a command or to refuse a wrong argument.

The module of a command (t5bench/__main__.py) has its ``run``, and may need packages. Commands that need none have their
arguments beside it, as ``add_arguments``; so have those in packages/.
"""

import argparse
from pathlib import Path

from t5bench.arguments import add_whole_training, at_least

CLUSTER = """\
Checks all nodes at once over ssh, within a minute, and prints one table. About each node: whether it can be reached,
its limits, memory, disks, kernel log, GPUs and speed. Between nodes: clocks, names, the state of this repository and of
the engine, libraries, data, GPUs, free ports, and the network as measured with all-reduces.

Below the table come the reasons for failures, PASS or FAIL for each node, and the list for srun's --exclude. Every
node must have the repository, the data and this shell's Python (PYTHON, else python3) at the same path. With --health
only the nodes themselves are checked, which takes 30 seconds and needs neither data nor engine.

Exit status: 0 all checks passed, 1 a check failed, 2 wrong use.
"""
DEFAULT_RUNS = "outputs"
MOST_REPEATS = 10_000


def runs_to_compare(parser: argparse.ArgumentParser) -> None:
    """What every command over a comparison takes: the runs, and how to compare them."""
    runs = f"a run directory, or one that contains some (default: {DEFAULT_RUNS})"
    parser.add_argument("runs", nargs="*", metavar="RUN", help=runs)
    parser.add_argument("--baseline", default="ddp", metavar="STRATEGY", help="baseline (default: %(default)s)")
    allow = "allow runs to differ in this, and mark the rows that do"
    parser.add_argument("--allow", action="append", default=[], metavar="NAME", help=allow)
    parser.add_argument("--peak-tflops", type=at_least(1e-6, float), metavar="X", help="a GPU's dense peak, for MFU")


def compare(parser: argparse.ArgumentParser) -> None:
    runs_to_compare(parser)
    add_whole_training(parser)
    formats = ("terminal", "markdown", "csv", "json")
    parser.add_argument("--format", choices=formats, default=formats[0], help="what to print (default: %(default)s)")
    watch = "redraw the table until every run of the sweep has ended (default: every 5 seconds)"
    parser.add_argument("--watch", nargs="?", type=at_least(0.1, float), const=5.0, metavar="SECONDS", help=watch)
    parser.add_argument("--wide", action="store_true", help="print every column and every note")
    parser.add_argument("--output", type=Path, help="directory for the files (default: 'comparison' next to the runs)")


def wandb(parser: argparse.ArgumentParser) -> None:
    runs_to_compare(parser)
    parser.add_argument("--project", metavar="P", help="the W&B project (default: that of the runs)")
    place = "directory of `compare`'s page, and for the W&B files (default: 'comparison' next to the runs)"
    parser.add_argument("--comparison", type=Path, metavar="DIR", help=place)


def pack(parser: argparse.ArgumentParser) -> None:
    runs_to_compare(parser)
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="PACKAGE", help="for example runs.tar.gz")


def verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("package", type=Path, metavar="PACKAGE", help="a file that pack wrote")
    parser.add_argument("--sha256", default="", metavar="CHECKSUM", help="the package's published checksum")


def history(parser: argparse.ArgumentParser) -> None:
    packages = "a package, or a directory with runs"
    parser.add_argument("places", nargs="+", metavar="PACKAGE", help=packages)
    price = "price of a GPU (on CPUs, of a process) per hour, in any currency"
    parser.add_argument("--price", type=at_least(1e-9, float), metavar="AMOUNT", help=price)
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write a page, a .html file")


def explain(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", type=Path, help="run directories with a profile (PROFILE_ITERATION)")


def parity(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="a run directory")
    parser.add_argument("--baseline", type=Path, metavar="DIR", help="compare with this run (default: the first DDP)")
    parser.add_argument("--reference", type=Path, metavar="DIR", help="also compare with this run, of another engine")
    parser.add_argument("--outside", type=Path, metavar="FILE", help="native.reference's curves, for the baseline")
    locate = "say where each run first differs from the baseline (runs with -- --trace)"
    parser.add_argument("--locate", action="store_true", help=locate)
    parser.add_argument(
        "--sensitivity", type=Path, metavar="FILE", help="the recipe's measured sensitivity (alone: print it)"
    )


def parity_check(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("strategies", nargs="*", help="compared with DDP (default: all)")
    parser.add_argument("--engine", choices=("megatron", "native"), required=True)
    parser.add_argument("--runs-dir", type=Path, required=True, help="where the runs go; must not exist")
    parser.add_argument("--locate", action="store_true", help="say where each strategy first differs from DDP")
    parser.add_argument("--sensitivity", action="store_true", help="only measure what the check can see")
    parser.add_argument("--blind-spots", action="store_true", help="also measure what the check can see")
    parser.add_argument("--bf16", action="store_true", help="train in fp32, and then again in bf16")


def sweep(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runs-dir", type=Path, required=True, help="directory of the runs")
    parser.add_argument("--strategies", default="", help="separated by spaces (default: all)")
    parser.add_argument(
        "--repeats",
        type=at_least(1, most=MOST_REPEATS),
        default=1,
        help="runs of each strategy, in another order in each repeat",
    )
    parser.add_argument("--retries", type=at_least(0, most=MOST_REPEATS), default=0, help="retries of a failed run")
    parser.add_argument("--launch", choices=["local", "ssh"], default="local", help="here, or on all hosts")
    recipe = "run the fastest rows once more with these settings: DROPOUT=0.1 CLIP_GRAD=1"
    parser.add_argument("--recipe", default="", metavar="SETTINGS", help=recipe)
    parser.add_argument("--dry-run", action="store_true", help="print what would run")


def search(parser: argparse.ArgumentParser) -> None:
    from t5bench.choose.asked import add_machine

    parser.add_argument("--runs-dir", type=Path, required=True, help="directory of the search")
    parser.add_argument("--runs", type=at_least(1), help="budget: so many runs (default: no limit)")
    parser.add_argument("--minutes", type=at_least(0.1, float), help="budget: minutes of runs (default: no limit)")
    parser.add_argument("--iterations", type=at_least(25), default=40, help="of each run (default: %(default)s)")
    parser.add_argument("--launch", choices=["local", "ssh"], default="local", help="here, or on all hosts")
    add_machine(parser)
    parser.add_argument("--dry-run", action="store_true", help="print what would run first")


def cluster(parser: argparse.ArgumentParser) -> None:
    parser.description = CLUSTER
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("hosts", nargs="*", metavar="HOST", help="the nodes, the master first")
    parser.add_argument("--health", action="store_true", help="check only whether each node is healthy")
    network = "write what was measured of the network into this file, for python -m t5bench predict --network"
    parser.add_argument("--network", type=Path, metavar="FILE", help=network)
    host = "train a tiny model on each node, and write what an operator costs its host, for predict --host"
    parser.add_argument("--host", type=Path, metavar="FILE", help=host)


def trained_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="a run directory with checkpoints, or one that export has written")
    parser.add_argument("--tokenizer", type=Path, help="the tokenizer's directory (default: where the run had it)")
    parser.add_argument("--device", help="cpu, cuda or cuda:N (default: a GPU if there is one)")


def generate(parser: argparse.ArgumentParser) -> None:
    trained_model(parser)
    parser.add_argument("--prompt", action="append", default=[], help="a prompt; may be given several times")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="a file, one prompt per line; - is standard input")
    parser.add_argument("--max-new-tokens", type=int, metavar="N", help="the longest answer (default: 64)")
    parser.add_argument("--temperature", type=float, metavar="T", help="sample tokens; below 1 favours likely ones")
    parser.add_argument("--top-k", type=int, metavar="K", help="sample from the K likeliest tokens")
    parser.add_argument("--top-p", type=float, metavar="P", help="sample from the likeliest tokens of this total share")
    parser.add_argument("--samples", type=int, default=1, metavar="N", help="answers to sample for each prompt")
    parser.add_argument("--seed", type=int, default=1234, help="random seed of the sampling (default: 1234)")


def evaluate(parser: argparse.ArgumentParser) -> None:
    trained_model(parser)
    parser.add_argument("--data", metavar="PREFIX", help="<prefix>.bin and .idx (default: where the run had them)")
    parser.add_argument("--samples", type=int, metavar="N", help="a T5's validation samples (default: the run's)")
    parser.add_argument("--wikitext", type=Path, metavar="FILE", help="word perplexity on WikiText: text or .parquet")
    parser.add_argument("--lambada", type=Path, metavar="FILE", help="accuracy of last words: .jsonl or .parquet")
    parser.add_argument("--stride", type=int, metavar="N", help="tokens to score at a time (default: as many as fit)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def reshape(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="a run directory with checkpoints, including the files of all its nodes")
    parser.add_argument("--tp", type=at_least(1), default=1, help="Megatron's new tensor-parallel size (default: 1)")
    parser.add_argument("--pp", type=at_least(1), default=1, help="Megatron's new pipeline-parallel size (default: 1)")
    engine = "which engine will continue it (default: the one that trained it)"
    parser.add_argument("--engine", choices=("megatron", "native"), help=engine)
    parser.add_argument("--iteration", type=int, help="reshape this checkpoint (default: the newest intact one)")
    parser.add_argument("--output", type=Path, help="the new directory (default: RUN-tpN-ppM, or RUN-native)")


def export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="a run directory with checkpoints, including the files of all its nodes")
    parser.add_argument("output", type=Path, help="the new directory")
    parser.add_argument("--iteration", type=int, help="export this checkpoint (default: the newest intact one)")
    parser.add_argument("--tokenizer", type=Path, help="the tokenizer's directory (default: where the run had it)")
    parser.add_argument(
        "--max-shard-size", default="2GB", metavar="SIZE", help="largest weights file (default: %(default)s)"
    )


def importing(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directory", type=Path, help="config.json, safetensors and a tokenizer, as Transformers saves them"
    )
    parser.add_argument("run", type=Path, help="the new directory; the checkpoint will be in RUN/checkpoints")
    parser.add_argument("--tp", type=at_least(1), default=1, help="tensor-parallel size (default: 1)")
    parser.add_argument("--pp", type=at_least(1), default=1, help="pipeline-parallel size (default: 1)")
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp16"), default="bf16", help="of the finetuning")
    engine = "which engine will train on (default: native for what its models describe, else megatron)"
    parser.add_argument("--engine", choices=("megatron", "native"), help=engine)


def record(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, help="the run directory, which the launcher has prepared")
    parser.add_argument("node", type=int, help="this node's rank")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="what to run and record")


def collect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="the run directory, created if it does not exist")
    parser.add_argument("sources", nargs="+", metavar="FROM", help="a directory, or host:directory to fetch over ssh")
    parser.add_argument("--same-run", action="store_true", help="treat the parts as one run, whatever their clocks say")


def prepare_data(parser: argparse.ArgumentParser) -> None:
    """It is told everything by settings."""


# By command.
ARGUMENTS = {
    "prepare-data": prepare_data,
    "compare": compare,
    "wandb": wandb,
    "pack": pack,
    "verify": verify,
    "history": history,
    "explain": explain,
    "parity": parity,
    "parity-check": parity_check,
    "sweep": sweep,
    "search": search,
    "cluster": cluster,
    "generate": generate,
    "evaluate": evaluate,
    "reshape": reshape,
    "export": export,
    "import": importing,
    "record": record,
    "collect": collect,
}
