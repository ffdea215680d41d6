#!/usr/bin/env bash
# wheel.sh ARCHITECTURE [OPTION OF PIP WHEEL]...: builds a wheel for x86_64 or aarch64 in dist/. auditwheel
# adds the libraries that ours needs, and tags the wheel with the oldest C library on which all of them run;
# then their licences are added. An architecture other than this machine's is cross-compiled.
set -euo pipefail
cd "$(dirname "$0")/.."
architecture=$1
shift
build=build-wheel-$architecture
options=(--config-settings "build-dir=$build" "$@") # Debian 12's pip has no -C
places=()
if [[ $architecture != "$(uname -m)" ]]; then
  scripts/aarch64_root.sh
  root=$PWD/build-aarch64/root/usr/lib
  export _PYTHON_HOST_PLATFORM=linux-$architecture
  options+=(--config-settings "cmake.define.CMAKE_TOOLCHAIN_FILE=$PWD/scripts/aarch64.cmake"
    --config-settings cmake.define.THINWIRE_CUDA=OFF)
  places=(--ldpaths "$root/$architecture-linux-gnu:$root")
fi
plain=$(mktemp -d)
trap 'rm -rf "$plain"' EXIT
export PATH=$PWD/.venv/bin:$PATH
python -m pip wheel -q --no-deps --no-build-isolation --disable-pip-version-check -w "$plain" "${options[@]}" .
# The wheel has machine code for all GPUs, the build for tests only for one architecture.
cuda=$build/integrations/c/libthinwire_cuda.so
[[ ! -f $cuda ]] || python scripts/sass_table.py --check kernels/sass.md "$cuda"
rm -f dist/*_"$architecture".whl
python -m auditwheel repair "${places[@]}" -w "$plain/tagged" "$plain"/*.whl >"$build/auditwheel.log" 2>&1 || {
  cat "$build/auditwheel.log" >&2
  exit 1
}
python scripts/wheel_licences.py "$plain"/tagged/*.whl
mkdir -p dist && cp "$plain"/tagged/*.whl dist/
ls dist/*_"$architecture".whl
