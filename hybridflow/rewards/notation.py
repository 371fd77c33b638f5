r"""Numbers, formulas and words as models write them, put into the one notation that the verifiers compare.

Where it stands: under :mod:`hybridflow.rewards.verifiers`; pure functions on texts. Invariant: the value stays. ``−5``
(with the minus sign of Unicode) becomes ``-5``, ``2½`` ``(2+1/2)``, ``1{,}234`` ``1234``; what is dropped is invisible,
separates thousands, or is a currency's sign.
"""

# ruff: noqa: RUF001, RUF002 - look-alike characters are the subject here.

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction

_INVISIBLE = dict.fromkeys([0xAD, 0xFEFF, *range(0x200B, 0x2010), *range(0x202A, 0x202F), *range(0x2060, 0x2070)])
_SYMBOLS = str.maketrans(
    dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\ufe63\uff0d", "-")
    | {"×": r"\times ", "·": r"\cdot ", "÷": "/", "\u2044": "/", "π": r"\pi ", "∞": r"\infty ", "°": r"^\circ "}
    | {"≤": r"\leq ", "≥": r"\geq ", "≠": r"\neq ", "±": r"\pm "}
)
_SUPERSCRIPT = re.compile("[⁺⁻]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+")
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-")
_VULGAR = re.compile(r"(?:(?<!\d)(\d+)\s*)?([¼½¾⅐-⅞])")
_ROOT = re.compile(r"√\s*(?:\(([^()]*)\)|(\d+(?:\.\d+)?|[A-Za-z]))")

_CURRENCY = re.compile(r"(?:\\\$|[€£¥₹])\s*(?=\d)")
# Between groups of three digits. A comma stays, because (1,234) may be a pair; the readers of numbers know it.
_THOUSANDS = re.compile(r"(?<=\d)(?:\{,\}|\\[,;:! ]|[\u00a0\u202f\u2007\u2009\u2019'_])+(?=\d{3}(?!\d))")
_SPACED_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?: \d{3})+(?![\d,])")
_MIXED = re.compile(r"(?<![\w./^{*)])(\d+) +(\d+)/(\d+)(?![\w/.])")
_SCIENTIFIC = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([+-]?\d+)(?![\w.])")

_FRACTION = re.compile(r"(\d)?\s*\\[dtc]?frac\s*(?:\{(\d+)\}|(\d))\s*(?:\{(\d+)\}|(\d))")
_UNSIGNED = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:/\d+|[eE][+-]?\d{1,3}(?!\d))?|\.\d+"
_NUMBER = re.compile(rf"((?<![\w)\]}}.])-)?\\?[$€£¥]?(?<![A-Za-z_^\d.])(\(\d+\+\d+/\d+\)|{_UNSIGNED})")

_FORMULA = re.compile(r"\$|\\boxed|\\\(|\\\[")
_PERCENT = re.compile(r"\s*(?:\\?%|\\?\bpercent\b|\\text\{ ?percent\})$")
_PERCENT_INSIDE = re.compile(r"(\\boxed\{|\$)((?:[^{}$]|\{[^{}]*\})*?)\s*\\?%\s*(?:\}|\$)")
_REPEATING = re.compile(r"(?<!\d)(\d{0,9})\.(\d{0,9})\\overline\{(\d{1,9})\}")
_UNIT = re.compile(r"(-?\(?[\d.,/+]+\)?) +[^\W\d_][^\d=<>+-]*(?:\^\{?-?\d\}?)?")
_NAMES = re.compile(r"\\(?:begin|end)\{\w+\}|\\[A-Za-z]+|(?<![A-Za-z])(?:sqrt|pi|infinity)(?![A-Za-z])")
_PI = re.compile(r"(?<![\\A-Za-z])pi(?![A-Za-z])")
_LETTERS = re.compile(r"[^\W\d_]{2,}")
_TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_WORD = re.compile(r"[^\W\d_]{2,}(?:[ -][^\W\d_]+)*")


def plain(text: str) -> str:
    """The text with ASCII digits, signs and fractions, thousands together, and symbols as LaTeX's commands."""
    text = text.translate(_INVISIBLE).translate(_SYMBOLS)
    text = _VULGAR.sub(lambda found: _mixed(found[1], *unicodedata.normalize("NFKC", found[2]).split("\u2044")), text)
    text = _SUPERSCRIPT.sub(lambda found: f"^{{{found[0].translate(_SUPERSCRIPTS)}}}", text)
    if text.count("$") == 1:  # no mark of a formula, those come in pairs
        text = re.sub(r"(?:\b(?:US|CA|AU))?\\?\$", "", text)
    text = _THOUSANDS.sub("", _CURRENCY.sub("", text.replace("\\boxed {", "\\boxed{")))
    if not text.isascii():
        text = "".join(char if char.isascii() else _ascii(char) for char in text)
    text = _ROOT.sub(lambda found: rf"\sqrt{{{found[1] or found[2]}}}", text)
    return _MIXED.sub(lambda found: _mixed(*found.groups()), text)


def numbers(text: str) -> list[str]:
    """The numbers of a :func:`plain` text in order, as :func:`value` reads them, without commas and currency."""
    text = _FRACTION.sub(lambda f: _mixed(f[1], f[2] or f[3], f[4] or f[5]), text)
    return [sign + digits.replace(",", "") for sign, digits in _NUMBER.findall(text)]


def value(number: str) -> Fraction | None:
    """The value of one of :func:`numbers`; None for what is none, and for a division by zero."""
    sign, digits = (-1, number[1:]) if number.startswith("-") else (1, number)
    whole, _, rest = digits.strip("()").partition("+") if digits.startswith("(") else ("0", "", digits)
    try:
        return sign * (Fraction(whole) + Fraction(rest))
    except (ValueError, ZeroDivisionError):
        return None


def word(text: str) -> str | None:
    r"""A text that is only words (``Tuesday``, ``\text{no solution}``) in lower case; None for any other."""
    bare = _TEXT.sub(r"\1", text).strip(" .*`$")
    return bare.casefold() if _WORD.fullmatch(bare) and not _NAMES.fullmatch(bare) else None


def formula(text: str, whole: bool) -> str:
    r"""A :func:`plain` text with its formula marked, as math-verify wants it.

    A formula that stands alone and is not marked (``x^2+1``) is put into ``\boxed{}``, a number with a percent sign
    into ``$50$%``, which math-verify takes as equal to 50 and to 0.5. Text around a formula is left as it is.

    Args:
        whole: the text is known to be one formula, even if it has words (units).
    """
    text = _SCIENTIFIC.sub(r"\1\\times 10^{\2}", text.strip().strip("`*").strip())
    # math-verify would read the mixed number 1 + 234.
    text = _SPACED_THOUSANDS.sub(lambda found: found[0].replace(" ", ""), text)
    text = _REPEATING.sub(lambda found: _repeating(*found.groups()), text)
    if _FORMULA.search(text):
        return _PERCENT_INSIDE.sub(
            lambda found: f"${found[2]}$%" if found[1] == "$" else rf"$\boxed{{{found[2]}}}$%", text
        )
    if not whole and ("\n" in text or _LETTERS.search(_NAMES.sub("", _TEXT.sub("", text)))):
        return text
    text = text.rstrip(". ")
    number = _PERCENT.sub("", text)
    return f"${number}$%" if number != text else "\\boxed{" + _PI.sub(r"\\pi", text) + "}"


def without_unit(text: str) -> str:
    """``5`` of ``5 km/h``, for a :func:`plain` text that is a number, a blank and a unit; any other text as it is."""
    found = _UNIT.fullmatch(text.strip().rstrip("."))
    return found[1] if found else text


def has_variables(text: str) -> bool:
    r"""Whether a formula has letters besides the names of commands (``\frac``) and of known functions."""
    return re.search(r"[^\W\d_]", _NAMES.sub("", _TEXT.sub("", text))) is not None


def _mixed(whole: str | None, numerator: str, denominator: str) -> str:
    return f"({whole}+{numerator}/{denominator})" if whole else f"{numerator}/{denominator}"


def _repeating(whole: str, fixed: str, repeated: str) -> str:
    """0.1666... as a fraction: (16 - 1) / 90."""
    digits = len(repeated)
    over = int(whole + fixed + repeated) - int(whole + fixed or "0")
    return rf"\frac{{{over}}}{{{(10**digits - 1) * 10 ** len(fixed)}}}"


def _ascii(char: str) -> str:
    kind = unicodedata.category(char)
    if kind == "Nd":
        return str(unicodedata.digit(char))
    if kind == "Zs":
        return " "
    # Full-width forms, and the letters of mathematical typefaces.
    return unicodedata.normalize("NFKC", char) if "\uff01" <= char <= "\uff5e" or char >= "\U0001d400" else char
