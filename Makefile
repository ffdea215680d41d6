# Every target does its own set-up; run again, the set-up is quick.
SHELL := /bin/bash
PYTHON := .venv/bin/python
export PYTHONPATH := $(CURDIR)/integrations/python
export THINWIRE_LIBRARY := $(CURDIR)/build/integrations/c/libthinwire.so
JOBS ?= $(shell nproc)

.PHONY: help setup build demo test test-cpp test-asan test-tsan test-python gpu bench accuracy ratio wheel wheel-check lint format clean

help:
	@echo "make demo    train a real model over a 1 Gb/s link, plain and compressed, and compare"
	@echo "make test    every test that can run on this machine"
	@echo "make gpu     the checks and benchmarks that need an NVIDIA GPU"
	@echo "make bench   codec, allreduce and training benchmarks against their targets"
	@echo "make accuracy, make ratio   what compression costs in accuracy (an hour), and in precision"
	@echo "make wheel   a wheel that needs no compiler; make lint, make format, make clean"

setup:
	@scripts/setup.sh

build: setup
	@cmake --preset release > build/configure.log || { cat build/configure.log; exit 1; }
	@cmake --build --preset release -j $(JOBS)

demo: build
	@$(PYTHON) -m thinwire demo --out build/demo

test: test-cpp test-asan test-tsan test-python

test-cpp: build
	@ctest --preset release --output-on-failure

test-asan: setup
	@cmake --preset asan > build/configure-asan.log
	@cmake --build --preset asan -j $(JOBS)
	@ctest --preset asan --output-on-failure

# The thread sanitizer needs the address-space layout that setarch -R gives. Gloo is not built with
# it, so the tests of schedule and in_process run, and those over Gloo do not.
test-tsan: setup
	@cmake --preset tsan > build/configure-tsan.log
	@cmake --build --preset tsan -j $(JOBS)
	@setarch $$(uname -m) -R ctest --preset tsan --output-on-failure

test-python: build
	@$(PYTHON) -m pytest -q tests

# On a machine with a GPU: what the tests skip elsewhere, and how fast the kernels are.
gpu: build
	@scripts/gpu.sh

bench: build
	@scripts/bench.sh

# Resumes where it was stopped; make accuracy ARGS=--short takes a minute.
accuracy: build
	@$(PYTHON) bench/accuracy.py --out build/accuracy $(ARGS)

ratio: build
	@$(PYTHON) bench/ratio.py --out build/ratio

wheel: setup
	@$(PYTHON) -m pip wheel -q --no-deps --no-build-isolation -w dist .
	@ls dist/*.whl

wheel-check: wheel
	@scripts/wheel_check.sh

lint: build
	@scripts/lint.sh

format: setup
	@git ls-files '*.cc' '*.h' '*.c' '*.cu' '*.cuh' | xargs clang-format -i
	@.venv/bin/ruff format -q integrations bench tests

clean:
	rm -rf build build-* dist
