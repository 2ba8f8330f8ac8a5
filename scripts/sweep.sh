# shellcheck shell=bash
# Runs of several strategies, one after another, each by its launcher: what run_megatron_t5_all.sh and check_parity.sh
# have in common. Sourced after common.sh.

sweep_settings() {
  setting RETRIES 1 "Times that a failed run is tried again once all others have run"
  setting RUNS_DIR "$1" "Directory of the runs; what is complete there is not run again"
}

# choose_strategies [NAME...]: sets CHOSEN; all when none is named.
choose_strategies() {
  local all strategy
  all=$(list_strategies)
  CHOSEN=("$@")
  (($#)) || mapfile -t CHOSEN <<<"$all"
  for strategy in "${CHOSEN[@]}"; do
    [[ $'\n'$all$'\n' == *$'\n'$strategy$'\n'* ]] || die "there is no strategy '$strategy'" "There are: ${all//$'\n'/ }"
  done
}

launcher_of() { REPLY=$REPO_ROOT/scripts/run_megatron_t5_$1.sh; }

# The rows of one repeat: ROW_NAMES and ROW_SIZES (processes in all), and by name ROW_STRATEGY and ROW_PROCESSES (what
# the launcher is told; empty: the strategy's own number).
declare -A ROW_STRATEGY=() ROW_PROCESSES=()
ROW_NAMES=() ROW_SIZES=()
plan_rows() {
  local strategy
  ROW_NAMES=() ROW_SIZES=()
  for strategy in "${CHOSEN[@]}"; do
    add_row "$strategy" "$strategy" "" || true
  done
  ((${#ROW_NAMES[@]})) || die "none of the strategies can run here" "What stops each is said above"
}

# DDP once more for each number of processes that another row has: every row gets a baseline of its own world size.
plan_baselines() {
  local index processes missing_sizes=()
  [[ " ${ROW_NAMES[*]} " == *" ddp "* ]] || return 0
  for processes in "${ROW_SIZES[@]}"; do
    for index in "${!ROW_NAMES[@]}"; do
      [[ ${ROW_STRATEGY[${ROW_NAMES[index]}]} != ddp || ${ROW_SIZES[index]} != "$processes" ]] || continue 2
    done
    [[ " ${missing_sizes[*]} " == *" $processes "* ]] || missing_sizes+=("$processes")
  done
  for processes in "${missing_sizes[@]}"; do
    add_row "ddp-$processes" ddp "$processes" || true
  done
}

# add_row NAME STRATEGY PROCESSES: asks the launcher whether it would run.
add_row() {
  local name=$1 strategy=$2 answer processes
  launcher_of "$strategy"
  answer=$(row_environment "$strategy" "$3" "$RUNS_DIR/plan" && bash "$REPLY" --dry-run 2>&1) || die "$strategy: $answer"
  if [[ $answer == *'a real run would stop here: '* ]]; then
    answer=${answer#*a real run would stop here: }
    note "$name cannot run here: ${answer%%$'\n'*}"
    return 1
  fi
  processes=${answer##*--nproc_per_node }
  ROW_NAMES+=("$name")
  ROW_SIZES+=("${processes%% *}")
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
  note "$interrupted_by received: stopped, nothing is left running${GOES_ON:+. $GOES_ON}"
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

# run_each DIRECTORY...: one line a run, with an estimate of the time left; sets FAILED to those that failed.
run_each() {
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

# run_all DIRECTORY...: all of them, and then what failed again.
run_all() {
  local retry
  catch_signals
  run_each "$@"
  for ((retry = 0; retry < RETRIES && ${#FAILED[@]}; retry++)); do
    note "trying again what failed"
    run_each "${FAILED[@]}"
  done
}

t5bench() { PYTHONPATH=$REPO_ROOT${PYTHONPATH:+:$PYTHONPATH} "$PYTHON" -m t5bench "$@"; }

# prepare_sample DIRECTORY: the bundled articles as an indexed dataset, unless they are there.
prepare_sample() {
  "$PYTHON" "$REPO_ROOT/scripts/build_indexed_dataset.py" --check "$1/xsum_text_document" >/dev/null 2>&1 || {
    note "preparing the bundled sample"
    mkdir -p -- "$1"
    SAMPLE=1 TOKENIZER_MODEL='' MEGATRON_DATA_DIR=$1 bash "$REPO_ROOT/scripts/prepare_xsum_megatron.sh" >"$1/prepare.log" 2>&1 || {
      cat -- "$1/prepare.log" >&2
      die "the bundled sample could not be prepared" "Its messages are above"
    }
  }
}
