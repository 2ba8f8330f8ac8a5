#!/usr/bin/env bash
# A whole replica per process; gradients are all-reduced every iteration.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/megatron_common.sh"

STRATEGY=ddp
STRATEGY_TITLE="DDP (baseline): Megatron native DDP, no model sharding"
STRATEGY_PORT=29800
STRATEGY_COLOUR=ink
run_strategy "$@"
