"""What models write becomes what the verifiers read, with its value unchanged."""

# ruff: noqa: RUF001 - look-alike characters are the subject here.

from __future__ import annotations

import time
from fractions import Fraction

import pytest

from hybridflow.rewards.notation import formula, has_variables, numbers, plain, value, without_unit, word


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("\u22125", "-5"),  # the minus sign of Unicode, and a dash
        ("\u20135", "-5"),
        ("５０％", "50%"),
        ("٥", "5"),
        ("𝟓", "5"),
        ("5\u200b", "5"),
        ("\u202a5", "5"),
        ("5\u00a0cm", "5 cm"),
        ("½", "1/2"),
        ("−2½", "-(2+1/2)"),
        ("2 1/2", "(2+1/2)"),
        ("x^2 1/2", "x^2 1/2"),
        ("1\u202f234", "1234"),
        ("1{,}234", "1234"),
        (r"1\,234\,567", "1234567"),
        ("1'000", "1000"),
        ("1_000", "1000"),
        ("1,234", "1,234"),
        ("(1, 234)", "(1, 234)"),
        ("10²", "10^{2}"),
        ("10⁻³", "10^{-3}"),
        ("√2", r"\sqrt{2}"),
        ("√(x+1)", r"\sqrt{x+1}"),
        (r"\$5", "5"),
        ("US$5", "5"),
        ("-$5", "-5"),
        ("€5", "5"),
        ("$x$", "$x$"),
        ("Zürich", "Zürich"),
    ],
)
def test_a_text_in_plain_notation(text: str, wanted: str):
    assert plain(text) == wanted


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("7 + 5 = 12.", ["7", "5", "12"]),
        ("it costs $1,234.50", ["1234.50"]),
        ("10-5", ["10", "5"]),
        ("x=-5", ["-5"]),
        ("(-5)", ["-5"]),
        ("3 - 5", ["3", "5"]),
        ("H2O and x_3 and x^4", []),
        ("答案是72", ["72"]),
        (r"\frac{1}{2} or 2\frac34", ["1/2", "(2+3/4)"]),
        ("-1/2, .5, 1.5e3", ["-1/2", ".5", "1.5e3"]),
        ("12,34", ["12", "34"]),
        ("50%", ["50"]),
        ("none", []),
    ],
)
def test_the_numbers_of_a_text(text: str, wanted: list[str]):
    assert numbers(plain(text)) == wanted


@pytest.mark.parametrize(
    ("number", "wanted"),
    [
        ("-1/2", Fraction(-1, 2)),
        ("(2+3/4)", Fraction(11, 4)),
        ("-(2+1/2)", Fraction(-5, 2)),
        ("1.5e3", 1500),
        (".5", 0.5),
    ],
)
def test_the_value_of_a_number(number: str, wanted: Fraction | float):
    assert value(number) == wanted


def test_what_has_no_value_is_none():
    assert value("1/0") is None and value("") is None and value("9" * 5000) is None
    assert numbers("1e999999999") == ["1"]  # nothing is computed that would not end


def test_words_are_told_from_formulas():
    assert word("Tuesday.") == word(r"\text{Tuesday}") == "tuesday"
    assert word(r"\text{no solution}") == "no solution"
    assert [word(text) for text in ("x", "A", r"\frac{a}{b}", "pi", "x y1", "5 cm", "")] == [None] * 7


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("x^2+1", r"\boxed{x^2+1}"),
        ("**5**", r"\boxed{5}"),
        ("50%", "$50$%"),
        (r"50\%", "$50$%"),
        (r"so \boxed{50\%}", r"so $\boxed{50}$%"),
        (r"$50\%$", "$50$%"),
        ("1 234", r"\boxed{1234}"),
        ("1.5e-3", r"\boxed{1.5\times 10^{-3}}"),
        (r"0.1\overline{6}", r"\boxed{\frac{15}{90}}"),
        ("2pi", r"\boxed{2\pi}"),
        ("The answer is 5.", "The answer is 5."),
        ("5\n6", "5\n6"),
    ],
)
def test_a_formula_that_stands_alone_is_marked(text: str, wanted: str):
    assert formula(text, whole=False) == wanted


def test_units_and_variables():
    assert without_unit("5 km/h") == without_unit("5 m^2") == without_unit("5 cm.") == "5"
    assert without_unit("5 x + 3") == "5 x + 3" and without_unit("x 5") == "x 5"
    assert has_variables("x+1") and not has_variables(r"\frac{1}{2}\text{ cm}") and not has_variables("2pi")


@pytest.mark.parametrize(
    "text", ["9" * 20000, "½" * 5000, "1 " * 10000, "1," * 10000, "√(" * 5000, "{" * 20000, "$" * 9999]
)
def test_long_garbage_is_read_in_linear_time(text: str):
    start = time.process_time()
    numbers(plain(text))
    word(text)
    without_unit(formula(plain(text), whole=False))
    assert time.process_time() - start < 1.0
