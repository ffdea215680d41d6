"""The loss of accuracy and precision by compression."""
