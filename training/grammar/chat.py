"""Conversations: requests for stories in many phrasings, questions about them, small talk, and what is not a story."""

import random

from . import requests, words
from .moods import draw_mood
from .story import Character, Story, articles, choose, draw_character, tell
from .talk import FOLLOW_UPS, OFF_TOPIC, REFUSALS, SMALL_TALK, SYSTEM_PROMPTS, THANKS

Message = dict[str, str]


def casual(rng: random.Random, text: str) -> str:
    """A request as people type it: sometimes in lower case, without a full stop, or with a "please"."""
    fate = rng.random()
    if fate < 0.16:
        text = text.lower() if fate < 0.06 else text[0].lower() + text[1:]
    if rng.random() < 0.35:
        text = text.rstrip(".!?")
    return text


def draw_hero(rng: random.Random) -> Character:
    """The hero of a story; most heroes have made-up names, so that the model copies and does not recall."""
    return draw_character(rng, 0.75)


def plain_story(rng: random.Random) -> str:
    """A story that nobody asked for."""
    mood = draw_mood(rng)
    return tell(rng, draw_hero(rng), mood, words.home(rng)).text


def story_turn(rng: random.Random) -> tuple[list[Message], Story]:
    """A request that fixes some of the facts, and a story in which they are true."""
    hero, mood, home = draw_hero(rng), draw_mood(rng), words.home(rng)
    theme = rng.choice(requests.THEMED) if rng.random() < 0.15 else None
    story = tell(rng, hero, mood, home, theme)
    request = articles(casual(rng, requests.ask(rng, story, asks_theme=theme is not None)))
    return [{"role": "user", "content": request}, {"role": "assistant", "content": story.text}], story


def answer_about(rng: random.Random, story: Story) -> list[Message]:
    """A question about the story just told, with its answer."""
    known = [pair for pair in FOLLOW_UPS if "{F}" not in pair[1] or story.friend.name in story.text]
    question, answer = rng.choice(known)
    facts = {
        "N": story.hero.name, "k": story.hero.kind, "F": story.friend.name, "fk": story.friend.kind, "home": story.home,
        "moral": story.moral, "mood": story.mood,
    }  # fmt: skip
    facts |= {key: story.slots[key] for key in ("he", "his", "him")}
    facts |= {"His": facts["his"].capitalize(), "He": facts["he"].capitalize()}
    question = casual(rng, choose(rng, question).format(**facts))
    answer = articles(choose(rng, answer).format(**facts))
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def small_talk(rng: random.Random, after: bool = False) -> list[Message]:
    """A greeting, thanks, or a question about the story-teller; behind a story it is mostly thanks."""
    question, answer = THANKS if after and rng.random() < 0.6 else rng.choice(SMALL_TALK)
    answer = choose(rng, answer)
    return [{"role": "user", "content": casual(rng, choose(rng, question))}, {"role": "assistant", "content": answer}]


def off_topic(rng: random.Random) -> list[Message]:
    """Something else than a story, politely declined."""
    question = casual(rng, choose(rng, rng.choice(OFF_TOPIC)))
    return [{"role": "user", "content": question}, {"role": "assistant", "content": choose(rng, rng.choice(REFUSALS))}]


def another(rng: random.Random) -> list[Message]:
    """A second story after the first."""
    messages, story = story_turn(rng)
    if rng.random() < 0.7:
        messages[0]["content"] = articles(casual(rng, requests.ask_next(rng, story)))
    return messages


def conversation(rng: random.Random) -> list[Message]:
    """Mostly a request and its story, then perhaps questions, thanks, something off topic or a second story."""
    messages: list[Message] = []
    if rng.random() < 0.06:
        messages.append({"role": "system", "content": rng.choice(SYSTEM_PROMPTS)})
    while rng.random() < 0.2:
        messages += small_talk(rng) if rng.random() < 0.7 else off_topic(rng)
    if rng.random() < 0.3 and messages and messages[-1]["role"] == "assistant":
        return messages
    turn, story = story_turn(rng)
    messages += turn
    while rng.random() < 0.3:
        kind = rng.random()
        if kind < 0.5:
            messages += answer_about(rng, story)
        elif kind < 0.8:
            messages += small_talk(rng, after=True) if kind < 0.72 else off_topic(rng)
        else:
            return messages + another(rng)
    return messages
