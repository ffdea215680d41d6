#!/usr/bin/env bash
# frameworks.sh [OPTION...] TEST...: runs tests in the environment of frameworks_setup.sh. OPTION: an option of
# pytest. TEST: a file or folder of tests.
set -euo pipefail
cd "$(dirname "$0")/.."
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 build/frameworks/bin/python -m pytest -q -n "${PYTEST_JOBS:-3}" --dist worksteal --max-worker-restart 0 "$@"
