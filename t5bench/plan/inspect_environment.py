"""What a launcher asks of Python before torchrun starts, in one short process.

Prints ``key=value`` lines: ``data_problem`` (a sentence, when the indexed dataset cannot be used), ``deepspeed`` and
``flash_attention`` (installed versions, when installed), ``zero_stage`` and one ``ds_config`` line for every line of
the effective DeepSpeed JSON. The launcher has 0.15 s of CPU for everything, hence no import beyond the standard
library and no ``importlib.metadata``, which alone takes a fifth of that.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from t5bench.corpus.index import read_index

EXIT_CONFIGURATION = 2


def installed_version(distribution: str) -> str | None:
    """Version of an installed distribution (underscored name), from the name of its metadata folder."""
    for folder in sys.path:
        for metadata in Path(folder).glob(f"{distribution}-*.dist-info"):
            return metadata.name.removesuffix(".dist-info").split("-", 1)[1]
    return None


def effective_ds_config(
    stage_config: dict[str, Any],
    *,
    micro_batch_size: int,
    global_batch_size: int,
    clip_grad: float,
    precision: str,
    gradient_reduction: str,
) -> dict[str, Any]:
    """A strategy's own JSON completed with the run's batch sizes (in samples), clipping norm and precision.

    DeepSpeed takes these from the JSON and Megatron from its arguments, and neither notices when they differ: a
    different micro-batch size changes the gradient scale, fp32 arguments with a bf16 JSON train in bf16. Here both come
    from the same settings.

    Raises ValueError when the strategy's own JSON already sets one of them.
    """
    run_config = {
        "train_batch_size": global_batch_size,
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_clipping": clip_grad,
        "bf16": {"enabled": precision == "--bf16"},
        "fp16": {"enabled": precision == "--fp16"},
        # DeepSpeed's own progress lines would stand between the engine's.
        "steps_per_print": 10**9,
    }
    if gradient_reduction == "fp32":
        # As Megatron's DDP does whatever the precision. Not data_types.grad_accum_dtype beside it: with that ZeRO-1 in
        # bf16 becomes another optimizer of DeepSpeed's.
        run_config["communication_data_type"] = "fp32"
    if twice := sorted(run_config.keys() & stage_config.keys()):
        raise ValueError(f"{', '.join(twice)} come from the settings and cannot stand in the strategy's JSON")
    return run_config | stage_config


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-prefix", type=Path, required=True)
    parser.add_argument("--ds-config", type=Path)
    parser.add_argument("--micro-batch-size", type=int, required=True)
    parser.add_argument("--global-batch-size", type=int, required=True)
    parser.add_argument("--clip-grad", type=float, required=True)
    parser.add_argument("--precision", choices=["--bf16", "--fp16", ""], required=True)
    parser.add_argument("--gradient-reduction", choices=["default", "fp32"], required=True)
    args = parser.parse_args()

    try:
        read_index(args.data_prefix)
    except ValueError as error:
        print(f"data_problem={error}")
    for key, distribution in (("deepspeed", "deepspeed"), ("flash_attention", "flash_attn")):
        if version := installed_version(distribution):
            print(f"{key}={version}")
    if args.ds_config:
        try:
            stage_config = json.loads(args.ds_config.read_text())
            stage = stage_config["zero_optimization"]["stage"]
            config = effective_ds_config(
                stage_config,
                micro_batch_size=args.micro_batch_size,
                global_batch_size=args.global_batch_size,
                clip_grad=args.clip_grad,
                precision=args.precision,
                gradient_reduction=args.gradient_reduction,
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            print(f"error: {args.ds_config}: {error}", file=sys.stderr)
            return EXIT_CONFIGURATION
        print(f"zero_stage={stage}")
        for line in json.dumps(config, indent=2).splitlines():
            print(f"ds_config={line}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
