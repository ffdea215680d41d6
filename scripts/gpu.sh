#!/usr/bin/env bash
# Everything that needs a GPU: bytes, compute-sanitizer, DDP on GPU tensors, bandwidth. Goes on after
# a failure, and says at the end what failed. Logs and JSON: the folder given, or build/gpu.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:-build/gpu}
python=${PYTHON:-.venv/bin/python}
mkdir -p "$out"
failed=()

step() { # NAME COMMAND...
  local name=$1
  shift
  echo "== $name"
  "$@" >"$out/$name.log" 2>&1 || failed+=("$name")
  tail -n 4 "$out/$name.log"
}

nvidia-smi --query-gpu=name,driver_version --format=csv >"$out/gpu.csv" || {
  echo "no GPU here"
  exit 1
}
step bytes build/tests/kernels/kernel_test --gtest_filter='*cuda'
step graph build/tests/kernels/cuda_graph_test
step engine build/tests/schedule/device_test --gtest_filter='*cuda'
few='*ManyShards*cuda:*WithoutWire*cuda:*Accumulate*cuda:*EveryDType*cuda'
for tool in memcheck racecheck; do
  step $tool compute-sanitizer --tool $tool --error-exitcode 9 \
    build/tests/kernels/kernel_test --gtest_filter="$few"
done
step torch "$python" -m pytest -q -rs tests/integrations/python/test_cuda.py \
  tests/integrations/python/test_training_modes.py
step bandwidth bash -c "build/bench/kernel_bench >'$out/kernels.json'"

if ((${#failed[@]})); then
  echo "failed: ${failed[*]}"
  exit 1
fi
echo "all passed"
