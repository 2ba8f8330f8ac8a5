# shellcheck shell=bash
# What every script needs and nothing that knows Megatron: messages, settings, hosts and ranks, ports, processes.
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
REPO_ROOT=$(cd -- "${BASH_SOURCE[0]%/*}/.." && pwd -P)
PYTHON=${PYTHON:-python3}
[[ $PYTHON != */* || $PYTHON == /* ]] || PYTHON=$PWD/$PYTHON
# What the engines and the programs in this repository import its packages from.
[[ :${PYTHONPATH:-}: == *:"$REPO_ROOT":* ]] || export PYTHONPATH=$REPO_ROOT${PYTHONPATH:+:$PYTHONPATH}

# ---- messages ------------------------------------------------------------------------------------------------------

# Exit status 2: nothing expensive has started and nothing was changed.
readonly EXIT_CONFIGURATION=2

note() { printf '%s\n' "$*" >&2; }

# die WHAT-IS-WRONG [WHAT-TO-DO]
die() {
  printf 'error: %s\n' "$1" >&2
  [[ -z ${2:-} ]] || printf '       %s\n' "$2" >&2
  exit "$EXIT_CONFIGURATION"
}

# Why a run cannot start, for its plan: kind (fatal or lack), code, what was found and what to do, again and again.
DRY_RUN=0 OBSTACLES=()

# refuse CODE WHAT-IS-WRONG [WHAT-TO-DO]: the request is wrong, and nothing can be planned.
refuse() {
  OBSTACLES+=(fatal "$1" "$2" "${3:-}")
  [[ $DRY_RUN != json ]] || make_plan # prints it for programs, and ends
  die "$2" "${3:-}"
}

# lack CODE WHAT-IS-MISSING [WHAT-TO-DO]: this machine lacks something; a dry run names it and goes on.
lack() { OBSTACLES+=(lack "$1" "$2" "${3:-}"); }

# ---- settings ------------------------------------------------------------------------------------------------------

SETTING_NAMES=()
declare -A SETTING_KIND=() SETTING_ROLE=() SETTING_ARGUMENT=() SETTING_DEFAULT=() SETTING_MEANING=()

# setting NAME KIND ROLE ARGUMENT DEFAULT MEANING: the environment wins over the default, even with an empty value.
# KIND is whole:MINIMUM[:MAXIMUM], decimal, one-of:A|B, path, text or secret, with a ? where it may be empty; ROLE is one
# of those in t5bench/record/plan.py; ARGUMENT is the engine's (several separated by commas, = where the value is the
# argument itself, - for none).
setting() {
  SETTING_NAMES+=("$1")
  SETTING_KIND[$1]=$2 SETTING_ROLE[$1]=$3 SETTING_ARGUMENT[$1]=$4 SETTING_DEFAULT[$1]=$5 SETTING_MEANING[$1]=$6
  [[ -n ${!1+given} ]] || printf -v "$1" '%s' "$5"
}

# group NAME WORD...: NUL-separated words for a Python process; t5bench/plan/request.py reads them.
group() { printf '%s\0' "$1" "$(($# - 1))" "${@:2}"; }

settings_group() {
  local name words=()
  for name in "${SETTING_NAMES[@]}"; do
    words+=("$name" "${SETTING_KIND[$name]}" "${SETTING_ROLE[$name]}" "${SETTING_ARGUMENT[$name]}" "${SETTING_DEFAULT[$name]}"
      "${SETTING_MEANING[$name]}" "${!name}")
  done
  group settings "${words[@]}"
  group directory "$PWD"
}

# The settings by role, for --help.
print_settings() { require_python && settings_group | python_module t5bench.plan settings; }

# Every setting must be of its kind, and paths become absolute. The launchers' plan does this too.
check_settings() {
  require_python
  hear check settings_group || exit "$?"
}

# hear TASK REQUEST: sets the variables that the planning process answers to what the function REQUEST prints; its status.
hear() {
  local answer word status=0
  mapfile -d '' -t answer < <("$2" | python_module t5bench.plan "$1")
  wait "$!" || status=$?
  for word in "${answer[@]}"; do
    printf -v "${word%%=*}" '%s' "${word#*=}"
  done
  return "$status"
}

# What the launchers and the preparation of data have in common.
# shellcheck disable=SC2034 # read by the scripts that source this file
readonly DEFAULT_TOKENIZER=google-t5/t5-large
data_dir_setting() { setting MEGATRON_DATA_DIR path place - "$REPO_ROOT/megatron_data" "Directory containing indexed dataset files"; }

# python_module NAME ARGUMENT...: paths among the arguments are absolute, for it runs in the repository: Python looks for
# modules in the current directory first, and that may be another checkout.
python_module() (cd -- "$REPO_ROOT" && exec "$PYTHON" -m "$@")

require_python() {
  command -v "$PYTHON" >/dev/null || die "there is no '$PYTHON' on PATH" "Activate the environment that has torch, or set PYTHON"
}

# ---- hosts and ranks -----------------------------------------------------------------------------------------------

addresses_of() { getent ahosts "$1" 2>/dev/null | while read -r address _; do printf '%s\n' "$address"; done; }

is_loopback() { [[ $1 == localhost || $1 == 127.* || $1 == ::1 ]]; }

# The names are compared before any resolver is asked: a cluster's short and long names differ only after the first dot.
same_name() { [[ $1 == "$2" || (! $1$2 =~ ^[0-9.:]+$ && ${1%%.*} == "${2%%.*}") ]]; }

same_host() {
  same_name "$1" "$2" && return 0
  local first
  first=$(addresses_of "$1")
  [[ -n $first && " ${first//$'\n'/ } " == *" $(addresses_of "$2" | head -n 1) "* ]]
}

is_this_host() {
  same_name "$1" "$HOSTNAME" || is_loopback "$1" && return 0
  local address own
  own=" $(hostname -I 2>/dev/null || true) "
  for address in $(addresses_of "$1"); do
    is_loopback "$address" || [[ $own != *" $address "* ]] || return 0
  done
  return 1
}

# As in t5bench/record/hosts.py: a name, an IPv4 address, or an IPv6 address, perhaps with its zone.
readonly HOST_PATTERN='^([A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?|[0-9A-Fa-f]*:[0-9A-Fa-f:.]*(%[A-Za-z0-9_.-]+)?)$'

check_hosts() {
  local host
  for host in "$@"; do
    [[ $host =~ $HOST_PATTERN ]] || refuse host-name "'$host' is not the name or the address of a host" "Correct it where the hosts are named"
  done
}

# Host names of the SLURM allocation, one a line; nothing outside one.
slurm_hosts() {
  local list=${SLURM_JOB_NODELIST:-${SLURM_NODELIST:-}}
  [[ $list == *'['* ]] || {
    printf '%s\n' "${list//,/$'\n'}"
    return 0
  }
  command -v scontrol >/dev/null || refuse no-scontrol "SLURM gives the nodes as '$list' but scontrol is not on PATH" \
    'Export the names yourself: export HOSTS="node0 node1"'
  scontrol show hostnames "$list"
}

# resolve_topology [MASTER] [RANK]: sets HOST_LIST, NNODES, MASTER_ADDR and NODE_RANK.
# Each comes from the argument, else the environment, else SLURM, else this host's name.
resolve_topology() {
  MASTER_ADDR=${1:-${MASTER_ADDR:-}} NODE_RANK=${2:-${NODE_RANK:-}}
  read -r -d '' -a HOST_LIST <<<"${HOSTS:-$(slurm_hosts)}" || true
  check_hosts "${HOST_LIST[@]}" ${MASTER_ADDR:+"$MASTER_ADDR"}
  resolve_node_count
  resolve_master
  resolve_rank
  check_rank_against_hosts
}

resolve_node_count() {
  if [[ -z ${NNODES:-} && -n $MASTER_ADDR && -z ${HOST_LIST[*]}${SLURM_JOB_NUM_NODES:-} ]] && ! is_loopback "$MASTER_ADDR"; then
    NNODES=2
    note "Neither HOSTS nor NNODES says how many nodes there are: taking the README's 2, with $MASTER_ADDR as the master."
  fi
  ((${#HOST_LIST[@]} == 0)) || NNODES=${NNODES:-${#HOST_LIST[@]}}
  NNODES=${NNODES:-${SLURM_JOB_NUM_NODES:-1}}
  [[ $NNODES =~ ^[1-9][0-9]{0,8}$ ]] || refuse setting-value "NNODES must be a whole number of at least 1, found '$NNODES'"
}

resolve_master() {
  MASTER_ADDR=${MASTER_ADDR:-${HOST_LIST[0]:-}}
  [[ -n $MASTER_ADDR ]] || ((NNODES == 1)) || refuse no-master "NNODES is $NNODES but no master host is known" \
    'Name it as the first argument, or export HOSTS="node0 node1 ..." in rank order'
  MASTER_ADDR=${MASTER_ADDR:-127.0.0.1}
}

resolve_rank() {
  local index
  if [[ -z $NODE_RANK && -n ${SLURM_NODEID:-} ]]; then
    [[ ${SLURM_LOCALID:-0} == 0 ]] || refuse tasks-per-node "srun started more than one launcher on this node (SLURM_LOCALID=$SLURM_LOCALID)" \
      'One launcher starts all processes of its node: use srun --ntasks-per-node=1'
    NODE_RANK=$SLURM_NODEID
  fi
  [[ -n $NODE_RANK ]] || ((NNODES > 1)) || NODE_RANK=0
  for index in "${!HOST_LIST[@]}"; do
    [[ -n $NODE_RANK ]] || ! is_this_host "${HOST_LIST[index]}" || NODE_RANK=$index
  done
  [[ -n $NODE_RANK ]] || refuse no-node-rank "Unable to infer NODE_RANK: this host is $HOSTNAME, HOSTS is '${HOST_LIST[*]}'" \
    "Pass it explicitly: bash scripts/${0##*/} $MASTER_ADDR 0 on node 0, ... 1 on node 1"
  [[ $NODE_RANK =~ ^(0|[1-9][0-9]{0,8})$ ]] || refuse node-rank "the node rank must be a whole number, found '$NODE_RANK'" \
    "Usage: bash scripts/${0##*/} [master-host] [node-rank]"
  ((NODE_RANK < NNODES)) || refuse node-rank "the node rank is $NODE_RANK but there are $NNODES nodes" \
    "Ranks run from 0 to $((NNODES - 1)); NNODES or HOSTS set the number of nodes"
}

check_rank_against_hosts() {
  ((${#HOST_LIST[@]} && NNODES > 1)) || return 0
  ((${#HOST_LIST[@]} >= NNODES)) ||
    note "HOSTS names ${#HOST_LIST[@]} of the $NNODES nodes: the others are not checked against their rank."
  same_host "$MASTER_ADDR" "${HOST_LIST[0]}" || refuse master-is-not-first "the master host is $MASTER_ADDR but HOSTS begins with ${HOST_LIST[0]}" \
    "Rank 0 runs on the master: name ${HOST_LIST[0]} as the master, or put $MASTER_ADDR first in HOSTS"
  local expected=${HOST_LIST[NODE_RANK]:-}
  [[ -z $expected ]] || is_this_host "$expected" || lack rank-of-another-host \
    "rank $NODE_RANK belongs to $expected in HOSTS, but this is $HOSTNAME" \
    "Start rank $NODE_RANK on $expected, or correct HOSTS ('${HOST_LIST[*]}')"
}

# ---- ports ---------------------------------------------------------------------------------------------------------

# Listening sockets in /proc/net/tcp*: the local port in hexadecimal, state 0A. By grep, for a busy node has thousands.
port_is_taken() {
  local port
  printf -v port '%04X' "$1"
  grep -qsE "^ *[0-9]+: [0-9A-F]+:$port [0-9A-F]+:[0-9A-F]{4} 0A " /proc/net/tcp /proc/net/tcp6
}

# ---- processes -----------------------------------------------------------------------------------------------------

# Ends what the run started and carries its mark: TERM, then KILL after the given seconds.
# setsid: a Ctrl-C must not end what ends the others.
end_marked() (cd -- "$REPO_ROOT" && setsid -w "$PYTHON" -m t5bench.run.processes "$1" "$2" || true)

# Waits so many seconds, or for a signal, and starts no process.
pause() { read -rt "$1" -u "$NEVER" || true; }

# Whether the recorder is there. One that somebody stopped goes on after 5 s: the run's output stands still without it.
recorder_lives() {
  local state
  { kill -0 "$recorder_pid" && read -r _ _ state _ <"/proc/$recorder_pid/stat"; } 2>/dev/null || return 1
  [[ $state == T ]] || stopped=0
  if ((++stopped > 25)); then
    note "what keeps the record of this run was stopped; it goes on"
    kill -s CONT "$recorder_pid"
  fi
}

# run_to_end RECORDER END_FILE COMMAND...: runs the command, with its output going into `RECORDER mark`, ends
# everything that it started when it ends or when this shell gets INT, TERM or HUP, tells RECORDER in END_FILE how it ended
# (exit status, signal), and returns RECORDER's status. What the command leaves in TMPDIR is removed.
run_to_end() {
  local recorder=$1 end_file=$2 mark=$$-$RANDOM$RANDOM child recorder_pid stopped=0 patience=50 status=0 NEVER
  local scratch=${TMPDIR:-/tmp}/t5-$mark
  interrupted_by=''
  trap 'interrupted_by=${interrupted_by:-INT}' INT
  trap 'interrupted_by=${interrupted_by:-TERM}' TERM
  trap 'interrupted_by=${interrupted_by:-HUP}' HUP
  exec {NEVER}<> <(:)
  # The name of a socket, which multiprocessing makes there, may have 107 characters.
  { ((${#scratch} < 75)) && mkdir -m 700 -- "$scratch" 2>/dev/null; } || scratch=''
  # A Ctrl-Z stops this shell, and not what reads the run's output.
  exec {output_fd}> >(trap '' INT TERM HUP TSTP && "$recorder" "$mark")
  recorder_pid=$!
  # setsid: a Ctrl-C on the terminal reaches this shell alone, which then ends the others in order.
  setsid env T5_RUN_MARK="$mark" ${scratch:+TMPDIR="$scratch"} "${@:3}" >&"$output_fd" 2>&1 &
  child=$!
  while [[ -z $interrupted_by ]] && kill -0 "$child" 2>/dev/null && recorder_lives; do pause 0.2; done
  if [[ -n $interrupted_by ]]; then
    note "$interrupted_by received: ending the processes of this run"
    # SLURM kills after 30 s (KillWait), and the record takes some of them.
    end_marked "$mark" 15
  else
    end_marked "$mark" 10
  fi
  wait "$child" && status=0 || status=$?
  [[ -z $scratch ]] || rm -rf -- "$scratch"
  # In the place of what is there, which takes no space on a disk that has become full.
  printf '%-40s\n' "$status $interrupted_by" 1<>"$end_file" || true
  exec {output_fd}>&-
  while recorder_lives && ((patience > 0)); do
    # It may wait for other nodes to tell why they failed; whoever is asked to end does not, and has 5 s for it.
    if [[ -n $interrupted_by ]]; then
      { kill -s TERM "$recorder_pid" && kill -s CONT "$recorder_pid"; } 2>/dev/null || true
      patience=$((patience - 1))
    fi
    pause 0.1
  done
  if ((patience == 0)); then
    # One that a file system holds takes no signal.
    kill -s KILL "$recorder_pid" 2>/dev/null || true
    status=$((128 + $(kill -l "$interrupted_by")))
  else
    wait "$recorder_pid" && status=0 || status=$?
  fi
  exec {NEVER}>&-
  if ((status > 128)) && [[ -z $interrupted_by && -s $end_file ]]; then
    note "error: what keeps the record of this run was killed (signal $((status - 128))); the run ended with it"
    status=1
  fi
  trap - INT TERM HUP
  return "$status"
}
