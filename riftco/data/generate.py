"""Deterministic text for a first run: little stories from plots and words, and questions with their answers.

Everything here is decided by the seed through Python's `random.Random` and its `randrange` alone, so a seed gives
the same text on every machine and Python version.
"""

import random
from collections.abc import Callable, Sequence
from typing import TypeVar

from riftco.data import story_words as words
from riftco.data._checks import positive_integer, unsigned_integer
from riftco.data.story_plots import ENDINGS, OPENINGS, PLOTS, Step

_Item = TypeVar("_Item")


def generate_stories(n_bytes: int, seed: int = 0) -> str:
    """Little stories of cause, talk and ending, a blank line between two; ASCII, so a byte is a character.

    Args:
        n_bytes: at least so many bytes, rounded up to the end of a story; a longer text of the same seed begins with
            the shorter one.
        seed: which stories.
    """
    wanted = positive_integer("generate_stories", "n_bytes", n_bytes)
    choose = _Chooser(unsigned_integer("generate_stories", "seed", seed))
    stories: list[str] = []
    size = 0
    while size < wanted:
        stories.append(_story(choose) + "\n\n")
        size += len(stories[-1])
    return "".join(stories)


def generate_instructions(n: int, seed: int = 0) -> list[dict[str, str]]:
    """Rows of {"prompt", "completion"}: facts of a short text, sums, copying, order, opposites, kinds of things.

    There are n rows. Kinds take turns, so that any n has all of them in
    equal shares; every completion is right and ends in a full stop.
    """
    count = positive_integer("generate_instructions", "n", n)
    choose = _Chooser(unsigned_integer("generate_instructions", "seed", seed))
    pairs = (_QUESTIONS[index % len(_QUESTIONS)](choose) for index in range(count))
    return [{"prompt": prompt, "completion": completion} for prompt, completion in pairs]


class _Chooser:
    """Draws from a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def number(self, stop: int) -> int:
        return self._random.randrange(stop)

    def one(self, items: Sequence[_Item]) -> _Item:
        return items[self.number(len(items))]

    def two(self, items: Sequence[_Item]) -> tuple[_Item, _Item]:
        first = self.number(len(items))
        second = self.number(len(items) - 1)
        return items[first], items[second + (second >= first)]


def _story(choose: _Chooser) -> str:
    fields = _fields(choose)
    steps: list[Step] = [OPENINGS, *choose.one(PLOTS), ENDINGS]
    sentences = [choose.one(step).format_map(fields) for step in steps]
    return " ".join(_capital(sentence) for sentence in sentences)


def _fields(choose: _Chooser) -> dict[str, str]:
    """One value for every field of a story."""
    hero_is_girl, friend_is_girl = choose.number(2) == 0, choose.number(2) == 0
    girls, boys = choose.two(words.GIRLS), choose.two(words.BOYS)
    (preposition, place), (_, second_place) = choose.two(words.PLACES)
    spot, wrong_spot = choose.two(words.HIDING_PLACES)
    food, second_food = choose.two(words.FOODS)
    helper = choose.one(words.HELPERS)
    weather = choose.one(words.WEATHERS)
    noise_maker = choose.one(tuple(words.NOISES))
    hero_he, hero_him, hero_his = _pronouns(hero_is_girl)
    friend_he, friend_him, friend_his = _pronouns(friend_is_girl)
    return {
        "hero": girls[0] if hero_is_girl else boys[0],
        "he": hero_he,
        "him": hero_him,
        "his": hero_his,
        "friend": girls[1] if friend_is_girl else boys[1],
        "friend_he": friend_he,
        "friend_him": friend_him,
        "friend_his": friend_his,
        "place": place,
        "where": f"{preposition} {place}",
        "second_place": second_place,
        "spot": spot,
        "wrong_spot": wrong_spot,
        "food": food,
        "second_food": second_food,
        "helper": helper,
        "helper_name": f"{hero_his} {helper}",
        "weather": weather,
        "weather_fact": words.WEATHER_FACTS[weather],
        "weather_plan": words.WEATHER_PLANS[weather],
        "noise_maker": noise_maker,
        "noise": words.NOISES[noise_maker],
        "colour": choose.one(words.COLOURS),
        "thing": choose.one(words.THINGS),
        "handmade": choose.one(words.HANDMADE),
        "material": choose.one(words.MATERIALS),
        "animal": choose.one(words.ANIMALS),
        "size": choose.one(words.SIZES),
        "mood": choose.one(words.MOODS),
        "skill": choose.one(words.SKILLS),
        "time": choose.one(words.TIMES),
        "lesson": choose.one(words.LESSONS),
    }


def _pronouns(is_girl: bool) -> tuple[str, str, str]:
    return ("she", "her", "her") if is_girl else ("he", "him", "his")


def _capital(sentence: str) -> str:
    return sentence[0].upper() + sentence[1:]


def _owner_question(choose: _Chooser) -> tuple[str, str]:
    (one, other), (thing, second) = choose.two(words.GIRLS + words.BOYS), choose.two(words.THINGS)
    colour, second_colour = choose.two(words.COLOURS)
    story = f"{one} has a {colour} {thing}. {other} has a {second_colour} {second}."
    questions = (
        (f"What does {other} have?", f"{other} has a {second_colour} {second}."),
        (f"Who has the {thing}?", f"{one} has the {thing}."),
        (f"Which colour is the {second}?", f"The {second} is {second_colour}."),
    )
    question, answer = choose.one(questions)
    return f"{story} {question}", answer


def _place_question(choose: _Chooser) -> tuple[str, str]:
    (one, other), places = choose.two(words.GIRLS + words.BOYS), choose.two(words.PLACES)
    here, there = (" ".join(place) for place in places)
    name, where = choose.one(((one, here), (other, there)))
    return f"{one} is {here}. {other} is {there}. Where is {name}?", f"{name} is {where}."


def _sum_question(choose: _Chooser) -> tuple[str, str]:
    left, right = choose.number(21), choose.number(21)
    if choose.number(2):
        return f"What is {left} plus {right}?", f"{left + right}."
    left, right = max(left, right), min(left, right)
    return f"What is {left} minus {right}?", f"{left - right}."


def _count_question(choose: _Chooser) -> tuple[str, str]:
    name, thing = choose.one(words.GIRLS + words.BOYS), choose.one(("apple", "nut", "plum", "coin", "button", "stone"))
    have, more = 2 + choose.number(9), 2 + choose.number(9)
    prompt = f"{name} has {have} {thing}s and gets {more} more. How many {thing}s does {name} have now?"
    return prompt, f"{name} has {have + more} {thing}s."


def _copy_question(choose: _Chooser) -> tuple[str, str]:
    line = " ".join(choose.one(words.THINGS + words.COLOURS + words.ANIMALS) for _ in range(2 + choose.number(4)))
    return f"Repeat these words: {line}", f"{line}."


def _order_question(choose: _Chooser) -> tuple[str, str]:
    items = [choose.one(words.ANIMALS)]
    while len(items) < 3:
        item = choose.one(words.ANIMALS)
        if item not in items:
            items.append(item)
    which, index = choose.one((("first", 0), ("last", 2)))
    return f"Which word is {which}: {', '.join(items)}?", f"The {which} word is {items[index]}."


def _larger_question(choose: _Chooser) -> tuple[str, str]:
    left, right = choose.two(range(100))
    return f"Which number is larger, {left} or {right}?", f"{max(left, right)} is larger."


def _opposite_question(choose: _Chooser) -> tuple[str, str]:
    pair = choose.one(words.OPPOSITES)
    word, other = pair if choose.number(2) else pair[::-1]
    return f"What is the opposite of {word}?", f"The opposite of {word} is {other}."


def _kind_question(choose: _Chooser) -> tuple[str, str]:
    kind, other = choose.two(tuple(words.CATEGORIES))
    word = choose.one(words.CATEGORIES[kind])
    first, second = (kind, other) if choose.number(2) else (other, kind)
    return f"Is {word} the name of {_article(first)} or of {_article(second)}?", f"It is the name of {_article(kind)}."


def _article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


_QUESTIONS: tuple[Callable[[_Chooser], tuple[str, str]], ...] = (
    _owner_question,
    _sum_question,
    _place_question,
    _copy_question,
    _count_question,
    _order_question,
    _larger_question,
    _opposite_question,
    _kind_question,
)
