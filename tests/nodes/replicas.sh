#!/usr/bin/env bash
# Replicas of the hierarchical allreduce are bit-identical where network namespaces are the nodes, which
# the ranks find out by themselves: 2 x 2, 3 x 2 and 2 x 4 ranks over Gloo.  replicas.sh [STEPS]
set -euo pipefail
cd "$(dirname "$0")/../.."
steps=${1:-200}
for shape in "2 2" "3 2" "2 4"; do
  read -r nodes local_size <<< "$shape"
  folder=$(mktemp -d)
  failed=0
  .venv/bin/python -m bench.lab --ranks_per_host "$local_size" none "$nodes" \
    "$PWD/.venv/bin/python" tests/nodes/rank.py "$folder" "$steps" || failed=$?
  digests=$(cat "$folder"/digest.* 2>/dev/null | sort -u | wc -l)
  ranks=$(ls "$folder" | grep -c '^digest' || true)
  rm -rf "$folder"
  ((failed != 77)) || exit 0 # it has said why it can't run here
  if ((failed || digests != 1 || ranks != nodes * local_size)); then
    echo "$nodes nodes of $local_size: $ranks ranks ended, with $digests different results" >&2
    exit 1
  fi
  echo "$nodes nodes of $local_size ranks: $ranks ranks have the same bits after $steps steps"
done
