#!/usr/bin/env bash
# The encoder runs on the first process, the decoder on the second; micro-batches stream between them.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/megatron_common.sh"

STRATEGY=pipeline
STRATEGY_TITLE="Pipeline Parallelism: encoder on GPU 0, decoder on GPU 1 (PP=2)"
STRATEGY_PORT=29810
STRATEGY_COLOUR="#d55e00"
STRATEGY_PP=2
run_strategy "$@"
