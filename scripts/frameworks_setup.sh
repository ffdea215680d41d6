#!/usr/bin/env bash
# frameworks_setup.sh NAME...: makes an environment, build/frameworks or build/$VENV, with the packages that
# tests/frameworks/NAME.txt pin. A .pth file adds the packages of .venv, which itself is not changed.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=build/${VENV:-frameworks}
python=$venv/bin/python
missing=()
for name in "$@"; do
  cmp -s "tests/frameworks/$name.txt" "$venv/$name.installed" || missing+=("$name")
done
((${#missing[@]})) || exit 0

echo "installing ${missing[*]} into $venv"
.venv/bin/python -m venv --without-pip "$venv"
packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$packages/base.pth"
for name in "${missing[@]}"; do
  "$python" -m pip install -q --disable-pip-version-check -r "tests/frameworks/$name.txt"
  cp "tests/frameworks/$name.txt" "$venv/$name.installed"
done
