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
#   cluster.sh cable HOST MS LOST DAMAGED  a cable that delays, loses and damages per cent of what goes either way;  cable HOST mend
#   cluster.sh poweroff HOST        the cable first, then everything on it is killed: the others see silence, no FIN
#   cluster.sh boot HOST            start it again
#   cluster.sh private HOST DIR     a copy of that directory of its own, in memory;  public HOST DIR undoes it
#
# LAB_DIR holds the state: another directory is another cluster. LAB_NET=fd00:77:: makes one without IPv4.
set -euo pipefail

export LAB_DIR=${LAB_DIR:-/tmp/t5-lab}
SELF=$(readlink -f -- "${BASH_SOURCE[0]}")
readonly SELF NET=${LAB_NET:-10.77.0.}
readonly PACKAGES=(slurmctld slurmd slurm-client munge openssh-server openssh-client iproute2)

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

address_of() { if [[ $1 == login ]]; then printf '%s1' "$NET"; else printf '%s%s' "$NET" $((10 + ${1#node})); fi; }

# The pid, on the machine, of a host's first process. Its command line is compared, for pids are given out again.
pid_of() {
  local pid
  pid=$(cat -- "$LAB_DIR/$1/pid" 2>/dev/null) && is_host "$pid" "$1" && printf '%s\n' "$pid"
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
  local last=$(($1 - 1)) ssh=$LAB_DIR/etc/ssh index
  mkdir -p -- "$LAB_DIR"/{etc/slurm,etc/ssh,state}
  chmod 755 -- "$LAB_DIR"
  {
    printf '127.0.0.1 localhost\n%s1 login\n' "$NET"
    for ((index = 0; index <= last; index++)); do printf '%s node%s\n' "$NET$((10 + index))" "$index"; done
  } >"$LAB_DIR/etc/hosts"
  # No DNS: an unknown name is unknown at once.
  sed 's/^hosts:.*/hosts: files/' /etc/nsswitch.conf >"$LAB_DIR/etc/nsswitch.conf"
  # One key is everyone's, the hosts' too.
  ssh-keygen -q -t ed25519 -N '' -C lab -f "$ssh/key"
  cp -- "$ssh/key.pub" "$ssh/authorized_keys"
  printf '* %s\n' "$(<"$ssh/key.pub")" >"$ssh/known_hosts"
  (umask 077 && head -c 128 /dev/urandom >"$LAB_DIR/etc/munge.key")
  cat >"$ssh/ssh_config" <<CONFIG
Host *
  IdentityFile $ssh/key
  UserKnownHostsFile $ssh/known_hosts
  StrictHostKeyChecking yes
  BatchMode yes
  ConnectTimeout 5
CONFIG
  cat >"$ssh/sshd_config" <<CONFIG
HostKey $ssh/key
AuthorizedKeysFile $ssh/authorized_keys
StrictModes no
PasswordAuthentication no
UsePAM no
UseDNS no
MaxStartups 100
Subsystem sftp internal-sftp
CONFIG
  # SLURM wants a device file for a GPU.
  printf 'NodeName=node[0-%s] Name=gpu File=/dev/null\n' "$last" >"$LAB_DIR/etc/slurm/gres.conf"
  # slurmd insists on one; v1 is not touched before it is needed.
  printf 'CgroupPlugin=cgroup/v1\n' >"$LAB_DIR/etc/slurm/cgroup.conf"
  cat >"$LAB_DIR/etc/slurm/slurm.conf" <<CONFIG
ClusterName=lab
SlurmctldHost=login
$([[ $NET != *:* ]] || printf 'CommunicationParameters=EnableIPv6')
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=cred_expire=5
CredType=cred/munge
StateSaveLocation=$LAB_DIR/state
SlurmdSpoolDir=/run/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile=$LAB_DIR/login/slurmctld.log
SlurmdLogFile=$LAB_DIR/%n/slurmd.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
ReturnToService=2
SlurmdTimeout=10
KillWait=5
PropagateResourceLimits=NONE
GresTypes=gpu
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=node[0-$last] CPUs=4 RealMemory=4096 Gres=gpu:1 State=UNKNOWN
PartitionName=gpu Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO PriorityTier=1
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP OverSubscribe=NO PriorityTier=2
CONFIG
  printf '%s\n' "$1" >"$LAB_DIR/count"
}

# ---- a host's life -------------------------------------------------------------------------------------------------

# The first process of a host.
init() {
  local name=$1 path
  cd /
  hostname "$name"
  mount -t tmpfs -o mode=755 tmpfs /run
  mount -t tmpfs tmpfs /dev/shm
  mount -t sysfs sysfs /sys 2>/dev/null || true # else what is there shows the machine's network devices
  for path in hosts nsswitch.conf slurm ssh; do mount --bind "$LAB_DIR/etc/$path" "/etc/$path"; done
  mkdir -p /run/sshd /run/munge /run/slurmd
  ip link set lo up
  wait_until 10 has_address || die "$name got no address"
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

has_address() { ip -o address show | grep -qF "$NET"; }

boot() {
  local name=$1 outer pid device=eth0
  ! pid_of "$name" >/dev/null || return 0
  mkdir -p -- "$LAB_DIR/$name" /etc/slurm /etc/ssh
  rm -f -- "$LAB_DIR/$name/ready" "$LAB_DIR/$name/pid"
  setsid unshare --cgroup --net --uts --ipc --mount --pid --fork --kill-child --mount-proc --propagation private \
    env -u HOSTNAME /bin/bash "$SELF" init "$name" </dev/null >>"$LAB_DIR/$name/init.log" 2>&1 9>&- &
  outer=$!
  until pid=$(cat "/proc/$outer/task/$outer/children" 2>/dev/null) && pid=${pid%% *} && is_host "$pid" "$name"; do
    kill -0 "$outer" 2>/dev/null || die "$name did not start" "Its output is in $LAB_DIR/$name/init.log"
    sleep 0.02
  done
  printf '%s\n' "$pid" >"$LAB_DIR/$name/pid"
  disown "$outer"
  if [[ $name == login ]]; then
    device=switch
    in_network login ip link add "$device" type bridge forward_delay 0
  else
    in_network login ip link del "to-$name" 2>/dev/null || true
    in_network login ip link add "to-$name" type veth peer name "$device" netns "$pid"
    in_network login ip link set "to-$name" master switch up
  fi
  in_network "$name" ip link set "$device" up
  if [[ $NET == *:* ]]; then
    in_network "$name" ip address add "$(address_of "$name")/64" dev "$device" nodad
  else
    in_network "$name" ip address add "$(address_of "$name")/24" dev "$device"
  fi
}

# halt PID: the kernel kills the rest of its process table with it.
halt() {
  kill -KILL "$1" 2>/dev/null || true
  while [[ -d /proc/$1 ]]; do sleep 0.02; done
}

poweroff() {
  in_network login ip link set "to-$1" down
  halt "$(pid_of "$1")"
}

# ---- the whole -----------------------------------------------------------------------------------------------------

up() {
  local count=${1:-2} host
  ((EUID == 0)) || die "root is needed to make hosts of namespaces"
  [[ $LAB_DIR =~ ^/[-./[:alnum:]_]+$ ]] || die "LAB_DIR must be an absolute path of plain characters, found '$LAB_DIR'" \
    "SLURM's configuration cannot quote"
  has_packages || die "SLURM, munge, sshd or iproute2 is missing" "On Debian and Ubuntu: bash '$SELF' packages"
  mkdir -p -- "$LAB_DIR"
  exec 9>"$LAB_DIR/lock"
  flock 9
  [[ ! -e $LAB_DIR/count ]] || die "there is a cluster in $LAB_DIR already" "End it first: LAB_DIR='$LAB_DIR' bash '$SELF' down"
  configure "$count"
  for host in login $(nodes); do boot "$host"; done
  for host in login $(nodes); do
    wait_until 10 test -e "$LAB_DIR/$host/ready" || die "$host is not ready" "Its output is in $LAB_DIR/$host/init.log"
  done
  wait_until 20 all_idle "$count" || die "SLURM's nodes are not idle: $(in_host login sinfo -h -N 2>&1)"
}

all_idle() { [[ $(in_host login sinfo -h -N -t idle -o %N 2>/dev/null | sort -u | wc -l) == "$1" ]]; }

# By the environment of the hosts' first processes, for an `up` that was killed half-way has written no pid.
down() {
  local environment pid words
  for environment in $(grep -lsazFx -- "LAB_DIR=$LAB_DIR" /proc/[0-9]*/environ || true); do
    pid=${environment//[!0-9]/}
    mapfile -d '' -t words < <(cat -- "/proc/$pid/cmdline" 2>/dev/null)
    [[ ${words[*]:1:2} != "$SELF init" ]] || halt "$pid"
  done
  cat -- "$LAB_DIR"/node*/cable 2>/dev/null | xargs -r kill 2>/dev/null || true
  rm -rf -- "$LAB_DIR"
}

guard() {
  tail --pid="$1" -f /dev/null
  down
}

# limit HOST DEVICE RATE|off: what leaves through this device. After a pause a burst passes at once, and it has to hold a
# packet; so packets are small, or a pipeline's messages would cost nothing.
limit() {
  in_network "$1" tc qdisc del dev "$2" root 2>/dev/null || true
  in_network "$1" ip link set dev "$2" gso_max_size 65536
  if [[ $3 != off ]]; then
    in_network "$1" ip link set dev "$2" gso_max_size 5792
    in_network "$1" tc qdisc add dev "$2" root tbf rate "$3" burst 6kb latency 20ms
  fi
}

# A program carries the frames between the host's cable, on a bridge with a device of its own, and the switch.
cable() {
  local pid=$LAB_DIR/$1/cable
  if [[ $2 == mend ]]; then
    [[ ! -e $pid ]] || kill "$(<"$pid")" 2>/dev/null || true
    rm -f -- "$pid"
    in_network login ip link set "to-$1" master switch
    in_network login ip link del "own-$1" 2>/dev/null || true
    return
  fi
  nsenter -t "$(pid_of login)" -n -- python3 "${SELF%/*}/bad_cable.py" "$@" </dev/null >/dev/null 2>>"$LAB_DIR/$1/cable.log" 9>&- &
  printf '%s\n' "$!" >"$pid"
  disown
  wait_until 5 in_network login ip link set "out-$1" master switch up 2>/dev/null || die "no cable: $(<"$LAB_DIR/$1/cable.log")"
  in_network login ip link add "own-$1" type bridge forward_delay 0
  in_network login ip link set "own-$1" up
  in_network login ip link set "in-$1" master "own-$1" up
  in_network login ip link set "to-$1" master "own-$1"
}

# The quoted script runs on the host.
private() {
  # shellcheck disable=SC2016 # $1 is that script's own
  in_host "$1" bash -c 'set -e
    copy=$(mktemp -d) && mount -t tmpfs tmpfs "$copy"
    cp -a -- "$1/." "$copy/" && mount --move "$copy" "$1" && rmdir "$copy"' private "$2"
}

main() {
  case ${1:-help} in
    packages | up | down | guard | init | boot | cable | poweroff | private) "$@" ;;
    exec) in_host "${@:2}" ;;
    link) in_network login ip link set "to-$2" "$3" ;;
    shape) limit "$2" eth0 "$3" && limit login "to-$2" "$3" ;;
    public) in_host "$2" umount -- "$3" 2>/dev/null || true ;; # a host that was booted has it no more
    *)
      sed -n '2,/^set -/{/^set -/!s/^# \{0,1\}//p}' "$SELF"
      return 2
      ;;
  esac
}

main "$@"
