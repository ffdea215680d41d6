#!/usr/bin/env bash
# The compiler, qemu, and in build-aarch64/root the libraries for 64-bit ARM, with a Python.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/install.sh cmake ninja-build pkg-config qemu-user-static g++-aarch64-linux-gnu
# Not as arm64 packages of this machine: libgloo-dev and libisal-dev exist once on a machine.
scripts/debian_root.sh arm64 build-aarch64/root libgloo-dev libucx-dev libssl-dev libisal-dev libabsl-dev \
  libhwy-dev libgtest-dev python3
# Headers of one architecture, where the cross compiler looks too.
cp -a build-aarch64/root/usr/include/aarch64-linux-gnu/. build-aarch64/root/usr/include/
# Debian's file for CMake names Gloo's library by its absolute path.
sed -i 's|"/usr/lib/|"${_IMPORT_PREFIX}/lib/|' build-aarch64/root/usr/share/cmake/Gloo/GlooTargets-*.cmake
