"""`search_qa`: answer a question with the help of a search index.

    user:   Cleeve Hill is the highest point in which range of English hills?
    model:  <search>Cleeve Hill highest point range</search>
    tool:   <information>
            [1] Cleeve Hill: Cleeve Hill is the highest point both of the Cotswold Hills and in the county of ...
            </information>
    model:  <answer>Cotswolds</answer>

Rows are in a built-in format, with `answers` where several count; `corpus: builtin:facts` makes its own. A search past
`max_searches` is refused with a sentence. An answer beside a search does not count, as the model has not seen the result.

Rewards: `answer` is 1 for an answer that counts. With `format_reward`, `format` pays that much for any answer after replies
that could all be read. With `turn_reward`, the first search whose results hold an answer is paid that much.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, get_args

from polyturn.environments.base import Environment, Reply, StepResult, TaskList, Vocabulary
from polyturn.environments.rewards.answers import gold_answers, normalised, same_answer
from polyturn.environments.search import facts
from polyturn.environments.search.backends import BackendName, build_backend
from polyturn.environments.search.base import Passage
from polyturn.environments.search.moves import SEARCH, Moves, ToolFormat, harmless, read_moves, write_answer, write_search
from polyturn.environments.search.words import words_of
from polyturn.errors import DataError, EnvironmentSetupError, nearest
from polyturn.rendering.tool_calls import ToolSpec, call_format
from polyturn.types import Message, Row, Split, Task, TaskSource

Announce = Literal["system", "template"]
IGNORED = frozenset(("yes", "no"))
"""Answers that stand in almost any text, and show nothing when results hold them."""
NOTHING = "nothing found"
EXAMPLES: tuple[tuple[str, str, Passage, str], ...] = (
    (
        "Which planet of our solar system has the shortest year?",
        "planet with the shortest year",
        Passage(id="1", title="Mercury (planet)", text="Mercury is the planet nearest to the Sun. Its year takes 88 days."),
        "Mercury",
    ),
    (
        "In which city is the oldest bridge over the river Arno that still stands?",
        "oldest bridge over the Arno",
        Passage(id="2", title="Ponte Vecchio", text="The Ponte Vecchio in Florence is the oldest bridge over the Arno."),
        "Florence",
    ),
)
"""Question, query, result and answer of the worked examples that `examples` shows. Written for this."""


@dataclass(slots=True)
class State:
    """One trajectory: what was searched for and found, and the answer given."""

    golds: tuple[str, ...]
    wanted: tuple[str, ...]
    """Gold answers as results are looked through for them."""
    found: dict[str, str] = field(default_factory=dict)
    """Results by query, as they were shown."""
    seen: set[str] = field(default_factory=set)
    searches: int = 0
    shown: bool = False
    tidy: bool = True
    given: str | None = None

    def key(self) -> str:
        """Equal for equal knowledge, whatever order it was gathered in."""
        return ",".join(sorted(self.seen))


class SearchQa(Environment):
    """Answer a question with the help of a search index."""

    name: ClassVar[str] = "search_qa"
    names_states: ClassVar[bool] = True
    reads_formats: ClassVar[bool] = True

    def __init__(
        self,
        *,
        corpus: str | None = None,
        backend: BackendName = "bm25",
        url: str | None = None,
        token_env: str | None = None,
        contact: str | None = None,
        top_k: int = 3,
        max_searches: int = 4,
        tool_format: ToolFormat = "xml",
        announce: Announce = "system",
        turn_reward: float = 0.0,
        format_reward: float = 0.0,
        max_passage_words: int = 100,
        query_max_chars: int = 200,
        examples: int = 0,
        instructions: bool = True,
    ) -> None:
        for name, value, valid in (("tool_format", tool_format, ToolFormat), ("announce", announce, Announce)):
            if value not in get_args(valid):
                raise EnvironmentSetupError(
                    f"environment.args.{name}={value!r} is none of search_qa; {nearest(str(value), get_args(valid))}"
                )
        counts = {"top_k": top_k, "max_searches": max_searches}
        for name, number in (counts | {"max_passage_words": max_passage_words, "query_max_chars": query_max_chars}).items():
            most = 9 if name in counts else 10_000
            if not isinstance(number, int) or not 1 <= number <= most:
                raise EnvironmentSetupError(f"environment.args.{name}={number!r} is out of range; use 1 to {most}")
        if not 0 <= format_reward < 1:
            raise EnvironmentSetupError(
                f"environment.args.format_reward={format_reward} must be less than the 1 of a right answer; use 0 to 0.9"
            )
        if not 0 <= turn_reward < float("inf"):
            raise EnvironmentSetupError(f"environment.args.turn_reward={turn_reward} is no reward; use 0 or a little more")
        if not isinstance(examples, int) or not 0 <= examples <= len(EXAMPLES):
            raise EnvironmentSetupError(
                f"environment.args.examples={examples!r} is out of range; use 0 to {len(EXAMPLES)} worked examples"
            )
        if announce == "template" and tool_format == "xml":
            raise EnvironmentSetupError(
                "environment.args.announce=template lets the chat template describe the tool in the model's own form of calls, "
                "and tool_format=xml is none; use announce=system, or the model's tool_format"
            )
        self.corpus = corpus
        self.top_k = top_k
        self.max_searches = max_searches
        self.tool_format: ToolFormat = tool_format
        self.announce: Announce = announce
        self.turn_reward = turn_reward
        self.format_reward = format_reward
        self.max_passage_words = max_passage_words
        self.query_max_chars = query_max_chars
        self.examples = examples
        self.instructions = instructions
        self._terse = corpus == facts.BUILTIN and not instructions
        self._backend = build_backend(backend, corpus=corpus, url=url, token_env=token_env, contact=contact)

    async def start(self) -> None:
        """Open the index or the connection. Raises UserError or ResourceError."""
        await self._backend.start()

    async def stop(self) -> None:
        """Close it."""
        await self._backend.stop()

    # ── tasks ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def tasks(self, split: Split, seed: int) -> TaskSource:
        """The questions of `builtin:facts`. Raises EnvironmentSetupError for another corpus, whose questions come from rows."""
        if self.corpus != facts.BUILTIN:
            raise EnvironmentSetupError(
                "environment search_qa takes its questions from rows; set data.path (and data.eval_path) to a file with "
                f"question and answers, or environment.args.corpus={facts.BUILTIN}; `polyturn env check search_qa` takes --data"
            )
        if split == "eval":
            return TaskList([self._fact("eval", 0, index) for index in range(facts.NUM_HELD_OUT)])
        return _Endless(self, seed)

    def _fact(self, split: Split, seed: int, index: int) -> Task:
        rng = random.Random(f"facts/{split}/{seed}/{index}")
        question = facts.world().question(index, rng, held_out=split == "eval")
        task_id = f"{split}/{seed}/{index}" if split == "train" else f"eval/{index}"
        asked = Message(role="user", content=question.text)
        task = Task(id=task_id, environment=self.name, messages=(asked,), answer=question.answer, info=question.info())
        return self._instructed(task)

    def task_from_example(self, row: Row) -> Task:
        """The row's question, after the instructions. Raises DataError for a row without an answer."""
        task = Environment.task_from_example(self, row)
        if not gold_answers(task):
            raise DataError("field 'answer' is missing; a question needs an answer, or a list of answers")
        return self._instructed(task)

    def _instructed(self, task: Task) -> Task:
        """`task` with the instructions in its system message, in front of what stands there, and worked examples after it."""
        system = "\n\n".join(message.content for message in task.messages if message.role == "system")
        if self.instructions:
            system = f"{instructions(self.tool_format, self.announce, self.max_searches)}\n\n{system}".strip()
        said = [message for message in task.messages if message.role != "system"]
        opening = [Message(role="system", content=system)] if system else []
        return replace(task, messages=(*opening, *self._shown_examples(), *said))

    def _shown_examples(self) -> list[Message]:
        """Worked examples as earlier turns of the conversation."""
        messages = []
        for question, query, passage, answer in EXAMPLES[: self.examples]:
            messages += [
                Message(role="user", content=question),
                Message(role="assistant", content=write_search(query, self.tool_format)),
                Message(role="tool", content=self._shown([passage])),
                Message(role="assistant", content=write_answer(answer)),
            ]
        return messages

    def tool_specs(self, task: Task) -> Sequence[ToolSpec]:
        """The search, with `announce: template`; else the instructions say how."""
        return (SEARCH,) if self.announce == "template" else ()

    # ── one trajectory ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def setup(self, task: Task) -> State:
        """Nothing is known yet."""
        golds = gold_answers(task)
        if not golds:
            raise DataError(f"task {task.id} has no answer; search_qa scores the answer against it")
        wanted = dict.fromkeys(words for gold in golds if (words := normalised(gold)) and words not in IGNORED)
        return State(golds=golds, wanted=tuple(wanted))

    async def step(self, state: State, reply: Reply) -> StepResult:
        """Run the searches of a reply, or take its answer. What can't be read gets an error and counts; it ends nothing."""
        key = state.key()
        moves = read_moves(reply.text, self.tool_format, truncated=reply.truncated)
        counts: dict[str, float] = {"malformed": 1} if moves.problem else {}
        state.tidy = state.tidy and not moves.problem
        if moves.searches:
            return replace(await self._run(state, moves, counts), state_key=key)
        if moves.answer is not None:
            state.given = moves.answer
            return StepResult(done=True, state_key=key, counts=counts)
        state.tidy = False
        told = moves.problem or "neither a search nor an answer"
        told = self._error(f"{told}; to answer, say {write_answer('the answer')}")
        return StepResult(messages=(Message(role="user", content=told),), state_key=key, counts={"malformed": 1})

    async def rewards(self, state: State) -> Mapping[str, float]:
        """`answer`, and `format` where it is paid."""
        right = state.given is not None and any(same_answer(state.given, gold) for gold in state.golds)
        components = {"answer": float(right)}
        if self.format_reward:
            components["format"] = self.format_reward * (state.given is not None and state.tidy)
        return components

    async def _run(self, state: State, moves: Moves, counts: dict[str, float]) -> StepResult:
        messages: list[Message] = []
        shown_before = state.shown
        for query in moves.searches:
            messages.append(Message(role="tool", content=await self._search(state, query, counts)))
            if state.searches > self.max_searches:
                break  # one refusal is enough, however many calls a reply makes
        if moves.problem:
            messages.append(Message(role="tool", content=self._error(moves.problem)))
        reward = 0.0
        if state.shown and not shown_before:
            reward, counts["answer_in_results"] = self.turn_reward, 1
        return StepResult(messages=tuple(messages), reward=reward, counts=counts)

    async def _search(self, state: State, query: str, counts: dict[str, float]) -> str:
        """What the model is told about one search."""
        words = " ".join(query.split()).encode("utf-8", "replace").decode()
        if not words:
            _add(counts, "empty_query")
            return self._error("the query is empty; say what to look for")
        if len(words) > self.query_max_chars:
            _add(counts, "malformed")
            return self._error(f"the query has {len(words)} characters, of at most {self.query_max_chars}; ask in fewer words")
        state.searches += 1
        if state.searches > self.max_searches:
            _add(counts, "over_limit")
            return self._error(f"all {self.max_searches} searches are used; say {write_answer('the answer')}")
        _add(counts, "searches")
        if (asked := words.casefold()) in state.found:
            _add(counts, "repeated_query")
        else:
            passages = await self._backend.search(words, self.top_k)
            state.seen.update(passage.id for passage in passages)
            state.found[asked] = self._shown(passages)
        text = state.found[asked]
        standing = f" {normalised(text)} "
        state.shown = state.shown or any(f" {answer} " in standing for answer in state.wanted)
        return text

    def _shown(self, passages: Sequence[Passage]) -> str:
        """Results as the model reads them. Nothing in a passage can end them, or look like a move of the model's."""
        lines = [
            f"[{number}] {harmless(passage.title)}: {_cut(harmless(passage.text), self.max_passage_words)}"
            for number, passage in enumerate(passages, 1)
        ]
        listed = "\n".join(lines or [NOTHING])
        return f"<information>\n{listed}\n</information>" if self.tool_format == "xml" else listed

    def _error(self, problem: str) -> str:
        return "error" if self._terse else f"error: {problem}"

    # ── demonstrations ─────────────────────────────────────────────────────────────────────────────────────────────────

    def gold(self, task: Task) -> Sequence[str]:
        """The question as query, then the answer; in `builtin:facts`, the queries that lead there."""
        return self._replies(self._queries(task) or [self._question(task)], gold_answers(task)[0])

    def demonstrations(self, task: Task, rng: random.Random) -> Sequence[str]:
        """As gold with another query now and then; in `builtin:facts` they are impatient (see there)."""
        answer = gold_answers(task)[0]
        if queries := self._queries(task):
            guesses: Any = task.info.get("guesses", [])
            queries, guess = facts.impatient(queries, guesses, rng)
            return self._replies(queries, guess or answer)
        question = self._question(task)
        keywords = " ".join(words_of(question)) or question
        return self._replies([rng.choice((question, keywords))], answer)

    def _queries(self, task: Task) -> list[str]:
        queries: Any = task.info.get("queries") if self.corpus == facts.BUILTIN else None
        return list(queries or [])

    def _question(self, task: Task) -> str:
        return harmless(task.messages[-1].content)[: self.query_max_chars].strip()

    def _replies(self, queries: Sequence[str], answer: str) -> list[str]:
        searches = [write_search(query, self.tool_format) for query in queries[: self.max_searches]]
        return [*searches, write_answer(answer)]

    def vocabulary(self) -> Vocabulary:
        """That of `builtin:facts` without instructions. Raises EnvironmentSetupError for open text."""
        if not self._terse or self.tool_format != "xml":
            raise EnvironmentSetupError(
                f"builtin:tiny speaks search_qa only with environment.args.corpus={facts.BUILTIN}, tool_format=xml and "
                "instructions=false; set these, or choose another model.path"
            )
        return facts.facts_vocabulary()


class _Endless:
    """Training questions made when asked for."""

    size: int | None = None

    def __init__(self, environment: SearchQa, seed: int) -> None:
        self._environment = environment
        self._seed = seed

    def __getitem__(self, index: int) -> Task:
        return self._environment._fact("train", self._seed, index)


def instructions(form: ToolFormat, announce: Announce, max_searches: int) -> str:
    """What a model is told before the question. How to call is left out where the chat template says it."""
    times = "once" if max_searches == 1 else f"up to {max_searches} times"
    answer = f"When you know the answer, reply with {write_answer('the answer')}: a few words, no explanation."
    if form == "xml":
        return (
            f"Answer the question. You can search an encyclopedia, {times}: reply with "
            f"{write_search('words to look for', form)} and nothing else, and the results come back between <information> and "
            f"</information>. {answer}"
        )
    text = f"Answer the question. You can search an encyclopedia, {times}, with the tool search. {answer}"
    return text if announce == "template" else f"{text}\n\n{call_format(form).instructions([SEARCH])}"


def _add(counts: dict[str, float], name: str) -> None:
    counts[name] = counts.get(name, 0) + 1


def _cut(text: str, max_words: int) -> str:
    words = text.split(" ", max_words)
    return text if len(words) <= max_words else " ".join([*words[:max_words], "..."])
