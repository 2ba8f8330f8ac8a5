#!/usr/bin/env bash
# Every process keeps all parameters and gradients, and 1/N of the Adam moments and fp32 parameters.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/megatron_common.sh"

STRATEGY=zero1
STRATEGY_TITLE="ZeRO-1: optimizer state sharding"
STRATEGY_PORT=29801
STRATEGY_COLOUR="#56b4e9"
STRATEGY_DS_CONFIG=megatron_zero1.json
run_strategy "$@"
