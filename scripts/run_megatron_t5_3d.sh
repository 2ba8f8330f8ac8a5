#!/usr/bin/env bash
# Two pipeline stages of DeepSpeed's engine, each split over two processes; further processes
# share the optimizer state.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/megatron_common.sh"

STRATEGY=3d
STRATEGY_TITLE="3D (TP+PP+ZeRO-1): TP=2 x PP=2 in DeepSpeed's pipeline engine, for GPT"
STRATEGY_PORT=29813
STRATEGY_COLOUR="#7a5195"
STRATEGY_TP=2
STRATEGY_PP=2
STRATEGY_DS_CONFIG=megatron_zero1.json
STRATEGY_FAMILIES="gpt"
STRATEGY_ENGINES="megatron"
run_strategy "$@"
