"""Invariants 1 to 4 of the design: each has a check, a test that it holds, and a partner that breaks the code and is caught.

1. Tokens in, tokens out: what is trained are the ids that the engine read and sampled, all of them, and no others.
2. The loss mask is not the attention mask: the model reads what the tool says, and is not trained on it.
3. Ids, mask, log-probabilities, advantages, turns and versions of a sample line up, token by token.
4. A fault is not a reward, and a limit is not a fault.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from polyturn.advantages.registry import build_estimator
from polyturn.engine.scripted import ScriptedEngine
from polyturn.environments.base import StepResult
from polyturn.errors import SampleError
from polyturn.models.tiny import build_tiny
from polyturn.rendering.renderer import Conversation
from polyturn.rollouts import episode
from polyturn.rollouts.episode import play
from polyturn.trainer.row import to_tensors
from polyturn.trainer.scorer import Scorer
from polyturn.trajectories import assemble as assembling
from polyturn.trajectories.assemble import assemble
from polyturn.trajectories.pack import pack
from polyturn.types import Completion, Message, Trajectory, TrajectoryGroup
from semantics.scenes import Talk, assistant_turns, play_group, player, reply_ids, says, talk_renderer, talk_task
from unit.rendering.families import family


def broken(check, *arguments):
    """Whether `check` finds that something is wrong."""
    try:
        check(*arguments)
    except (AssertionError, SampleError):
        return True
    return False


# ── 1. tokens in, tokens out ───────────────────────────────────────────────────────────────────────────────────────────


class Spelling(ScriptedEngine):
    """Says lines one character a token, which is not how a tokenizer spells them, and remembers what it read and said."""

    def __init__(self, renderer, *lines):
        self.calls = []
        self._renderer, self._lines = renderer, lines
        super().__init__(self._spell)

    def _spell(self, context):
        line = self._lines[min(len(self.calls), len(self._lines) - 1)]
        ids = [token for character in line for token in self._renderer.tokenizer.encode(character)]
        return (*ids, self._renderer.stop_ids[0])

    async def generate(self, prompt_ids, sampling, *, session=None):
        completion = await super().generate(prompt_ids, sampling)
        self.calls.append((prompt_ids, completion.ids))
        return completion


async def check_tokens_in_tokens_out() -> None:
    renderer = family("chatml").renderer()
    engine = Spelling(renderer, "look at the blue one", "look again", "answer(red)")
    chosen = player(Talk(), engine, renderer, max_turn_tokens=64, max_trajectory_tokens=2000)
    trajectory = await play(chosen, talk_task(opening="find the red one"), 0)
    assert trajectory.success
    assert [turn.completion_ids for turn in trajectory.turns] == [said for _, said in engine.calls]
    (sample,) = assemble(trajectory, [1.0] * 3, temperature=1.0)
    ids = sample.input_ids.tolist()
    for read, said in engine.calls:
        assert ids[: len(read) + len(said)] == [*read, *said]
        assert sample.loss_mask[len(read) : len(read) + len(said)].all()
    assert sample.loss_mask.sum() == sum(len(said) for _, said in engine.calls)
    assert len(ids) == len(engine.calls[-1][0]) + len(engine.calls[-1][1])


async def test_1_tokens_in_tokens_out():
    await check_tokens_in_tokens_out()


def drop_the_stop_token(monkeypatch):
    sampled = assembling._Row.sampled

    def without_the_last(row, turn, index, advantage):
        shorter = replace(
            turn,
            completion_ids=turn.completion_ids[:-1],
            engine_logprobs=turn.engine_logprobs[:-1],
            policy_versions=turn.policy_versions[:-1],
        )
        sampled(row, shorter, index, advantage)

    monkeypatch.setattr(assembling._Row, "sampled", without_the_last)


def tokenize_the_text_again(monkeypatch):
    add_completion = Conversation.add_completion

    def from_text(conversation, ids):
        tokenizer = conversation._renderer.tokenizer
        return add_completion(conversation, tokenizer.encode(tokenizer.decode(ids, continued=True)))

    monkeypatch.setattr(Conversation, "add_completion", from_text)


def record_the_text_again(monkeypatch):
    """The conversation is right, but what is recorded of a turn was made from its text."""
    turn = episode._turn

    def from_text(prompt_ids, continues, completion, text, result):
        tokenizer = family("chatml").tokenizer
        ids = tokenizer.encode(text) + completion.ids[-1:]
        again = Completion(
            ids=ids, engine_logprobs=(-0.5,) * len(ids), policy_versions=(0,) * len(ids), stop_reason=completion.stop_reason
        )
        return turn(prompt_ids, continues, again, text, result)

    monkeypatch.setattr(episode, "_turn", from_text)


def drop_what_the_tool_says(monkeypatch):
    monkeypatch.setattr(assembling._Row, "read", lambda row, ids: _read_once(row, ids))


def _read_once(row, ids, read=assembling._Row.read):
    if not row.input_ids:
        read(row, ids)


def start_every_turn_anew(monkeypatch):
    monkeypatch.setattr(episode, "_turn", lambda *a, turn=episode._turn: replace(turn(*a), continues=False))


BREAKS_TOKENS = [
    drop_the_stop_token,
    tokenize_the_text_again,
    record_the_text_again,
    drop_what_the_tool_says,
    start_every_turn_anew,
]


@pytest.mark.parametrize("break_it", BREAKS_TOKENS, ids=lambda break_it: break_it.__name__)
async def test_1_is_caught_when_broken(break_it, monkeypatch):
    break_it(monkeypatch)
    with pytest.raises((AssertionError, ValueError)):
        await check_tokens_in_tokens_out()


# ── 2. the loss mask is not the attention mask ─────────────────────────────────────────────────────────────────────────


def tiny():
    tokenizer = talk_renderer().tokenizer
    return build_tiny(vocab_size=tokenizer.vocab_size, eos_id=tokenizer.eos_ids[0], pad_id=0, seed=1).eval()


async def scored(tool_says: str) -> tuple[Trajectory, torch.Tensor, torch.Tensor]:
    """A two-turn trajectory whose tool says something, with the log-probabilities and turns of its trained tokens."""
    result = StepResult(messages=(Message(role="tool", content=tool_says),))

    async def step(state, reply):
        return result if len(state.seen) == 1 else StepResult(done=True)

    engine = says(talk_renderer(), "look(red)", "answer(red)")
    trajectory = await play(player(Talk({"step": step}, unlucky=0), engine), talk_task(), 0)
    (row,) = pack(assemble(trajectory, [1.0, 1.0], temperature=1.0), row_tokens=200, planned_trajectories=1).rows
    tensors = to_tensors(row, torch.device("cpu"))
    with torch.no_grad():
        logprobs, _ = Scorer(tiny())(tensors)
    return trajectory, logprobs, tensors.turn_index_N


async def check_the_model_reads_the_tool() -> None:
    trajectory, blue, turns = await scored("blue")
    _, green, _ = await scored("green")
    sampled = [token for turn in trajectory.turns for token in turn.completion_ids]
    assert len(blue) == len(green) == len(sampled)
    assert turns.tolist() == [0] * len(trajectory.turns[0].completion_ids) + [1] * len(trajectory.turns[1].completion_ids)
    assert torch.equal(blue[turns == 0], green[turns == 0])
    assert ((blue - green)[turns == 1].abs() > 1e-6).all()


async def check_the_tool_is_not_in_the_loss() -> None:
    trajectory, _, _ = await scored("green again green")
    (sample,) = assemble(trajectory, [1.0, 1.0], temperature=1.0)
    tokenizer = talk_renderer().tokenizer
    said_by_tool = np.isin(sample.input_ids, [tokenizer.token_id("green"), tokenizer.token_id("again")])
    assert said_by_tool.sum() == 3
    assert not sample.loss_mask[said_by_tool].any()
    assert not sample.advantages[said_by_tool].any()
    (row,) = pack([sample], row_tokens=200, planned_trajectories=1).rows
    tensors = to_tensors(row, torch.device("cpu"))
    assert not np.isin(tensors.targets_N.numpy(), sample.input_ids[said_by_tool]).any()


async def test_2_the_model_reads_the_tool_and_is_not_trained_on_it():
    await check_the_model_reads_the_tool()
    await check_the_tool_is_not_in_the_loss()


def hide_the_tool(monkeypatch):
    """As an attention mask made from the loss mask: what was not sampled after the opening is not seen."""
    monkeypatch.setattr(assembling._Row, "read", lambda row, ids: _read_once(row, ids))


def train_on_the_tool(monkeypatch):
    def read(row, ids, read=assembling._Row.read):
        opening = not row.input_ids
        read(row, ids)
        if not opening:
            row.loss_mask[-len(ids) :] = [True] * len(ids)

    monkeypatch.setattr(assembling._Row, "read", read)


async def test_2_is_caught_when_the_tool_is_hidden(monkeypatch):
    hide_the_tool(monkeypatch)
    with pytest.raises(AssertionError):
        await check_the_model_reads_the_tool()


async def test_2_is_caught_when_the_tool_is_trained_on(monkeypatch):
    train_on_the_tool(monkeypatch)
    with pytest.raises(AssertionError):
        await check_the_tool_is_not_in_the_loss()


# ── 3. everything of a token lines up ──────────────────────────────────────────────────────────────────────────────────


class Telling(ScriptedEngine):
    """The log-probability and version that it gives a token tell which token of which turn it is."""

    def __init__(self, *lines, lengths=(0, 0)):
        renderer = talk_renderer()
        self._lengths = lengths
        super().__init__(lambda context: reply_ids(renderer, lines[assistant_turns(renderer, context)]))

    async def generate(self, prompt_ids, sampling, *, session=None):
        completion = await super().generate(prompt_ids, sampling)
        turn = assistant_turns(talk_renderer(), prompt_ids)
        logprobs = [-(1.0 + turn + token / 100) for token in completion.ids]
        change = self._lengths[turn]
        logprobs = logprobs[:change] if change < 0 else [*logprobs, *[-9.0] * change]
        return replace(completion, engine_logprobs=tuple(logprobs), policy_versions=tuple(10 + turn for _ in completion.ids))


async def telling_trajectory(lengths=(0, 0)) -> Trajectory:
    engine = Telling("look(red) again", "answer(red)", lengths=lengths)
    return await play(player(Talk(), engine), talk_task(), 0)


def check_alignment(trajectory: Trajectory) -> None:
    (sample,) = assemble(trajectory, [0.5, -0.25], temperature=1.0)
    arrays = (sample.loss_mask, sample.advantages, sample.engine_logprobs, sample.turn_index, sample.policy_version)
    assert {len(array) for array in arrays} == {len(sample)}
    assert sample.loss_mask.sum() == trajectory.num_completion_tokens
    for token, trained, advantage, logprob, turn, version in zip(sample.input_ids, *arrays, strict=True):
        if trained:
            assert logprob == pytest.approx(-(1.0 + turn + token / 100))
            assert advantage == [0.5, -0.25][turn]
            assert version == 10 + turn
        else:
            assert (advantage, logprob, turn, version) == (0.0, 0.0, -1, -1)


async def test_3_everything_of_a_token_lines_up():
    check_alignment(await telling_trajectory())


@pytest.mark.parametrize("lengths", [(-1, 0), (0, 1), (-1, 1), (1, -1)])
async def test_3_an_engine_that_miscounts_makes_no_sample(lengths):
    trajectory = await telling_trajectory(lengths)
    assert trajectory.valid
    with pytest.raises(SampleError, match="talk/0/0"):
        assemble(trajectory, [0.5, -0.25], temperature=1.0)


def shifted(name):
    def shift(monkeypatch):
        def made(**arrays):
            return make(**{**arrays, name: np.roll(arrays[name], 1)})

        make = assembling.TrainSample
        monkeypatch.setattr(assembling, "TrainSample", made)

    return shift


@pytest.mark.parametrize("name", ["loss_mask", "advantages", "engine_logprobs", "turn_index", "policy_version", "input_ids"])
async def test_3_is_caught_when_shifted(name, monkeypatch):
    trajectory = await telling_trajectory()
    shifted(name)(monkeypatch)
    assert broken(check_alignment, trajectory)


# ── 4. a fault is not a reward, and a limit is not a fault ─────────────────────────────────────────────────────────────


class Mixed(Talk):
    """Even siblings are shown red and solve the task, odd ones green and don't; 3 is lost, and 6 never comes to an answer."""

    async def step(self, state, reply):
        state.seen.append(reply)
        if state.number == 3:
            raise ConnectionError("the sandbox is gone")
        if reply.text.startswith("answer"):
            return StepResult(done=True)
        shown = "blue" if state.number == 6 else "red" if state.number % 2 == 0 else "green"
        return StepResult(messages=(Message(role="tool", content=shown),))


async def mixed_group() -> TrajectoryGroup:
    renderer = talk_renderer()
    ids = {word: renderer.tokenizer.token_id(word) for word in ("red", "green", "blue")}

    def script(context):
        if not assistant_turns(renderer, context):
            return reply_ids(renderer, "look(blue)")
        shown = next(word for word in reversed(context) if word in ids.values())
        line = {ids["red"]: "answer(red)", ids["green"]: "answer(green)", ids["blue"]: "look(blue)"}[shown]
        return reply_ids(renderer, line)

    return await play_group(player(Mixed(), ScriptedEngine(script), max_turns=3))


def check_faults_and_limits(group: TrajectoryGroup) -> None:
    limited = group.trajectories[6]
    assert limited.end_reason == "max_turns"
    assert limited.valid
    assert limited.outcome_reward == 0.0
    assert [trajectory.outcome_reward for trajectory in group.trajectories] == [1.0, 0.0, 1.0, None, 1.0, 0.0, 0.0, 0.0]
    without = replace(group, trajectories=tuple(t for t in group.trajectories if t.sibling != 3))
    for name in ("turn_rtg", "grpo", "dr_grpo", "rloo"):
        (credit,), (expected,) = (build_estimator(name, {})([chosen]) for chosen in (group, without))
        assert credit.per_turn[3] is None
        others = [values for sibling, values in enumerate(credit.per_turn) if sibling != 3]
        assert all(np.array_equal(values, right) for values, right in zip(others, expected.per_turn, strict=True))
        assert others[6] is not None
        assert (others[5] < 0).all()


async def test_4_a_fault_is_no_reward_and_a_limit_no_fault():
    check_faults_and_limits(await mixed_group())


def count_faults_as_zero(monkeypatch):
    trajectory = episode._Episode.trajectory

    def forgiven(self):
        made = trajectory(self)
        return made if made.fault is None else replace(made, fault=None, outcome_reward=0.0)

    monkeypatch.setattr(episode._Episode, "trajectory", forgiven)


def compare_with_faults(monkeypatch):
    trajectory = episode._Episode.trajectory
    monkeypatch.setattr(
        episode._Episode,
        "trajectory",
        lambda self: replace(made := trajectory(self), outcome_reward=made.outcome_reward or 0.0),
    )


def make_limits_faults(monkeypatch):
    trajectory = episode._Episode.trajectory

    def strict(self):
        made = trajectory(self)
        return replace(made, fault="out of turns", outcome_reward=None) if made.truncated else made

    monkeypatch.setattr(episode._Episode, "trajectory", strict)


@pytest.mark.parametrize("break_it", [count_faults_as_zero, compare_with_faults, make_limits_faults], ids=lambda f: f.__name__)
async def test_4_is_caught_when_broken(break_it, monkeypatch):
    break_it(monkeypatch)
    assert broken(check_faults_and_limits, await mixed_group())
