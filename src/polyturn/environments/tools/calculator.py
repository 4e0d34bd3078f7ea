"""The calculator that models may call: exact arithmetic on numbers, with limits instead of surprises.

It knows + - * / // % ** and brackets, and numbers with commas between thousands. Names, calls, strings and everything else of
Python are refused before anything is computed. No input makes it hang: length, powers and the size of every number on the way
have limits, and passing one is an error for the model to read.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping
from fractions import Fraction

from polyturn.errors import PolyturnError

MAX_LENGTH = 200
"""Characters of an expression."""
MAX_BITS = 1024
"""Bits of any numerator or denominator on the way: about 300 digits."""
MAX_SHOWN_DIGITS = 40
"""Digits of a result."""
SIGNIFICANT_DIGITS = 12
"""Of a result that has no end as a decimal."""

_CHARACTERS = re.compile(r"[0-9eE+\-*/%().,\s]*", re.ASCII)
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])", re.ASCII)
_LETTERS = str.maketrans({"×": "*", "÷": "/", "−": "-", "–": "-"})  # noqa: RUF001
_NO_EXPRESSION = "this is not an expression; use numbers, + - * / // % ** and brackets"
_COMMA = "a comma may only stand between groups of three digits"


class CalculatorError(PolyturnError):
    """What is wrong with an expression, in words for the model."""


def calculate(expression: str) -> str:
    """The value of `expression`, whole or decimal. Raises CalculatorError.

    >>> calculate("1,080 / (4 + 5)"), calculate("2 / 3")
    ('120', '0.666666666667')
    """
    if len(expression) > MAX_LENGTH:
        raise CalculatorError(f"the expression is longer than {MAX_LENGTH} characters")
    text = _THOUSANDS.sub(lambda match: match.group().replace(",", ""), expression.translate(_LETTERS)).strip()
    text = text.removesuffix("=").rstrip()  # as in 48/2=
    if not text:
        raise CalculatorError("the expression is empty")
    strange = _CHARACTERS.sub("", text)
    if strange:
        raise CalculatorError(f"{strange[0]!r} is not allowed; use numbers, + - * / // % ** and brackets")
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise CalculatorError(_COMMA if "," in text else _NO_EXPRESSION) from error
    return _shown(_value(tree))


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return _number(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow):
            return _power(left, right)
        compute = _OPERATORS.get(type(node.op))
        if compute is not None:
            if right == 0 and not isinstance(node.op, ast.Add | ast.Sub | ast.Mult):
                raise CalculatorError("division by zero")
            return _within(Fraction(compute(left, right)))
    if isinstance(node, ast.Tuple):
        raise CalculatorError(_COMMA)
    raise CalculatorError(_NO_EXPRESSION)


_OPERATORS: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def _number(value: float) -> Fraction:
    if not math.isfinite(value):
        raise CalculatorError("a number is too large")
    return _within(Fraction(repr(value)))  # the decimal that was written, not its nearest binary fraction


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if base == 0 and exponent < 0:
        raise CalculatorError("division by zero")
    if exponent.denominator == 1:
        size = max(base.numerator.bit_length(), base.denominator.bit_length())
        if base not in (0, 1, -1) and size * abs(exponent) > 2 * MAX_BITS:
            raise CalculatorError("a number is too large")
        return _within(base ** (exponent.numerator if abs(base) != 1 else exponent.numerator % 2))
    if base < 0:
        raise CalculatorError("a negative number has no such root")
    try:
        return _number(float(base) ** float(exponent))
    except OverflowError as error:
        raise CalculatorError("a number is too large") from error


def _within(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise CalculatorError("a number is too large")
    return value


def _shown(value: Fraction) -> str:
    """A whole number, a decimal with an end, or one rounded to SIGNIFICANT_DIGITS."""
    if value.denominator == 1:
        text = str(value.numerator)
        if len(text) > MAX_SHOWN_DIGITS:
            raise CalculatorError("the result is too large")
        return text
    scale = 10**SIGNIFICANT_DIGITS
    if (value * scale).denominator == 1 and abs(value) < scale:
        return _decimal(value, SIGNIFICANT_DIGITS)
    digits = SIGNIFICANT_DIGITS - 1 - math.floor(math.log10(abs(value)))
    if digits > MAX_SHOWN_DIGITS:
        return f"{float(value):.{SIGNIFICANT_DIGITS}g}"
    if digits <= 0:
        return _shown(Fraction(round(value)))
    return _decimal(value, digits)


def _decimal(value: Fraction, places: int) -> str:
    whole, rest = divmod(round(abs(value) * 10**places), 10**places)
    shown = f"{whole}.{rest:0{places}}".rstrip("0").rstrip(".")
    return f"-{shown}" if value < 0 and shown != "0" else shown
