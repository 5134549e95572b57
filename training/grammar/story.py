"""Tells one story: draws a cast, expands a plot's beats, and keeps the facts for the questions that may follow."""

import random
import re
from dataclasses import dataclass, field
from itertools import pairwise

from . import names, words
from .moods import ANY_MOOD, MOODS
from .plots_days import DAY_PLOTS
from .plots_friends import FRIEND_PLOTS
from .plots_quests import QUEST_PLOTS
from .telling import ENDINGS, HABITS, INTROS, MORAL_LINES, MORALS

PLOTS = FRIEND_PLOTS | QUEST_PLOTS | DAY_PLOTS
PRONOUNS = {
    "she": {"he": "she", "his": "her", "him": "her", "himself": "herself"},
    "he": {"he": "he", "his": "his", "him": "him", "himself": "himself"},
}
_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_SLOT = re.compile(r"\{(\^?)([A-Za-z_]+)(\^?)\}")


@dataclass
class Character:
    """Somebody in a story."""

    name: str
    kind: str
    pronoun: str


@dataclass
class Story:
    """A story's text and what is true in it."""

    text: str
    plot: str
    theme: str
    moral: str
    hero: Character
    friend: Character
    mood: str
    home: str
    place: str
    item: str
    slots: dict[str, str] = field(default_factory=dict)


def draw_character(rng: random.Random, invent: float, taken: tuple[str, ...] = ()) -> Character:
    """A character whose name does not start like a taken one; the kind may fix the pronoun.

    Only heroes may be of a made-up kind.
    """
    while True:
        name, pronoun = names.pick(rng, invent)
        kind = words.kind(rng, made_up=0.0 if taken else 0.02)
        fixed = words.KIND_PRONOUN.get(kind, pronoun)
        known_other = fixed != pronoun and name in names.KNOWN[pronoun]
        alike = any(name[:3] == other[:3] for other in taken)
        if not alike and kind not in taken and not known_other:
            return Character(name, kind, fixed)


def choose(rng: random.Random, text: str) -> str:
    """Resolve every [a|b] in a text, innermost first."""
    while match := _CHOICE.search(text):
        text = text[: match.start()] + rng.choice(match[1].split("|")) + text[match.end() :]
    return text


def fill(text: str, slots: dict[str, str]) -> str:
    """Put the slots in: {He} or {inp^} capitalise what {he} or {inp} gives."""

    def value(match: re.Match[str]) -> str:
        key = match[2]
        if key in slots:
            return slots[key][0].upper() + slots[key][1:] if match[3] else slots[key]
        # {He} is {he} capitalised, {fHe} is {fhe} capitalised: the pronouns' own capital letter asks for it.
        text = slots[key.lower()]
        return text[0].upper() + text[1:]

    return articles(_SLOT.sub(value, text))


def articles(text: str) -> str:
    """Turn "a" into "an" before a vowel sound."""
    return re.sub(r"\b([Aa]) (?=(?!uni|use|one)[aeiou])", r"\1n ", text)


def _people(hero: Character, friend: Character, guest: Character) -> dict[str, str]:
    slots = {"N": hero.name, "k": hero.kind, "F": friend.name, "fk": friend.kind, "G": guest.name, "gk": guest.kind}
    for prefix, person in (("", hero), ("f", friend), ("g", guest)):
        slots |= {prefix + key: value for key, value in PRONOUNS[person.pronoun].items()}
    return slots


def _things(rng: random.Random, item: str, kind: str) -> dict[str, str]:
    place, preposition = rng.choice(words.PLACES)
    slots = {"p": place, "inp": f"{preposition} {place}", "item": ""}
    slots |= {
        "food": rng.choice(words.FOODS),
        "breakfast": rng.choice(words.FOODS),
        "monster": rng.choice(words.MONSTERS),
        "tr": rng.choice(words.TREASURES),
    }
    slots["tra"] = f"a {rng.choice(['golden', 'small silver', 'strange', 'shining', 'very old', 'blue'])} {slots['tr']}"
    able = [skill for skill in words.SKILLS if kind not in words.BORN_ABLE.get(skill[0], ())]
    slots["skill"], slots["skilling"], slots["skill_thing"] = rng.choice(able)
    slots["fear"], slots["fear_event"], slots["fear_good"] = rng.choice(words.FEARS)
    if item:
        slots["oo"] = rng.choice(words.ITEMS[item])
        slots["o"] = f"{rng.choice(words.COLOURS)} {slots['oo']}" if rng.random() < 0.9 else slots["oo"]
        slots["item"] = slots["o"]
    return slots


def _beats(rng: random.Random, plot: str, mood_line: str) -> list[str]:
    """One variant of each beat; "---" stays as the mark of a paragraph."""
    chosen = []
    for line in plot.strip().splitlines():
        if line.startswith("?") and rng.random() < 0.5:
            continue
        line = mood_line if line == "@mood" else rng.choice(line.removeprefix("?").split(" || "))
        chosen.append(choose(rng, line))
    return chosen


def _introduce(text: str, name: str, kind: str) -> str:
    """Say a friend's kind where the name comes first, if the beat chosen does not."""
    first, kind_at = text.find(f"{{{name}}}"), text.find(f"{{{kind}}}")
    if first < 0 or 0 <= kind_at < first + 30:
        return text
    return text[:first] + f"{{{name}}} the {{{kind}}}" + text[first + len(name) + 2 :]


def _shorten(rng: random.Random, text: str) -> str:
    """Once the thing is known by its colour, sometimes say only "the kite"."""
    head, found, tail = text.partition("{o}")
    parts = tail.split("the {o}")
    return head + found + parts[0] + "".join(f"the {{{rng.choice(('o', 'oo'))}}}{part}" for part in parts[1:])


def _join(beats: list[str], paragraphs: bool) -> str:
    """Beats to text; no paragraph opens with a name, so that names keep their leading space."""
    text = beats[0]
    for before, beat in pairwise(beats):
        if beat != "---":
            breaks = before == "---" and paragraphs and not beat.startswith(("{N}", "{F}", "{G}"))
            text += ("\n\n" if breaks else " ") + beat
    return text


def tell(rng: random.Random, hero: Character, mood: str, home: str, theme: str | None = None) -> Story:
    """A story about the hero given; of a plot of the theme, if there is one."""
    name = rng.choice([key for key, plot in PLOTS.items() if theme in (None, plot[0])])
    theme, item, beats = PLOTS[name]
    friend = draw_character(rng, 0.4, (hero.name, hero.kind))
    guest = draw_character(rng, 0.4, (hero.name, hero.kind, friend.name, friend.kind))
    slots = _people(hero, friend, guest) | _things(rng, item, hero.kind) | {"mood": mood, "home": home}
    slots["moral"] = rng.choice(MORALS[theme])
    early, later = MOODS.get(mood, ANY_MOOD)
    opening = [choose(rng, rng.choice(INTROS)), choose(rng, early)]
    opening += [choose(rng, rng.choice(HABITS))] if rng.random() < 0.4 else []
    body = _beats(rng, beats, later)
    endings = [line for line in ENDINGS if "{F}" not in line or "{F}" in " ".join(body)]
    ending = [choose(rng, rng.choice(endings))] if rng.random() < 0.6 else []
    ending += [choose(rng, rng.choice(MORAL_LINES))] if rng.random() < 0.6 or not ending else []
    text = _join(opening + body + ending, rng.random() < 0.8)
    text = fill(_shorten(rng, _introduce(_introduce(text, "F", "fk"), "G", "gk")), slots)
    return Story(text, name, theme, slots["moral"], hero, friend, mood, home, slots["p"], slots["item"], slots)
