# shellcheck shell=bash
# What every script needs and is not specific to Megatron: messages, settings, hosts and ranks, processes.
# Sourced, never run.

if ((BASH_VERSINFO[0] < 4 || (BASH_VERSINFO[0] == 4 && BASH_VERSINFO[1] < 4))); then
  printf 'error: bash 4.4 or newer is needed, this is %s\n' "$BASH_VERSION" >&2
  exit 2
fi

# The environment may export functions (cd), options (SHELLOPTS) and CDPATH to every bash; with -p, bash takes none of them.
[[ -o privileged ]] || exec bash "-p${-//[!vx]/}" -- "$0" "$@"

REPO_ROOT=$(cd -- "${BASH_SOURCE[0]%/*}/.." && pwd -P)
# One Python plans, trains and records, also in what this script starts.
export PYTHON=${PYTHON:-python3}
[[ $PYTHON == */* ]] || PYTHON=$(type -P -- "$PYTHON" || printf '%s' "$PYTHON")
[[ $PYTHON != */* || $PYTHON == /* ]] || PYTHON=$PWD/$PYTHON
# What precedes a strategy in names; T5 came first and has no prefix.
FAMILY_PREFIX=${MODEL_FAMILY:-t5}-
# shellcheck disable=SC2034 # read by the scripts that source this file
FAMILY_PREFIX=${FAMILY_PREFIX#t5-}
# The engines and the programs of this repository import its packages from here, not from another checkout.
[[ ${PYTHONPATH:-}: == "$REPO_ROOT":* ]] || export PYTHONPATH=$REPO_ROOT${PYTHONPATH:+:$PYTHONPATH}

# ---- messages ------------------------------------------------------------------------------------------------------

# A terminal that is gone or a log on a full disk ends no run. Control characters of arguments steer no terminal.
note() { printf '%s\n' "${*//[![:print:]$'\t\n']/?}" >&2 || true; }

# die WHAT-IS-WRONG [WHAT-TO-DO]: exit status 2 says that nothing expensive has started and nothing was changed.
die() {
  note "error: $1"
  [[ -z ${2:-} ]] || note "       $2"
  exit 2
}

for part in t5bench/{__init__.py,plan,record,costmodel,run} native ds_configs patches; do
  [[ -e $REPO_ROOT/$part ]] || die "$REPO_ROOT holds only a part of this repository: $part is missing" \
    "Clone or copy the whole repository to this node; its scripts do not run alone"
done
unset part
pwd -P >/dev/null 2>&1 || die "the current directory was removed" "Change to one that exists"

# ---- signals -------------------------------------------------------------------------------------------------------

# Signals that end a run in order; t5bench/record/status.py has the same (SIGNALS).
readonly ENDING_SIGNALS=(HUP INT QUIT ABRT USR1 USR2 ALRM TERM XCPU VTALRM PROF IO PWR)
interrupted_by='' planning_pid=''

# Makes the first of ENDING_SIGNALS set interrupted_by and end the planning process, instead of ending this shell.
remember_signals() {
  local signal
  for signal in "${ENDING_SIGNALS[@]}"; do
    # shellcheck disable=SC2064 # this signal's name
    trap "interrupt $signal" "$signal"
  done
}

# Others, from a key that is held down, would cut short the waiting for the processes.
interrupt() {
  trap '' "${ENDING_SIGNALS[@]}"
  interrupted_by=$1
  [[ -z $planning_pid ]] || kill -s TERM "$planning_pid" 2>/dev/null || true
}

# ---- the planning process ------------------------------------------------------------------------------------------

# exec_plan TASK ARGUMENT...: becomes the planning process, which prints its answer.
exec_plan() {
  export HOSTS NNODES MASTER_ADDR NODE_RANK
  T5_ANSWER=3 exec_module t5bench.plan "$PWD" "$@" 3>&1 >&2
}

# plan TASK ARGUMENT...: what t5bench/plan/__main__.py does for a script; prints its answer.
plan() (exec_plan "$@")

# ask TASK ARGUMENT...: sets the variables and arrays in the planning process's answer; ends this script if it refuses.
ask() {
  local status=0 answered='' answer_fd
  [[ -z $interrupted_by ]] || cancel
  # A terminal and SLURM send signals to both processes; the planning process gets TERM from this one.
  exec {answer_fd}< <(trap '' "${ENDING_SIGNALS[@]}" && trap - TERM && exec_plan "$@")
  planning_pid=$!
  # shellcheck disable=SC1090 # the answer is a piece of bash
  source "/dev/fd/$answer_fd"
  exec {answer_fd}<&-
  wait "$planning_pid" || status=$?
  planning_pid=''
  # The answer says this itself, because a signal may have ended the wait.
  [[ -z $answered ]] || return 0
  [[ -z $interrupted_by ]] || cancel
  ((status > 0 && status <= 128)) || note "error: the planning process gave no answer (exit status $status)"
  exit "$((status ? status : 1))"
}

# Ends this script because a signal came before the run began.
cancel() {
  note "error: cancelled: $interrupted_by received before the run began"
  exit "$((128 + $(kill -l "$interrupted_by")))"
}

# ---- arguments -----------------------------------------------------------------------------------------------------

# Prints the script's head comment and its settings.
print_help() {
  sed -n '1d; /^#/!q; s/^# \?//p' "$0"
  printf '\nSettings, from the environment (name, default, meaning):\n'
  plan "$@"
}

# begin OPTIONS ARGUMENT...: answers --help, refuses options not in OPTIONS (NAME allows any name), and sets the script's
# settings, which t5bench/plan/scripts.py declares, from the environment or their defaults; paths become absolute.
begin() {
  local argument script=${0##*/}
  for argument in "${@:2}"; do
    case $argument in
      '') ;;
      -h | --help)
        print_help script-help "${script%.sh}" || true # head may have closed the pipe
        exit
        ;;
      -*) [[ " $1 " == *" $argument "* ]] || die "unknown option '$argument'" "Run bash scripts/$script --help to see the options" ;;
      *) [[ " $1 " == *" NAME "* ]] || die "unknown argument '$argument'" "Give settings as environment variables; --help lists them" ;;
    esac
  done
  ask script "${script%.sh}"
}

# The arguments of a launcher: POSITIONAL (master and rank), DRY_RUN and EXTRA_ARGUMENTS, which go to the engine.
# shellcheck disable=SC2034 # read by the script that sources this file
parse_arguments() {
  POSITIONAL=() EXTRA_ARGUMENTS=() DRY_RUN=''
  while (($#)); do
    case $1 in
      --dry-run) DRY_RUN=dry-run ;;
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

require_python() {
  command -v "$PYTHON" >/dev/null || die "'$PYTHON' is not on PATH" "Activate the Python environment that has torch, or set PYTHON to its interpreter"
}

# python_module NAME ARGUMENT...: runs in the repository, because Python looks for modules in the current directory first,
# which may be another checkout. So paths among the arguments must be absolute.
python_module() (exec_module "$@")

# exec_module NAME ARGUMENT...: becomes that module.
exec_module() { require_python && cd -- "$REPO_ROOT" && exec "$PYTHON" -m "$@"; }

# ---- hosts and ranks -----------------------------------------------------------------------------------------------

# Prints the host names of the SLURM allocation, if there is one, or of the part of it that srun was told to use. A part
# of one node may be where the user types commands for all.
slurm_hosts() {
  local list=${SLURM_JOB_NODELIST:-${SLURM_NODELIST:-}}
  [[ ${SLURM_STEP_NUM_NODES:-1} == 1 ]] || list=${SLURM_STEP_NODELIST:-$list}
  if [[ $list != *'['* ]]; then
    printf '%s\n' "${list//,/ }"
  elif ! timeout 20 scontrol show hostnames "$list"; then
    note "SLURM lists the nodes as '$list', but scontrol is missing, failed or took 20 s: export HOSTS=\"node0 node1\""
  fi
}

# resolve_nodes [MASTER] [RANK]: sets HOSTS, NNODES, MASTER_ADDR and NODE_RANK, each from the argument, else the
# environment, else SLURM. The plan finds this host's rank among HOSTS where none is given, and says what is wrong.
resolve_nodes() {
  local hosts=()
  MASTER_ADDR=${1:-${MASTER_ADDR:-}} NODE_RANK=${2:-${NODE_RANK:-${SLURM_NODEID:-}}}
  read -r -d '' -a hosts <<<"${HOSTS:-$(slurm_hosts)}" || true
  if [[ -n $MASTER_ADDR && -z ${NNODES:-}${hosts[*]}${SLURM_JOB_NUM_NODES:-} && ! ${MASTER_ADDR,,} =~ ^(localhost\.?|127\..*|::1)$ ]]; then
    NNODES=2
    note "Neither HOSTS nor NNODES gives the number of nodes: assuming 2, with $MASTER_ADDR as the master."
  fi
  if [[ ${SLURM_STEP_NUM_NODES:-} == 1 && -z ${1:-}${HOSTS:-}${NNODES:-} ]] && ((${#hosts[@]} > 1)); then
    note "srun runs this on one of the job's ${#hosts[@]} nodes: start it on the others too, or on one node with HOSTS=$(</proc/sys/kernel/hostname)."
  fi
  if [[ ${SLURM_HET_SIZE:-1} -gt 1 && -z ${HOSTS:-} ]]; then
    note "This SLURM job has $SLURM_HET_SIZE components, and this run uses the nodes of one: ${hosts[*]}. Export HOSTS, the master first, to use all."
  fi
  # The plan refuses such a list as a host's name; without it, this would be a run on one node.
  [[ -n ${NNODES:-}${hosts[*]}${SLURM_JOB_NUM_NODES:-} ]] || hosts=(${SLURM_JOB_NODELIST:+"$SLURM_JOB_NODELIST"})
  ((${#hosts[@]} == 0)) || NNODES=${NNODES:-${#hosts[@]}}
  NNODES=${NNODES:-${SLURM_JOB_NUM_NODES:-1}} MASTER_ADDR=${MASTER_ADDR:-${hosts[0]:-}}
  [[ $NNODES != 1 ]] || MASTER_ADDR=${MASTER_ADDR:-127.0.0.1} NODE_RANK=${NODE_RANK:-0}
  HOSTS="${hosts[*]}"
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

# run_to_end RECORDER END_FILE COMMAND...: runs the command with its output going to `RECORDER mark`. When the command ends,
# or one of ENDING_SIGNALS has come (remember_signals), it ends everything that the command started, tells RECORDER in
# END_FILE how it ended (exit status, signal), and returns RECORDER's status. It removes what the command leaves in TMPDIR.
run_to_end() {
  local recorder=$1 end_file=$2 mark=$$-$RANDOM$RANDOM child='' recorder_pid stopped=0 patience=50 status=0 waits=300 NEVER
  local scratch=${TMPDIR:-/tmp}/t5-$mark gate=${end_file%.end}.gate
  exec {NEVER}<> <(:)
  # multiprocessing creates sockets there, whose names may have at most 107 characters.
  { ((${#scratch} < 75)) && mkdir -m 700 -- "$scratch" 2>/dev/null; } || scratch=''
  # A Ctrl-Z suspends this shell, but not the reader of the run's output.
  exec {output_fd}> >(trap '' "${ENDING_SIGNALS[@]}" TSTP && "$recorder" "$mark")
  recorder_pid=$!
  # The recorder removes the gate once the nodes of the run have compared their plans, and fills it if these differ.
  while ((waits-- > 0)) && [[ -z $interrupted_by && -e $gate && ! -s $gate ]] && recorder_lives; do pause 0.1; done
  if [[ -z $interrupted_by && ! -s $gate ]] && recorder_lives; then
    # setsid: a Ctrl-C on the terminal reaches only this shell, which then stops the others in order.
    setsid env T5_RUN_MARK="$mark" ${scratch:+TMPDIR="$scratch"} "${@:3}" >&"$output_fd" 2>&1 &
    child=$!
  elif [[ -z $interrupted_by ]]; then
    status=2
  fi
  while [[ -n $child && -z $interrupted_by ]] && kill -0 "$child" 2>/dev/null && recorder_lives; do pause 0.2; done
  [[ -z $interrupted_by ]] || note "$interrupted_by received: stopping the processes of this run"
  # All processes with the run's mark get TERM and, after 15 s, KILL: SLURM kills after 30 s (KillWait), and the record takes
  # some of them. setsid: a Ctrl-C must not interrupt the clean-up.
  (cd -- "$REPO_ROOT" && setsid -w "$PYTHON" -m t5bench.run.processes "$mark" 15) || true
  [[ -z $child ]] || { wait "$child" && status=0 || status=$?; }
  [[ -z $scratch ]] || rm -rf -- "$scratch"
  # Overwriting in place needs no space on a full disk.
  { printf '%-40s\n' "$status $interrupted_by" 1<>"$end_file"; } 2>/dev/null || true
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
