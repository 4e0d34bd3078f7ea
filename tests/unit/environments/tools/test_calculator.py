"""The calculator: right to the last digit, and an answer or an error for whatever it is given."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from polyturn.environments.tools.calculator import MAX_LENGTH, CalculatorError, calculate


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("3*(4+5)", "27"),
        ("1,080 / (4 + 5)", "120"),
        ("1,234,567.5 * 2", "2469135"),
        ("48/2=", "24"),
        (" 2 + 3 ", "5"),
        ("7 // 2", "3"),
        ("-7 // 2", "-4"),
        ("-7 % 3", "2"),
        ("2**10", "1024"),
        ("2**-1", "0.5"),
        ("9**0.5", "3"),
        ("2**0.5", "1.41421356237"),
        ("0.1 + 0.2", "0.3"),
        (".5*60", "30"),
        ("5.", "5"),
        ("2/3", "0.666666666667"),
        ("-1/3", "-0.333333333333"),
        ("200000/3", "66666.6666667"),
        ("1/8", "0.125"),
        ("1e3", "1000"),
        ("3 × 4 ÷ 6 − 1", "1"),  # noqa: RUF001
        ("--5", "5"),
        ("0 * -1", "0"),
        ("1**99999999999999999999", "1"),
        ("(-1)**10000000000000001", "-1"),
        ("0**5", "0"),
        ("1/3/10**20", "0.00000000000000000000333333333333"),
        ("1e-50", "1e-50"),
        ("10**39", "1" + "0" * 39),
        ("(" * 90 + "1" + ")" * 90, "1"),
    ],
)
def test_results(expression, result):
    assert calculate(expression) == result


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("", "empty"),
        ("=", "empty"),
        ("1/0", "division by zero"),
        ("5 % 0", "division by zero"),
        ("5 // (2-2)", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("2 +", "this is not an expression"),
        ("3(4)", "this is not an expression"),
        ("1 2", "this is not an expression"),
        ("()", "a comma may only stand between groups of three digits"),
        ("1,2", "a comma may only stand between groups of three digits"),
        ("1,08", "a comma may only stand between groups of three digits"),
        ("1,0800", "a comma may only stand between groups of three digits"),
        ("x + 1", "'x' is not allowed"),
        ("2^3", "'^' is not allowed; use numbers, + - * / // % **"),
        ("__import__('os')", "'_' is not allowed"),
        ("7j", "'j' is not allowed"),
        ("'a'*3", '"\'" is not allowed'),
        ("1 if 2 else 3", "'i' is not allowed"),
        ("e", "this is not an expression"),
        ("9**9**9", "a number is too large"),
        ("2**99999999999999999999", "a number is too large"),
        ("2**-99999", "a number is too large"),
        ("1e400", "a number is too large"),
        ("10**300 * 10**300", "a number is too large"),
        ("1.5**10000.5", "a number is too large"),
        ("10**40", "the result is too large"),
        ("(-8)**(1/3)", "a negative number has no such root"),
        ("1+" * 101 + "1", "longer than 200 characters"),
        ("\u0663+1", "'\u0663' is not allowed"),
    ],
)
def test_errors_are_said(expression, said):
    with pytest.raises(CalculatorError) as caught:
        calculate(expression)
    assert said in str(caught.value)


expressions = st.recursive(
    st.integers(0, 10**6).map(str) | st.decimals(0, 1000, places=2).map(str),
    lambda inner: st.tuples(inner, st.sampled_from("+-*/"), inner).map(lambda parts: f"({parts[0]} {parts[1]} {parts[2]})"),
    max_leaves=6,
)


def exact(text: str) -> Fraction | None:
    """The value by another way: every number a Fraction, evaluated by Python itself."""
    source = "".join(f"Fraction('{part}')" if part[0].isdigit() else part for part in _split(text))
    try:
        return eval(source, {"Fraction": Fraction})
    except ZeroDivisionError:
        return None


def _split(text: str) -> list[str]:
    spaced = text.replace("(", " ( ").replace(")", " ) ")
    return spaced.split()


@given(expressions)
def test_sums_are_exact(expression):
    value = exact(expression)
    if value is None:
        with pytest.raises(CalculatorError, match="division by zero"):
            calculate(expression)
        return
    assume(len(expression) <= MAX_LENGTH)
    shown = Fraction(calculate(expression))
    if value.denominator == 1:
        assert shown == value
    else:
        assert abs(shown - value) <= abs(value) * Fraction(1, 10**11)


@given(st.text(alphabet="0123456789.,+-*/%()eE =", max_size=60) | st.text(max_size=20))
@example("9" * 200)
@example("-" * 199 + "1")
@example("1/" * 99 + "3")
@example("9e99**9e9")
@example("(9**99)**(9**99)")
@example("0.1**9999")
def test_nothing_hangs_and_nothing_else_is_raised(expression):
    try:
        result = calculate(expression)
    except CalculatorError:
        return
    assert len(result) <= 60
    assert len(str(Fraction(result))) <= 400
