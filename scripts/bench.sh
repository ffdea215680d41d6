#!/usr/bin/env bash
# bench.sh [--quick]: runs every benchmark, or with --quick those of the main table; writes JSON to build/bench/
set -euo pipefail
cd "$(dirname "$0")/.."
bench() { .venv/bin/python -m bench "$@" || echo "skipped: see above"; }

if [[ ${1:-} == --quick ]]; then
  bench allreduce --links 1gbit --sizes 1048576,16777216 --ways fp32,bf16,int8,int4,onebit:down=onebit,adaptive
  bench ddp --links 1gbit,loopback --seconds 4
  exit
fi
for simd in AVX3 AVX2; do
  echo "codecs on $simd"
  build/bench/codec_bench --simd=$simd --benchmark_format=json >"build/bench/codec-$simd.json" || true
done
for kind in allreduce latency ddp fsdp2 priority; do
  echo "$kind"
  bench "$kind"
done
.venv/bin/python -m bench.sched_bench
bench store --parts simulated --out build/bench/store-simulated.json
