# Every target does its own set-up, which is quick if it was done before.
SHELL := /bin/bash
PYTHON := .venv/bin/python
export PYTHONPATH := $(CURDIR)/integrations/python:$(CURDIR)
export THINWIRE_LIBRARY := $(CURDIR)/build/integrations/c/libthinwire.so
JOBS ?= $(shell nproc)
# Tests mostly wait for messages and deadlines, so three at a time fit on two cores; those of pytest
# start more processes.
TEST_JOBS ?= 3
PYTEST_JOBS ?= 3
# A worker that dies fails its test by name. No worker is restarted: pytest would wait for it forever.
PYTEST = $(PYTHON) -m pytest -q -n $(PYTEST_JOBS) --dist loadgroup --max-worker-restart 0 --durations 20

# If ccache is installed, the builds of all checkouts share it.
ifneq ($(shell command -v ccache),)
export CMAKE_C_COMPILER_LAUNCHER ?= ccache
export CMAKE_CXX_COMPILER_LAUNCHER ?= ccache
export CMAKE_CUDA_COMPILER_LAUNCHER ?= ccache
# Without this ccache does not cache files that use a precompiled header.
export CCACHE_SLOPPINESS ?= pch_defines,time_macros
endif

.PHONY: help packages venv setup build check demo demo-packages library test test-cpp build-asan test-asan build-tsan test-tsan tsan-gloo test-neon test-python test-torch trainers test-trainers \
  test-frameworks thread-safety docs \
  gpu gpu-pack gpu-pack-check neon fuzz soak replicas bench bench-frameworks bench-sites accuracy ratio wheel wheel-aarch64 \
  wheel-check wheel-check-aarch64 lint format clean

help:
	@echo "make demo    train a real model over a 1 Gb/s link, plain and compressed, and compare"
	@echo "make check   the tests that take seconds, for daily work"
	@echo "make test    every test that can run on this machine"
	@echo "make test-torch   the Python tests on the oldest and the newest torch"
	@echo "make test-frameworks   Lightning, Accelerate, transformers, Ray, torchft, Slurm and MPI themselves"
	@echo "make replicas   a thousand steps of every codec and 2 to 8 ranks, and nodes: bit-identical (20 minutes)"
	@echo "make thread-safety   clang's analysis of who holds which lock"
	@echo "make docs    the documentation as a site, in build/docs/html"
	@echo "make gpu-pack   a folder that runs these checks on another machine with a GPU"
	@echo "make gpu     the checks and benchmarks that need an NVIDIA GPU"
	@echo "make neon    the codecs' tests on 64-bit ARM, by qemu"
	@echo "make tsan-gloo   the tests over Gloo under the thread sanitizer, with a Gloo built for it"
	@echo "make fuzz    libFuzzer on decoders, parsers and frames, a minute each"
	@echo "make soak    faults: ranks that are killed or stopped in every phase, and half an hour of kills"
	@echo "make bench   codec, allreduce and training benchmarks against their targets"
	@echo "make accuracy, make ratio   what compression costs in accuracy (hours), and in precision"
	@echo "make bench-sites         a round between sites on a far link, beside torchft's DiLoCo, hivemind and Flower"
	@echo "make bench-frameworks   steps under DDP, FSDP2, Lightning, Accelerate, transformers and Horovod's API"
	@echo "make wheel, make wheel-aarch64   a wheel that needs no compiler; make lint, make format, make clean"
	@echo "make wheel-check   installs the wheel in an empty root, and runs every example there"
	@echo "make wheel-check-aarch64   the other wheel, by qemu: the bytes of x86-64"

packages:
	@scripts/setup.sh all

venv: packages
	@scripts/venv.sh requirements.txt requirements

setup: packages venv

build: setup
	@cmake --preset release > build/configure.log || { cat build/configure.log; exit 1; }
	@cmake --build --preset release -j $(JOBS)

# All tests except those marked slow: SLOW in tests/*/CMakeLists.txt, pytest.mark.slow in Python.
check: build
	@ctest --preset check --output-on-failure -j $(TEST_JOBS)
	@$(PYTEST) -m "not slow" tests

# make test runs a dozen steps of each, and stands threads in for nodes.
replicas: build
	@THINWIRE_TEST_STEPS=1000 build/tests/schedule/replica_test --gtest_filter='All*'
	@tests/nodes/replicas.sh

# Builds only the library, in the folder that `make build` also uses. If tests are configured there, they stay.
demo:
	@echo "make demo: less than five minutes on two cores of a fresh machine: packages 1, the library 2, training 1.5."
	@scripts/setup.sh library
	@$(MAKE) --no-print-directory -j2 demo-packages library
	@$(PYTHON) -m demo.run --out build/demo

# pip waits for downloads while the library is built.
demo-packages:
	@[ -f .venv/requirements.sha256 ] || scripts/venv.sh demo/requirements.txt demo

library:
	@[ -f build/CMakeCache.txt ] || cmake --preset library > build/configure.log || { cat build/configure.log; exit 1; }
	@cmake --build --preset library -j $(JOBS)

# pip mostly waits for downloads, and tests for messages, so builds run at the same time: the library is built during
# pip, and the sanitizers' programs, at a low priority, during the suites, which run one after another.
# `make test ALSO=docs` builds the documentation during the last suites.
test: packages
	@$(MAKE) --no-print-directory -j3 trainers thread-safety build
	@$(MAKE) --no-print-directory -j3 IN_TURN=1 test-python test-cpp test-trainers test-asan test-tsan test-neon $(ALSO)

ifdef IN_TURN
test-cpp test-trainers: | test-python
test-asan: | test-cpp test-trainers
test-tsan: | test-asan
build-tsan: | build-asan
test-neon: | build-tsan
docs: | test-asan
endif

thread-safety: packages
	@cmake --preset thread-safety > build/configure-thread-safety.log || { cat build/configure-thread-safety.log; exit 1; }
	@cmake --build --preset thread-safety -j $(JOBS)

test-cpp: build
	@ctest --preset release --output-on-failure -j $(TEST_JOBS)

test-asan: build-asan
	@ctest --preset asan --output-on-failure -j $(TEST_JOBS)

build-asan build-tsan: build-%: setup
	@cmake --preset $* > build/configure-$*.log || { cat build/configure-$*.log; exit 1; }
	@nice -n 19 cmake --build --preset $* -j $(JOBS)

# The thread sanitizer needs the address-space layout that setarch -R gives. Debian's Gloo is not built
# with the sanitizer, so the tests over Gloo run in `make tsan-gloo` and not here.
test-tsan: build-tsan
	@setarch $$(uname -m) -R ctest --preset tsan --output-on-failure -j $(TEST_JOBS)

# Clones Gloo from GLOO_REPOSITORY, by default Gloo's own repository.
tsan-gloo: build-tsan
	@JOBS=$(JOBS) scripts/tsan_gloo.sh

test-python: build
	@$(PYTEST) tests

# The part of test-frameworks that `make test` runs: Lightning, Accelerate and transformers, but not the twins
# without thinwire. test-python uses Open MPI, and runs the examples that need only torch. If downloads fail or
# take too long, this part is skipped.
TRAINERS_SETUP = timeout 300 scripts/frameworks_setup.sh trainers > build/trainers.log 2>&1
trainers: venv
	@$(TRAINERS_SETUP) || true
	@timeout 300 scripts/install.sh openmpi-bin >> build/trainers.log 2>&1 || true

test-trainers: build
	@if $(TRAINERS_SETUP); then \
	  scripts/frameworks.sh -m "not torch_alone" -k "not the_twin_learns" tests/frameworks/test_{frameworks,lightning_warm_up,mixed_precision,refusals}.py \
	    tests/integrations/python/test_examples.py; else \
	  echo "skipped Lightning, Accelerate and transformers, which are not to be had: build/trainers.log"; fi

# Not in CI: the newest torch requires CUDA packages of several GB.
TORCH_VERSIONS ?= 2.13.0 2.14.1
test-torch: build
	@scripts/test_torch.sh $(TORCH_VERSIONS)

# Installs and tests all frameworks and launchers; their Python packages stay out of .venv.
test-frameworks: build
	@scripts/frameworks_setup.sh trainers others
	@scripts/install.sh slurmctld slurmd slurm-client openmpi-bin mpich
	@scripts/frameworks.sh tests/frameworks tests/integrations/python/test_examples.py

# All fault tests; make soak SOAK_MINUTES=1 takes ten minutes. `make test` runs a short part of them.
SOAK_MINUTES ?= 30
soak: build
	@$(PYTHON) tests/faults/matrix.py
	@$(PYTHON) tests/faults/soak.py --minutes $(SOAK_MINUTES)
	@$(PYTHON) tests/faults/sites_soak.py
	@scripts/frameworks_setup.sh trainers others
	@build/frameworks/bin/python tests/faults/sites_soak.py --over lighthouse

# Makes a folder, and a tar of it, for a machine that has only an NVIDIA driver.
gpu-pack: build
	@scripts/gpu_pack.sh

# In an empty root the pack must start, and fail because there is no GPU.
gpu-pack-check: gpu-pack
	@scripts/gpu_pack_check.sh

# For a machine with a GPU: runs the tests that are skipped elsewhere, and measures the kernels.
gpu: gpu-pack
	@OUT=build/gpu PYTHON=$(PYTHON) build/gpu-pack/run.sh

# Tests only the codecs: on NEON they must give the same bytes as on x86.
neon: packages
	@JOBS=$(JOBS) scripts/neon.sh

test-neon: packages
	@if scripts/aarch64_root.sh > build/aarch64-root.log 2>&1; then JOBS=$(JOBS) nice -n 19 scripts/neon.sh; else \
	  echo "skipped the codecs on 64-bit ARM, whose packages are not to be had: build/aarch64-root.log"; fi

# make test runs the same fuzz targets over their corpora and over mutations of these.
fuzz: setup
	@JOBS=$(JOBS) scripts/fuzz.sh

# make bench ARGS=--quick prints the main table in five minutes.
bench: build
	@scripts/bench.sh $(ARGS)

# make bench-frameworks ARGS="--seconds 3" takes a minute.
bench-frameworks: build
	@scripts/frameworks_setup.sh trainers
	@build/frameworks/bin/python -m bench frameworks $(ARGS)

# A round of 5 M parameters on 100 Mb/s with 20 ms, in two minutes; not in CI.
bench-sites: build
	@scripts/frameworks_setup.sh trainers others
	@VENV=peers/hivemind scripts/frameworks_setup.sh hivemind
	@VENV=peers/flwr scripts/frameworks_setup.sh flwr
	@build/frameworks/bin/python -m bench.sites $(ARGS)

# Resumes after an interruption; make accuracy ARGS=--short takes a minute, and
# ARGS="--steps_part 8 --batch_part 4 --choices 1" shortens every run.
accuracy: build
	@$(PYTHON) -m bench.accuracy.run --out build/accuracy $(ARGS)

ratio: build
	@$(PYTHON) -m bench.accuracy.ratio --out build/ratio

# A wheel without the CUDA part: make wheel ARGS="--config-settings cmake.define.THINWIRE_CUDA=OFF".
wheel: setup
	@scripts/wheel.sh x86_64 $(ARGS)

wheel-aarch64: setup
	@scripts/wheel.sh aarch64 $(ARGS)

wheel-check: wheel
	@scripts/wheel_check.sh

wheel-check-aarch64: wheel wheel-aarch64
	@scripts/wheel_check_aarch64.sh

lint: build
	@scripts/lint.sh

format: setup
	@git ls-files '*.cc' '*.h' '*.c' '*.cu' '*.cuh' | xargs clang-format -i
	@.venv/bin/ruff format -q integrations bench tests docs/conf.py

# The sources are in docs/; Python's reference is read from the package, C's from thinwire.h.
docs: build
	@scripts/docs.sh

clean:
	rm -rf build build-* dist
