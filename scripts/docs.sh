#!/usr/bin/env bash
# Builds the documentation as a site in build/docs/html. A broken internal link is an error.
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/install.sh doxygen
scripts/venv.sh docs/requirements.txt docs

out=build/docs
mkdir -p "$out"
# Writes the header and its comments as XML: docs/Doxyfile.
(
  cat docs/Doxyfile
  echo "OUTPUT_DIRECTORY = $out/doxygen"
) | doxygen - >"$out/doxygen.log" 2>&1 || {
  cat "$out/doxygen.log"
  exit 1
}
PYTHONPATH=integrations/python .venv/bin/python -m sphinx -q -W --keep-going -j auto -c docs -d "$out/doctrees" . "$out/html"
echo '<meta http-equiv="refresh" content="0; url=docs/README.html">' >"$out/html/index.html"
echo "$out/html/index.html"
