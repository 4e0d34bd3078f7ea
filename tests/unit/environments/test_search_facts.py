from __future__ import annotations

import random

from polyturn.environments.builtin.search_qa import SearchQa
from polyturn.environments.contract import play_by_hand
from polyturn.environments.search.facts import facts_index, world
from polyturn.rendering.words import word_level_tokenizer


def made(**arguments) -> SearchQa:
    return SearchQa(corpus="builtin:facts", top_k=1, instructions=False, **arguments)


def test_every_fact_is_a_passage_of_its_own():
    assert len(world().lands) == 320
    assert len({passage.id for passage in world().passages()}) == len(world().passages()) == 320 + 2 * len(world().cities)


async def test_every_query_finds_its_fact_first():
    index = facts_index()
    for passage in world().passages()[::7]:
        relation, name = passage.id.split("/")
        (found,) = await index.search(f"{relation} of {name}", 1)
        assert found == passage


async def test_gold_replies_always_score_and_every_word_can_be_said():
    environment = made()
    vocabulary = environment.vocabulary()
    tokenizer = word_level_tokenizer(vocabulary.words, vocabulary.pattern)
    right = played = 0
    for split in ("train", "eval"):
        source = environment.tasks(split, 3)
        for index in range(100):
            task = source[index]
            for replies in (environment.gold(task), environment.demonstrations(task, random.Random(index))):
                episode = await play_by_hand(environment, task, replies)
                assert episode.done
                for message in episode.transcript:
                    assert tokenizer.decode(tokenizer.encode(message.content).ids) == message.content
            right, played = right + episode.score, played + 1
            assert (await play_by_hand(environment, task, environment.gold(task))).score == 1
    assert 0.15 < right / played < 0.45, "demonstrations are in a hurry: 0.4 of one step, 0.16 of two"


async def test_errors_are_one_word_that_the_vocabulary_has():
    environment = made(max_searches=1)
    task = environment.tasks("train", 0)[1]
    replies = ["", "<search>", "<search> </search>", "<search>of</search>", "<search>capital</search>"]
    episode = await play_by_hand(environment, task, replies)
    told = [message.content for message in episode.transcript[1:] if message.role != "assistant"]
    assert told == ["error", "error", "error", "<information>\nnothing found\n</information>", "error"]


def test_held_out_questions_are_about_other_names():
    environment = made()
    train = {environment.tasks("train", seed)[index].messages[-1].content for seed in range(2) for index in range(1000)}
    held_out = {environment.tasks("eval", 0)[index].messages[-1].content for index in range(256)}
    assert not train & held_out
    assert len(held_out) > 180
