"""Plain modules and their optimizers over GradientExchange, without DDP."""
