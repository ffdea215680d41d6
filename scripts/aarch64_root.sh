#!/usr/bin/env bash
# Installs a cross compiler and qemu, and unpacks libraries and a Python for 64-bit ARM into build-aarch64/root.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/install.sh cmake ninja-build pkg-config qemu-user-static g++-aarch64-linux-gnu
# Unpacked, not installed: a machine can have libgloo-dev and libisal-dev for only one architecture.
scripts/debian_root.sh arm64 build-aarch64/root libgloo-dev libucx-dev libssl-dev libisal-dev libabsl-dev \
  libhwy-dev libgtest-dev python3
# Copies the architecture's headers to where the cross compiler looks too.
cp -a build-aarch64/root/usr/include/aarch64-linux-gnu/. build-aarch64/root/usr/include/
# Debian's CMake file names Gloo's library by its absolute path.
sed -i 's|"/usr/lib/|"${_IMPORT_PREFIX}/lib/|' build-aarch64/root/usr/share/cmake/Gloo/GlooTargets-*.cmake
