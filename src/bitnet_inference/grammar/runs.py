"""Rules of GBNF that are runs of characters, mostly white space, as `ws ::= [ \\t\\n]*` or `ws ::= ([ \\t\\n] ws)?`.

The library reads a rule that uses no recursive one as one terminal, as far as it goes: with such a run at its end it
takes a character that should come behind. Of what uses itself it reads each character alone, which is too much work in
the strings of JSON for large vocabularies.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import count

_RULE = re.compile(r"^[ \t]*([\w-]+)[ \t]*::=", re.MULTILINE)
_PART = re.compile(r'"(?:[^"\\\n]|\\.)*+"?|\[(?:[^\]\\\n]|\\.)*+\]?|#[^\n]*|\{[^}\n]*\}|[\w-]+|[^\s]')
_CLASS = r"(\[(?:[^\]\\\n]|\\.)++\])"
_RUN = re.compile(rf"{_CLASS}\*|\(\s*{_CLASS}\s+([\w-]+)\s*\)\s*\?")


def with_runs(gbnf: str) -> str:
    """The same grammar, of which a run is read character by character, and what is before it at a rule's end, whole."""
    rules = _rules(gbnf)
    parts = {name: _PART.findall(body) for name, body in rules.items()}
    found = {name: run for name, body in rules.items() if (run := _run(name, body))}
    uses = {name: {part for part in parts[name] if part in rules and part != name} for name in rules}
    uses |= {name: uses[name] | {name} for name in rules.keys() - found.keys() if name in parts[name]}
    plain, runs = _without_cycles(uses), {name: run[1] or run[2] for name, run in found.items()}
    if plain == rules.keys():
        return _text(rules | {name: f"{chars}*" for name, chars in runs.items()}) if runs else gbnf
    plain -= found.keys()
    for name in found:  # that was part of terminals, and would take them apart
        if found[name][1] and not all(_ends(parts[user], runs) for user in plain if name in uses[user]):
            del runs[name]
    return _split(rules, runs, plain, parts) if runs else gbnf


def _split(
    rules: Mapping[str, str], runs: Mapping[str, str], plain: set[str], parts: Mapping[str, Sequence[str]]
) -> str:
    """With the runs as rules that use themselves; what was one terminal before one becomes a rule of its own."""
    readable: dict[str, str] = {}
    for name, body in rules.items():
        if name in runs:
            readable[name] = f"({runs[name]} {name})?"
        elif name in plain and _ends(parts[name], runs):
            free = (f"{name}-{number}" for number in count())
            before, last = next(each for each in free if each not in rules and each not in readable), parts[name][-1]
            readable |= {name: f"{before} {last}", before: body.rstrip()[: -len(last)]}
        else:
            readable[name] = body
    return _text(readable)


def _rules(gbnf: str) -> dict[str, str]:
    """Their bodies by their names, without comments; none where two have one name, which the library refuses."""
    bare = _PART.sub(lambda found: "" if found[0][0] == "#" else found[0], gbnf)
    _, *split = _RULE.split(bare)
    rules = dict(zip(split[::2], split[1::2], strict=True))
    return rules if 2 * len(rules) == len(split) else {}


def _text(rules: Mapping[str, str]) -> str:
    return "\n".join(f"{name} ::= {body.strip()}" for name, body in rules.items()) + "\n"


def _run(name: str, body: str) -> re.Match[str] | None:
    found = _RUN.fullmatch(body.strip())
    return found if found and found[3] in (None, name) else None


def _without_cycles(uses: Mapping[str, set[str]]) -> set[str]:
    """The rules that lead to none that uses itself."""
    users: dict[str, list[str]] = {name: [] for name in uses}
    for name, used in uses.items():
        for each in used:
            users[each].append(name)
    plain, num_left = set[str](), {name: len(used) for name, used in uses.items()}
    waiting = [name for name, used in uses.items() if not used]
    while waiting:
        plain.add(name := waiting.pop())
        for user in users[name]:
            num_left[user] -= 1
            waiting += [user] if not num_left[user] else []
    return plain


def _ends(parts: Sequence[str], runs: Mapping[str, str]) -> bool:
    """Whether it is one sequence with a run at its end, and nowhere else."""
    *before, last = parts or [""]
    depth, is_sequence = 0, bool(before)
    for part in before:
        depth += (part == "(") - (part == ")")
        is_sequence &= part not in runs and not (part == "|" and not depth)
    return is_sequence and last in runs
