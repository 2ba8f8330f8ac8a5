#!/usr/bin/env bash
# Like ZeRO-1, but every process keeps only its 1/N of the gradients.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/megatron_common.sh"

STRATEGY=zero2
STRATEGY_TITLE="ZeRO-2: + gradient sharding"
STRATEGY_PORT=29802
STRATEGY_COLOUR="#0072b2"
STRATEGY_DS_CONFIG=megatron_zero2.json
run_strategy "$@"
