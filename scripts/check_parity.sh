#!/usr/bin/env bash
# Whether the strategies train the same model: each trains from the same weights, and its curves are compared with DDP's.
set -euo pipefail
# shellcheck source=scripts/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"
# shellcheck source=scripts/sweep.sh
source "$REPO_ROOT/scripts/sweep.sh"

readonly BASELINE=ddp
readonly OUTPUTS=$REPO_ROOT/outputs/parity

declare_settings() {
  setting ENGINE megatron "megatron (patched Megatron-DeepSpeed; DDP is compared with native/ too) or native"
  setting MODEL_PRESET tiny "Model size: tiny, small, base or large"
  setting TRAIN_ITERS 20 "Iterations of each strategy"
  setting MICRO_BATCH_SIZE 2 "Small enough for several micro-batches in an iteration"
  setting LR 0.001 "Peak learning rate"
  setting CLIP_GRAD 1.1 "Must lie among DDP's gradient norms: clipping in some iterations alone"
  setting MEGATRON_DATA_DIR "" "Directory containing indexed dataset files (unset: the bundled sample, prepared in outputs/parity/data)"
  setting RUNS_DIR "$OUTPUTS/$(date +%Y%m%d-%H%M%S)" "Where the run directories go"
}

print_help() {
  cat <<HELP
Usage: bash scripts/check_parity.sh [strategy...]

Trains DDP and the named strategies (all when none is named) on this machine, in fp32, without dropout, from the same
initial weights on the same data, and compares each loss and gradient norm with DDP's. With ENGINE=megatron the native
engine's DDP is trained too and compared: that shows a mistake that all strategies share.
Exit status: 0 when all train the same model, 1 when one does not, 2 when the check could not be made.

Strategies: $(list_strategies | tr '\n' ' ')

Settings, from the environment (name, default, meaning); the launchers' settings work too, except PRECISION_FLAG,
DROPOUT, LOG_INTERVAL and what evaluates, saves and resumes:
HELP
  print_settings
}

# The baseline first, once.
put_baseline_first() {
  local name names=("$BASELINE")
  for name in "${CHOSEN[@]}"; do
    [[ " ${names[*]} " == *" $name "* ]] || names+=("$name")
  done
  CHOSEN=("${names[@]}")
}

# Rounding is then all that may differ, and every iteration shows.
export_run_settings() {
  export MODEL_PRESET TRAIN_ITERS MICRO_BATCH_SIZE LR CLIP_GRAD MEGATRON_DATA_DIR PYTHON
  export PRECISION_FLAG='' DROPOUT=0 LOG_INTERVAL=1 EVAL_ITERS=0 SAVE_INTERVAL=0 RESUME=0 WANDB_MODE=disabled
}

# train_all ENGINE STRATEGY...: the run directories are RUNS_DIR/ENGINE/<strategy>.
train_all() {
  local -x ENGINE=$1
  CHOSEN=("${@:2}")
  plan_rows
  [[ ${ROW_NAMES[0]} == "$BASELINE" ]] ||
    die "the $ENGINE engine's DDP cannot run here, and the others have nothing to be compared with" "What stops it is said above"
  run_each "${ROW_NAMES[@]/#/$RUNS_DIR/$ENGINE/}"
}

# compare STRATEGY...: one that could not run has no run directory, and fails by that.
compare() {
  local words=("${@/#/$RUNS_DIR/$ENGINE/}" --baseline "$RUNS_DIR/$ENGINE/$BASELINE")
  [[ $ENGINE != megatron ]] || words+=(--reference "$RUNS_DIR/native/$BASELINE")
  t5bench parity "${words[@]}"
}

main() {
  local strategies
  declare_settings
  case ${1:-} in
    -h | --help)
      print_help
      return 0
      ;;
    -*) die "unknown option '$1'" "bash scripts/check_parity.sh --help tells the rest" ;;
  esac
  choose_strategies "$@"
  put_baseline_first
  strategies=("${CHOSEN[@]}")
  require_one_of ENGINE megatron native
  [[ $ENGINE == megatron ]] || ((${#strategies[@]} > 1)) ||
    die "$BASELINE alone has nothing to be compared with" "Name another strategy, or none for all"
  require_integers 2 TRAIN_ITERS
  command -v "$PYTHON" >/dev/null || die "there is no '$PYTHON' on PATH" "Activate the environment that has torch, or set PYTHON"
  absolute_path "$RUNS_DIR" && RUNS_DIR=$REPLY
  LAUNCH=local # what is compared must differ in the strategy alone
  # Runs of an engine that was changed since would pass as runs of this one.
  [[ ! -e $RUNS_DIR ]] || die "$RUNS_DIR exists, and a check is made of new runs alone" "Choose another RUNS_DIR"
  if [[ -z $MEGATRON_DATA_DIR ]]; then
    MEGATRON_DATA_DIR=$OUTPUTS/data
    prepare_sample "$MEGATRON_DATA_DIR"
  fi
  export_run_settings
  catch_signals
  train_all "$ENGINE" "${strategies[@]}"
  [[ $ENGINE != megatron ]] || train_all native "$BASELINE"
  note "run directories: $RUNS_DIR"
  compare "${strategies[@]}"
}

main "$@"
