"""What tests on GPUs ask of a program of theirs: whether it is there can be seen without a GPU."""

from __future__ import annotations

import inspect

import pytest

from parts.shard_cases import CASES, CUT_CASES, KERNEL_CASES, LAYER_CASES
from parts.shard_scenes import ON_GPUS, SCENES, arguments


@pytest.mark.parametrize("words", ON_GPUS, ids=" ".join)
def test_a_scene_takes_its_words_and_knows_its_cases(words: tuple[str, ...]):
    given = arguments(list(words[1:]))
    inspect.signature(SCENES[words[0]]).bind(None, *given)
    cases = [case for part in given if isinstance(part, list) for case in part]
    assert set(cases) <= {*CASES, *CUT_CASES, *KERNEL_CASES, *LAYER_CASES}
