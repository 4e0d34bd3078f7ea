"""Numbers as people and models write them: read exactly, or not at all."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from polyturn.environments.rewards.numbers import boxed, last_number, read_number, same_number

READ = {
    # thousands, decimals, signs
    "1,080": 1080,
    "12,34,567": 1234567,
    "100,000,000.25": Fraction(400000001, 4),
    "72.": 72,
    "72.00": 72,
    ".5": Fraction(1, 2),
    "-7": -7,
    "−7": -7,  # noqa: RUF001
    "- 7": -7,
    "(-7)": -7,
    "+5": 5,
    "minus 7": -7,
    "negative $7": -7,
    "is -5": -5,
    "1_080": 1080,
    "1'080": 1080,
    "1\u202f080": 1080,
    "3,5": Fraction(7, 2),
    "0,333": Fraction(333, 1000),
    # money, units, words
    "$1,234.50": Fraction(2469, 2),
    "-$5": -5,
    "$-5": -5,
    "£20.": 20,
    "USD 5": 5,
    "Rs. 500": 500,
    "12 apples": 12,
    "20 dollars per day": 20,
    "5/day": 5,
    "5 miles/hour": 5,
    "5-pound bag": 5,
    "5 cm^2": 5,
    "5 cm²": 5,
    "90^\\circ": 90,
    "The answer is: 5!": 5,
    "**72**": 72,
    "It is *72*.": 72,
    "`72`": 72,
    "5 million": 5_000_000,
    "$2.5 billion": 2_500_000_000,
    "$5k": 5000,
    "5 K": 5,
    # equations
    "x = 5": 5,
    "= 5": 5,
    "2 + 3 = 5": 5,
    "5 =": 5,
    "sqrt(16) = 4": 4,
    "x \\approx 5.2": Fraction(26, 5),
    # fractions
    "3/4": Fraction(3, 4),
    "3 / 4 cup": Fraction(3, 4),
    "10/5": 2,
    "1.5/2": Fraction(3, 4),
    "3 1/2": Fraction(7, 2),
    "-3 1/2 cups": Fraction(-7, 2),
    "½": Fraction(1, 2),
    "3½": Fraction(7, 2),
    "-3/4": Fraction(-3, 4),
    # powers of ten
    "1e3": 1000,
    "1.5E-3": Fraction(3, 2000),
    "12e": 12,
    "3x10^4": 30000,
    "3 × 10⁴": 30000,  # noqa: RUF001
    "10^6": 10**6,
    "10^{-3}": Fraction(1, 1000),
    "1e400": 10**400,
    # LaTeX
    "$42$": 42,
    "\\(42\\)": 42,
    "\\boxed{42}": 42,
    "\\frac{3}{4}": Fraction(3, 4),
    "-\\dfrac{3}{4}": Fraction(-3, 4),
    "\\frac{-3}{4}": Fraction(-3, 4),
    "\\tfrac12": Fraction(1, 2),
    "3\\frac{1}{2}": Fraction(7, 2),
    "2 \\times 10^{3}": 2000,
    "1\\,080": 1080,
    "1{,}080": 1080,
    "5\\text{ apples}": 5,
    "\\text{5 apples}": 5,
    "\\$5.00": 5,
    "\\left(5\\right)": 5,
}

PERCENT = {"50%": 50, "18\\%": 18, "5 percent": 5, "5 per cent": 5, "-2.5 %": Fraction(-5, 2)}

NO_NUMBER = [
    "",
    " ",
    "no number",
    "five",
    "NUMBER",
    "x",
    # several
    "5 or 6",
    "5-6",
    "5, 6",
    "1,2,3",
    "1,234,56",
    "10:30",
    "1.2.3",
    "2024-01-05",
    "3/4/5",
    "1 080",
    # work left undone, and what changes a value
    "2 + 3",
    "2*3",
    "10 minus 5",
    "5^2",
    "5²",
    "2^{10}",
    "\\sqrt{16}",
    "sqrt(16)",
    "√16",
    "|5|",
    "5 \\pm 1",
    "\\pi",
    "2\\pi",
    "2π",
    "half of 5",
    "twice 5",
    "5 squared",
    "x/2",
    "x - 5",
    "x-5",
    "5*x",
    "> 5",
    # no value
    "1/0",
    "\\frac{1}{0}",
    "3 1/0",
    "1e401",
    "1e999999999",
    "1e-999999999999999999999",
    "10^{999999999}",
    "3 x 10^99999",
    # part of a name
    "CO2",
    "v1.2",
    "x5",
    "\u0665",
    "9" * 401,
    "5" + " " * 300,
]


@pytest.mark.parametrize(("text", "value"), READ.items())
def test_what_is_a_number(text, value):
    number = read_number(text)
    assert number is not None
    assert (number.value, number.percent) == (value, False)


@pytest.mark.parametrize(("text", "value"), PERCENT.items())
def test_what_is_a_share(text, value):
    number = read_number(text)
    assert number is not None
    assert (number.value, number.percent) == (value, True)


@pytest.mark.parametrize("text", NO_NUMBER, ids=lambda text: text[:30])
def test_what_is_none(text):
    assert read_number(text) is None


@pytest.mark.parametrize(
    ("given_", "expected", "same"),
    [
        ("1080", "1,080", True),
        ("$1,080.00", "1080", True),
        ("1/3", "0.333333333", False),
        ("0.1", "1/10", True),
        ("12 apples", "12 pears", True),
        ("-12", "12", False),
        ("50%", "50", True),
        ("50%", "0.5", True),
        ("1/2", "50 %", True),
        ("50", "0.5", False),
        ("50%", "0.5%", False),
        ("50%", "5000", False),
        ("1e3", "1000", True),
        ("5 or 6", "5", False),
        ("2 + 3", "5", False),
        ("", "0", False),
        ("no number", "no number", False),
        ("1/0", "1/0", False),
    ],
)
def test_same_number(given_, expected, same):
    assert same_number(given_, expected) is same
    assert same_number(expected, given_) is same


@pytest.mark.parametrize(
    ("text", "last"),
    [
        ("She has 12 eggs and sells each for $1,080.50.", "1,080.50"),
        ("12 of 15", "15"),
        ("It fell by -3 1/2 points", "-3 1/2"),
        ("so x = \\frac{3}{4}", "3/4"),
        ("5 and then 1/0", "5"),
        ("20-5", "5"),
        ("In 5 tries, 80% hit", "80%"),
        ("nothing", None),
        ("", None),
        ("9 " + "x" * 5000, None),
    ],
)
def test_last_number(text, last):
    assert last_number(text) == last


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        ("so \\boxed{42}.", "42"),
        ("\\boxed{\\frac{3}{4}}", "\\frac{3}{4}"),
        ("\\boxed{1} then \\boxed {2}", "2"),
        ("\\boxed{\\boxed{5}}", "5"),
        ("\\fbox{5}", None),
        ("\\fboxed{5}", "5"),
        ("\\boxed{1} then \\boxed{2", "1"),
        ("} \\boxed{3} {", "3"),
        ("\\boxed{}", ""),
        ("boxed{3}", None),
        ("", None),
    ],
)
def test_boxed(text, inside):
    assert boxed(text) == inside


# ── properties ─────────────────────────────────────────────────────────────────────────────────────────────────────────

integers = st.integers(-(10**15), 10**15)
MATHS = st.text(alphabet="0123456789.,+-*/^%$= eE\\{}()fracboxedtimes½−⁄", max_size=80)  # noqa: RUF001
BEFORE = st.sampled_from(["", "The answer is ", "x = ", "$", "about ", "**", "\\text{total} = "])
AFTER = st.sampled_from(["", ".", " apples", "\n", "!", " per day", "**", "\\text{ cm}"])


@given(st.text(max_size=60) | MATHS)
@example("1" * 5000)
@example("*" * 5000 + "5")
@example("\\boxed{" * 700)
@example("^" + " " * 4000 + "\\circ")
@example("5 " + "," * 4000)
@example("\\frac{" * 500 + "1")
def test_any_text_is_read_or_not_and_nothing_is_raised(text):
    number = read_number(text)
    assert number is None or isinstance(number.value, Fraction)
    found = last_number(text)
    assert found is None or read_number(found) is not None or "=" in found
    assert boxed(text) is None or "\\" in text


@given(integers, BEFORE, AFTER)
def test_an_integer_is_read_whatever_is_around_it(value, before, after):
    for written in (f"{value}", f"{value:,}", f"{value}.00"):
        if before == "$" and value < 0:
            continue
        number = read_number(f"{before}{written}{after}")
        assert number is not None
        assert number.value == value


@given(st.integers(-999, 999), st.integers(1, 999))
def test_a_fraction_is_read_in_every_notation(top, bottom):
    value = Fraction(top, bottom)
    for written in (f"{top}/{bottom}", f"\\frac{{{top}}}{{{bottom}}}", f"${top}/{bottom}$"):
        assert same_number(written, f"{value.numerator}/{value.denominator}"), written


@given(integers, st.integers(0, 12))
def test_a_decimal_equals_its_scientific_notation(digits, places):
    plain = Fraction(digits, 10**places)
    for written in (f"{digits}e-{places}", f"{digits} \\times 10^{{-{places}}}"):
        number = read_number(written)
        assert number is not None
        assert number.value == plain


@given(integers, integers)
def test_same_number_is_equality(left, right):
    assert same_number(str(left), f"{right:,}") is (left == right)


@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_two_numbers_are_none(left, right):
    assert read_number(f"{left} and {right}") is None
    assert last_number(f"{left} and {right}") == str(right)
