#!/usr/bin/env bash
# Two pipeline stages, each split over two processes.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/megatron_common.sh"

STRATEGY=hybrid
STRATEGY_TITLE="Hybrid (TP+PP): TP=2 x PP=2, requires 4 GPUs in total"
STRATEGY_PORT=29812
STRATEGY_COLOUR="#cc79a7"
STRATEGY_TP=2
STRATEGY_PP=2
run_strategy "$@"
