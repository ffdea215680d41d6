#!/usr/bin/env bash
# Collects all files that a machine with an NVIDIA GPU needs to run scripts/gpu_run.sh, in build/gpu-pack
# and build/gpu-pack.tar.gz: programs, their libraries including the C library, the Python package, tests.
set -euo pipefail
cd "$(dirname "$0")/.."
pack=build/gpu-pack
programs=(tests/kernels/kernel_test tests/kernels/cuda_graph_test tests/schedule/device_test bench/kernel_bench
  bench/nccl_bench)
tests=(conftest.py devices.py models.py test_cuda.py test_cuda_nccl.py test_training_modes.py)

[[ -f build/integrations/c/libthinwire_cuda.so ]] || {
  echo "the build has no CUDA part, which needs nvcc" >&2
  exit 1
}
rm -rf "$pack" "$pack.tar.gz"
mkdir -p "$pack"/{bin,lib/glibc,python,tests/integrations/python,site}

# The package, as in the wheel.
cmake --install build --strip --prefix "$pack/python/thinwire" >/dev/null
git ls-files integrations/python/thinwire | tar c -T - | tar x -C "$pack/python" --strip-components=2
package=$pack/python/thinwire/lib

for program in "${programs[@]}"; do
  install --strip "build/$program" "$pack/bin/"
  patchelf --set-rpath '$ORIGIN/../python/thinwire/lib:$ORIGIN/../lib' "$pack/bin/${program##*/}"
done

# Each library has the name that the loader looks for. Those of the C library go to a folder that is used
# only if the machine's C library is too old.
ldd "$pack"/bin/* "$package"/*.so* | sed -nE 's|^\t(.* => )?(/[^ ]+) \(.*|\2|p' | sort -u | while read -r library; do
  name=${library##*/}
  case $name in
    ld-linux-x86-64.so.* | libc.so.* | libm.so.*) cp -L "$library" "$pack/lib/glibc/$name" ;;
    *) cp -L "$library" "$pack/lib/$name" ;;
  esac
done
# More libraries, which a driver's library built for an older C library needs.
libc=$(ldd "$pack/bin/kernel_test" | sed -nE 's|.* => (/.*/libc\.so\.6) .*|\1|p')
for name in libdl.so.2 libpthread.so.0 librt.so.1; do
  cp -L "${libc%/*}/$name" "$pack/lib/glibc/$name"
done
for library in "$pack"/lib/*.so*; do patchelf --set-rpath '$ORIGIN' "$library"; done
for library in "$package"/*.so; do patchelf --set-rpath '$ORIGIN/../../../lib' "$library"; done

cp tests/conftest.py tests/ranks.py "$pack/tests/"
for name in "${tests[@]}"; do cp "tests/integrations/python/$name" "$pack/tests/integrations/python/"; done
cp pyproject.toml "$pack/"
# For a machine that has torch but not pytest.
site=$(.venv/bin/python -c 'import pytest, pathlib; print(pathlib.Path(pytest.__file__).parent.parent)')
tar c -C "$site" --exclude=__pycache__ pytest _pytest py.py pluggy iniconfig packaging pygments | tar x -C "$pack/site"
install scripts/gpu_run.sh "$pack/run.sh"
install -m 644 scripts/gpu_nccl.py "$pack/nccl.py"
tar czf "$pack.tar.gz" -C build gpu-pack

kilobytes=$(du -sk "$pack" | cut -f1)
echo "$pack: $((kilobytes / 1024)) MB, $(du -sk "$pack.tar.gz" | cut -f1) KB as $pack.tar.gz"
((kilobytes <= 48 * 1024)) || {
  echo "expected 48 MB at most" >&2
  exit 1
}
