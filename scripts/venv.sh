#!/usr/bin/env bash
# venv.sh REQUIREMENTS NAME: installs Python packages into .venv, unless the stamp NAME shows that they are installed.
# pip compiles all byte code, because the tests' processes write none.
set -euo pipefail
cd "$(dirname "$0")/.."

stamp=.venv/$2.sha256
sha256sum --check --status "$stamp" 2>/dev/null && exit 0
echo "installing $1 into .venv"
[[ -x .venv/bin/python ]] || python3 -m venv .venv
.venv/bin/python -m pip install -q --disable-pip-version-check -r "$1"
sha256sum "$1" >"$stamp"
