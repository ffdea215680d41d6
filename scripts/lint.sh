#!/usr/bin/env bash
# Checks format and lint; changes no file.
set -euo pipefail
cd "$(dirname "$0")/.."
git ls-files '*.cc' '*.h' '*.c' '*.cu' '*.cuh' | xargs clang-format --dry-run -Werror
.venv/bin/ruff format --check integrations bench tests docs/conf.py
.venv/bin/ruff check integrations bench tests docs/conf.py
if command -v pyright >/dev/null; then
  pyright --pythonpath .venv/bin/python
else
  echo "pyright is not here: skipped"
fi
if command -v clang-tidy >/dev/null; then
  # simd_kernels.cc is compiled once for each instruction set, which clang-tidy does not support.
  git ls-files 'compress/*.cc' 'transport/*.cc' 'schedule/*.cc' 'integrations/c/*.cc' |
    grep -v simd_kernels | xargs clang-tidy -p build --quiet
else
  echo "clang-tidy is not here: skipped"
fi
