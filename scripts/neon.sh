#!/usr/bin/env bash
# The codecs on NEON: compress/ and its tests, cross-compiled for 64-bit ARM and run by qemu. Golden
# files, worked examples, and every codec at every length from 0 to 4097 against the scalar
# reference, all to the byte.
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/aarch64_root.sh
mkdir -p build-neon
cmake --preset neon >build-neon/configure.log || {
  cat build-neon/configure.log
  exit 1
}
cmake --build --preset neon -j "${JOBS:-$(nproc)}"
# topk_test repeats random searches that take qemu minutes; codec_test has topk at every length.
ctest --test-dir build-neon --output-on-failure -j "${JOBS:-$(nproc)}" -E "^topk_test"
