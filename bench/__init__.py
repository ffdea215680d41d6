"""Benchmarks, and the network lab that tests and the demo share."""
