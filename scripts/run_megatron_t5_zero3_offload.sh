#!/usr/bin/env bash
# Like ZeRO-3, but optimizer states and parameters are in CPU memory, and Adam runs on the CPU.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/megatron_common.sh"

STRATEGY=zero3_offload
STRATEGY_TITLE="ZeRO-3 + CPU Offload: + optimizer & param offload to CPU"
STRATEGY_PORT=29804
STRATEGY_COLOUR="#b5a21e"
STRATEGY_DS_CONFIG=megatron_zero3_offload.json
run_strategy "$@"
