#!/usr/bin/env bash
# The hierarchical allreduce against the flat one in the same run, between network namespaces that
# stand for nodes:  hierarchy.sh RATE NODES LOCAL_SIZE [REPETITIONS [ROWS [LARGEST [SMALLEST]]]] > rows.json
# RATE as netlab.sh's, of each node's link. "+auto" behind a row: UCX inside nodes, where it is here.
set -euo pipefail
cd "$(dirname "$0")/.."
rate=$1 nodes=$2 repetitions=${4:-15}
rows=${5:-fp32+flat,fp32+hierarchical,int4+flat,int4+hierarchical,int4+flat+auto,int4+hierarchical+auto}
bench=$PWD/build/bench/allreduce_bench
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export LOCAL_SIZE=$3 bench folder repetitions rows largest=${6:-67108864} smallest=${7:-1048576}
bench/netlab.sh "$rate" "$nodes" bash -c \
  'exec "$bench" "$RANK" "$WORLD_SIZE" "$folder" eth0 "$repetitions" "$largest" "$rows" "$smallest"'
