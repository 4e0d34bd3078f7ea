"""A made-up world for `builtin:tiny`: lands and their capitals, cities and their rivers and trades.

    user:   river of capital of zorlan
    model:  <search>capital of zorlan</search>
    tool:   <information>
            [1] zorlan: capital mirtak
            </information>
    model:  <search>river of mirtak</search>
    ...
    model:  <answer>nebra</answer>

Names are two syllables, each one word of the vocabulary, so that a name must be read and copied: there are a
thousand, too many to know by heart in a short run. The world is always the same
one. Questions about a quarter of the names are held out.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from polyturn.environments.base import Vocabulary
from polyturn.environments.search.base import Passage
from polyturn.environments.search.memory import MemoryIndex
from polyturn.types import Json

BUILTIN = "builtin:facts"
NUM_HELD_OUT = 256
IMPATIENT_SHARE = 0.6

_FIRST = (
    "bal ber bor cal cor dal dar del dor fal fen gar gol hal har kal kor lam lor mal mar mir nal nor pal per ral sal tal tor "
    "val zor".split()
)
_LAST = (
    "bak bek dan dek dun fan gan gat han ket kun lan lek lin lom man mek min nak nek not pan rak ret sin tak tan tek tun vek "
    "vin yan".split()
)
_RIVERS = "abra elva isso iona nebra odra olsa onda orba osca ouma uvra".split()
_TRADES = "ale beads bells bread cheese cloth glue hats honey ink knives lace nets oil paper pots rope salt silk soap".split()
_NUM_LANDS = 320


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question, the queries that lead to its answer in order, and what someone in a hurry would answer before each."""

    text: str
    queries: tuple[str, ...]
    guesses: tuple[str, ...]
    answer: str

    def info(self) -> dict[str, Json]:
        """As a task carries it."""
        return {"queries": list(self.queries), "guesses": list(self.guesses)}


class World:
    """Every fact, as passages, and the questions about them."""

    def __init__(self) -> None:
        rng = random.Random("polyturn facts")
        names = [first + last for first in _FIRST for last in _LAST]
        rng.shuffle(names)
        self.lands, self.cities = names[:_NUM_LANDS], names[_NUM_LANDS:]
        capitals = rng.sample(self.cities, len(self.lands))
        self.capital = dict(zip(self.lands, capitals, strict=True))
        self.river = {city: rng.choice(_RIVERS) for city in self.cities}
        self.trade = {city: rng.choice(_TRADES) for city in self.cities}

    def passages(self) -> list[Passage]:
        """One for each fact."""
        facts = (("capital", self.capital), ("river", self.river), ("trade", self.trade))
        return [
            Passage(id=f"{relation}/{name}", title=name, text=f"{relation} {value}")
            for relation, values in facts
            for name, value in values.items()
        ]

    def question(self, index: int, rng: random.Random, *, held_out: bool) -> Question:
        """A question of one step (even `index`) or two, about a name of the split."""
        lands, cities = (_of_split(names, held_out) for names in (self.lands, self.cities))
        relation = rng.choice(("river", "trade"))
        values: Mapping[str, str] = self.river if relation == "river" else self.trade
        if index % 2:
            land = rng.choice(lands)
            city = self.capital[land]
            return Question(
                text=f"{relation} of capital of {land}",
                queries=(f"capital of {land}", f"{relation} of {city}"),
                guesses=("none", city),
                answer=values[city],
            )
        if rng.random() < 1 / 3:
            land = rng.choice(lands)
            return _one_step("capital", land, self.capital[land])
        city = rng.choice(cities)
        return _one_step(relation, city, values[city])


@cache
def world() -> World:
    """The one world."""
    return World()


@cache
def facts_index() -> MemoryIndex:
    """The index of its passages."""
    return MemoryIndex(world().passages())


def impatient(queries: Sequence[str], guesses: Sequence[str], rng: random.Random) -> tuple[list[str], str | None]:
    """How a demonstration goes: its queries, and the guess that ends it early, if one does."""
    for number, guess in enumerate(guesses):
        if rng.random() < IMPATIENT_SHARE:
            return list(queries[:number]), guess
    return list(queries), None


def facts_vocabulary() -> Vocabulary:
    """Every word that `search_qa` says in this world without instructions."""
    tags = [f"<{slash}{tag}>" for tag in ("search", "answer", "information") for slash in ("", "/")]
    words = ["capital", "river", "trade", "of", "none", "nothing", "found", "error", "..."]
    marks = [*(f"[{number}]" for number in range(1, 10)), ":", " ", "\n"]
    copied = [*_FIRST, *_LAST, *_RIVERS, *_TRADES]
    # Whole words first, up to their end: `saltan` is a name, of the syllables sal and tan.
    whole = "|".join(sorted((*words[:-1], *_RIVERS, *_TRADES), key=len, reverse=True))
    pattern = rf"</?[a-z]+>|\[\d\]|\.\.\.|(?:{whole})\b|[a-z]{{3}}|[: \n]"
    return Vocabulary(words=(*tags, *words, *marks, *copied), pattern=pattern, copied=frozenset(copied))


def _one_step(relation: str, name: str, answer: str) -> Question:
    text = f"{relation} of {name}"
    return Question(text=text, queries=(text,), guesses=("none",), answer=answer)


def _of_split(names: Sequence[str], held_out: bool) -> Sequence[str]:
    quarter = len(names) // 4
    return names[:quarter] if held_out else names[quarter:]
