# shellcheck shell=bash
# What every script needs and is not specific to Megatron: messages, settings, hosts and ranks, processes.
# Sourced, never run.

if ((BASH_VERSINFO[0] < 4 || (BASH_VERSINFO[0] == 4 && BASH_VERSINFO[1] < 4))); then
  printf 'error: bash 4.4 or newer is needed, this is %s\n' "$BASH_VERSION" >&2
  exit 2
fi

# A standard stream that is closed would become the next file that is opened.
{ : 3<&0; } 2>/dev/null || exec </dev/null
{ : 3>&1; } 2>/dev/null || exec >/dev/null
{ : 3>&2; } || exec 2>/dev/null
unset CDPATH
REPO_ROOT=$(cd -- "${BASH_SOURCE[0]%/*}/.." && pwd -P)
PYTHON=${PYTHON:-python3}
[[ $PYTHON != */* || $PYTHON == /* ]] || PYTHON=$PWD/$PYTHON
# A model family's directories, and what precedes a strategy in names; T5 came first and has no prefix.
FAMILY_PREFIX=${MODEL_FAMILY:-t5}-
FAMILY_PREFIX=${FAMILY_PREFIX#t5-}
# shellcheck disable=SC2034 # read by the scripts that source this file
FAMILY_DATA=$REPO_ROOT/megatron_data${FAMILY_PREFIX:+/${FAMILY_PREFIX%-}}
# The families are the files there: (gpt t5), and as text gpt|t5.
FAMILIES=("$REPO_ROOT"/scripts/families/*.sh)
FAMILIES=("${FAMILIES[@]##*/}")
FAMILIES=("${FAMILIES[@]%.sh}")
printf -v FAMILY_NAMES '|%s' "${FAMILIES[@]}"
FAMILY_NAMES=${FAMILY_NAMES#|}
# The engines and the programs of this repository import its packages from here.
[[ :${PYTHONPATH:-}: == *:"$REPO_ROOT":* ]] || export PYTHONPATH=$REPO_ROOT${PYTHONPATH:+:$PYTHONPATH}

# ---- messages ------------------------------------------------------------------------------------------------------

# A terminal that is gone or a log on a full disk ends no run.
note() { printf '%s\n' "$*" >&2 || true; }

# die WHAT-IS-WRONG [WHAT-TO-DO]: exit status 2 says that nothing expensive has started and nothing was changed.
die() {
  note "error: $1"
  [[ -z ${2:-} ]] || note "       $2"
  exit 2
}

pwd -P >/dev/null 2>&1 || die "the current directory was removed" "Change to one that exists"

# ---- settings ------------------------------------------------------------------------------------------------------

SETTING_NAMES=()
declare -A SETTING_KIND=() SETTING_ROLE=() SETTING_ARGUMENT=() SETTING_DEFAULT=() SETTING_MEANING=()

# setting NAME KIND ROLE ARGUMENT DEFAULT MEANING: the environment wins over the default, even with an empty value.
# KIND is whole:MINIMUM[:MAXIMUM], decimal[:MINIMUM], one-of:A|B, path, text or secret, with a ? where it may be empty;
# ROLE is one of those in t5bench/record/plan.py; ARGUMENT is the engine's (several separated by commas, = where the value
# is the argument itself, - for none).
setting() {
  SETTING_NAMES+=("$1")
  SETTING_KIND[$1]=$2 SETTING_ROLE[$1]=$3 SETTING_ARGUMENT[$1]=$4 SETTING_DEFAULT[$1]=$5 SETTING_MEANING[$1]=$6
  [[ -n ${!1+given} ]] || printf -v "$1" '%s' "$5"
}

# group NAME WORD...: NUL-separated words for a Python process; t5bench/plan/launchers.py reads them.
group() { printf '%s\0' "$1" "$(($# - 1))" "${@:2}"; }

# Of a secret's value, a plan says only that it is given.
settings_group() {
  local name value words=()
  for name in "${SETTING_NAMES[@]}"; do
    value=${!name}
    [[ ${SETTING_KIND[$name]} != secret* ]] || value=${value:+given}
    words+=("$name" "${SETTING_KIND[$name]}" "${SETTING_ROLE[$name]}" "${SETTING_ARGUMENT[$name]}" "${SETTING_DEFAULT[$name]}"
      "${SETTING_MEANING[$name]}" "$value")
  done
  group settings "${words[@]}"
  group directory "$PWD"
}

# Prints the script's head comment and its settings by role.
print_help() {
  sed -n '1d; /^#/!q; s/^# \?//p' "$0"
  printf '\nSettings, from the environment (name, default, meaning):\n'
  settings_group | python_module t5bench.plan settings
}

# begin OPTIONS ARGUMENT...: answers --help, refuses options not in OPTIONS (NAME allows any name), and checks
# the settings: each must be of its kind, and paths become absolute. The launchers' plan does this too.
begin() {
  local argument
  for argument in "${@:2}"; do
    case $argument in
      '') ;;
      -h | --help)
        print_help || true # head may have closed the pipe
        exit
        ;;
      -*) [[ " $1 " == *" $argument "* ]] || die "unknown option '$argument'" "Run bash scripts/${0##*/} --help to see the options" ;;
      *) [[ " $1 " == *" NAME "* ]] || die "unknown argument '$argument'" "Give settings as environment variables; --help lists them" ;;
    esac
  done
  hear check settings_group || exit "$?"
}

# The arguments of a launcher: POSITIONAL (master and rank), DRY_RUN and EXTRA_ARGUMENTS, which go to the engine.
# shellcheck disable=SC2034 # read by the script that sources this file
parse_arguments() {
  POSITIONAL=() EXTRA_ARGUMENTS=() DRY_RUN=0
  while (($#)); do
    case $1 in
      --dry-run) DRY_RUN=1 ;;
      --dry-run=json) DRY_RUN=json ;;
      -h | --help)
        print_usage || true # head may have closed the pipe
        exit
        ;;
      --)
        EXTRA_ARGUMENTS=("${@:2}")
        break
        ;;
      -*) die "unknown option '$1'" "Engine arguments go after --; see --help" ;;
      *) POSITIONAL+=("$1") ;;
    esac
    shift
  done
  ((${#POSITIONAL[@]} <= 2)) || die "expected at most two arguments, found ${#POSITIONAL[@]}: ${POSITIONAL[*]}" \
    "Usage: bash scripts/${0##*/} [master-host] [node-rank]"
}

# hear TASK REQUEST: sends the planning process what the function REQUEST prints, sets the variables in its answer, and
# returns its status.
hear() {
  local answer word status=0
  # A Ctrl-C ends this shell, and without it the planning process ends by itself.
  mapfile -d '' -t answer < <(trap '' INT && "$2" | python_module t5bench.plan "$1")
  wait "$!" || status=$?
  for word in "${answer[@]}"; do
    printf -v "${word%%=*}" '%s' "${word#*=}"
  done
  return "$status"
}

# Shared by several scripts.
# shellcheck disable=SC2034 # read by the scripts that source this file
readonly DEFAULT_TOKENIZER=google-t5/t5-large
engine_dir_setting() { setting MEGATRON_DIR path place - "$REPO_ROOT/../Megatron-DeepSpeed" "Path to your Megatron-DeepSpeed checkout"; }

require_python() {
  command -v "$PYTHON" >/dev/null || die "'$PYTHON' is not on PATH" "Activate the Python environment that has torch, or set PYTHON to its interpreter"
}

# python_module NAME ARGUMENT...: runs in the repository, because Python looks for modules in the current directory first,
# which may be another checkout. So paths among the arguments must be absolute.
python_module() (require_python && cd -- "$REPO_ROOT" && exec "$PYTHON" -m "$@")

# ---- hosts and ranks -----------------------------------------------------------------------------------------------

# Prints the host names of the SLURM allocation, if there is one, or of the part of it that srun was told to use. A part
# of one node may be where the user types commands for all.
slurm_hosts() {
  local list=${SLURM_JOB_NODELIST:-${SLURM_NODELIST:-}}
  [[ ${SLURM_STEP_NUM_NODES:-1} == 1 ]] || list=${SLURM_STEP_NODELIST:-$list}
  if [[ $list != *'['* ]]; then
    printf '%s\n' "${list//,/ }"
  elif ! { command -v scontrol >/dev/null && scontrol show hostnames "$list"; }; then
    note "SLURM lists the nodes as '$list', but scontrol is missing or failed to expand this: export HOSTS=\"node0 node1\""
  fi
}

# resolve_topology [MASTER] [RANK]: sets HOST_LIST, NNODES, MASTER_ADDR and NODE_RANK, each from the argument, else the
# environment, else SLURM. t5bench/plan/topology.py finds this host among the others, and says what is wrong.
resolve_topology() {
  MASTER_ADDR=${1:-${MASTER_ADDR:-}} NODE_RANK=${2:-${NODE_RANK:-${SLURM_NODEID:-}}}
  read -r -d '' -a HOST_LIST <<<"${HOSTS:-$(slurm_hosts)}" || true
  if [[ -n $MASTER_ADDR && -z ${NNODES:-}${HOST_LIST[*]}${SLURM_JOB_NUM_NODES:-} && ! $MASTER_ADDR =~ ^(localhost|127\..*|::1)$ ]]; then
    NNODES=2
    note "Neither HOSTS nor NNODES gives the number of nodes: assuming 2, with $MASTER_ADDR as the master."
  fi
  if [[ ${SLURM_STEP_NUM_NODES:-} == 1 && -z ${1:-}${HOSTS:-}${NNODES:-} ]] && ((${#HOST_LIST[@]} > 1)); then
    note "srun runs this on one of the job's ${#HOST_LIST[@]} nodes: start it on the others too, or on one node with HOSTS=$(</proc/sys/kernel/hostname)."
  fi
  # The plan refuses such a list as a host's name; without it, this would be a run on one node.
  [[ -n ${NNODES:-}${HOST_LIST[*]}${SLURM_JOB_NUM_NODES:-} ]] || HOST_LIST=(${SLURM_JOB_NODELIST:+"$SLURM_JOB_NODELIST"})
  ((${#HOST_LIST[@]} == 0)) || NNODES=${NNODES:-${#HOST_LIST[@]}}
  NNODES=${NNODES:-${SLURM_JOB_NUM_NODES:-1}} MASTER_ADDR=${MASTER_ADDR:-${HOST_LIST[0]:-}}
  [[ $NNODES != 1 ]] || MASTER_ADDR=${MASTER_ADDR:-127.0.0.1} NODE_RANK=${NODE_RANK:-0}
}

# ---- processes -----------------------------------------------------------------------------------------------------

# Waits this many seconds, or until a signal, without starting a process.
pause() { read -rt "$1" -u "$NEVER" || true; }

# Whether the recorder is alive. If it is suspended, resumes it after 5 s, because the run's output waits for it.
recorder_lives() {
  local state
  { kill -0 "$recorder_pid" && read -r _ _ state _ <"/proc/$recorder_pid/stat"; } 2>/dev/null || return 1
  [[ $state == T ]] || stopped=0
  if ((++stopped > 25)); then
    note "the recorder of this run was suspended; resuming it"
    kill -s CONT "$recorder_pid"
  fi
}

# Signals that end a run in order; t5bench/record/status.py has the same (SIGNALS).
readonly ENDING_SIGNALS=(HUP INT QUIT ABRT USR1 USR2 ALRM TERM XCPU VTALRM PROF IO PWR)

# run_to_end RECORDER END_FILE COMMAND...: runs the command with its output going to `RECORDER mark`. When the command ends,
# or this shell gets one of ENDING_SIGNALS, it ends everything that the command started, tells RECORDER in END_FILE how it
# ended (exit status, signal), and returns RECORDER's status. It removes what the command leaves in TMPDIR.
run_to_end() {
  local recorder=$1 end_file=$2 mark=$$-$RANDOM$RANDOM child recorder_pid stopped=0 patience=50 status=0 NEVER signal
  local scratch=${TMPDIR:-/tmp}/t5-$mark
  interrupted_by=''
  # With job control (bash -i, or monitor in SHELLOPTS), each command would lead a process group, and setsid would fork.
  set +m
  # Only the first one counts: others, from a key that is held down, would cut short the waiting for the processes.
  for signal in "${ENDING_SIGNALS[@]}"; do
    # shellcheck disable=SC2064 # this signal's name
    trap "interrupted_by=$signal; trap '' ${ENDING_SIGNALS[*]}" "$signal"
  done
  exec {NEVER}<> <(:)
  # multiprocessing creates sockets there, whose names may have at most 107 characters.
  { ((${#scratch} < 75)) && mkdir -m 700 -- "$scratch" 2>/dev/null; } || scratch=''
  # A Ctrl-Z suspends this shell, but not the reader of the run's output.
  exec {output_fd}> >(trap '' "${ENDING_SIGNALS[@]}" TSTP && "$recorder" "$mark")
  recorder_pid=$!
  # setsid: a Ctrl-C on the terminal reaches only this shell, which then stops the others in order.
  setsid env T5_RUN_MARK="$mark" ${scratch:+TMPDIR="$scratch"} "${@:3}" >&"$output_fd" 2>&1 &
  child=$!
  while [[ -z $interrupted_by ]] && kill -0 "$child" 2>/dev/null && recorder_lives; do pause 0.2; done
  [[ -z $interrupted_by ]] || note "$interrupted_by received: stopping the processes of this run"
  # All processes with the run's mark get TERM and, after 15 s, KILL: SLURM kills after 30 s (KillWait), and the record takes
  # some of them. setsid: a Ctrl-C must not interrupt the clean-up.
  (cd -- "$REPO_ROOT" && setsid -w "$PYTHON" -m t5bench.run.processes "$mark" 15) || true
  wait "$child" && status=0 || status=$?
  [[ -z $scratch ]] || rm -rf -- "$scratch"
  # Overwriting in place needs no space on a full disk.
  printf '%-40s\n' "$status $interrupted_by" 1<>"$end_file" || true
  exec {output_fd}>&-
  while recorder_lives && ((patience > 0)); do
    # It may wait for other nodes' reasons; after a signal it must not, and has 5 s to finish.
    if [[ -n $interrupted_by ]]; then
      { kill -s TERM "$recorder_pid" && kill -s CONT "$recorder_pid"; } 2>/dev/null || true
      patience=$((patience - 1))
    fi
    pause 0.1
  done
  if ((patience == 0)); then
    # A recorder that hangs in a file system ignores signals.
    kill -s KILL "$recorder_pid" 2>/dev/null || true
    status=$((128 + $(kill -l "$interrupted_by")))
  else
    wait "$recorder_pid" && status=0 || status=$?
  fi
  exec {NEVER}>&-
  if ((status > 128)) && [[ -z $interrupted_by && -s $end_file ]]; then
    note "error: the recorder of this run was killed (signal $((status - 128))), so the run was stopped"
    status=1
  fi
  return "$status"
}
