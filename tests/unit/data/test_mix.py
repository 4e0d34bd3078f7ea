"""Several sources by weight, and curricula: any cursor goes on where the uninterrupted order stood."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyturn.data.mix import MixedStream, MixedTasks, Part
from polyturn.data.stream import TaskStream
from polyturn.errors import DataError
from polyturn.types import Task


class Source:
    def __init__(self, size, difficulties=None):
        self.size = size
        self._difficulties = difficulties

    def __getitem__(self, index):
        if self.size is not None and not 0 <= index < self.size:
            raise IndexError(index)
        info = {} if self._difficulties is None else {"difficulty": self._difficulties[index]}
        return Task(id=f"task/{index}", environment="talk", messages=(), answer=str(index), info=info)


def parts(*weights, sizes=None):
    sizes = sizes or [7] * len(weights)
    return [
        Part(name="abcdefgh"[n], source=Source(size), weight=weight)
        for n, (weight, size) in enumerate(zip(weights, sizes, strict=True))
    ]


def ids(stream, count):
    return [task.id for task in stream.take(count)]


WEIGHTS = st.lists(st.floats(0.01, 100), min_size=1, max_size=5)


@given(weights=WEIGHTS, seed=st.integers(0, 99), takes=st.lists(st.integers(0, 20), max_size=6), rest=st.integers(0, 40))
def test_a_resumed_mix_goes_on_where_the_other_stood(weights, seed, takes, rest):
    whole = ids(MixedStream(parts(*weights), seed=seed), sum(takes) + rest)
    stream = MixedStream(parts(*weights), seed=seed)
    assert [name for count in takes for name in ids(stream, count)] == whole[: sum(takes)]
    assert stream.cursor == sum(takes)
    resumed = MixedStream(parts(*weights), seed=seed, cursor=stream.cursor)
    assert ids(resumed, rest) == whole[sum(takes) :]
    stream.cursor = 0
    assert ids(stream, len(whole)) == whole


@given(weights=WEIGHTS, seed=st.integers(0, 99), start=st.integers(0, 5000))
def test_shares_converge_over_any_stretch(weights, seed, start):
    count = 2000
    taken = Counter(task.environment for task in MixedStream(parts(*weights), seed=seed, cursor=start).take(count))
    for part in parts(*weights):
        assert abs(taken[part.name] / count - part.weight / sum(weights)) < 0.01


def test_every_part_walks_its_own_epochs_and_no_id_comes_twice():
    tasks = MixedStream(parts(1, 3, sizes=[5, 4]), seed=3).take(200)
    assert len({task.id for task in tasks}) == 200
    assert {task.environment for task in tasks} == {"a", "b"}
    for name, size in (("a", 5), ("b", 4)):
        answers = [int(task.answer or "") for task in tasks if task.environment == name]
        for start in range(0, len(answers) - size, size):
            assert sorted(answers[start : start + size]) == list(range(size))
    alone = TaskStream(Source(5), seed=3)
    assert [task.id for task in tasks if task.environment == "a"][:12] == [f"a/{task.id}" for task in alone.take(12)]


def test_a_step_holds_every_part():
    """Not by chance: 32 tasks of three equal parts hold 10 or 11 of each, or nearly so, in every step."""
    stream = MixedStream(parts(1, 1, 1, sizes=[None] * 3), seed=0)
    for _ in range(100):
        counts = Counter(task.environment for task in stream.take(32))
        assert min(counts.values()) >= 8
        assert max(counts.values()) <= 13


def test_the_seed_and_the_position_decide():
    orders = ["".join(task.environment for task in MixedStream(parts(1, 1), seed=seed).take(12)) for seed in range(2)]
    assert orders == ["ababbabaabab", "bbabaababbab"]


def test_a_far_cursor_is_reached_quickly():
    assert len(MixedStream(parts(1, 2, sizes=[None, None]), seed=0, cursor=3_000_000).take(5)) == 5


def test_one_part_alone():
    assert ids(MixedStream(parts(2.0), seed=1), 20) == [f"a/{name}" for name in ids(TaskStream(Source(7), seed=1), 20)]


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ([Part(name="a", source=Source(1)), Part(name="a", source=Source(1))], "two parts of data.mix are called 'a'"),
        ([Part(name="a", source=Source(1), weight=0.0)], "the weight of a is 0; give a number above 0"),
        ([Part(name="a", source=Source(1), weight=float("nan"))], "give a number above 0"),
        ([Part(name="a", source=Source(3)), Part(name="b", source=Source(0))], "b has no training tasks"),
    ],
)
def test_parts_that_can_not_be_mixed(made, said):
    with pytest.raises(DataError, match=said):
        MixedStream(made, seed=0)


def test_mixed_tasks_are_one_source():
    tasks = MixedTasks(parts(1, 1, sizes=[2, 3]))
    assert tasks.size == 5
    assert [tasks[index].id for index in range(5)] == ["a/task/0", "a/task/1", "b/task/0", "b/task/1", "b/task/2"]
    assert tasks[3].environment == "b"
    with pytest.raises(IndexError):
        tasks[5]
    endless = MixedTasks(parts(1, 1, sizes=[2, None]))
    assert endless.size is None
    assert len({endless[index].id for index in range(4)}) == 4


# ── curricula ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@given(
    difficulties=st.lists(st.sampled_from(["easy", "medium", "hard", 1, 2.5, "level 7"]), min_size=1, max_size=12),
    seed=st.integers(0, 99),
    shuffle=st.booleans(),
    cursor=st.integers(0, 30),
)
def test_easy_first_in_the_first_epoch_only_and_resumable(difficulties, seed, shuffle, cursor):
    size = len(difficulties)

    def stream(cursor=0):
        return TaskStream(Source(size, difficulties), seed=seed, shuffle=shuffle, curriculum="easy_first", cursor=cursor)

    ranks = {"easy": 1, "medium": 2, "hard": 3, "level 7": 7}
    first = [ranks.get(task.info["difficulty"], task.info["difficulty"]) for task in stream().take(size)]
    assert first == sorted(first)
    plain = TaskStream(Source(size, difficulties), seed=seed, shuffle=shuffle)
    assert ids(stream(size), 2 * size) == ids(TaskStream(Source(size), seed=seed, shuffle=shuffle, cursor=size), 2 * size)
    assert sorted(ids(stream(), size)) == sorted(ids(plain, size))
    assert ids(stream(cursor), 10) == ids(stream(), cursor + 10)[cursor:]


def test_equal_difficulties_are_shuffled():
    orders = {tuple(ids(TaskStream(Source(8, ["easy"] * 8), seed=seed, curriculum="easy_first"), 8)) for seed in range(5)}
    assert len(orders) == 5


def test_a_curriculum_over_what_has_no_order():
    with pytest.raises(DataError, match="these have no end; set it to none"):
        TaskStream(Source(None), seed=0, curriculum="easy_first")
    with pytest.raises(DataError, match=r"task/1: no difficulty that can be ordered \('purple'\)"):
        TaskStream(Source(2, ["easy", "purple"]), seed=0, curriculum="easy_first")
    with pytest.raises(DataError, match=r"task/0: no difficulty that can be ordered \(None\)"):
        TaskStream(Source(2), seed=0, curriculum="easy_first")
