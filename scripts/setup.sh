#!/usr/bin/env bash
# setup.sh library|all: installs, by apt, the Debian packages that are missing. library: those for building the
# library and running the demo; all: also those for tests, benchmarks and checks.
set -euo pipefail
cd "$(dirname "$0")/.."

packages=(g++ cmake ninja-build pkg-config libgloo-dev libssl-dev libabsl-dev libhwy-dev libisal-dev
  iproute2 python3-venv dataset-fashion-mnist)
[[ ${1:-all} == library ]] ||
  packages+=(clang clang-format libucx-dev libzmq5 libgtest-dev libbenchmark-dev patchelf jargon-text
    spin iptables wireguard-go wireguard-tools)
scripts/install.sh "${packages[@]}"

mkdir -p build
[[ ${1:-all} == library ]] || command -v nvcc >/dev/null ||
  echo "nvcc is not here: the CUDA part is left out."
