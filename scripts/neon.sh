#!/usr/bin/env bash
# Tests the codecs on NEON: cross-compiles compress/ and its tests for 64-bit ARM, and runs them by qemu.
# They compare every byte of golden files and worked examples, and every codec at every length from 0 to
# 4097 with the scalar reference.
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/aarch64_root.sh
mkdir -p build-neon
cmake --preset neon >build-neon/configure.log || {
  cat build-neon/configure.log
  exit 1
}
cmake --build --preset neon -j "${JOBS:-$(nproc)}"
# topk_test repeats random searches that take qemu minutes; codec_test covers topk at every length.
ctest --test-dir build-neon --output-on-failure -j "${JOBS:-$(nproc)}" -E "^topk_test"
