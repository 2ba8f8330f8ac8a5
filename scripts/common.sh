# shellcheck shell=bash
# What every launcher needs and nothing that knows Megatron: messages, settings, hosts and ranks, ports, processes.
# Sourced, never run. Functions that answer with a value set REPLY, so that no process is started to read it.

[[ -z ${COMMON_SH_LOADED:-} ]] || return 0
COMMON_SH_LOADED=1

if ((BASH_VERSINFO[0] < 4 || (BASH_VERSINFO[0] == 4 && BASH_VERSINFO[1] < 4))); then
  printf 'error: bash 4.4 or newer is needed, this is %s\n' "$BASH_VERSION" >&2
  exit 2
fi

unset CDPATH
# srun hands on the login host's HOSTNAME where /etc/profile exports it, and a shell keeps what it is given.
read -r HOSTNAME </proc/sys/kernel/hostname
# shellcheck disable=SC2034 # read by the scripts that source this file
REPO_ROOT=$(cd -- "${BASH_SOURCE[0]%/*}/.." && pwd -P)
DRY_RUN=0
PYTHON=${PYTHON:-python3}
# What every Python process here imports t5bench from, wherever it is started.
[[ :${PYTHONPATH:-}: == *:"$REPO_ROOT":* ]] || export PYTHONPATH=$REPO_ROOT${PYTHONPATH:+:$PYTHONPATH}

# ---- messages ------------------------------------------------------------------------------------------------------

# Exit status 2: nothing expensive has started and nothing was changed.
readonly EXIT_CONFIGURATION=2

note() { printf '%s\n' "$*" >&2; }
warn() { printf 'warning: %s\n' "$*" >&2; }

# die WHAT-IS-WRONG [WHAT-TO-DO]
die() {
  printf 'error: %s\n' "$1" >&2
  [[ -z ${2:-} ]] || printf '       %s\n' "$2" >&2
  exit "$EXIT_CONFIGURATION"
}

# For what a machine lacks rather than what a setting gets wrong: a dry run names it and goes on.
missing() {
  ((DRY_RUN)) || die "$@"
  printf 'a real run would stop here: %s\n' "$1" >&2
  [[ -z ${2:-} ]] || printf '       %s\n' "$2" >&2
}

# ---- settings ------------------------------------------------------------------------------------------------------

SETTING_NAMES=()
declare -A SETTING_DEFAULT=() SETTING_MEANING=()

# setting NAME DEFAULT MEANING: the environment wins over the default, even with an empty value.
setting() {
  SETTING_NAMES+=("$1")
  SETTING_DEFAULT[$1]=$2
  SETTING_MEANING[$1]=$3
  [[ -n ${!1+given} ]] || printf -v "$1" '%s' "$2"
}

print_settings() {
  local name default
  for name in "${SETTING_NAMES[@]}"; do
    default=${SETTING_DEFAULT[$name]:-(unset)}
    default=${default/#"$REPO_ROOT/../"/../}
    printf '  %-28s %-22s %s\n' "$name" "${default/#"$REPO_ROOT/"/./}" "${SETTING_MEANING[$name]}"
  done
}

# What the launchers and the preparation of data have in common.
# shellcheck disable=SC2034 # read by the scripts that source this file
readonly DEFAULT_TOKENIZER=google-t5/t5-large
data_dir_setting() { setting MEGATRON_DATA_DIR "$REPO_ROOT/megatron_data" "Directory containing indexed dataset files"; }

# require_integers MINIMUM NAME...
require_integers() {
  local minimum=$1 name
  for name in "${@:2}"; do
    if ! [[ ${!name} =~ ^(0|[1-9][0-9]{0,17})$ ]] || ((${!name} < minimum)); then
      die "$name must be a whole number of at least $minimum, found '${!name}'"
    fi
  done
}

# require_numbers NAME...: non-negative decimals, 1e-4 style included.
require_numbers() {
  local name
  for name in "$@"; do
    [[ ${!name} =~ ^([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?$ ]] ||
      die "$name must be a number that is not negative, found '${!name}'"
  done
}

# require_one_of NAME ALLOWED...
require_one_of() {
  local name=$1 allowed
  for allowed in "${@:2}"; do
    [[ ${!name} != "$allowed" ]] || return 0
  done
  die "$name is '${!name}'" "It may be one of: ${*:2}"
}

absolute_path() {
  case $1 in
    /*) REPLY=$1 ;;
    *) REPLY=$PWD/${1#./} ;;
  esac
}

# ---- strategies ----------------------------------------------------------------------------------------------------

# Names of all strategies, one a line, in the order of their ports: a launcher is found by being there.
list_strategies() {
  local launcher
  for launcher in "$REPO_ROOT"/scripts/run_megatron_t5_*.sh; do
    launcher=$(sed -n -e 's/^STRATEGY_PORT=//p' -e 's/^STRATEGY=//p' "$launcher")
    [[ $launcher != *$'\n'* ]] || printf '%s %s\n' "${launcher#*$'\n'}" "${launcher%%$'\n'*}"
  done | sort -n | cut -d' ' -f2
}

# choose_strategies [NAME...]: sets CHOSEN; all when none is named.
choose_strategies() {
  local all chosen
  all=$(list_strategies)
  CHOSEN=("$@")
  (($#)) || mapfile -t CHOSEN <<<"$all"
  for chosen in "${CHOSEN[@]}"; do
    [[ $'\n'$all$'\n' == *$'\n'$chosen$'\n'* ]] || die "there is no strategy '$chosen'" "There are: ${all//$'\n'/ }"
  done
}

# ---- hosts and ranks -----------------------------------------------------------------------------------------------

addresses_of() {
  getent ahosts "$1" 2>/dev/null | while read -r address _; do printf '%s\n' "$address"; done
}

host_resolves() { getent hosts "$1" >/dev/null 2>&1 || getent ahosts "$1" >/dev/null 2>&1; }

is_loopback() { [[ $1 == localhost || $1 == 127.* || $1 == ::1 ]]; }

# The names are compared before any resolver is asked: a cluster's short and long names differ only after the first dot.
is_this_host() {
  local name=$1 own=${HOSTNAME:-$(uname -n)} address
  [[ $name == "$own" || $name == "${own%%.*}" ]] && return 0
  is_loopback "$name" && return 0
  [[ ! $name =~ ^[0-9.:]+$ && ${name%%.*} == "${own%%.*}" ]] && return 0
  local own_addresses
  own_addresses=" $(hostname -I 2>/dev/null || true) "
  for address in $(addresses_of "$name"); do
    [[ $address != 127.* && $address != ::1 && $own_addresses == *" $address "* ]] && return 0
  done
  return 1
}

same_host() {
  [[ $1 == "$2" || (! $1$2 =~ ^[0-9.:]+$ && ${1%%.*} == "${2%%.*}") ]] && return 0
  local first
  first=$(addresses_of "$1")
  [[ -n $first && " ${first//$'\n'/ } " == *" $(addresses_of "$2" | head -n 1) "* ]]
}

# Host names of the SLURM allocation, one a line; nothing outside one.
slurm_hosts() {
  local list=${SLURM_JOB_NODELIST:-${SLURM_NODELIST:-}}
  [[ -n $list ]] || return 0
  if [[ $list == *'['* ]]; then
    command -v scontrol >/dev/null || die "SLURM gives the nodes as '$list' but scontrol is not on PATH" \
      'Export the names yourself: export HOSTS="node0 node1"'
    scontrol show hostnames "$list"
  else
    printf '%s\n' "${list//,/$'\n'}"
  fi
}

# resolve_topology [MASTER] [RANK]: sets HOST_LIST, NNODES, MASTER_ADDR and NODE_RANK.
# Each comes from the argument, else the environment, else SLURM, else this host's name.
resolve_topology() {
  local master=${1:-${MASTER_ADDR:-}} rank=${2:-${NODE_RANK:-}}
  read -r -d '' -a HOST_LIST <<<"${HOSTS:-$(slurm_hosts)}" || true
  resolve_node_count "$master"
  resolve_master "$master"
  resolve_rank "$rank"
  check_rank_against_hosts
}

resolve_node_count() {
  local master=$1
  if [[ -z ${NNODES:-} ]]; then
    if ((${#HOST_LIST[@]})); then
      NNODES=${#HOST_LIST[@]}
    elif [[ -n ${SLURM_JOB_NUM_NODES:-} ]]; then
      NNODES=$SLURM_JOB_NUM_NODES
    elif [[ -z $master ]] || is_loopback "$master"; then
      NNODES=1
    else
      NNODES=2
      note "Neither HOSTS nor NNODES says how many nodes there are: taking the README's 2, with $master as the master."
    fi
  fi
  require_integers 1 NNODES
}

resolve_master() {
  MASTER_ADDR=$1
  if [[ -z $MASTER_ADDR ]]; then
    if ((${#HOST_LIST[@]})); then
      MASTER_ADDR=${HOST_LIST[0]}
    elif ((NNODES == 1)); then
      MASTER_ADDR=127.0.0.1
    else
      die "NNODES is $NNODES but no master host is known" \
        'Name it as the first argument, or export HOSTS="node0 node1 ..." in rank order'
    fi
  fi
}

resolve_rank() {
  NODE_RANK=$1
  if [[ -z $NODE_RANK && -n ${SLURM_NODEID:-} ]]; then
    [[ ${SLURM_LOCALID:-0} == 0 ]] || die "srun started more than one launcher on this node (SLURM_LOCALID=$SLURM_LOCALID)" \
      'One launcher starts all processes of its node: use srun --ntasks-per-node=1'
    NODE_RANK=$SLURM_NODEID
  fi
  if [[ -z $NODE_RANK ]] && ((NNODES == 1)); then
    NODE_RANK=0
  fi
  if [[ -z $NODE_RANK ]]; then
    local index
    for index in "${!HOST_LIST[@]}"; do
      if is_this_host "${HOST_LIST[index]}"; then
        NODE_RANK=$index
        break
      fi
    done
  fi
  [[ -n $NODE_RANK ]] || die "Unable to infer NODE_RANK: this host is ${HOSTNAME:-unnamed}, HOSTS is '${HOST_LIST[*]}'" \
    "Pass it explicitly: bash scripts/${0##*/} $MASTER_ADDR 0 on node 0, ... 1 on node 1"
  [[ $NODE_RANK =~ ^(0|[1-9][0-9]{0,8})$ ]] || die "the node rank must be a whole number, found '$NODE_RANK'" \
    "Usage: bash scripts/${0##*/} [master-host] [node-rank]"
  ((NODE_RANK < NNODES)) || die "the node rank is $NODE_RANK but there are $NNODES nodes" \
    "Ranks run from 0 to $((NNODES - 1)); NNODES or HOSTS set the number of nodes"
}

check_rank_against_hosts() {
  ((${#HOST_LIST[@]} && NNODES > 1)) || return 0
  ((${#HOST_LIST[@]} >= NNODES)) ||
    note "HOSTS names ${#HOST_LIST[@]} of the $NNODES nodes: the others are not checked against their rank."
  if ! same_host "$MASTER_ADDR" "${HOST_LIST[0]}"; then
    die "the master host is $MASTER_ADDR but HOSTS begins with ${HOST_LIST[0]}" \
      "Rank 0 runs on the master: name ${HOST_LIST[0]} as the master, or put $MASTER_ADDR first in HOSTS"
  fi
  local expected=${HOST_LIST[NODE_RANK]:-}
  [[ -z $expected ]] || is_this_host "$expected" || missing \
    "rank $NODE_RANK belongs to $expected in HOSTS, but this is ${HOSTNAME:-unnamed}" \
    "Start rank $NODE_RANK on $expected, or correct HOSTS ('${HOST_LIST[*]}')"
}

# ---- ports ---------------------------------------------------------------------------------------------------------

# Listening sockets in /proc/net/tcp*: the local port in hexadecimal, state 0A. By grep, for a busy node has thousands.
port_is_taken() {
  local port
  printf -v port '%04X' "$1"
  grep -qsE "^ *[0-9]+: [0-9A-F]+:$port [0-9A-F]+:[0-9A-F]{4} 0A " /proc/net/tcp /proc/net/tcp6
}

# ---- torchrun ------------------------------------------------------------------------------------------------------

# write_torchrun DIRECTORY: a torchrun of $PYTHON. The one on PATH may belong to another Python, whose packages its workers get.
write_torchrun() {
  mkdir -p -- "$1"
  # shellcheck disable=SC2016 # "$@" is for the script that is written
  printf '#!/usr/bin/env bash\nexec %q -m torch.distributed.run "$@"\n' "$PYTHON" >"$1/torchrun"
  chmod +x -- "$1/torchrun"
}

# ---- processes -----------------------------------------------------------------------------------------------------

# Workers leave torchrun's process group and outlive a torchrun that is killed; the mark in their environment finds them.
marked_processes() {
  grep -lsaF -- "T5_RUN_MARK=$1" /proc/[0-9]*/environ 2>/dev/null | while IFS=/ read -r _ _ pid _; do
    printf '%s\n' "$pid"
  done
}

signal_marked() {
  local signal=$1 mark=$2 pids
  mapfile -t pids < <(marked_processes "$mark")
  ((${#pids[@]})) || return 1
  kill -s "$signal" -- "${pids[@]}" 2>/dev/null || true
}

# Ends what carries the mark: TERM, then KILL after the given seconds. SLURM allows 30 s in all (KillWait).
end_marked() {
  local mark=$1 seconds=$2 tick
  signal_marked TERM "$mark" || return 0
  # A process that was stopped takes no TERM before it goes on.
  signal_marked CONT "$mark" || true
  for ((tick = 0; tick < seconds * 5; tick++)); do
    sleep 0.2
    [[ -n $(marked_processes "$mark") ]] || return 0
  done
  signal_marked KILL "$mark" || true
  # What follows counts on their memory, also a GPU's, and on their ports.
  for ((tick = 0; tick < 25; tick++)); do
    [[ -n $(marked_processes "$mark") ]] || return 0
    sleep 0.2
  done
}

# run_to_end RECORDER END_FILE COMMAND...: runs the command, with its output going into `RECORDER mark`, ends
# everything that it started when it ends or when this shell gets INT, TERM or HUP, tells RECORDER in END_FILE how it ended
# (exit status, signal), and returns RECORDER's status.
run_to_end() {
  local recorder=$1 end_file=$2 mark=$$-$RANDOM$RANDOM child status=0
  interrupted_by=''
  trap 'interrupted_by=${interrupted_by:-INT}' INT
  trap 'interrupted_by=${interrupted_by:-TERM}' TERM
  trap 'interrupted_by=${interrupted_by:-HUP}' HUP
  # Written over in its place at the end, which takes no space on a disk that has become full.
  printf '%40s\n' '' >"$end_file" || true
  # A Ctrl-Z stops this shell, and not what reads the run's output.
  exec {output_fd}> >(trap '' INT TERM HUP TSTP && "$recorder" "$mark")
  local recorder_pid=$!
  # setsid: a Ctrl-C on the terminal reaches this shell alone, which then ends the others in order.
  setsid env T5_RUN_MARK="$mark" "${@:3}" >&"$output_fd" 2>&1 &
  child=$!
  while true; do
    wait "$child" && status=0 || status=$?
    if [[ -n $interrupted_by ]]; then
      note "$interrupted_by received: ending the processes of this run"
      # SLURM kills after 30 s (KillWait), and the record takes some of them.
      end_marked "$mark" 15
      break
    fi
    kill -0 "$child" 2>/dev/null || break
  done
  [[ -n $interrupted_by ]] || end_marked "$mark" 10
  printf '%-40s\n' "$status $interrupted_by" 1<>"$end_file" || true
  exec {output_fd}>&-
  while true; do
    # It may wait for other nodes to tell why they failed; whoever is asked to end does not.
    [[ -z $interrupted_by ]] || kill -s TERM "$recorder_pid" 2>/dev/null || true
    wait "$recorder_pid" && status=0 || status=$?
    kill -0 "$recorder_pid" 2>/dev/null || break
  done
  if ((status > 128)) && [[ -z $interrupted_by && -s $end_file ]]; then
    note "error: what keeps the record of this run was killed (signal $((status - 128))); the run ended with it"
    status=1
  fi
  trap - INT TERM HUP
  return "$status"
}
