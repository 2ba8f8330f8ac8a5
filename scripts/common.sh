# shellcheck shell=bash
# What every script needs and is not specific to Megatron: messages, settings, hosts and ranks, processes.
# Sourced, never run.

if ((BASH_VERSINFO[0] < 4 || (BASH_VERSINFO[0] == 4 && BASH_VERSINFO[1] < 4))); then
  printf 'error: bash 4.4 or newer is needed, this is %s\n' "$BASH_VERSION" >&2
  exit 2
fi

# A process is what its parent left it: a closed stream's number would go to the next file that is opened, and what this
# script creates it must be able to read. t5bench/inherited.py sees to the signals.
[[ -e /dev/fd/0 && ! -d /dev/fd/0 ]] || exec 0</dev/null
[[ -e /dev/fd/1 ]] || exec 1>/dev/null
[[ -e /dev/fd/2 ]] || exec 2>/dev/null
umask u+rwx
unset PYTHONINSPECT # which lets every Python go on with what somebody types
# A command that was waited for may have taken the signal for its own, and bash would go on. A loop of yours around this
# script ends with it only if the signal ended it.
end_by_interrupt() { trap - INT && kill -s INT $$; }
trap end_by_interrupt INT

# The environment may export functions (cd), options (SHELLOPTS) and CDPATH to every bash; with -p, bash takes none of them.
[[ -o privileged ]] || exec bash "-p${-//[!vx]/}" -- "$0" "$@"

REPO_ROOT=$(cd -- "${BASH_SOURCE[0]%/*}/.." && pwd -P)
# One Python plans, trains and records, also in what this script starts.
export PYTHON=${PYTHON:-python3}
[[ $PYTHON == */* ]] || PYTHON=$(type -P -- "$PYTHON" || printf '%s' "$PYTHON")
[[ $PYTHON != */* || $PYTHON == /* ]] || PYTHON=$PWD/$PYTHON
# The engines and the programs of this repository import its packages from here, not from another checkout.
[[ ${PYTHONPATH:-}: == "$REPO_ROOT":* ]] || export PYTHONPATH=$REPO_ROOT${PYTHONPATH:+:$PYTHONPATH}

# ---- messages ------------------------------------------------------------------------------------------------------

# A terminal that is gone, a log on a full disk or a pipe that nobody reads neither ends a run nor holds it up. Control
# characters of arguments steer no terminal.
note() {
  local text=${*//[![:print:]$'\t\n']/?}
  timeout --foreground 3 printf '%s\n' "$text" >&2 2>/dev/null || [[ $? != 127 ]] || printf '%s\n' "$text" >&2 || true
}

# die WHAT-IS-WRONG [WHAT-TO-DO]: exit status 2 says that nothing expensive has started and nothing was changed.
die() {
  note "error: $1"
  [[ -z ${2:-} ]] || note "       $2"
  exit 2
}

for part in t5bench/{__init__.py,plan,record,costmodel,run} native ds_configs patches packages/judge/src/training_comparison; do
  [[ -e $REPO_ROOT/$part ]] || die "$REPO_ROOT holds only a part of this repository: $part is missing" \
    "Clone or copy the whole repository to this node; its scripts do not run alone"
done
unset part
pwd -P >/dev/null 2>&1 || die "the current directory was removed" "Change to one that exists"

# ---- the model -----------------------------------------------------------------------------------------------------

# From here on MODEL is a description of the model, which does not depend on files of this host.
if [[ -n ${MODEL:-} ]]; then
  described=$(cd -- "$REPO_ROOT" && "$PYTHON" -m t5bench.plan.described_model "$OLDPWD") || exit 2
  while IFS='=' read -r name value; do
    [[ -z $name ]] || export "$name=$value" # nothing is printed where MODEL is a description already
  done <<<"$described"
  unset described name value
fi
# What precedes a strategy in names; T5 came first and has no prefix.
FAMILY_PREFIX=${MODEL_FAMILY:-t5}-
# shellcheck disable=SC2034 # read by the scripts that source this file
FAMILY_PREFIX=${FAMILY_PREFIX#t5-}

# ---- the planning process ------------------------------------------------------------------------------------------

# exec_plan TASK ARGUMENT...: becomes the planning process (t5bench/plan/__main__.py), which prints its answer.
exec_plan() {
  export HOSTS NNODES MASTER_ADDR NODE_RANK
  exec_module t5bench.plan "$PWD" "$@"
}

# ---- arguments -----------------------------------------------------------------------------------------------------

# Prints the script's head comment and its settings.
print_help() {
  sed -n '1d; /^#/!q; s/^# \?//p' "$0"
  printf '\nSettings, from the environment (name, default, meaning):\n'
  (exec_plan "$@")
}

# begin OPTIONS ARGUMENT...: answers --help, refuses options not in OPTIONS (NAME allows any name), and sets the script's
# settings, which t5bench/plan/scripts.py declares, from the environment or their defaults; paths become absolute.
begin() {
  local argument script=${0##*/} settings
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
  settings=$(exec_plan script "${script%.sh}") || exit
  # shellcheck disable=SC1090 # assignments
  source <(printf '%s' "$settings")
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
        print_usage "${@:2:1}" || true # head may have closed the pipe
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
  local remedy="Activate the Python environment that has torch, or set PYTHON to its interpreter"
  if [[ $PYTHON == */* ]]; then
    [[ -f $PYTHON ]] || die "there is no file $PYTHON, which PYTHON names" "$remedy"
    [[ -x $PYTHON ]] || die "$PYTHON, which PYTHON names, cannot be executed" "$remedy"
  fi
  command -v "$PYTHON" >/dev/null || die "'$PYTHON' is not on PATH" "$remedy"
}

# python_module NAME ARGUMENT...: runs in the repository, because Python looks for modules in the current directory first,
# which may be another checkout. So paths among the arguments must be absolute.
python_module() (exec_module "$@")

# exec_module NAME ARGUMENT...: becomes that module.
exec_module() { require_python && cd -- "$REPO_ROOT" && exec "$PYTHON" -m "$@"; }

# attend COMMAND...: runs what this script goes on after. Bash would leave it running where a signal ends the script
# alone, as kill and process managers send it; here it gets the signal first.
attend() {
  local child signal received='' status=0
  set -m # a process group of its own, which does not ignore INT
  "$@" </dev/null &
  child=$!
  set +m
  for signal in HUP INT QUIT USR1 USR2 TERM; do
    # shellcheck disable=SC2064 # of this child and this signal
    trap "received=$signal; kill -s $signal -- -$child || true" "$signal"
  done
  {
    wait "$child" || status=$?
    while kill -0 "$child"; do # a signal has ended the waiting
      status=0
      wait "$child" || status=$?
    done
  } 2>/dev/null # where bash says how each ended
  trap - HUP QUIT USR1 USR2 TERM
  trap end_by_interrupt INT
  [[ -z $received ]] || { trap - "$received" && kill -s "$received" $$ && exit $((128 + $(kill -l "$received"))); }
  return "$status"
}

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

# take NAME VALUE...: sets NAME to the first value that is not empty.
take() {
  local name=$1 value=''
  for value in "${@:2}"; do
    [[ -z $value ]] || break
  done
  printf -v "$name" '%s' "$value"
}

# resolve_nodes [MASTER] [RANK]: sets HOSTS, NNODES, MASTER_ADDR and NODE_RANK, each from the argument, else the
# environment, else SLURM, else its default. The plan finds this host's rank among HOSTS where none is given, and says what
# is wrong.
resolve_nodes() {
  local hosts=() number='' assumed=1 alone=()
  [[ ${HOSTS:-} == *[![:space:]]* ]] || HOSTS=''
  read -r -d '' -a hosts <<<"${HOSTS:-$(slurm_hosts)}" || true
  check_slurm_step "$@"
  is_named_alone "$@" && assumed=2
  # The plan refuses such a list as a host's name; without it, this would be a run on one node.
  [[ -n ${NNODES:-}${hosts[*]}${SLURM_JOB_NUM_NODES:-} || $assumed == 2 ]] ||
    hosts=(${SLURM_JOB_NODELIST:+"$SLURM_JOB_NODELIST"})
  ((${#hosts[@]} == 0)) || number=${#hosts[@]}
  HOSTS="${hosts[*]}"

  # In each row: argument, environment, SLURM, default.
  take NNODES '' "${NNODES:-$number}" "${SLURM_JOB_NUM_NODES:-}" "$assumed"
  [[ $NNODES != 1 ]] || alone=(127.0.0.1 0)
  take MASTER_ADDR "${1:-}" "${MASTER_ADDR:-}" "${hosts[0]:-}" "${alone[0]:-}"
  take NODE_RANK "${2:-}" "${NODE_RANK:-}" "${SLURM_NODEID:-}" "${alone[1]:-}"
}

# is_named_alone [MASTER] [RANK]: whether a master on another machine is all that says how many nodes there are. Uses hosts.
is_named_alone() {
  local master=${1:-${MASTER_ADDR:-}}
  [[ -n $master && -z ${NNODES:-}${hosts[*]}${SLURM_JOB_NUM_NODES:-} ]] || return 1
  [[ ! ${master,,} =~ ^(localhost\.?|127\..*|::1)$ ]] || return 1
  note "Neither HOSTS nor NNODES gives the number of nodes: assuming 2, with $master as the master."
}

# check_slurm_step [MASTER] [RANK]: whether srun started this where it can take its nodes from SLURM. Uses hosts.
check_slurm_step() {
  if [[ -n ${SLURM_NODEID:-} && -z ${1:-}${2:-}$HOSTS${NODE_RANK:-} ]]; then
    if ((${SLURM_LOCALID:-0} > 0)); then
      note "Task $SLURM_LOCALID of this node has nothing to do: one launcher starts all processes of its node (srun --ntasks-per-node=1)."
      exit 0
    fi
    [[ -n ${SLURM_STEP_ID:-} || ${SLURM_JOB_NUM_NODES:-1} == 1 || -n ${NNODES:-} ]] ||
      die "this job has $SLURM_JOB_NUM_NODES nodes, but only one of them runs this script: srun did not start it" \
        "Run: srun --ntasks-per-node=1 bash $0, or sbatch scripts/slurm/run_strategy.sbatch"
  fi
  if [[ ${SLURM_STEP_NUM_NODES:-} == 1 && -z ${1:-}$HOSTS${NNODES:-} ]] && ((${#hosts[@]} > 1)); then
    note "srun runs this on one of the job's ${#hosts[@]} nodes: start it on the others too, or on one node with HOSTS=$(</proc/sys/kernel/hostname)."
  fi
  if [[ ${SLURM_HET_SIZE:-1} -gt 1 && -z $HOSTS ]]; then
    note "This SLURM job has $SLURM_HET_SIZE components, and this run uses the nodes of one: ${hosts[*]}. Export HOSTS, the master first, to use all."
  fi
}
