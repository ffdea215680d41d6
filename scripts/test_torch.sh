#!/usr/bin/env bash
# test_torch.sh VERSION...: runs the Python tests that are not slow, and torch's and torchft's own tests of
# process groups over the backend thinwire, with each of these versions of torch. Each version has its own
# environment, build/torch-VERSION; one whose wheel requires CUDA takes several GB.
set -euo pipefail
cd "$(dirname "$0")/.."

for version in "$@"; do
  venv=build/torch-$version
  [[ -x $venv/bin/python ]] || python3 -m venv "$venv"
  grep -E '^(numpy|pytest|pytest-xdist|hypothesis|tqdm|safetensors|cryptography)==' requirements.txt >"$venv/wanted.txt"
  grep '^torchft==' tests/frameworks/others.txt >>"$venv/wanted.txt"
  printf '%s\n' "torch==$version" expecttest==0.3.0 parameterized==0.9.0 >>"$venv/wanted.txt"
  cmp -s "$venv/wanted.txt" "$venv/installed.txt" || {
    echo "installing torch $version into $venv"
    "$venv/bin/python" -m pip install -q --disable-pip-version-check -r "$venv/wanted.txt"
    cp "$venv/wanted.txt" "$venv/installed.txt"
  }
  echo "torch $version"
  "$venv/bin/python" -m pytest -q -n "${PYTEST_JOBS:-3}" --dist loadgroup --max-worker-restart 0 -m "not slow" \
    tests/integrations/python
  nice "$venv/bin/python" tests/frameworks/torch_suites.py
done
