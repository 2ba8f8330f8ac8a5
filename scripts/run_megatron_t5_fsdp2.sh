#!/usr/bin/env bash
# Like ZeRO-3, but by PyTorch itself: fully_shard of each layer. Gradients are reduced once an
# iteration.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/megatron_common.sh"

STRATEGY=fsdp2
STRATEGY_TITLE="FSDP2: parameter, gradient and optimizer sharding by PyTorch"
STRATEGY_PORT=29814
STRATEGY_COLOUR="#b35900"
STRATEGY_FLAGS=--fsdp2
STRATEGY_ENGINES="native"
run_strategy "$@"
