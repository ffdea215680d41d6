#!/usr/bin/env bash
# libFuzzer on every target of tests/fuzz (or those of FUZZ_TARGETS), FUZZ_SECONDS each (60), from the
# committed corpora. What a target finds beyond them stays in build-fuzz/found; an input that breaks a promise ends the run, and
# its file is named. `scripts/fuzz.sh --keep` takes what adds coverage into the committed corpora.
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
