#!/usr/bin/env bash
# Like ZeRO-2, but parameters are sharded too: gathered layer by layer and freed after use.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/megatron_common.sh"

STRATEGY=zero3
STRATEGY_TITLE="ZeRO-3: + parameter sharding"
STRATEGY_PORT=29803
STRATEGY_COLOUR="#009e73"
STRATEGY_DS_CONFIG=megatron_zero3.json
run_strategy "$@"
