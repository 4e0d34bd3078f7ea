r"""Reads numbers as people and models write them, and compares them as numbers, exactly.

    1,080   $1,234.50   12 apples   x = 5   3 1/2   \frac{3}{4}   1.5e3   2 \times 10^{3}   5 million   50%

A text is a number when exactly one stands in it and nothing around it changes its value: words are its unit. `5 or 6`, `2 + 3`
and `\sqrt{16}` are none; where the extra `math` is installed, `same_number` asks it about the last kind (see `symbolic`).

A comma that is no thousands mark is a decimal comma. A per cent sign is a unit, so 50% equals 50; and since a share is what
it means, 50% equals 0.5 too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from polyturn.environments.rewards.plain import plain
from polyturn.environments.rewards.symbolic import same_expression

MAX_LENGTH = 300
"""Longest text that is read as one number, in characters."""
MAX_SEARCHED = 4000
"""How far from the end of a text `last_number` and `boxed` look, in characters."""
MAX_DIGITS = 400
"""Digits of a number, and the largest power of ten: 1e999999999 would fill the memory."""

_TOKEN = re.compile(
    r"(?P<number>(?:"
    r"(?<!\d,)[1-9]\d{0,2}(?:,\d{2,3})*,\d{3}(?:\.\d+)?(?!,?\d)"  # 1,234,567.8 and 12,34,567
    r"|(?<!\d,)\d+,\d+(?![,.]?\d)"  # 3,5
    r"|\d+(?:\.\d+)?|(?<![\w.])\.\d+"
    r")(?:[eE][-+]?\d+(?!\w))?)"
    r"|(?P<word>[^\W\d_]\w*(?:\.\d+)*)"
    r"|(?P<mark>\S)",
    re.ASCII,
)
_GROUPED = re.compile(r"[1-9]\d{0,2}(?:,\d{2,3})*,\d{3}(?:\.\d+)?", re.ASCII)
_SCALES = {"k": 3, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_CURRENCY = "$€£¥₹"
_HARMLESS = frozenset(".,;:!?()[]{}\"'“”‘’…°≈~" + _CURRENCY)  # noqa: RUF001
_CHANGES_VALUE = frozenset(
    "sqrt cbrt log ln exp sin cos tan mod pi infinity half twice double triple squared cubed factorial".split()
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """A number as it was written: 50% has value 50 and `percent`."""

    value: Fraction
    percent: bool = False

    def same(self, other: Number) -> bool:
        """Whether both are the same number; a per cent sign that only one has may be a unit or a hundredth."""
        if self.value == other.value:
            return True
        return self.percent != other.percent and self._share == other._share

    @property
    def _share(self) -> Fraction:
        return self.value / 100 if self.percent else self.value


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class _Reading:
    """One number in a text: its tokens are `first` up to `end`. None for one that has no value, such as 1/0."""

    number: Number | None
    first: int
    end: int


def same_number(given: str, expected: str) -> bool:
    """Whether two texts are the same number, exactly: 1/3 is not 0.333.

    >>> same_number("$1,080.00", "1080"), same_number("5 or 6", "6")
    (True, False)
    """
    left, right = read_number(given), read_number(expected)
    if left is not None and right is not None:
        return left.same(right)
    return same_expression(given, expected)


def read_number(text: str) -> Number | None:
    """The one number that `text` is, None where it is none or several. Of an equation, the side after the last `=`."""
    if len(text) > MAX_LENGTH:
        return None
    sides = [side for side in re.split("[=≈]", plain(text)) if any(map(str.isdigit, side))]
    if not sides:
        return None
    tokens = _tokens(sides[-1])
    readings = list(_readings(tokens))
    if len(readings) != 1:
        return None
    (reading,) = readings
    return reading.number if _stands_alone(tokens, reading) else None


def last_number(text: str) -> str | None:
    """The last number in a text, in plain notation, None where there is none.

    >>> last_number("She has 12 eggs and sells each for $1,080.50.")
    '1,080.50'
    """
    written = plain(text[-MAX_SEARCHED:])
    tokens = _tokens(written)
    valid = [reading for reading in _readings(tokens) if reading.number is not None]
    return written[tokens[valid[-1].first].start : tokens[valid[-1].end - 1].end] if valid else None


def boxed(text: str) -> str | None:
    r"""What the last closed `\boxed{...}` holds, None without one.

    >>> boxed(r"so \boxed{\frac{3}{4}} is it")
    '\\frac{3}{4}'
    """
    text = text[-MAX_SEARCHED:]
    opened: list[int | None] = []
    last: tuple[int, int] | None = None
    for match in re.finditer(r"\\f?boxed\s*\{|[{}]", text):
        if match.group() != "}":
            opened.append(match.end() if len(match.group()) > 1 else None)
        elif opened:
            start = opened.pop()
            if start is not None and (last is None or start > last[0]):
                last = (start, match.start())
    return None if last is None else text[slice(*last)]


def _tokens(text: str) -> list[_Token]:
    return [_Token(str(match.lastgroup), match.group(), *match.span()) for match in _TOKEN.finditer(text)]


def _readings(tokens: Sequence[_Token]) -> Iterator[_Reading]:
    """Every number, from left to right, with its sign, fraction, power of ten, scale and per cent sign."""
    position = 0
    while position < len(tokens):
        if tokens[position].kind != "number":
            position += 1
            continue
        value, end = _magnitude(tokens, position)
        percent, power = False, 0
        if end < len(tokens):
            following = tokens[end].text.lower()
            percent = following in ("%", "percent", "pct")
            power = _SCALES.get(following.removesuffix("s"), 0)
            if following == "k" and tokens[end].start != tokens[end - 1].end:
                power = 0  # 5k is five thousand, 5 K is cold
            end += percent or power > 0
        first, negative = _sign(tokens, position)
        if value is not None:
            value *= (-1 if negative else 1) * Fraction(10) ** power
        yield _Reading(None if value is None else Number(value=value, percent=percent), first, end)
        position = end


def _magnitude(tokens: Sequence[_Token], at: int) -> tuple[Fraction | None, int]:
    """The value that starts at a number token, and where it ends."""

    def shape(*wanted: str) -> bool:
        following = tokens[at + 1 : at + 1 + len(wanted)]
        return len(following) == len(wanted) and all(
            token.kind == "number" if want == "n" else token.text == want for token, want in zip(following, wanted, strict=True)
        )

    first = _decimal(tokens[at].text)
    if shape("n", "/", "n") and not shape("n", "/", "n", "/") and all(tokens[at + k].text.isdigit() for k in (0, 1, 3)):
        return _sum(first, _ratio(_decimal(tokens[at + 1].text), _decimal(tokens[at + 3].text))), at + 4
    if shape("/", "n"):
        return _ratio(first, _decimal(tokens[at + 2].text)), at + 3
    for signs in ((), ("-",), ("+",)):
        scaled = ("×", "n", "^", *signs, "n")  # noqa: RUF001
        if shape(*scaled) and tokens[at + 2].text == "10":
            return _times_ten(first, tokens[at + len(scaled)].text, signs), at + 1 + len(scaled)
        if shape("^", *signs, "n") and tokens[at].text == "10":
            return _times_ten(Fraction(1), tokens[at + 2 + len(signs)].text, signs), at + 3 + len(signs)
    return first, at + 1


def _sign(tokens: Sequence[_Token], at: int) -> tuple[int, bool]:
    """Where the number at `at` starts, its sign and currency included, and whether it is negative.

    A dash is a sign when it touches the number (or its currency) and no word or number before it, or starts the text.
    """
    first = at
    if first > 0 and tokens[first - 1].text in _CURRENCY and tokens[first - 1].end == tokens[first].start:
        first -= 1
    if first > 0 and tokens[first - 1].text in ("-", "+"):
        sign = tokens[first - 1]
        before = tokens[first - 2] if first > 1 else None
        touches = sign.end == tokens[first].start
        apart = before is None or before.end < sign.start or before.text in _CURRENCY + "([{:=,"
        if before is None or (touches and apart):
            return first - 1, sign.text == "-"
    return at, False


def _stands_alone(tokens: Sequence[_Token], reading: _Reading) -> bool:
    """Whether all that stands around the one number is its unit or punctuation."""
    for index, token in enumerate(tokens):
        if reading.first <= index < reading.end:
            continue
        if token.kind == "word":
            if token.text.lower() in _CHANGES_VALUE:
                return False
        elif token.text in "-/":
            # Between words (`miles/hour`), and between the number and its unit (`5/day`, `5-pound`).
            if index + 1 == reading.first or index + 1 == len(tokens) or tokens[index + 1].kind != "word":
                return False
        elif token.text not in _HARMLESS:
            return False
    return True


def _decimal(text: str) -> Fraction | None:
    """The value of one number token."""
    digits, _, exponent = text.lower().partition("e")
    digits = digits.replace(",", "" if _GROUPED.fullmatch(digits) else ".")
    if len(digits) > MAX_DIGITS:
        return None
    return _times_ten(Fraction(digits), exponent or "0")


def _times_ten(value: Fraction | None, exponent: str, signs: Sequence[str] = ()) -> Fraction | None:
    sign, digits = (-1 if "-" in (*signs, exponent[0]) else 1), exponent.lstrip("+-")
    if value is None or not digits.isdigit() or len(digits) > 6 or int(digits) > MAX_DIGITS:
        return None
    return value * Fraction(10) ** (sign * int(digits))


def _ratio(top: Fraction | None, bottom: Fraction | None) -> Fraction | None:
    return None if top is None or not bottom else top / bottom


def _sum(left: Fraction | None, right: Fraction | None) -> Fraction | None:
    return None if left is None or right is None else left + right
