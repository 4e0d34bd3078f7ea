"""A reply that may still be growing, and readers written as generators over it.

A reader's grammar is one generator. Where the text so far does not decide how to read on, it yields, and is resumed when there
is more or the reply has ended. Nothing else depends on where pieces end, so a reply read in pieces gives what the whole gives.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable
from typing import TypeAlias, TypeVar

from polyturn.rendering.tool_calls.base import Call, ParsedReply

T = TypeVar("T")
Steps: TypeAlias = Generator[None, None, T]
_SPACE = re.compile(r"\s*")


class Tags:
    """Literal marks to look for. None may start with another."""

    def __init__(self, *tags: str) -> None:
        self.pattern = re.compile("|".join(map(re.escape, tags)))
        self.longest = max(map(len, tags))


class Source:
    """The text of a reply so far, and what was found in it: text and calls in order."""

    def __init__(self) -> None:
        self.text = ""
        self.ended = False
        self.truncated = False
        self.calls: list[Call] = []
        self._said: list[str] = []

    def extend(self, piece: str) -> None:
        """Append `piece`."""
        # CPython grows a string in place while a local variable holds its only reference; `self.text += piece` would copy all
        # of it, and a reply of many tokens would take quadratic time. So grammars keep no reference to it while they wait.
        text, self.text = self.text, ""
        text += piece
        self.text = text

    def say(self, start: int, end: int) -> None:
        """What stands there is text, not a call."""
        self._said.append(self.text[start:end])

    @property
    def said(self) -> str:
        """The text around the calls."""
        return "".join(self._said)

    def find(self, tags: Tags, start: int) -> Steps[tuple[str, int] | None]:
        """The first of `tags` and where it stands, None when none comes."""
        while True:
            match = tags.pattern.search(self.text, start)
            if match is not None:
                return match[0], match.start()
            if self.ended:
                return None
            start = max(start, len(self.text) - tags.longest + 1)
            yield

    def run(self, pattern: re.Pattern[str], start: int) -> Steps[int]:
        """The end of a run of characters: `pattern` matches any number of them, and each on its own."""
        while True:
            match = pattern.match(self.text, start)
            start = start if match is None else match.end()
            del match
            if start < len(self.text) or self.ended:
                return start
            yield

    def space(self, start: int) -> Steps[int]:
        """The end of the white space that starts there."""
        return (yield from self.run(_SPACE, start))

    def starts(self, literal: str, at: int) -> Steps[bool]:
        """Whether `literal` stands there."""
        while not self.ended and len(self.text) - at < len(literal) and literal.startswith(self.text[at:]):
            yield
        return self.text.startswith(literal, at)

    def which(self, literals: Iterable[str], at: int) -> Steps[str | None]:
        """The one of `literals` that stands there."""
        for literal in literals:
            if (yield from self.starts(literal, at)):
                return literal
        return None


class SourceReader:
    """A `CallReader` over a grammar."""

    def __init__(self, grammar: Callable[[Source], Steps[None]]) -> None:
        self._source = Source()
        self._steps = grammar(self._source)
        self._finished = False

    def feed(self, text: str) -> tuple[Call, ...]:
        """See `CallReader.feed`."""
        assert not self._finished, "a finished reader was fed"
        known = len(self._source.calls)
        self._source.extend(text)
        self._resume()
        return tuple(self._source.calls[known:])

    def finish(self, truncated: bool = False) -> ParsedReply:
        """See `CallReader.finish`."""
        assert not self._finished, "a reader was finished twice"
        self._finished = True
        self._source.ended, self._source.truncated = True, truncated
        self._resume()
        return ParsedReply(text=self._source.said, calls=tuple(self._source.calls))

    def _resume(self) -> None:
        """Read as far as the text decides."""
        for _ in self._steps:
            assert not self._finished, "a grammar waits for more of a reply that has ended"
            return


def parsed(reader: SourceReader, reply: str, truncated: bool) -> ParsedReply:
    """The whole of `reply`."""
    reader.feed(reply)
    return reader.finish(truncated)


def whole(text: str, steps: Callable[[Source], Steps[T]]) -> T:
    """What `steps` makes of a text that is all there."""
    source = Source()
    source.extend(text)
    source.ended = True
    running = steps(source)
    try:
        next(running)
    except StopIteration as stopped:
        result: T = stopped.value
        return result
    raise AssertionError("a grammar waits for more of a text that has ended")


def shown(text: str, start: int, end: int, most: int = 20) -> str:
    """A quotation of what stands there, for a problem. Depends on nothing after `end`."""
    return repr(text[start : min(end, start + most)].rstrip())
