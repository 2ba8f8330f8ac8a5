# shellcheck shell=bash
# Runs of several strategies, one after another, each by its launcher: what run_megatron_t5_all.sh and check_parity.sh
# have in common. Sourced after common.sh.

sweep_settings() {
  setting RETRIES 1 "Times that a failed run is tried again once all others have run"
  setting LAUNCH local "local (this machine's processes), or ssh (the nodes of HOSTS, else SLURM's, from this one terminal)"
  setting RUNS_DIR "$1" "Directory of the runs; what is complete there is not run again"
}

check_launch() {
  require_one_of LAUNCH local ssh
  [[ $LAUNCH == ssh ]] || return 0
  SWEEP_HOSTS=${HOSTS:-$(slurm_hosts | tr '\n' ' ')}
  [[ -n ${SWEEP_HOSTS// /} ]] || die "LAUNCH=ssh but no hosts are known" 'export HOSTS="node0 node1" in rank order'
}

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
  answer=$(launch_row "$strategy" "$3" "$RUNS_DIR/plan" --dry-run 2>&1) || die "$strategy: $answer"
  if [[ $answer == *'a real run would stop here: '* ]]; then
    answer=${answer#*a real run would stop here: }
    note "$name cannot run here: ${answer%%$'\n'*}"
    return 1
  fi
  [[ $answer =~ --nnodes\ ([0-9]+)\ --nproc_per_node\ ([0-9]+) ]] || die "$strategy: $answer"
  ROW_NAMES+=("$name")
  ROW_SIZES+=($((BASH_REMATCH[1] * BASH_REMATCH[2])))
  ROW_STRATEGY[$name]=$strategy
  ROW_PROCESSES[$name]=$3
}

# launch_row STRATEGY PROCESSES DIRECTORY [--dry-run]: the launcher, here or on the hosts, told what differs by row.
# To be called in a subshell: what it exports stays there.
launch_row() {
  local launcher=$REPO_ROOT/scripts/run_megatron_t5_$1.sh hosts
  export OUTPUT_DIR=$3 WANDB_RUN_GROUP=${WANDB_RUN_GROUP:-${RUNS_DIR##*/}}
  if [[ $LAUNCH == ssh ]]; then
    read -r -d '' -a hosts <<<"$SWEEP_HOSTS" || true
    [[ -z $2 ]] || export NPROC_PER_NODE=$(($2 / ${#hosts[@]}))
    exec "$PYTHON" -m t5bench.sweep.ssh --hosts "$SWEEP_HOSTS" --launcher "$launcher" --directory "$3" "${@:4}"
  fi
  export NNODES=1 HOSTS=''
  [[ -z $2 ]] || export NPROC_PER_NODE=$2
  [[ -n ${MASTER_PORT:-} ]] || MASTER_PORT=$(free_port) || return
  export MASTER_PORT
  exec bash "$launcher" "${@:4}"
}

free_port() { with_t5bench -c 'from t5bench.plan.ports import free_port; print(free_port())'; }

# Of all nodes, as the record says.
is_complete() { grep -qs '^  "status": "complete",$' "$1/run.json"; }

# Of any node.
has_record() {
  local records=("$1"/node*.json)
  [[ -e ${records[0]} ]]
}

# Rewrites one line while a run goes on; where nobody watches, it says nothing in between.
show_progress() {
  local label=$1 directory=$2 line
  [[ -t 2 ]] || return 0
  line=$(cat -- "$directory"/node*.{log,terminal} 2>/dev/null | grep -aoE 'iteration +[0-9]+/ *[0-9]+' | tail -n 1 | tr -s ' ') || true
  printf '\r%s  %-28s' "$label" "${line:-starting}" >&2
}

# run_one LABEL NAME DIRECTORY: sets OUTCOME, a line for people; 0 when the run is complete.
run_one() {
  local label=$1 name=$2 directory=$3 exit_status=0 status='' reason='' speed
  mkdir -p -- "$directory"
  (launch_row "${ROW_STRATEGY[$name]}" "${ROW_PROCESSES[$name]}" "$directory") >"$directory/launcher.log" 2>&1 &
  launcher=$!
  while kill -0 "$launcher" 2>/dev/null && [[ -z $interrupted_by ]]; do
    show_progress "$label" "$directory"
    sleep 0.3
  done
  [[ -z $interrupted_by ]] || stop_launcher
  wait "$launcher" || exit_status=$?
  ((exit_status == EXIT_CONFIGURATION)) || ANY_BEGAN=1
  [[ ! -t 2 ]] || printf '\r' >&2
  status=$(sed -n 's/^  "status": "\(.*\)",$/\1/p' "$directory/run.json" 2>/dev/null) || true
  reason=$(sed -n 's/^  "reason": "\(.*\)",$/\1/p' "$directory/run.json" 2>/dev/null) || true
  if ((exit_status == 0)); then
    speed=$(tail -n 1 "$directory/metrics.jsonl" 2>/dev/null | sed -n 's/.*"samples_per_second": \([0-9.]*\).*/, \1 samples\/s at the end/p')
    OUTCOME=complete$speed
  else
    # A launcher that refuses leaves no record, or that of another node which waited for it in vain.
    if ((exit_status == EXIT_CONFIGURATION)) || [[ -z $reason ]]; then
      status=configuration reason=$(grep -m 1 '^error: ' "$directory/launcher.log") || reason="exit status $exit_status"
    fi
    OUTCOME="FAILED ($status): ${reason#error: }; see $directory"
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

ANY_BEGAN=0
any_began() { ((ANY_BEGAN)); }

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
      ANY_BEGAN=1
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

with_t5bench() { "$PYTHON" "$@"; }

t5bench() { with_t5bench -m t5bench "$@"; }

# prepare_sample DIRECTORY: the bundled articles as an indexed dataset, unless they are there.
prepare_sample() {
  "$PYTHON" -m t5bench.corpus.build --check "$1/xsum_text_document" >/dev/null 2>&1 || {
    note "preparing the bundled sample"
    mkdir -p -- "$1"
    SAMPLE=1 TOKENIZER_MODEL='' MEGATRON_DATA_DIR=$1 bash "$REPO_ROOT/scripts/prepare_xsum_megatron.sh" >"$1/prepare.log" 2>&1 || {
      cat -- "$1/prepare.log" >&2
      die "the bundled sample could not be prepared" "Its messages are above"
    }
  }
}
