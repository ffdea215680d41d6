"""`make demo`: trains one model with several ways of exchanging gradients and compares them.

Run it as `python -m demo.run` in the repository. The benchmarks use its network lab (lab.py), its
data (data.py) and its ways of exchanging gradients (exchange.py), too."""
