#!/usr/bin/env bash
# Tests with Lightning, Accelerate, transformers, Ray, torchft and dashboards, in an environment of their own: they see the
# project's packages by a .pth file, and what they need besides stays out of .venv.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=build/frameworks
python=$venv/bin/python
if ! cmp -s tests/frameworks/requirements.txt "$venv/installed"; then
  .venv/bin/python -m venv --without-pip "$venv"
  packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  .venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$packages/base.pth"
  "$python" -m pip install -q -r tests/frameworks/requirements.txt
  cp tests/frameworks/requirements.txt "$venv/installed"
fi
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 "$python" -m pytest -q tests/frameworks "$@"
