"""Predictions of a step: notes of how long it computes, a probe of the link, and the choice."""
