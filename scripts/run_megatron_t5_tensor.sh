#!/usr/bin/env bash
# Every layer is split: heads and FFN columns over two processes, an all-reduce per block.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/megatron_common.sh"

STRATEGY=tensor
STRATEGY_TITLE="Tensor Parallelism: column/row-parallel across 2 GPUs (TP=2)"
STRATEGY_PORT=29811
STRATEGY_COLOUR="#e69f00"
STRATEGY_TP=2
run_strategy "$@"
