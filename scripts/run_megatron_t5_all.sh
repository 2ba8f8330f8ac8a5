#!/usr/bin/env bash
# Every strategy, one run after another, REPEATS times in turn, and the comparison of them all.
set -euo pipefail
# shellcheck source=scripts/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

declare_sweep_settings() {
  setting STRATEGIES "" "Strategies to run, separated by spaces (unset: all)"
  setting REPEATS 1 "Times that each is run, in turn (A B C A B C), so that drift of the machine hits all alike"
  setting RETRIES 1 "Times that a failed run is tried again once all others have run"
  setting RUNS_DIR "$REPO_ROOT/outputs/all" "Directory of the runs; what is complete there is not run again"
}

print_help() {
  cat <<'HELP'
Usage: bash scripts/run_megatron_t5_all.sh [--dry-run] [--help]

Runs the strategies on this machine's processes and compares them. DDP is also run with as many processes as any strategy
needs, so that every row has a baseline of its own world size. Run it again to go on after an interruption.
  --dry-run   print what would run, and what would not

Settings, from the environment (name, default, meaning); the launchers' settings work too:
HELP
  print_settings
}

parse_arguments() {
  while (($#)); do
    case $1 in
      --dry-run) DRY_RUN=1 ;;
      -h | --help) print_help && exit 0 ;;
      *) die "unknown argument '$1'" 'Name strategies in STRATEGIES="ddp zero1"; --help tells the rest' ;;
    esac
    shift
  done
}

choose_strategies() {
  local all strategy
  all=$(list_strategies)
  read -r -d '' -a CHOSEN <<<"${STRATEGIES:-$all}" || true
  for strategy in "${CHOSEN[@]}"; do
    [[ $'\n'$all$'\n' == *$'\n'$strategy$'\n'* ]] || die "there is no strategy '$strategy'" "There are: ${all//$'\n'/ }"
  done
}

launcher_of() { REPLY=$REPO_ROOT/scripts/run_megatron_t5_$1.sh; }

# The rows of one repeat: ROW_NAMES, and for each ROW_STRATEGY and ROW_PROCESSES (empty: the strategy's own number).
declare -A ROW_STRATEGY=() ROW_PROCESSES=()
ROW_NAMES=()
plan_rows() {
  local strategy processes sizes=()
  declare -A baseline=()
  ROW_NAMES=()
  for strategy in "${CHOSEN[@]}"; do
    add_row "$strategy" "$strategy" "" || continue
    sizes+=("$PROCESSES")
    [[ $strategy != ddp ]] || baseline[$PROCESSES]=1
  done
  ((${#sizes[@]})) || die "none of the strategies can run here" "What stops each is said above"
  [[ " ${CHOSEN[*]} " == *" ddp "* ]] || return 0
  for processes in "${sizes[@]}"; do
    [[ -n ${baseline[$processes]:-} ]] || ! add_row "ddp-$processes" ddp "$processes" || baseline[$processes]=1
  done
}

# add_row NAME STRATEGY PROCESSES: asks the launcher whether it would run; sets PROCESSES, all of this machine's.
add_row() {
  local name=$1 strategy=$2 answer
  launcher_of "$strategy"
  answer=$(row_environment "$strategy" "$3" "$RUNS_DIR/plan" && bash "$REPLY" --dry-run 2>&1) || die "$strategy: $answer"
  if [[ $answer == *'a real run would stop here: '* ]]; then
    answer=${answer#*a real run would stop here: }
    note "$name cannot run here: ${answer%%$'\n'*}"
    return 1
  fi
  PROCESSES=${answer##*--nproc_per_node }
  PROCESSES=${PROCESSES%% *}
  ROW_NAMES+=("$name")
  ROW_STRATEGY[$name]=$strategy
  ROW_PROCESSES[$name]=$3
}

# row_environment STRATEGY PROCESSES DIRECTORY: what a launcher is told beside the user's own settings.
row_environment() {
  export OUTPUT_DIR=$3 NNODES=1 HOSTS=''
  export WANDB_RUN_GROUP=${WANDB_RUN_GROUP:-${RUNS_DIR##*/}}
  [[ -z $2 ]] || export NPROC_PER_NODE=$2
  [[ -n ${MASTER_PORT:-} ]] || MASTER_PORT=$(free_port) || return
  export MASTER_PORT
}

free_port() { "$PYTHON" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }

is_complete() {
  local status=''
  [[ ! -s $1/node0.status ]] || read -r status _ <"$1/node0.status"
  [[ $status == complete ]]
}

# Rewrites one line while a run goes on; where nobody watches, it says nothing in between.
show_progress() {
  local label=$1 log=$2 line
  [[ -t 2 ]] || return 0
  line=$(grep -aoE 'iteration +[0-9]+/ *[0-9]+' "$log" 2>/dev/null | tail -n 1 | tr -s ' ') || true
  printf '\r%s  %-28s' "$label" "${line:-starting}" >&2
}

# run_one LABEL NAME DIRECTORY: sets OUTCOME, a line for people; 0 when the run is complete.
run_one() {
  local label=$1 name=$2 directory=$3 exit_status=0 status='' reason='' speed
  mkdir -p -- "$directory"
  launcher_of "${ROW_STRATEGY[$name]}"
  (row_environment "${ROW_STRATEGY[$name]}" "${ROW_PROCESSES[$name]}" "$directory" && exec bash "$REPLY") \
    >"$directory/launcher.log" 2>&1 &
  launcher=$!
  while kill -0 "$launcher" 2>/dev/null && [[ -z $interrupted_by ]]; do
    show_progress "$label" "$directory/node0.log"
    sleep 0.3
  done
  [[ -z $interrupted_by ]] || stop_launcher
  wait "$launcher" || exit_status=$?
  [[ ! -t 2 ]] || printf '\r' >&2
  [[ ! -s $directory/node0.status ]] || read -r status reason <"$directory/node0.status" || true
  if ((exit_status == 0)); then
    speed=$(tail -n 1 "$directory/metrics.jsonl" 2>/dev/null | sed -n 's/.*"samples_per_second": \([0-9.]*\).*/, \1 samples\/s at the end/p')
    OUTCOME=complete$speed
  else
    [[ -n $reason ]] || reason=$(grep -m 1 '^error: ' "$directory/launcher.log") || reason="exit status $exit_status"
    OUTCOME="FAILED (${status:-not started}): $reason; see $directory"
  fi
  return "$exit_status"
}

stop_launcher() {
  kill -TERM "$launcher" 2>/dev/null || true
  wait "$launcher" 2>/dev/null || true
  note ""
  note "$interrupted_by received: stopped, nothing is left running. The same command goes on from here."
  exit $((128 + $(kill -l "$interrupted_by")))
}

catch_signals() {
  local name
  interrupted_by=''
  for name in INT TERM HUP; do
    # shellcheck disable=SC2064 # the signal's name is known now
    trap "interrupted_by=$name" "$name"
  done
}

duration() {
  local seconds=$1
  if ((seconds < 120)); then REPLY="$seconds s"; elif ((seconds < 7200)); then REPLY="$((seconds / 60)) min"; else
    REPLY="$((seconds / 3600)) h $((seconds % 3600 / 60)) min"
  fi
}

# run_all DIRECTORY...: one line a run, with an estimate of the time left; sets FAILED to those that failed.
run_all() {
  local directory name label started number=0 number_of_runs=$# done_runs=0 seconds=0 left
  FAILED=()
  for directory in "$@"; do
    name=${directory##*/}
    number=$((number + 1))
    printf -v label '[%*d/%d] %-14s' "${#number_of_runs}" "$number" "$#" "${directory#"$RUNS_DIR/"}"
    if is_complete "$directory"; then
      note "$label  complete already"
      continue
    fi
    started=$SECONDS
    run_one "$label" "$name" "$directory" || FAILED+=("$directory")
    seconds=$((seconds + SECONDS - started)) done_runs=$((done_runs + 1))
    duration $((SECONDS - started))
    label="$label  $OUTCOME, $REPLY"
    left=$((seconds * ($# - number) / done_runs))
    duration "$left"
    ((left == 0)) || label+="; about $REPLY left"
    note "$label"
  done
}

main() {
  declare_sweep_settings
  parse_arguments "$@"
  require_integers 1 REPEATS
  require_integers 0 RETRIES
  absolute_path "$RUNS_DIR" && RUNS_DIR=$REPLY
  choose_strategies
  plan_rows
  local repeat runs=() retry
  for ((repeat = 1; repeat <= REPEATS; repeat++)); do
    runs+=("${ROW_NAMES[@]/#/$RUNS_DIR/repeat$repeat/}")
  done
  if ((DRY_RUN)); then
    for repeat in "${runs[@]}"; do
      if is_complete "$repeat"; then printf 'complete  %s\n' "$repeat"; else printf 'run       %s\n' "$repeat"; fi
    done
    return 0
  fi

  catch_signals
  run_all "${runs[@]}"
  for ((retry = 0; retry < RETRIES && ${#FAILED[@]}; retry++)); do
    note "trying again what failed"
    run_all "${FAILED[@]}"
  done
  printf '\n'
  PYTHONPATH=$REPO_ROOT${PYTHONPATH:+:$PYTHONPATH} "$PYTHON" -m t5bench compare "${runs[@]}" --output "$RUNS_DIR/comparison"
}

main "$@"
