"""The cost of compression in accuracy, and in precision."""
