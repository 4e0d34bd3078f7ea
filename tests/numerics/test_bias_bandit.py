"""The bias gate: estimator x aggregation, through the real loss, on a bandit where the policy decides when to stop.

The policy has one number per turn, the probability to go on. Stopping ends the episode; turn 3 ends it either way. Turn
rewards and the chance of success are known, and so is the gradient of the expected return.

Only 8 episodes can happen (four ways to go x success or not), hence 8^3 groups of three. Each goes through the estimator and
`policy_loss` once. That gives the expected gradient exactly, as a sum over all groups, and a simulation of 400,000 groups for
the price of drawing how often each came up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from numerics.builders import loss_options, make_group, make_inputs, make_trajectory
from polyturn.advantages import Estimator, GroupAdvantages
from polyturn.advantages.dr_grpo import DrGrpo
from polyturn.advantages.rloo import Rloo
from polyturn.advantages.turn_rtg import TurnRtg
from polyturn.losses import policy_loss, token_weights
from polyturn.types import Trajectory, TrajectoryGroup

GO_ON = np.array([0.6, 0.5, 0.5])
GO_ON_REWARD = (0.05, 0.05, -0.1)
"""Reward of the turn in which the policy goes on; stopping gives 0."""
SUCCESS = {"S": 0.5, "CS": 0.05, "CCS": 0.75, "CCC": 0.95}
"""Chance of success by what was done: C goes on, S stops."""
GROUP_SIZE = 3
BUDGET = 3
NUM_SIMULATED = 400_000

# Worth of the states, from the back:
#   turn 3: go on -.1 + .95 = .85, stop .75;               value (.85 + .75)/2 = .8
#   turn 2: go on .05 + .8 = .85, stop .05;                value (.85 + .05)/2 = .45
#   turn 1: go on .05 + .45 = .5, stop .5: there it makes no difference.
# d/d logit_k = P(reach k) p_k (1 - p_k) (worth of going on - worth of stopping)
TRUTH = np.array([0.24 * 0.0, 0.6 * 0.25 * 0.8, 0.6 * 0.5 * 0.25 * 0.1])


@dataclass(frozen=True)
class Episode:
    actions: str
    success: bool

    @property
    def probability(self) -> float:
        going = [GO_ON[k] if action == "C" else 1 - GO_ON[k] for k, action in enumerate(self.actions)]
        chance = SUCCESS[self.actions]
        return float(np.prod(going)) * (chance if self.success else 1 - chance)

    @property
    def trajectory(self) -> Trajectory:
        rewards = [GO_ON_REWARD[k] if action == "C" else 0.0 for k, action in enumerate(self.actions)]
        return make_trajectory(rewards, float(self.success))


EPISODES = [Episode(actions, success) for actions in SUCCESS for success in (True, False)]
GROUPS = list(product(EPISODES, repeat=GROUP_SIZE))
PROBABILITIES = np.array([np.prod([episode.probability for episode in group]) for group in GROUPS])


@cache
def trajectory_groups() -> list[TrajectoryGroup]:
    made = {episode: episode.trajectory for episode in EPISODES}
    return [make_group(*(made[episode] for episode in group)) for group in GROUPS]


class ForwardSum:
    """What not to do: each turn's reward normalised over the rollouts that reached the turn, summed forward."""

    def __init__(self, *, divide: bool) -> None:
        self.divide = divide

    def __call__(self, groups: Sequence[TrajectoryGroup]) -> list[GroupAdvantages]:
        return [GroupAdvantages(per_turn=tuple(self.credit(group.trajectories))) for group in groups]

    def credit(self, trajectories: Sequence[Trajectory]) -> list[np.ndarray]:
        rewards = [np.array(t.turn_rewards) for t in trajectories]
        for turn_rewards, trajectory in zip(rewards, trajectories, strict=True):
            turn_rewards[-1] += trajectory.outcome_reward
        normalised = [np.zeros_like(turn_rewards) for turn_rewards in rewards]
        for k in range(max(len(turn_rewards) for turn_rewards in rewards)):
            reached = [i for i, turn_rewards in enumerate(rewards) if len(turn_rewards) > k]
            values = np.array([rewards[i][k] for i in reached])
            spread = values.std() + 1e-4 if self.divide else 1.0
            for i in reached:
                normalised[i][k] = (rewards[i][k] - values.mean()) / spread
        return [z[::-1].cumsum()[::-1] for z in normalised]


def gradient_per_group(estimator: Callable[..., list[GroupAdvantages]], aggregation: str) -> np.ndarray:
    """What one optimizer step on each group adds to the three logits, `[groups, 3]`. One token a turn."""
    groups = trajectory_groups()
    tokens = [
        (g, GROUP_SIZE * g + i, k, action, credit[k])
        for g, result in enumerate(estimator(groups))
        for i, credit in enumerate(result.per_turn)
        for k, action in enumerate(GROUPS[g][i].actions)
    ]
    group, trajectory, turn = (np.array([token[column] for token in tokens]) for column in range(3))
    went_on = np.array([token[3] == "C" for token in tokens])
    advantages = [token[4] for token in tokens]
    options = {"planned_trajectories": GROUP_SIZE, "fixed_length": BUDGET}
    weights = np.concatenate([token_weights(aggregation, trajectory[group == g], **options) for g in range(len(groups))])
    logprobs = np.log(np.where(went_on, GO_ON[turn], 1 - GO_ON[turn]))
    inputs = make_inputs(logprobs, advantages, weights=weights, trajectories=trajectory.tolist(), turns=turn.tolist())
    policy_loss(inputs, loss_options(aggregation=aggregation)).loss.backward()
    # d log pi / d logit = 1 - p where the policy went on, -p where it stopped; the step goes down the loss.
    step = -inputs.trainer_logprobs_N.grad.numpy() * (went_on - GO_ON[turn])
    table = np.zeros((len(groups), len(GO_ON)))
    np.add.at(table, (group, turn), step)
    return table


def simulated(per_group: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean over 400,000 random groups, and its standard error."""
    counts = np.random.default_rng(0).multinomial(NUM_SIMULATED, PROBABILITIES)
    mean = counts @ per_group / NUM_SIMULATED
    variance = counts @ (per_group - mean) ** 2 / (NUM_SIMULATED - 1)
    return mean, np.sqrt(variance / NUM_SIMULATED)


def test_the_bandit_is_what_its_comment_says() -> None:
    assert sum(episode.probability for episode in EPISODES) == pytest.approx(1.0)
    assert PROBABILITIES.sum() == pytest.approx(1.0)
    worth = np.array([sum(episode.trajectory.turn_rewards) + episode.success for episode in EPISODES])
    score = np.zeros((len(EPISODES), len(GO_ON)))
    for row, episode in zip(score, EPISODES, strict=True):
        row[: len(episode.actions)] = [(action == "C") - GO_ON[k] for k, action in enumerate(episode.actions)]
    chance = np.array([episode.probability for episode in EPISODES])
    np.testing.assert_allclose((chance * worth) @ score, TRUTH, atol=1e-15)


UNBIASED = [TurnRtg(), TurnRtg(baseline="zero_padded"), Rloo()]


@pytest.mark.parametrize("estimator", UNBIASED, ids=repr)
def test_these_are_unbiased_with_the_fixed_aggregation(estimator: Estimator) -> None:
    per_group = gradient_per_group(estimator, "fixed") * BUDGET
    np.testing.assert_allclose(PROBABILITIES @ per_group, TRUTH, atol=1e-12)
    mean, error = simulated(per_group)
    assert (np.abs(mean - TRUTH) < 3 * error).all()
    assert (error < 1e-3).all()


def test_dr_grpo_only_scales_the_gradient() -> None:
    expected = PROBABILITIES @ gradient_per_group(DrGrpo(), "fixed") * BUDGET
    np.testing.assert_allclose(expected, TRUTH * (GROUP_SIZE - 1) / GROUP_SIZE, atol=1e-12)


@pytest.mark.parametrize("divide", [False, True])
def test_the_forward_sum_misses(divide: bool) -> None:
    """Going on at turn 1 makes no difference, and the forward sum pushes against it all the same.

    Without the division it also sees no reason at all to go on at turn 2, which is worth .8 more than to stop.
    """
    per_group = gradient_per_group(ForwardSum(divide=divide), "fixed") * BUDGET
    mean, error = simulated(per_group)
    assert abs(mean[0] - TRUTH[0]) > 30 * error[0]
    expected = PROBABILITIES @ per_group
    assert expected[0] < -0.03
    if not divide:
        np.testing.assert_allclose(expected[1], 0.0, atol=1e-12)


@pytest.mark.parametrize("estimator", UNBIASED[:2], ids=repr)
def test_the_sequence_mean_misses(estimator: Estimator) -> None:
    """It pushes turn 1 one way too, and no common factor fits the other turns: a bias, not another learning rate."""
    per_group = gradient_per_group(estimator, "sequence")
    mean, error = simulated(per_group)
    assert abs(mean[0]) > 30 * error[0]
    factor = (PROBABILITIES @ per_group)[1:] / TRUTH[1:]
    assert abs(factor[0] / factor[1] - 1) > 0.1


def test_the_token_mean_misses() -> None:
    per_group = gradient_per_group(TurnRtg(), "token")
    mean, error = simulated(per_group)
    assert abs(mean[0]) > 20 * error[0]


def test_a_discount_misses() -> None:
    expected = PROBABILITIES @ gradient_per_group(TurnRtg(gamma=0.5), "fixed") * BUDGET
    assert abs(expected[0] - TRUTH[0]) > 0.01


def test_survivors_are_the_less_noisy_baseline_where_few_arrive() -> None:
    """Zero-padding compares the last turn mostly with siblings that never got there."""
    survivors, padded = (simulated(gradient_per_group(estimator, "fixed"))[1] for estimator in UNBIASED[:2])
    assert survivors[-1] < 0.9 * padded[-1]


def test_losing_a_trajectory_leaves_the_others_alone_under_the_fixed_aggregation() -> None:
    """Divided by what was planned; the other aggregations enlarge those that are left."""
    index = np.array([0, 0, 1, 2], dtype=np.int64)
    kept = index[index != 2]
    for aggregation, equal in (("fixed", True), ("token", False), ("sequence", False)):
        options = {"planned_trajectories": 3, "fixed_length": 4}
        all_of_them, rest = token_weights(aggregation, index, **options), token_weights(aggregation, kept, **options)
        assert np.array_equal(all_of_them[index != 2], rest) is equal


PAGE = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()


@pytest.mark.parametrize(
    ("row", "estimator", "aggregation", "scale"),
    [
        ("`turn_rtg` (either baseline), `rloo`; `fixed`", TurnRtg(), "fixed", BUDGET),
        ("forward sum, means subtracted; `fixed`", ForwardSum(divide=False), "fixed", BUDGET),
        ("forward sum, divided by std as well; `fixed`", ForwardSum(divide=True), "fixed", BUDGET),
        ("`turn_rtg`; `sequence`", TurnRtg(), "sequence", 1),
        ("`turn_rtg`; `token`", TurnRtg(), "token", 1),
        ("`turn_rtg` with `gamma: 0.5`; `fixed`", TurnRtg(gamma=0.5), "fixed", BUDGET),
    ],
)
def test_the_table_of_the_docs_holds_these_numbers(row: str, estimator: Estimator, aggregation: str, scale: int) -> None:
    (line,) = [line for line in PAGE.splitlines() if line.startswith(f"| {row} |")]
    written = [float(cell) for cell in line.split("|")[2:5]]
    expected = PROBABILITIES @ gradient_per_group(estimator, aggregation) * scale
    np.testing.assert_allclose(written, expected, atol=6e-4)
