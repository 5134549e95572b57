"""Which regular expressions are refused before the library sees them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from bitnet_inference.errors import InvalidParams

MAX_REPEATS = 10_000  # the library takes seconds to refuse much more

_COUNT = re.compile(r"\{\s*(\d*)\s*(?:,\s*(\d*)\s*)?\}")
_LOOK_AROUND = ("?=", "?!", "?<=", "?<!")
# Of a class, what it holds and its end. One without an end goes on to that of the text: to look for it from every
# bracket anew would take minutes.
_INSIDE, _END = r"(?:\\.|[^\]\\])*+", r"(?:\]|\\?\Z)"
_DECIMAL = "^(?!^[-+.]*$)"
_MOST_DIGITS = re.compile(r"\(\?=\[\\d\.\]\{1,(\d+)\}0\*\$\)")
_WHOLE = re.compile(r"(\(\?:\\d\{0,\d+\})\|")
_WITHIN_DIGITS = re.compile(_MOST_DIGITS.pattern + r"\\d\*\\\.\\d\*0\*\$")
# No point in front, and no two in a row: of a name, which is classes and points, and hosts, where none can be.
_EMAIL = re.compile(
    r"\^\(\?!\\\.\)\(\?!\.\*\\\.\\\.\)\(\[([^].]+)\\\.\]\*\)"
    r"(\[[^].]+\]@\(\[[^].]+\]\[[^].]+\]\*\\\.\)\+\[[^].]+\]\{2,\}\$)"
)
# Escaped characters, classes, groups' borders and counts; a class may begin with its own end, as in []a].
_SIGN = re.compile(rf"\\.|\[\^?\]?{_INSIDE}{_END}|[()]|{_COUNT.pattern}", re.DOTALL)
_CLASS = re.compile(rf"\\.|\[(\^?\]?)({_INSIDE})({_END})", re.DOTALL)
_RANGE = re.compile(r"(\\.|[^\\])-(\\.|[^\\])|\\.|.", re.DOTALL)  # of a class, or one of its characters


def plain_classes(regex: str) -> str:
    """With `[`, `-`, `&` and `~` by their numbers where they are characters of a class.

    For the library they are operations on sets: [^a&&b], [+--] and [a[b]] say something else than in ECMA-262 and GBNF.
    """

    def plain(found: re.Match[str]) -> str:
        return found[0] if found[2] is None else f"[{found[1]}{_RANGE.sub(numbered, found[2])}{found[3]}"

    def numbered(found: re.Match[str]) -> str:
        ends = [found[0]] if found[1] is None else [found[1], found[2]]
        return "-".join(f"\\x{ord(end):02x}" if end in "[-&~" else end for end in ends)

    return _CLASS.sub(plain, regex)


def without_look_around(regex: str) -> tuple[str, ...]:
    """The patterns that together say what one of pydantic for a Decimal, or of zod for an address, says by look-around.

    Any other one stays as it is, and alone.
    """
    if regex.startswith(_DECIMAL):
        return _plain_decimals(regex), "[0-9]"
    return (_EMAIL.sub(r"^(?:[\1]+\.)*[\1]*\2", regex),)


def _plain_decimals(regex: str) -> str:
    """That there is a digit is left to be asked for.

    Where the places behind the point have a limit of their own, the one of all digits adds nothing.
    """
    regex = _WHOLE.sub(r"\1$|", "^" + regex[len(_DECIMAL) :])  # pydantic forgets that nothing may follow
    regex = _WITHIN_DIGITS.sub(_of_digits, regex)
    return _MOST_DIGITS.sub("", regex)


def _of_digits(found: re.Match[str]) -> str:
    most = min(int(found[1][:3]) - 1, 99)
    return "(?:" + "|".join(rf"\d{{0,{most - behind}}}\.\d{{0,{behind}}}0*" for behind in range(most + 1)) + ")$"


def check_regex(where: str, regex: str) -> None:
    """Raises InvalidParams for look-around, and for counts as in a{1000000} or ((a{1000}){1000}){1000}."""
    for match in _SIGN.finditer(regex):
        if match[0] == "(" and regex.startswith(_LOOK_AROUND, match.end()):
            found = regex[match.start() : match.end() + 8]
            raise InvalidParams(f"grammar: {where}: look-around ({found}...) is not supported: write it without")
    if any(count > MAX_REPEATS for count in _nested_repeats(regex)):
        raise InvalidParams(f"grammar: {where}: a part repeats too often: repeat it {MAX_REPEATS} times at most in all")


def check_counts(where: str, grammar: str) -> None:
    """The same for the counts of a whole grammar, each for itself."""
    if any(_most(match) > MAX_REPEATS for match in _COUNT.finditer(grammar)):
        raise InvalidParams(f"grammar: {where}: a part repeats too often: repeat it {MAX_REPEATS} times at most")


def _nested_repeats(regex: str) -> Iterator[int]:
    """How often each counted part is repeated, with the counts inside it."""
    most = [1]  # in each open group
    closed, end = 1, -1  # the group that was closed last: its most, and where it ends
    for match in _SIGN.finditer(regex):
        if match[0] == "(":
            most.append(1)
        elif match[0] == ")" and len(most) > 1:
            closed, end = most.pop(), match.end()
            most[-1] = max(most[-1], closed)
        elif match[0].startswith("{"):
            repeats = _most(match) * (closed if match.start() == end else 1)
            most[-1] = max(most[-1], repeats)
            yield repeats


def _most(match: re.Match[str]) -> int:
    return max(int((number or "1")[:9]) for number in match.groups())
