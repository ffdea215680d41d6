#!/usr/bin/env bash
# build/frameworks: an environment with the frameworks that tests/frameworks/requirements.txt pins. It
# sees the project's packages by a .pth file, and what it needs besides stays out of .venv.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=build/frameworks
python=$venv/bin/python
cmp -s tests/frameworks/requirements.txt "$venv/installed" && exit 0
.venv/bin/python -m venv --without-pip "$venv"
packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$packages/base.pth"
"$python" -m pip install -q -r tests/frameworks/requirements.txt
cp tests/frameworks/requirements.txt "$venv/installed"
