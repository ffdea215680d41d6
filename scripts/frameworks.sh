#!/usr/bin/env bash
# Tests with Lightning, Accelerate, transformers, Ray, torchft, dashboards, Slurm, MPI and ssh themselves.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/frameworks_setup.sh
scripts/install.sh slurmctld slurmd slurm-client openmpi-bin mpich openssh-client dropbear-bin
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 build/frameworks/bin/python -m pytest -q -n 3 --dist worksteal tests/frameworks "$@"
