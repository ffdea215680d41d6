"""advise: how far to compress, and in which order to send, on this link with this model.

Two rehearsals (steps that exchange nothing) measure how long the model computes, and a probe
measures the link and the codecs; the simulator of schedule/sim then predicts a step of every codec
and policy."""

from __future__ import annotations

from thinwire.torch.advise.advice import Advice, advise
from thinwire.torch.forecast.choice import ACCURATE, CODECS, POLICIES, Prediction

__all__ = ["ACCURATE", "CODECS", "POLICIES", "Advice", "Prediction", "advise"]
