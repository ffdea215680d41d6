"""Subjects of the benchmarks: context managers that yield a turn (bench/harness.py)."""
