"""The order of training tasks: every task once an epoch, repeatable from the seed, resumable from the cursor."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyturn.data.stream import TaskStream
from polyturn.errors import DataError
from polyturn.types import Task


class Source:
    def __init__(self, size):
        self.size = size
        self.asked = []

    def __getitem__(self, index):
        assert index >= 0
        if self.size is not None and index >= self.size:
            raise IndexError(index)
        self.asked.append(index)
        return Task(id=f"task/{index}", environment="talk", messages=(), answer=str(index))


def ids(stream, count):
    return [task.id for task in stream.take(count)]


sizes = st.integers(1, 12)
seeds = st.integers(0, 1000)


@given(size=sizes, seed=seeds, epochs=st.integers(1, 4), shuffle=st.booleans())
def test_every_task_once_an_epoch_and_no_id_twice(size, seed, epochs, shuffle):
    source = Source(size)
    tasks = TaskStream(source, seed=seed, shuffle=shuffle).take(size * epochs)
    assert len({task.id for task in tasks}) == size * epochs
    for epoch in range(epochs):
        answers = [int(task.answer) for task in tasks[epoch * size : (epoch + 1) * size]]
        assert sorted(answers) == list(range(size))
        assert shuffle or answers == list(range(size))
        suffix = f"#{epoch + 1}" if epoch else ""
        assert [task.id for task in tasks[epoch * size : (epoch + 1) * size]] == [f"task/{a}{suffix}" for a in answers]


@given(
    size=st.none() | sizes,
    seed=seeds,
    shuffle=st.booleans(),
    parts=st.lists(st.integers(0, 9), max_size=6),
    cut=st.integers(0, 30),
)
def test_a_resumed_stream_goes_on_where_the_other_stood(size, seed, shuffle, parts, cut):
    total = sum(parts)
    whole = ids(TaskStream(Source(size), seed=seed, shuffle=shuffle), total + cut)
    stream = TaskStream(Source(size), seed=seed, shuffle=shuffle)
    taken = [task_id for part in parts for task_id in ids(stream, part)]
    assert taken == whole[:total]
    assert stream.cursor == total
    resumed = TaskStream(Source(size), seed=seed, shuffle=shuffle, cursor=stream.cursor)
    assert ids(resumed, cut) == whole[total:]


def test_the_order_depends_on_seed_and_epoch():
    orders = {tuple(int(task.answer) for task in TaskStream(Source(20), seed=seed).take(20)) for seed in range(5)}
    assert len(orders) == 5
    stream = TaskStream(Source(20), seed=0)
    epochs = [[task.answer for task in stream.take(20)] for _ in range(4)]
    assert all(one != other for one, other in pairwise(epochs))


def test_the_order_is_the_same_on_every_machine():
    order = [int(task.answer) for task in TaskStream(Source(8), seed=3).take(16)]
    assert order == [3, 7, 2, 5, 1, 0, 4, 6, 4, 2, 7, 3, 5, 0, 1, 6]


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_source_without_end_is_taken_in_its_order(shuffle):
    stream = TaskStream(Source(None), seed=4, shuffle=shuffle)
    assert ids(stream, 3) + ids(stream, 2) == [f"task/{index}" for index in range(5)]


def test_tasks_are_made_when_they_are_taken():
    source = Source(5)
    stream = TaskStream(source, seed=0, shuffle=False)
    assert source.asked == []
    stream.take(2)
    assert source.asked == [0, 1]


def test_a_source_without_tasks_is_refused():
    with pytest.raises(DataError, match=r"no training tasks; give data\.path a file with rows"):
        TaskStream(Source(0), seed=0)
