"""Policy losses: four independent axes, composed by `policy_loss`, and the weights that sum tokens over an optimizer step.

    ratio        pi / pi_old of a token, a turn or a trajectory
    clip         what happens when that is far from 1
    aggregation  how tokens are weighed against each other
    sampler      weight for the difference between trainer and engine

Everything is flat over trained tokens. This room knows log-probabilities and advantages; it knows nothing about models,
batches, groups or how an advantage came about. `reference` is the slow oracle of the tests.
"""

from polyturn.losses.aggregation import token_weights
from polyturn.losses.base import LossInputs, LossResult, Totals
from polyturn.losses.policy import needs_whole_segments, policy_loss
from polyturn.losses.ratio import segment_log_ratio
from polyturn.losses.sampler import sampler_weights

__all__ = [
    "LossInputs",
    "LossResult",
    "Totals",
    "needs_whole_segments",
    "policy_loss",
    "sampler_weights",
    "segment_log_ratio",
    "token_weights",
]
