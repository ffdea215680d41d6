#!/usr/bin/env bash
# allreduce_bench on one link:  allreduce.sh RATE [SIZE [REPETITIONS [LARGEST]]] > rows.json
# RATE as netlab.sh's, or "loopback" for an unshaped run that needs no root.
set -euo pipefail
cd "$(dirname "$0")/.."
rate=$1 size=${2:-2} repetitions=${3:-15} largest=${4:-67108864}
bench=$PWD/build/bench/allreduce_bench
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
if [[ $rate == loopback ]]; then
  for ((r = 1; r < size; r++)); do "$bench" "$r" "$size" "$folder" "" "$repetitions" "$largest" & done
  "$bench" 0 "$size" "$folder" "" "$repetitions" "$largest"
  wait
else
  export bench folder size repetitions largest
  bench/netlab.sh "$rate" "$size" bash -c 'exec "$bench" "$RANK" "$size" "$folder" eth0 "$repetitions" "$largest"'
fi
