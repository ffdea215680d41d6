#!/usr/bin/env bash
# Network namespaces joined by a bridge, each link shaped to RATE by a token bucket.
#
#   netlab.sh RATE N COMMAND...     runs COMMAND once in each of N namespaces and waits for all
#
# With LOCAL_SIZE it runs so many times in each namespace, which is a node then: the link is shared.
#
# COMMAND sees RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT and GLOO_SOCKET_IFNAME. RATE is
# tc's ("1gbit"), or "none". Without root it says so and exits with 77. Traffic stays in the
# namespaces, and everything is taken down at the end, whatever ends it.
set -euo pipefail

rate=$1 size=$2
shift 2
((EUID == 0)) || { echo "skipped: network namespaces need root" >&2; exit 77; }
command -v ip >/dev/null && command -v tc >/dev/null ||
  { echo "skipped: ip and tc (package iproute2) are not here" >&2; exit 77; }

local_size=${LOCAL_SIZE:-1}
lab=tw$((BASHPID % 100000))

down() {
  for ((r = 0; r < size; r++)); do ip netns del "$lab-$r" 2>/dev/null || true; done
  ip link del "$lab" 2>/dev/null || true
}
trap down EXIT
trap 'exit 130' INT TERM

shape() { # namespace-or-empty device
  [[ $rate == none ]] && return
  local tc=(tc)
  [[ -z $1 ]] || tc=(ip netns exec "$1" tc)
  "${tc[@]}" qdisc add dev "$2" root tbf rate "$rate" burst 128kb latency 20ms
}

ip link add "$lab" type bridge
ip link set "$lab" up
for ((r = 0; r < size; r++)); do
  ip netns add "$lab-$r"
  ip link add "$lab.$r" type veth peer name eth0 netns "$lab-$r"
  ip link set "$lab.$r" master "$lab" up
  ip -n "$lab-$r" addr add "10.88.0.$((r + 1))/24" dev eth0
  ip -n "$lab-$r" link set eth0 up
  ip -n "$lab-$r" link set lo up
  shape "$lab-$r" eth0
  shape "" "$lab.$r"
done

export WORLD_SIZE=$((size * local_size)) LOCAL_SIZE=$local_size MASTER_ADDR=10.88.0.1 MASTER_PORT=${MASTER_PORT:-29500} GLOO_SOCKET_IFNAME=eth0
pids=() failed=0
for ((r = 0; r < size; r++)); do
  # The ranks of a node start from one process: ip gives each that it starts a namespace of mounts.
  NODE=$r ip netns exec "$lab-$r" bash -c '
    pids=() failed=0
    for ((l = 0; l < LOCAL_SIZE; l++)); do
      rank=$((NODE * LOCAL_SIZE + l))
      RANK=$rank LOCAL_RANK=$((LOCAL_SIZE > 1 ? l : rank)) "$@" &
      pids+=($!)
    done
    trap "kill \${pids[*]} 2>/dev/null" TERM
    for pid in "${pids[@]}"; do wait "$pid" || failed=$?; done
    exit "$failed"' node "$@" &
  pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid" || failed=$?; done
exit "$failed"
