#!/usr/bin/env bash
# allreduce_bench on one link:  allreduce.sh RATE [SIZE [REPETITIONS [LARGEST [ROWS]]]] > rows.json
# RATE as netlab.sh's, or "loopback" for an unshaped run that needs no root.
set -euo pipefail
cd "$(dirname "$0")/.."
rate=$1 size=${2:-2}
export size bench=$PWD/build/bench/allreduce_bench folder=$(mktemp -d)
export rest="${3:-15} ${4:-67108864} ${5-}" # no spaces within
trap 'rm -rf "$folder"' EXIT
if [[ $rate == loopback ]]; then
  for ((r = 1; r < size; r++)); do "$bench" "$r" "$size" "$folder" "" $rest & done
  "$bench" 0 "$size" "$folder" "" $rest
  wait
else
  bench/netlab.sh "$rate" "$size" bash -c 'exec "$bench" "$RANK" "$size" "$folder" eth0 $rest'
fi
