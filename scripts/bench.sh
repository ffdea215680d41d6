#!/usr/bin/env bash
# Every benchmark of this version, then the tables with must and reached. Results: build/bench/*.json
set -euo pipefail
cd "$(dirname "$0")/.."
out=build/bench/results
mkdir -p "$out"

for simd in AVX3 AVX2; do
  echo "codecs on $simd"
  build/bench/codec_bench --simd=$simd --benchmark_format=json >"$out/codec-$simd.json" || true
done
for link in loopback 1gbit 5gbit 10gbit; do
  echo "allreduce over $link"
  bench/allreduce.sh $link >"$out/allreduce-$link.json" || echo "[]" >"$out/allreduce-$link.json"
done
echo "DDP steps"
.venv/bin/python bench/ddp_step.py --out "$out/ddp_step.json" || echo "skipped: see above"
echo "orders of chunks"
.venv/bin/python bench/priority.py --out "$out/priority.json" || echo "skipped: see above"
.venv/bin/python bench/timeline.py --out "$out" || echo "skipped: see above"
build/bench/sched_bench --out "$out/sched.json"
.venv/bin/python bench/report.py "$out"
