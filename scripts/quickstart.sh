#!/usr/bin/env bash
# Trains and compares all eight strategies from a fresh clone. It needs no GPU and no compiler.
#
# Usage: bash scripts/quickstart.sh [--help]
#
# Creates a virtual environment in the checkout, prepares the bundled sample, trains a tiny T5 with
# each strategy and compares them. Apart from the caches of pip, uv and matplotlib, and checksums of
# the data in ~/.cache/t5-parallelism, everything stays in the checkout: .venv/ and
# outputs/quickstart/. Run it again to continue where it stopped.
# The settings of run_megatron_t5_all.sh and of the launchers also work.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"


begin "" "$@"
python_module t5bench.sweep.venv "$REPO_ROOT/requirements.txt"
export PATH=$REPO_ROOT/.venv/bin:$PATH PYTHON=$REPO_ROOT/.venv/bin/python
export MEGATRON_DATA_DIR=$REPO_ROOT/outputs/quickstart/${FAMILY_PREFIX}data
SAMPLE=1 TOKENIZER_MODEL='' bash "$REPO_ROOT/scripts/prepare_xsum_megatron.sh" >/dev/null
# fp32 without dropout, so that a strategy that trains a different model shows.
export ENGINE TRAIN_ITERS LOG_INTERVAL=1 PRECISION_FLAG="${PRECISION_FLAG-}" DROPOUT="${DROPOUT:-0}"
export MODEL_PRESET="${MODEL_PRESET:-tiny}" MICRO_BATCH_SIZE="${MICRO_BATCH_SIZE:-2}" WANDB_MODE="${WANDB_MODE:-disabled}"
# The runs are too short for the launchers' default interval.
export SAMPLE_INTERVAL="${SAMPLE_INTERVAL:-0.2}"
# One iteration of each is profiled, so that the page shows where the time went.
export PROFILE_ITERATION="${PROFILE_ITERATION:-$((TRAIN_ITERS > 3 ? TRAIN_ITERS / 2 : 0))}"
export RUNS_DIR
exec bash "$REPO_ROOT/scripts/run_megatron_t5_all.sh"
