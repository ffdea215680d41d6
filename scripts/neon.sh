#!/usr/bin/env bash
# The codecs on NEON: compress/ and its tests, cross-compiled for 64-bit ARM and run by qemu. Golden
# files, worked examples, and every codec at every length from 0 to 4097 against the scalar
# reference, all to the byte. Debian's arm64 packages are added to those of this machine.
set -euo pipefail
cd "$(dirname "$0")/.."

if ! dpkg --print-foreign-architectures | grep -qx arm64; then
  as_root=()
  if ((EUID != 0)); then as_root=(sudo); fi
  "${as_root[@]}" dpkg --add-architecture arm64
fi
scripts/install.sh cmake ninja-build pkg-config qemu-user-static g++-aarch64-linux-gnu \
  libabsl-dev:arm64 libhwy-dev:arm64 libgtest-dev:arm64

mkdir -p build-neon
cmake --preset neon >build-neon/configure.log || {
  cat build-neon/configure.log
  exit 1
}
cmake --build --preset neon -j "${JOBS:-$(nproc)}"
# topk_test repeats random searches that take qemu minutes; codec_test has topk at every length.
ctest --test-dir build-neon --output-on-failure -j "${JOBS:-$(nproc)}" -E "^topk_test"
