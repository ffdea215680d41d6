#!/usr/bin/env bash
# in_root.sh ROOT COMMAND...: runs COMMAND with the folder ROOT as its root, only a loopback network and a
# clean environment. Requires root, or user namespaces.
set -euo pipefail
root=$1
shift
mkdir -p "$root"/{proc,dev,tmp,etc}
echo "127.0.0.1 localhost $(hostname)" >"$root/etc/hosts"
namespaces=(unshare --mount --net --pid --fork --kill-child)
((EUID == 0)) || namespaces+=(--map-root-user)
# This shell stays as the namespace's first process, and reaps the others.
"${namespaces[@]}" bash -c '
  ip link set lo up
  mount -t proc proc "$0/proc"
  mount --rbind /dev "$0/dev"
  env -i PATH=/venv/bin:/usr/bin HOME=/tmp LC_ALL=C.UTF-8 OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 \
    "$(type -P chroot)" "$0" "$@" || exit' "$root" "$@"
