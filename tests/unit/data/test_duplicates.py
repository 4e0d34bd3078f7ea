"""Questions asked twice: found exactly, found nearly, and without comparing all with all."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from polyturn.data import duplicates
from polyturn.data.duplicates import Likeness, nearly_same, question_key, same, words


def jaccard(left: str, right: str) -> float:
    """The measure by its definition, over texts of five words or more."""
    runs = [{tuple(words(text)[i : i + 3]) for i in range(len(words(text)) - 2)} for text in (left, right)]
    return len(runs[0] & runs[1]) / len(runs[0] | runs[1])


def sentence(rng: random.Random, size: int) -> list[str]:
    return ["".join(rng.choices("abcdefghij", k=5)) for _ in range(size)]


def test_case_space_and_marks_do_not_matter_and_signs_do():
    assert same(["What is 2 + 2?", "what  IS\n2 + 2", "What is 2 - 2?", "(What) is '2 + 2'..."]) == [
        Likeness(index=1, earlier=0, share=1.0),
        Likeness(index=3, earlier=0, share=1.0),
    ]
    assert question_key("2+3") != question_key("2-3")
    assert question_key("3.5") != question_key("35")
    assert question_key("?!") != question_key("!!")
    assert question_key("ﬁne Ⅳ") == question_key("fine IV")


def test_nearly_the_same_is_told_with_its_share():
    rng = random.Random(1)
    base = sentence(rng, 60)
    changed = [*base[:30], "other", *base[31:]]
    far = [*base[:30], *sentence(rng, 30)]
    texts = [" ".join(base), " ".join(changed), " ".join(far), " ".join(sentence(rng, 60))]
    (found,) = nearly_same(texts)
    assert (found.index, found.earlier) == (1, 0)
    assert abs(found.share - jaccard(texts[0], texts[1])) < 1e-9
    assert found.share == 55 / 61


def test_the_same_question_is_not_nearly_the_same():
    text = " ".join(sentence(random.Random(2), 20))
    assert nearly_same([text, text.upper() + "?"]) == []
    assert nearly_same(["", " ", "x", "x"]) == []


def test_a_template_with_other_words_is_not_nearly_the_same():
    cities = ("Peru", "Chile", "Cuba", "Kenya", "Ghana")
    assert nearly_same([f"What is the capital of {city}?" for city in cities]) == []


def test_against_the_slow_way():
    rng = random.Random(3)
    texts = []
    for _ in range(40):
        base = sentence(rng, 40)
        texts.append(" ".join(base))
        for _ in range(rng.randrange(3)):
            copy = list(base)
            for _ in range(rng.choice((1, 1, 2, 8))):
                copy[rng.randrange(40)] = "changed"
            texts.append(" ".join(copy))
    found = {found.index: found for found in nearly_same(texts)}
    kept: list[int] = []
    for index, text in enumerate(texts):
        shares = [jaccard(text, texts[other]) for other in kept]
        best = max(shares, default=0.0)
        if best >= duplicates.THRESHOLD:
            assert abs(found[index].share - best) < 1e-9
            assert jaccard(text, texts[found[index].earlier]) == best
        else:
            kept.append(index)
            assert index not in found


@given(st.lists(st.text(max_size=40), max_size=12))
def test_any_texts(texts):
    for found in (*same(texts), *nearly_same(texts)):
        assert found.earlier < found.index
        assert 0 < found.share <= 1


def test_the_comparisons_grow_with_the_rows_not_with_their_square(monkeypatch):
    rng = random.Random(4)
    prefix = sentence(rng, 30)
    texts = [" ".join([*prefix, *sentence(rng, 30)]) for _ in range(1000)]
    compared, share = 0, duplicates._share

    def counted(left, right):
        nonlocal compared
        compared += 1
        return share(left, right)

    monkeypatch.setattr(duplicates, "_share", counted)
    nearly_same(texts)
    assert 0 < compared <= len(texts) * duplicates.BANDS * duplicates.MOST_IN_BUCKET
    assert compared < len(texts) ** 2 / 8, "half of all pairs would be four times that"
