#!/usr/bin/env bash
# From a fresh clone to all eight strategies trained and compared, on any machine with Python: no GPU, no compiler.
set -euo pipefail
# shellcheck source=scripts/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"
# shellcheck source=scripts/python_env.sh
source "$REPO_ROOT/scripts/python_env.sh"
# shellcheck source=scripts/sweep.sh
source "$REPO_ROOT/scripts/sweep.sh"

setting ENGINE native "native (the engine in native/, from Python packages alone) or megatron (scripts/setup_megatron.sh first)"
setting TRAIN_ITERS 20 "Iterations of each strategy"

print_help() {
  cat <<'HELP'
Usage: bash scripts/quickstart.sh [--help]

Makes a virtual environment in the checkout, prepares the bundled sample, trains a tiny T5 with each of the eight
strategies and compares them. Everything it makes stays in the checkout: .venv/ and outputs/quickstart/.

Settings, from the environment (name, default, meaning); those of run_megatron_t5_all.sh and of the launchers work too:
HELP
  print_settings
}

# fp32 without dropout, so that a strategy that trains another model shows.
export_run_settings() {
  export ENGINE TRAIN_ITERS LOG_INTERVAL=1
  export MODEL_PRESET="${MODEL_PRESET:-tiny}" DROPOUT="${DROPOUT:-0}" PRECISION_FLAG="${PRECISION_FLAG-}"
  # The runs are too short for the launchers' own interval between samples.
  export SAMPLE_INTERVAL="${SAMPLE_INTERVAL:-0.2}"
  export MICRO_BATCH_SIZE="${MICRO_BATCH_SIZE:-2}" WANDB_MODE="${WANDB_MODE:-disabled}" PYTHON
  export MEGATRON_DATA_DIR=$REPO_ROOT/outputs/quickstart/data
  export RUNS_DIR=${RUNS_DIR:-$REPO_ROOT/outputs/quickstart/$(date +%Y%m%d-%H%M%S)}
}

main() {
  case ${1:-} in
    '') ;;
    -h | --help) print_help && return 0 ;;
    *) die "unknown option '$1'" "bash scripts/quickstart.sh --help tells the rest" ;;
  esac
  require_one_of ENGINE native megatron
  require_integers 1 TRAIN_ITERS
  ensure_venv "$REPO_ROOT/requirements.txt"
  export_run_settings
  prepare_sample "$MEGATRON_DATA_DIR"
  exec bash "$REPO_ROOT/scripts/run_megatron_t5_all.sh"
}

main "$@"
