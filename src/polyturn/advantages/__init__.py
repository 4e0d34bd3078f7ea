"""Credit: from groups of trajectories to one advantage per turn.

An estimator is a small file: a frozen dataclass whose fields are its options, called with the groups of a step. This room
knows rewards and turns; it knows nothing about tokens, samples, losses or torch.
"""

from polyturn.advantages.base import Estimator, GroupAdvantages
from polyturn.advantages.registry import ESTIMATORS, build_estimator

__all__ = ["ESTIMATORS", "Estimator", "GroupAdvantages", "build_estimator"]
