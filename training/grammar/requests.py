"""Requests for a story: a way of asking, and a phrase for what the story shall be about."""

import random

from .story import Story, choose

ASKING = """
Tell me a story about {x}.
Tell me a story about {x}.
Tell a story about {x}.
Tell me a short story about {x}.
Please tell me a story about {x}.
Can you tell me a story about {x}?
Can you write a story about {x}?
Could you write a story about {x}?
Could you please tell me a story about {x}?
Write a story about {x}.
Write a short story about {x}.
Write me a story about {x}, please.
I want a story about {x}.
I want a tale about {x}.
I would like to hear a story about {x}.
I'd like a story about {x}.
Tell me a tale about {x}.
Tell me a bedtime story about {x}.
A story about {x}, please.
A story about {x}.
Story about {x}
Make up a story about {x}!
Do you know a story about {x}?
Tell my daughter a story about {x}.
Tell us a story about {x}.
Give me a story about {x}.
Hi! Tell me a story about {x}.
Let me hear a story about {x}.
Invent a fairy tale about {x}.
What about a story about {x}?
{x}
Once upon a time there was {x}
""".strip().splitlines()

ABOUT_BOTH = """
a {k} [called|named|called|named|with the name|whose name is] {N}
a {mood} {k} [called|named] {N}
a {mood} {k} [called|named] {N}
a {mood} {k} [called|named] {N}
{N} the {k}
{N} the {mood} {k}
{N}, a {mood} {k}
{N}, the {mood} {k}
{N}, a {k}
a {k} [called|named] {N} who lives {home}
a {mood} {k} [called|named] {N} who lives {home}
a {mood} {k} [called|named] {N} that lived {home}
{N} the {k} who lives {home}
the {mood} {k} {N}
my {k} {N}
""".strip().splitlines()
ABOUT_KIND = """
a {k}
a {mood} {k}
the {mood} {k}
a {k} who lives {home}
a {mood} {k} who lives {home}
a {mood} {k} {home}
a {k} and [a|his|her] friend
""".strip().splitlines()
ABOUT_NAME = """
{N}
{N} who lives {home}
someone [called|named] {N}
{mood} {N}
""".strip().splitlines()
WITH_ITEM = " [and a {o}|and {his} {o}|with a {o}|who has a {o}|who loves {his} {o}]"
WITH_PLACE = " who [goes to|travels to|visits|walks to] {p}"
WITH_FRIEND = " and {his} friend {F}[| the {fk}]"

OPEN = """
Tell me a story.
tell me a story
Tell me a story, please.
Can you tell me a story?
Please tell me a story.
Write a story.
I want to hear a story.
Tell me a bedtime story.
Tell me something.
A story, please.
story
Once upon a time
Surprise me with a story.
Can I have a story?
Do you know any stories?
""".strip().splitlines()
ANOTHER = """
Another one, please.
Another one please
Another story, please!
Tell me another story.
One more!
One more story, please.
Can you tell me another one?
more
Tell me one more story.
Again!
That was nice. Tell me another one.
""".strip().splitlines()
NEXT = """
Now tell me one about {x}.
Now one about {x}.
And one about {x}?
Another one about {x}, please.
Tell me another story about {x}.
And now a story about {x}
How about {x}?
Can you tell me one about {x}?
""".strip().splitlines()

THEMES = {
    "friendship": ["friendship", "being a good friend"], "helping": ["helping others", "helping"],
    "sharing": ["sharing", "sharing things"], "honesty": ["honesty", "telling the truth"],
    "kindness": ["kindness", "being kind"], "courage": ["courage", "being brave"],
    "patience": ["patience", "not giving up"], "teamwork": ["teamwork", "working together"],
}  # fmt: skip
THEMED = list(THEMES)
WITH_THEME = [" with a moral about {t}", " that teaches {t}", " and about {t}", ". It should be about {t}", " and {t}"]


def _subject(rng: random.Random, story: Story) -> str:
    """What the story is about: name and kind, or one of them; sometimes with the thing or the friend in it."""
    fate = rng.random()
    forms = ABOUT_BOTH if fate < 0.72 else ABOUT_KIND if fate < 0.88 else ABOUT_NAME
    subject = rng.choice(forms)
    extra = rng.random()
    if "lives" not in subject and "lived" not in subject and "friend" not in subject:
        if extra < 0.08 and story.item and f"{story.item}" in story.text:
            subject += WITH_ITEM
        elif extra < 0.12 and story.place in story.text:
            subject += WITH_PLACE
        elif extra < 0.18 and forms is ABOUT_BOTH and story.friend.name in story.text:
            subject += WITH_FRIEND
    return subject


def ask_next(rng: random.Random, story: Story) -> str:
    """A request for a further story, about something or not."""
    if rng.random() < 0.5:
        return rng.choice(ANOTHER)
    subject = choose(rng, _subject(rng, story))
    text = rng.choice(NEXT).replace("{x}", subject).format(**story.slots)
    return text[0].upper() + text[1:]


def ask(rng: random.Random, story: Story, asks_theme: bool) -> str:
    """A request to which the story is the answer."""
    theme = rng.choice(THEMES[story.theme])
    if asks_theme and rng.random() < 0.4:
        subject = theme
    elif rng.random() < 0.08 and not asks_theme:
        return rng.choice(OPEN)
    else:
        subject = _subject(rng, story) + (rng.choice(WITH_THEME) if asks_theme else "")
    slots = story.slots | {"t": theme}
    asking = rng.choice(ASKING).replace("{x}", choose(rng, subject))
    text = asking.format(**slots)
    return text[0].upper() + text[1:]
