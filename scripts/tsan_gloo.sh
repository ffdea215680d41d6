#!/usr/bin/env bash
# Runs the tests over Gloo under the thread sanitizer, with a Gloo that is built with it too: the commit
# that Debian packages, from GLOO_REPOSITORY (by default Gloo's on GitHub). Then runs 10^5 short exchanges
# by concurrent threads; `make test` runs a tenth of them.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/install.sh git cmake ninja-build
# `make test` does not build the programs whose tests are all over Gloo.
cmake --build --preset tsan -j "${JOBS:-$(nproc)}" --target tests-excluded
commit=5b143513263133af2b95547e97c07cebeb72bf72
gloo=build-tsan/gloo
repository=${GLOO_REPOSITORY:-https://github.com/facebookincubator/gloo}

if [[ ! -e $gloo/source/ready ]]; then
  rm -rf "$gloo/source"
  git clone -q --no-checkout "$repository" "$gloo/source"
  git -C "$gloo/source" checkout -q "$commit"
  # Newer kernel headers reject the structure with which Gloo queries an interface's speed.
  sed -i 's/^#if LINUX_VERSION_CODE >= KERNEL_VERSION(4,6,0)$/#if 0/' "$gloo/source/gloo/common/linux.cc"
  touch "$gloo/source/ready"
fi
# Gloo needs these two headers, which others no longer include in newer standard libraries.
cmake -S "$gloo/source" -B "$gloo/build" -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo \
  -DCMAKE_CXX_FLAGS_RELWITHDEBINFO="-O1 -g1 -DNDEBUG" -DBUILD_SHARED_LIBS=ON -DBUILD_TEST=OFF \
  -DCMAKE_CXX_FLAGS="-fsanitize=thread -include cstdint -include array" >"$gloo/configure.log" || {
  cat "$gloo/configure.log"
  exit 1
}
cmake --build "$gloo/build" -j "${JOBS:-$(nproc)}"
ln -sf libgloo.so "$gloo/build/gloo/libgloo.so.0" # the name of Debian's library

# A test that finds UCX loads it. UCX hooks madvise, which a thread still calls after the sanitizer has ended.
export UCX_MEM_MMAP_HOOK_MODE=none
export LD_LIBRARY_PATH=$PWD/$gloo/build/gloo TSAN_OPTIONS="suppressions=$PWD/tests/tsan.supp"
for test in build-tsan/tests/{transport,schedule}/*_test; do
  [[ $("$test" --gtest_list_tests --gtest_filter='*Gloo*') == *Gloo* ]] || continue
  echo "$(basename "$test")"
  setarch "$(uname -m)" -R "$test" --gtest_filter='*Gloo*' --gtest_brief=1
done
echo "parallel_test, 10^5 exchanges"
THINWIRE_TEST_ROUNDS=25000 setarch "$(uname -m)" -R build-tsan/tests/schedule/parallel_test \
  --gtest_filter='*Exchanges' --gtest_brief=1
