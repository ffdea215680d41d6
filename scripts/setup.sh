#!/usr/bin/env bash
# Installs what builds, tests and the demo need: Debian packages by apt, Python packages into .venv.
# What is there already is not asked for again.
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/install.sh g++ clang cmake ninja-build pkg-config libgloo-dev libucx-dev libssl-dev libabsl-dev \
  libhwy-dev libisal-dev libgtest-dev libbenchmark-dev iproute2 python3-venv patchelf dataset-fashion-mnist jargon-text \
  clang-format spin iptables wireguard-go wireguard-tools

mkdir -p build
stamp=.venv/requirements.sha256
if ! sha256sum --check --status "$stamp" 2>/dev/null; then
  echo "setting up .venv"
  [[ -x .venv/bin/python ]] || python3 -m venv .venv
  .venv/bin/python -m pip install -q --disable-pip-version-check -r requirements.txt
  sha256sum requirements.txt >"$stamp"
fi

command -v nvcc >/dev/null ||
  echo "nvcc is not here: the CUDA part is left out."
