#!/usr/bin/env bash
# Installs what building needs: Debian packages, by apt. What is there already is not asked for again.
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/install.sh g++ clang cmake ninja-build pkg-config libgloo-dev libucx-dev libssl-dev libabsl-dev \
  libhwy-dev libisal-dev libgtest-dev libbenchmark-dev iproute2 python3-venv patchelf dataset-fashion-mnist jargon-text \
  clang-format spin iptables wireguard-go wireguard-tools

mkdir -p build
command -v nvcc >/dev/null ||
  echo "nvcc is not here: the CUDA part is left out."
