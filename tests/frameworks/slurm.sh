#!/usr/bin/env bash
# slurm.sh FOLDER COMMAND...: COMMAND beside a Slurm of one node, with its daemons in namespaces of their
# own, where they have the network and end with the command. Its files are in FOLDER. Needs root.
set -euo pipefail
folder=$1
shift
node=$(hostname)
mkdir -p "$folder"/{state,spool}
cat >"$folder/slurm.conf" <<CONF
ClusterName=test
SlurmctldHost=$node
AuthType=auth/none
CredType=cred/none
SlurmUser=root
SlurmdUser=root
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
MailProg=/bin/true
# It may say that it has more processors than the machine.
SlurmdParameters=config_overrides
NodeName=$node NodeAddr=127.0.0.1 CPUs=4
PartitionName=all Nodes=$node Default=YES
CONF
export SLURM_CONF=$folder/slurm.conf
# Slurm asks for an address beside loopback's before it listens.
exec unshare --net --pid --fork --kill-child --mount-proc bash -c '
  ip link set lo up
  ip link add eth0 type veth peer name eth1
  ip addr add 10.88.1.1/24 dev eth0
  ip link set eth0 up
  ip link set eth1 up
  slurmctld -D >/dev/null 2>&1 &
  slurmd -D >/dev/null 2>&1 &
  until [[ $(sinfo -h -o %T 2>/dev/null) == idle ]]; do sleep 0.1; done
  "$@" || exit' bash "$@"
