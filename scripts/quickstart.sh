#!/usr/bin/env bash
# From a fresh clone to all eight strategies trained and compared, on any machine with Python: no GPU, no compiler.
set -euo pipefail
# shellcheck source=scripts/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"
# shellcheck source=scripts/python_env.sh
source "$REPO_ROOT/scripts/python_env.sh"

mapfile -t STRATEGIES < <(list_strategies)
setting ENGINE native "native (the engine in native/, from Python packages alone) or megatron (scripts/setup_megatron.sh first)"
setting TRAIN_ITERS 20 "Iterations of each strategy"

print_help() {
  cat <<'HELP'
Usage: bash scripts/quickstart.sh [--help]

Makes a virtual environment in the checkout, prepares the bundled sample, trains a tiny T5 with each of the eight
strategies and prints one comparison. Everything it makes stays in the checkout: .venv/ and outputs/quickstart/.

Settings, from the environment (name, default, meaning); the launchers' settings work too:
HELP
  print_settings
}

# fp32 without dropout, so that a strategy that trains another model shows.
export_run_settings() {
  export ENGINE TRAIN_ITERS LOG_INTERVAL=1
  export MODEL_PRESET="${MODEL_PRESET:-tiny}" DROPOUT="${DROPOUT:-0}" PRECISION_FLAG="${PRECISION_FLAG-}"
  export MICRO_BATCH_SIZE="${MICRO_BATCH_SIZE:-2}" WANDB_MODE="${WANDB_MODE:-disabled}" PYTHON
  export MEGATRON_DATA_DIR=$REPO_ROOT/outputs/quickstart/data
}

prepare_sample() {
  "$PYTHON" "$REPO_ROOT/scripts/build_indexed_dataset.py" --check "$MEGATRON_DATA_DIR/xsum_text_document" >/dev/null 2>&1 || {
    note "preparing the bundled sample"
    mkdir -p -- "$MEGATRON_DATA_DIR"
    SAMPLE=1 bash "$REPO_ROOT/scripts/prepare_xsum_megatron.sh" >"$MEGATRON_DATA_DIR/prepare.log" 2>&1 || {
      cat -- "$MEGATRON_DATA_DIR/prepare.log" >&2
      die "the sample could not be prepared"
    }
  }
}

free_port() { "$PYTHON" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }

# Rewrites one line while a strategy trains; where nobody watches, it says nothing in between.
show_progress() {
  local label=$1 log=$2 line
  [[ -t 2 ]] || return 0
  line=$(grep -aoE 'iteration +[0-9]+/ *[0-9]+' "$log" 2>/dev/null | tail -n 1 | tr -s ' ') || true
  printf '\r%s  %-28s' "$label" "${line:-starting}" >&2
}

# run_one LABEL STRATEGY DIRECTORY: 0 when it trained to its end.
run_one() {
  local label=$1 strategy=$2 directory=$3 status=0 started=$SECONDS
  mkdir -p -- "$directory"
  OUTPUT_DIR=$directory MASTER_PORT=$(free_port) \
    bash "$REPO_ROOT/scripts/run_megatron_t5_$strategy.sh" >"$directory/launcher.log" 2>&1 &
  launcher=$!
  while kill -0 "$launcher" 2>/dev/null && [[ -z $interrupted_by ]]; do
    show_progress "$label" "$directory/node0.log"
    sleep 0.3
  done
  [[ -z $interrupted_by ]] || stop_launcher
  wait "$launcher" || status=$?
  [[ ! -t 2 ]] || printf '\r' >&2
  if ((status == 0)); then
    printf '%s  trained %s iterations in %d s\n' "$label" "$TRAIN_ITERS" "$((SECONDS - started))" >&2
  else
    printf '%s  FAILED with exit status %d, see %s\n' "$label" "$status" "$directory/launcher.log" >&2
    grep -aE '^error:|Error' "$directory/launcher.log" | head -n 3 >&2 || true
  fi
  return "$status"
}

stop_launcher() {
  kill -TERM "$launcher" 2>/dev/null || true
  wait "$launcher" 2>/dev/null || true
  note "$interrupted_by received: stopped, nothing is left running"
  exit $((128 + $(kill -l "$interrupted_by")))
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
  prepare_sample

  local runs strategy number=0 failed=0
  runs=$REPO_ROOT/outputs/quickstart/$(date +%Y%m%d-%H%M%S)
  interrupted_by=''
  for strategy in INT TERM HUP; do
    # shellcheck disable=SC2064 # the signal's name is known now
    trap "interrupted_by=$strategy" "$strategy"
  done
  for strategy in "${STRATEGIES[@]}"; do
    number=$((number + 1))
    run_one "$(printf '[%d/%d] %-14s' "$number" "${#STRATEGIES[@]}" "$strategy")" "$strategy" "$runs/$strategy" || failed=1
  done

  printf '\nEngine: %s. Records: %s\n\n' "$ENGINE" "$runs"
  (cd -- "$REPO_ROOT" && "$PYTHON" -m t5bench summary "${STRATEGIES[@]/#/$runs/}") || failed=1
  cat <<'TEXT'

A toy model on a CPU shows that the strategies work and train the same model. It does not show which is fastest: that
depends on your GPUs, your network and the size of the model, and is what the launchers in scripts/ are for.
TEXT
  return "$failed"
}

main "$@"
