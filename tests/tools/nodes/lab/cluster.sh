#!/usr/bin/env bash
# The parts of the test cluster (../cluster_lab.py) that are a shell's:
#
#   cluster.sh packages         install with apt what is missing
#   cluster.sh host NAME NET    be the first process of a host, until standard input ends; LAB_DIR holds the cluster
set -euo pipefail

packages() {
  local policy=/usr/sbin/policy-rc.d mine=''
  # 101: no daemon may start on the machine itself.
  if [[ ! -e $policy ]]; then
    mine=1
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod +x "$policy"
  fi
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
    slurmctld slurmd slurm-client munge openssh-server openssh-client iproute2
  [[ -z $mine ]] || rm -f -- "$policy"
}

host() {
  local name=$1 path
  cd /
  hostname "$name"
  mount -t tmpfs -o mode=755 tmpfs /run
  mount -t tmpfs tmpfs /dev/shm
  mount -t sysfs sysfs /sys 2>/dev/null || true # else what is there shows the machine's network devices
  for path in hosts nsswitch.conf slurm ssh; do mount --bind "$LAB_DIR/etc/$path" "/etc/$path"; done
  mkdir -p /run/sshd /run/munge /run/slurmd
  ip link set lo up
  until ip -o address show | grep -qF "$2"; do sleep 0.05; done
  munged --key-file="$LAB_DIR/etc/munge.key" --log-file=/run/munge/munged.log --seed-file=/run/munge/seed
  /usr/sbin/sshd -E "$LAB_DIR/$name/sshd.log"
  if [[ $name == login ]]; then slurmctld; else slurmd -N "$name"; fi
  : >"$LAB_DIR/$name/ready"
  # While it waits, bash takes in the orphans that a first process inherits.
  cat >/dev/null
}

"$@"
