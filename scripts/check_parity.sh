#!/usr/bin/env bash
# Whether the strategies train the same model: each trains from the same weights, and its curves are compared with DDP's.
set -euo pipefail
# shellcheck source=scripts/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

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

Strategies: ${ALL_STRATEGIES[*]}

Settings, from the environment (name, default, meaning); the launchers' settings work too, except PRECISION_FLAG,
DROPOUT, LOG_INTERVAL and what evaluates, saves and resumes:
HELP
  print_settings
}

# choose_strategies [NAME...]: sets STRATEGIES, the baseline first.
choose_strategies() {
  local name
  STRATEGIES=("$BASELINE")
  (($#)) || set -- "${ALL_STRATEGIES[@]}"
  for name in "$@"; do
    [[ " ${ALL_STRATEGIES[*]} " == *" $name "* ]] ||
      die "there is no strategy '$name'" "These exist: ${ALL_STRATEGIES[*]}"
    [[ " ${STRATEGIES[*]} " == *" $name "* ]] || STRATEGIES+=("$name")
  done
}

# Rounding is then all that may differ, and every iteration shows.
export_run_settings() {
  export MODEL_PRESET TRAIN_ITERS MICRO_BATCH_SIZE LR CLIP_GRAD MEGATRON_DATA_DIR PYTHON
  export PRECISION_FLAG='' DROPOUT=0 LOG_INTERVAL=1 EVAL_ITERS=0 SAVE_INTERVAL=0 RESUME=0 WANDB_MODE=disabled
}

use_sample() {
  MEGATRON_DATA_DIR=$OUTPUTS/data
  "$PYTHON" "$REPO_ROOT/scripts/build_indexed_dataset.py" --check "$MEGATRON_DATA_DIR/xsum_text_document" >/dev/null 2>&1 || {
    note "preparing the bundled sample"
    mkdir -p -- "$MEGATRON_DATA_DIR"
    SAMPLE=1 TOKENIZER_MODEL='' MEGATRON_DATA_DIR=$MEGATRON_DATA_DIR \
      bash "$REPO_ROOT/scripts/prepare_xsum_megatron.sh" >"$MEGATRON_DATA_DIR/prepare.log" 2>&1 || {
      cat -- "$MEGATRON_DATA_DIR/prepare.log" >&2
      die "the bundled sample could not be prepared" "Its messages are above"
    }
  }
}

free_port() { "$PYTHON" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }

stop_on_signals() {
  local signal
  interrupted_by='' launcher=''
  for signal in INT TERM HUP; do
    # shellcheck disable=SC2064 # the signal's name is known now
    trap "interrupted_by=$signal; [[ -z \$launcher ]] || kill -TERM \"\$launcher\" 2>/dev/null || true" "$signal"
  done
}

# train ENGINE STRATEGY DIRECTORY: the launcher's exit status.
train() {
  local engine=$1 strategy=$2 directory=$3 status=0 started=$SECONDS
  mkdir -p -- "$directory"
  ENGINE=$engine OUTPUT_DIR=$directory NNODES=1 HOSTS='' MASTER_PORT=$(free_port) \
    bash "$REPO_ROOT/scripts/run_megatron_t5_$strategy.sh" 127.0.0.1 0 >"$directory/launcher.log" 2>&1 &
  launcher=$!
  wait "$launcher" || status=$?
  # A signal ends wait before the launcher has ended what it started.
  while kill -0 "$launcher" 2>/dev/null; do
    wait "$launcher" || true
  done
  launcher=''
  if [[ -n $interrupted_by ]]; then
    note "$interrupted_by received: stopped, nothing is left running"
    exit $((128 + $(kill -l "$interrupted_by")))
  fi
  if ((status == 0)); then
    note "$(printf '%-14s %-9s trained in %d s' "$strategy" "$engine" "$((SECONDS - started))")"
  else
    note "$(printf '%-14s %-9s ended with exit status %d, see %s' "$strategy" "$engine" "$status" "$directory/launcher.log")"
    grep -aE -A 1 '^error: ' "$directory/launcher.log" | head -n 3 >&2 || true
  fi
  return "$status"
}

# train_all ENGINE DIRECTORY STRATEGY...: the run directories are DIRECTORY/1/<strategy>.
train_all() {
  local engine=$1 directory=$2 strategy status
  for strategy in "${@:3}"; do
    status=0
    train "$engine" "$strategy" "$directory/1/$strategy" || status=$?
    if [[ $strategy == "$BASELINE" ]] && ((status == EXIT_CONFIGURATION)); then
      die "the $engine engine's DDP cannot be started here, and the others have nothing to be compared with" "Its message is above"
    fi
  done
}

compare() {
  local words=("${STRATEGIES[@]/#/$RUNS_DIR/$ENGINE/1/}" --baseline "$RUNS_DIR/$ENGINE/1/$BASELINE")
  [[ $ENGINE != megatron ]] || words+=(--reference "$RUNS_DIR/native/1/$BASELINE")
  cd -- "$REPO_ROOT"
  "$PYTHON" -m t5bench parity "${words[@]}"
}

main() {
  mapfile -t ALL_STRATEGIES < <(list_strategies)
  declare_settings
  case ${1:-} in
    -h | --help)
      print_help
      return 0
      ;;
    -*) die "unknown option '$1'" "bash scripts/check_parity.sh --help tells the rest" ;;
  esac
  choose_strategies "$@"
  require_one_of ENGINE megatron native
  [[ $ENGINE == megatron ]] || ((${#STRATEGIES[@]} > 1)) ||
    die "$BASELINE alone has nothing to be compared with" "Name another strategy, or none for all"
  require_integers 2 TRAIN_ITERS
  command -v "$PYTHON" >/dev/null || die "there is no '$PYTHON' on PATH" "Activate the environment that has torch, or set PYTHON"
  absolute_path "$RUNS_DIR" && RUNS_DIR=$REPLY
  [[ ! -e $RUNS_DIR ]] || die "$RUNS_DIR exists, and nothing is overwritten" "Choose another RUNS_DIR"
  [[ -n $MEGATRON_DATA_DIR ]] || use_sample
  export_run_settings
  stop_on_signals
  train_all "$ENGINE" "$RUNS_DIR/$ENGINE" "${STRATEGIES[@]}"
  [[ $ENGINE != megatron ]] || train_all native "$RUNS_DIR/native" "$BASELINE"
  note "run directories: $RUNS_DIR"
  compare
}

main "$@"
