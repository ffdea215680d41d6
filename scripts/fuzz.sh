#!/usr/bin/env bash
# Runs libFuzzer on every target of tests/fuzz (or those in FUZZ_TARGETS), each for FUZZ_SECONDS (60),
# from the committed corpora. New inputs are kept in build-fuzz/found. An input that fails a check ends the
# run, which prints the input's file name. `--keep` adds inputs with new coverage to the committed corpora.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/install.sh clang libclang-rt-14-dev
mkdir -p build-fuzz
cmake --preset fuzz >build-fuzz/configure.log || {
  cat build-fuzz/configure.log
  exit 1
}
cmake --build --preset fuzz -j "${JOBS:-$(nproc)}"
fuzz=build-fuzz/tests/fuzz/fuzz
for target in ${FUZZ_TARGETS:-$("$fuzz")}; do
  corpus=tests/fuzz/corpus/$target found=build-fuzz/found/$target
  mkdir -p "$corpus" "$found"
  export THINWIRE_FUZZ_TARGET=$target
  echo "$target"
  "$fuzz" -max_total_time="${FUZZ_SECONDS:-60}" -max_len=4096 -timeout=10 -print_final_stats=1 \
    -artifact_prefix="build-fuzz/broken-$target-" "$found" "$corpus" 2>"build-fuzz/$target.log" || {
    grep -vE "NEW|REDUCE|INFO|pulse" "build-fuzz/$target.log" | tail -40
    exit 1
  }
  grep -E "number_of_executed_units|new_units_added" "build-fuzz/$target.log"
  if [[ ${1:-} == --keep ]]; then
    "$fuzz" -merge=1 -max_len=4096 "$corpus" "$found" 2>"build-fuzz/$target.merge.log"
  fi
done
