#!/usr/bin/env bash
# A real little cluster on one Linux machine, for the tests: no docker, no systemd, root only.
#
# Each host is a set of namespaces (network, processes, name, mounts, ipc) whose first process is this script: an IP
# address, a host name, a process table, /run and /dev/shm of its own, and real munged, sshd and slurmd. The host
# "login" carries the switch (a bridge) and slurmctld. The file system is everyone's, as over NFS, but for the
# directories that `private` takes out. The machine's own network, /etc and process table stay untouched.
#
#   cluster.sh packages             install with apt what is missing
#   cluster.sh up [N]               login and node0 ... node(N-1), 2 unless said; returns when SLURM calls them idle
#   cluster.sh down                 end it all, also what is left of an `up` that was killed
#   cluster.sh guard PID            wait until that process is gone, then `down`
#   cluster.sh exec HOST COMMAND... run it there; directory and environment are kept (ssh works from any host to any)
#   cluster.sh link HOST up|down    plug or pull the network cable
#   cluster.sh shape HOST RATE|off  limit its network both ways, for instance 1gbit
#   cluster.sh poweroff HOST        the cable first, then everything on it is killed: the others see silence, no FIN
#   cluster.sh boot HOST            start it again
#   cluster.sh private HOST DIR     a copy of that directory of its own, in memory;  public HOST DIR undoes it
#   cluster.sh status
#
# LAB_DIR (state; another directory is another cluster), LAB_NET (first three bytes of the addresses), LAB_GPUS and
# LAB_CPUS (what a node claims to have), LAB_KILL_WAIT (SLURM's KillWait in seconds).
set -euo pipefail

LAB_DIR=${LAB_DIR:-/tmp/t5-lab}
readonly LAB_DIR
readonly NET=${LAB_NET:-10.77.0} GPUS=${LAB_GPUS:-1} CPUS=${LAB_CPUS:-4} KILL_WAIT=${LAB_KILL_WAIT:-5}
SELF=$(readlink -f -- "${BASH_SOURCE[0]}")
readonly SELF
readonly PACKAGES=(slurmctld slurmd slurm-client munge openssh-server openssh-client iproute2)

# The freezer of cgroup v1, where there is one, lets SLURM find (and `down` end) what has left its process tree.
FREEZER=''
! grep -qs ' cgroup .*freezer' /proc/mounts || FREEZER=/sys/fs/cgroup/freezer
GROUP=$FREEZER/t5-lab-$(printf %s "$LAB_DIR" | md5sum | head -c 8)
readonly FREEZER GROUP

die() {
  printf 'error: %s\n' "$1" >&2
  [[ -z ${2:-} ]] || printf '       %s\n' "$2" >&2
  exit 2
}

# wait_until SECONDS COMMAND...
wait_until() {
  local tick
  for ((tick = 0; tick < $1 * 20; tick++)); do
    "${@:2}" && return 0
    sleep 0.05
  done
  return 1
}

# ---- hosts ---------------------------------------------------------------------------------------------------------

nodes() { seq -f 'node%g' 0 $(($(<"$LAB_DIR/count") - 1)); }

address_of() {
  case $1 in
    login) printf '%s\n' "$NET.1" ;;
    node[0-9]*) printf '%s\n' "$NET.$((10 + ${1#node}))" ;;
    *) die "there is no host '$1'" ;;
  esac
}

# The pid, on the machine, of a host's first process. Its command line is compared, for pids are given out again.
pid_of() {
  local pid
  pid=$(cat -- "$LAB_DIR/$1/pid" 2>/dev/null) || return 1
  is_host "$pid" "$1" || return 1
  printf '%s\n' "$pid"
}

is_host() {
  local words=()
  mapfile -d '' -t words < <(cat -- "/proc/$1/cmdline" 2>/dev/null)
  [[ ${words[*]:1} == "$SELF init $2" ]]
}

in_network() {
  local pid
  pid=$(pid_of "$1") || die "host $1 is not up"
  nsenter -t "$pid" -n -- "${@:2}"
}

in_host() {
  local pid
  pid=$(pid_of "$1") || die "host $1 is not up"
  # A shell keeps the HOSTNAME that it is given, and ours is the machine's. The directory is entered over there: it may
  # be the host's own.
  # shellcheck disable=SC2016 # the inner shell expands it
  env -u HOSTNAME nsenter -t "$pid" -n -u -i -m -p --wd=/ -- \
    /bin/bash -c 'cd -- "$1" && exec "${@:2}"' exec "$PWD" "${@:2}"
}

# ---- configuration -------------------------------------------------------------------------------------------------

packages() {
  has_packages && return
  local policy=/usr/sbin/policy-rc.d mine=''
  # 101: no daemon may start on the machine itself.
  if [[ ! -e $policy ]]; then
    mine=1
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod +x "$policy"
  fi
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${PACKAGES[@]}"
  [[ -z $mine ]] || rm -f -- "$policy"
}

has_packages() {
  local program
  for program in slurmctld slurmd srun munged sshd ip tc; do
    command -v "$program" >/dev/null || return 1
  done
}

configure() {
  local count=$1
  mkdir -p -- "$LAB_DIR"/{etc/slurm,etc/ssh,state,dev,login}
  chmod 755 -- "$LAB_DIR"
  write_names "$count"
  write_ssh
  write_slurm "$count"
  printf '%s\n' "$count" >"$LAB_DIR/count"
}

write_names() {
  local index
  {
    printf '127.0.0.1 localhost\n%s login\n' "$NET.1"
    for ((index = 0; index < $1; index++)); do printf '%s node%s\n' "$NET.$((10 + index))" "$index"; done
  } >"$LAB_DIR/etc/hosts"
  # No DNS: an unknown name is unknown at once.
  sed 's/^hosts:.*/hosts: files/' /etc/nsswitch.conf >"$LAB_DIR/etc/nsswitch.conf"
}

write_ssh() {
  local ssh=$LAB_DIR/etc/ssh key
  for key in id hostkey; do
    [[ -s $ssh/$key ]] || ssh-keygen -q -t ed25519 -N '' -C lab -f "$ssh/$key"
  done
  cp -- "$ssh/id.pub" "$ssh/authorized_keys"
  printf '*,%s.* %s\n' "$NET" "$(cut -d' ' -f1,2 "$ssh/hostkey.pub")" >"$ssh/known_hosts"
  cat >"$ssh/ssh_config" <<CONFIG
Host *
  IdentityFile $ssh/id
  UserKnownHostsFile $ssh/known_hosts
  StrictHostKeyChecking yes
  BatchMode yes
  ConnectTimeout 5
CONFIG
  cat >"$ssh/sshd_config" <<CONFIG
HostKey $ssh/hostkey
AuthorizedKeysFile $ssh/authorized_keys
StrictModes no
PermitRootLogin prohibit-password
PasswordAuthentication no
UsePAM no
UseDNS no
AcceptEnv LANG LC_*
MaxStartups 100
Subsystem sftp internal-sftp
CONFIG
}

write_slurm() {
  local last=$(($1 - 1)) gpu tracking=linuxproc slurm=$LAB_DIR/etc/slurm
  [[ -z $FREEZER ]] || tracking=cgroup
  [[ -s $LAB_DIR/etc/munge.key ]] || (umask 077 && head -c 128 /dev/urandom >"$LAB_DIR/etc/munge.key")
  # SLURM wants device files for GPUs; these are /dev/null by other names.
  for ((gpu = 0; gpu < GPUS; gpu++)); do
    [[ -c $LAB_DIR/dev/nvidia$gpu ]] || mknod "$LAB_DIR/dev/nvidia$gpu" c 1 3
    printf 'NodeName=node[0-%s] Name=gpu File=%s\n' "$last" "$LAB_DIR/dev/nvidia$gpu"
  done >"$slurm/gres.conf"
  # slurmd insists on one; v1 is not touched before it is needed.
  printf 'CgroupPlugin=cgroup/v1\n' >"$slurm/cgroup.conf"
  cat >"$slurm/slurm.conf" <<CONFIG
ClusterName=lab
SlurmctldHost=login
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
StateSaveLocation=$LAB_DIR/state
SlurmdSpoolDir=/run/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile=$LAB_DIR/login/slurmctld.log
SlurmdLogFile=$LAB_DIR/%n/slurmd.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/$tracking
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
ReturnToService=2
SlurmctldTimeout=30
SlurmdTimeout=10
KillWait=$KILL_WAIT
MinJobAge=600
InactiveLimit=0
PropagateResourceLimits=NONE
$( ((GPUS == 0)) || printf 'GresTypes=gpu')
NodeName=node[0-$last] CPUs=$CPUS RealMemory=4096 $( ((GPUS == 0)) || printf 'Gres=gpu:%s' "$GPUS") State=UNKNOWN
PartitionName=gpu Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
CONFIG
}

# ---- a host's life -------------------------------------------------------------------------------------------------

# The first process of a host.
init() {
  local name=$1
  cd /
  hostname "$name"
  mount_own_files
  ip link set lo up
  wait_until 10 has_address "$(device_of "$name")" || die "$name got no address"
  munged --key-file="$LAB_DIR/etc/munge.key" --log-file=/run/munge/munged.log --seed-file=/run/munge/seed
  /usr/sbin/sshd -E "$LAB_DIR/$name/sshd.log"
  if [[ $name == login ]]; then slurmctld; else slurmd -N "$name"; fi
  : >"$LAB_DIR/$name/ready"
  trap 'exit 0' TERM
  # While it waits, bash takes in the orphans that a first process inherits.
  while true; do
    sleep 1000000 &
    wait "$!" || true
  done
}

mount_own_files() {
  local path
  mount -t tmpfs -o mode=755 tmpfs /run
  mount -t tmpfs tmpfs /dev/shm
  mount -t sysfs sysfs /sys 2>/dev/null || true # else what is there shows the machine's network devices
  if [[ -n $FREEZER ]]; then
    mount -t tmpfs cgroup /sys/fs/cgroup
    mkdir "$FREEZER"
    mount -t cgroup -o freezer cgroup "$FREEZER"
  fi
  for path in hosts nsswitch.conf slurm ssh; do mount --bind "$LAB_DIR/etc/$path" "/etc/$path"; done
  mkdir -p /run/sshd /run/munge /run/slurmd
}

device_of() { if [[ $1 == login ]]; then printf 'switch\n'; else printf 'eth0\n'; fi; }

has_address() { ip -4 -o address show dev "$1" 2>/dev/null | grep -q inet; }

boot() {
  local name=$1
  ! pid_of "$name" >/dev/null || return 0
  mkdir -p -- "$LAB_DIR/$name" /etc/slurm /etc/ssh
  rm -f -- "$LAB_DIR/$name/ready" "$LAB_DIR/$name/pid"
  start_init "$name"
  connect "$name"
}

start_init() {
  local name=$1 outer pid
  if [[ -n $FREEZER ]]; then # what starts from here lives in this host's group
    mkdir -p -- "$GROUP/$name"
    printf '%s\n' "$$" >"$GROUP/$name/cgroup.procs"
  fi
  setsid unshare --cgroup --net --uts --ipc --mount --pid --fork --kill-child --mount-proc --propagation private \
    env -u HOSTNAME LAB_DIR="$LAB_DIR" LAB_NET="$NET" /bin/bash "$SELF" init "$name" \
    </dev/null >>"$LAB_DIR/$name/init.log" 2>&1 9>&- &
  outer=$!
  until pid=$(cat "/proc/$outer/task/$outer/children" 2>/dev/null) && pid=${pid%% *} && is_host "$pid" "$name"; do
    kill -0 "$outer" 2>/dev/null || die "$name did not start" "Its output is in $LAB_DIR/$name/init.log"
    sleep 0.02
  done
  printf '%s\n' "$pid" >"$LAB_DIR/$name/pid"
  disown "$outer"
  [[ -z $FREEZER ]] || printf '%s\n' "$$" >"$FREEZER/cgroup.procs"
}

connect() {
  local name=$1 device
  device=$(device_of "$name")
  if [[ $name == login ]]; then
    in_network login ip link add "$device" type bridge forward_delay 0
    in_network login ip link set "$device" up
  else
    in_network login ip link del "to-$name" 2>/dev/null || true
    in_network login ip link add "to-$name" type veth peer name "$device" netns "$(pid_of "$name")"
    in_network login ip link set "to-$name" master switch up
    in_network "$name" ip link set "$device" up
  fi
  in_network "$name" ip address add "$(address_of "$name")/24" dev "$device"
}

halt() {
  local pid
  pid=$(pid_of "$1") || return 0
  kill -KILL "$pid" # the kernel kills the rest of the process table with it
  while [[ -d /proc/$pid ]]; do sleep 0.02; done
  rm -f -- "$LAB_DIR/$1/pid"
}

poweroff() {
  in_network login ip link set "to-$1" down
  halt "$1"
}

# ---- the whole -----------------------------------------------------------------------------------------------------

up() {
  local count=${1:-2} host
  check_machine
  mkdir -p -- "$LAB_DIR"
  exec 9>"$LAB_DIR/lock"
  flock 9
  if [[ -e $LAB_DIR/count && $(<"$LAB_DIR/count") != "$count" ]]; then
    die "$LAB_DIR holds a cluster of $(<"$LAB_DIR/count") nodes" "End it first: LAB_DIR='$LAB_DIR' bash '$SELF' down"
  fi
  pid_of login >/dev/null || configure "$count"
  for host in login $(nodes); do boot "$host"; done
  for host in login $(nodes); do
    wait_until 10 test -e "$LAB_DIR/$host/ready" || die "$host is not ready" "Its output is in $LAB_DIR/$host/init.log"
  done
  wait_until 20 all_idle "$count" || die "SLURM's nodes are not idle: $(in_host login sinfo -h -N 2>&1)"
}

check_machine() {
  ((EUID == 0)) || die "root is needed to make hosts of namespaces"
  [[ $LAB_DIR =~ ^/[-./[:alnum:]_]+$ ]] || die "LAB_DIR must be an absolute path of plain characters, found '$LAB_DIR'" \
    "SLURM's configuration cannot quote"
  has_packages || die "SLURM, munge, sshd or iproute2 is missing" "On Debian and Ubuntu: bash '$SELF' packages"
  unshare --net --uts --ipc --mount --pid --fork true 2>/dev/null || die "this machine does not allow namespaces"
}

all_idle() {
  [[ $(in_host login sinfo -h -N -t idle,alloc,mix -o %N 2>/dev/null | sort -u | wc -l) == "$1" ]]
}

down() {
  local directory
  [[ -d $LAB_DIR ]] || return 0
  for directory in "$LAB_DIR"/node*/ "$LAB_DIR"/login/; do
    [[ ! -d $directory ]] || halt "$(basename -- "$directory")"
  done
  [[ -z $FREEZER || ! -d $GROUP ]] || end_group
  rm -rf -- "$LAB_DIR"
}

# Whatever lost its pid file, as when `up` was killed half-way.
end_group() {
  local pids
  mapfile -t pids < <(find "$GROUP" -name cgroup.procs -exec cat {} +)
  ((${#pids[@]} == 0)) || kill -KILL "${pids[@]}" 2>/dev/null || true
  wait_until 5 remove_group || printf 'warning: %s is still in use\n' "$GROUP" >&2
}

remove_group() {
  find "$GROUP" -depth -type d -exec rmdir {} + 2>/dev/null || true
  [[ ! -d $GROUP ]]
}

guard() {
  tail --pid="$1" -f /dev/null
  down
}

shape() {
  limit "$1" eth0 "$2"
  limit login "to-$1" "$2"
}

# limit HOST DEVICE RATE|off: what leaves through this device.
limit() {
  in_network "$1" tc qdisc del dev "$2" root 2>/dev/null || true
  [[ $3 == off ]] || in_network "$1" tc qdisc add dev "$2" root tbf rate "$3" burst 1mb latency 20ms
}

# The quoted script runs on the host.
private() {
  # shellcheck disable=SC2016 # $1 is that script's own
  in_host "$1" bash -c 'set -e
    copy=$(mktemp -d) && mount -t tmpfs tmpfs "$copy"
    cp -a -- "$1/." "$copy/" && mount --move "$copy" "$1" && rmdir "$copy"' private "$2"
}

status() {
  local host
  [[ -e $LAB_DIR/count ]] || die "there is no cluster in $LAB_DIR"
  for host in login $(nodes); do
    printf '%s %s %s\n' "$host" "$(address_of "$host")" "$(pid_of "$host" || printf 'off')"
  done
  in_host login sinfo -N -l
}

main() {
  local command=${1:-help}
  case $command in
    packages | up | down | guard | init | boot | poweroff | shape | private | status) "$@" ;;
    exec) in_host "${@:2}" ;;
    link) in_network login ip link set "to-$2" "$3" ;;
    public) in_host "$2" umount -- "$3" ;;
    *)
      sed -n '2,/^set -/{/^set -/!s/^# \{0,1\}//p}' "$SELF"
      return 2
      ;;
  esac
}

main "$@"
