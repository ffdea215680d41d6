"""`make demo`: trains one model with several ways of exchanging gradients and compares them.

Run it as `python -m demo.run` in the repository. It runs in the network lab of bench/lab.py;
the benchmarks read its data (data.py)."""
