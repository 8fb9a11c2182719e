"""Prose: turning facts into titled passages."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tests.toy.relations import EntityKind

_OPENERS: dict[EntityKind, tuple[str, ...]] = {
    "person": (
        "{n} is the {role} of our district.",
        "{n} is the {role} most people here would name first.",
        "Few people in these parts have not heard of {n}, the {role}.",
        "{n}, the {role}, needs no introduction to older readers.",
        "When people here speak of the {role}, they mean {n}.",
    ),
    "company": (
        "{n} is the {role} that everybody here knows.",
        "{n} is a {role} with a long history.",
        "Behind the name {n} stands a {role}.",
        "The {role} called {n} is part of local life.",
    ),
    "place": (
        "{n} is a quiet place for most of the year.",
        "Whoever comes from the hills sees {n} from far away.",
        "{n} has changed little in living memory.",
        "The road ends in {n}.",
    ),
    "event": (
        "{n} is the {role} that the whole district waits for.",
        "{n} is the {role} with customs of its own.",
        "Of all the dates in our calendar, the {role} named {n} is the loudest.",
        "The {role} known as {n} needs weeks of work.",
    ),
}
_ROLE_OPENERS: dict[EntityKind, tuple[str, ...]] = {
    "person": (
        "There is more to tell about the {role}.",
        "Much has been written about the {role} since.",
        "The {role} comes up again in the later papers.",
        "These pages return to the {role}.",
    ),
    "company": (
        "There is more to tell about the {role}.",
        "The {role} appears again in the account books.",
        "Later entries return to the {role}.",
    ),
    "place": (),
    "event": (),
}
_REPORT_OPENERS = (
    "{n} was well attended this time.",
    "The rain stopped just before {n} began.",
    "Our reporter spent a long day at {n}.",
    "There was hardly a free seat at {n}.",
)
_FILLERS: dict[EntityKind, tuple[str, ...]] = {
    "person": (
        "Neighbours describe a patient character with a dry sense of humour.",
        "Not every story that is told about those years can be true.",
        "A photograph in the reading room shows a tall figure in a dark coat.",
        "Friends remember long walks and even longer conversations.",
        "Letters from that time are kept in two boxes in the cellar.",
        "Nobody was surprised by this, least of all the family.",
        "Work begins early in the morning and seldom ends before dark.",
        "Some of the details were added much later by another hand.",
        "Those who know both sides of the story tend to smile about it.",
        "Little of this was known outside the family at the time.",
    ),
    "company": (
        "The books have been kept in the same careful hand for decades.",
        "A fire destroyed part of the old building, but nobody was hurt.",
        "Older residents still remember the sound of the bell at noon.",
        "Orders come in by post, and most are filled within a week.",
        "Rumours of a sale have come and gone more than once.",
        "The yard is swept every evening before the gates are closed.",
        "Apprentices are taken on each spring and stay for three years.",
        "There have been better years and worse ones, as everywhere.",
    ),
    "place": (
        "In winter the roads are often closed for several days.",
        "The houses stand close together and most have slate roofs.",
        "A single inn offers rooms to those who miss the last coach.",
        "Older maps spell the name in three different ways.",
        "Children still learn the old songs by heart.",
        "On clear days the mountains can be seen from the upper windows.",
        "Most families have lived there for many generations.",
        "The council meets in a room above the fire station.",
    ),
    "event": (
        "Tickets are sold at the door and seldom last the morning.",
        "Most guests come on foot, some by the early coach.",
        "In bad weather everything is moved under canvas.",
        "A brass band plays until the lamps are lit.",
        "The programme is printed on thin yellow paper.",
        "Volunteers clear the tables long after midnight.",
        "Every few years somebody proposes to change the rules, in vain.",
        "Photographs of earlier years hang in the entrance.",
    ),
}
_CLOSERS = (
    "More can be found in the reading room on the first floor.",
    "The rest of the file has not been put in order yet.",
    "This entry was last revised by the archive in spring.",
    "Corrections may be left with the clerk at the desk.",
    "No further papers on the matter have survived.",
)
_NEUTRAL_TITLES = (
    "From the gazette",
    "Later years",
    "Notes in the margin",
    "A clipping",
    "Papers from the attic",
    "What happened next",
    "Second notebook",
    "Overheard at the inn",
    "An addendum",
    "Loose pages",
    "The clerk remembers",
    "Found between two ledgers",
)
_TITLES: dict[EntityKind, tuple[str, ...]] = {
    "person": ("{n}", "Portrait of {n}", "People: {n}", "{n}, a short life"),
    "company": ("{n}", "The story of {n}", "Companies: {n}", "About {n}"),
    "place": ("{n}", "A visit to {n}", "Places: {n}", "{n} and its people"),
    "event": ("{n}", "All about {n}", "Events: {n}", "{n}, year after year"),
}
_REPORT_TITLES = ("Report from {n}", "A day at {n}", "Scenes from {n}", "{n} in brief")


@dataclass(frozen=True)
class Style:
    """How passages are written.

    Parameters
    ----------
    targets : tuple of int
        How many words a passage is to have at least; one of them is drawn for each.
    openers, role_openers, report_openers : dict or tuple of str
        First sentences of profiles, sequels (``{role}`` alone) and reports.
    fillers, closers : dict or tuple of str
        Sentences that state no fact, mixed in until the passage is long enough; ``{y}`` is any year.
    """

    targets: tuple[int, ...]
    openers: Mapping[EntityKind, tuple[str, ...]]
    role_openers: Mapping[EntityKind, tuple[str, ...]]
    report_openers: tuple[str, ...]
    fillers: Mapping[EntityKind, tuple[str, ...]]
    closers: tuple[str, ...]


PLAIN = Style((60, 60, 70, 85), _OPENERS, _ROLE_OPENERS, _REPORT_OPENERS, _FILLERS, _CLOSERS)


@dataclass(frozen=True)
class Sayable:
    """One fact, ready to be said: its statement templates, value and what its subject may be called."""

    statements: tuple[str, ...]
    value: str
    subjects: tuple[str, ...]
    """Ways to name the subject at this point; the first is always clear on its own."""
    pronoun: str


def _say(rng: random.Random, fact: Sayable, *, may_use_pronoun: bool, clear: bool = False) -> str:
    """Say one fact; with ``clear`` only by a statement that names its subject."""
    templates = [text for text in fact.statements if "{S}" in text or "{s" in text] if clear else fact.statements
    template = rng.choice(list(templates))
    use_pronoun = may_use_pronoun and rng.random() < 0.6
    subject = fact.pronoun if use_pronoun else rng.choice(fact.subjects)
    objective = {"she": "her", "he": "him", "it": "it"}[fact.pronoun] if use_pronoun else subject
    capital = subject[0].upper() + subject[1:]
    return template.format(S=capital, s=subject, s_obj=objective, v=fact.value)


def _fit(rng: random.Random, style: Style, sentences: list[str], fillers: Sequence[str]) -> str:
    """Mix in sentences that state no fact until the text is long enough."""
    target = rng.choice(style.targets)
    spare = rng.sample(list(fillers), len(fillers))
    words = sum(len(sentence.split()) for sentence in sentences)
    while words < target:
        extra = spare.pop() if spare else rng.choice(style.closers)
        if "{y}" in extra:
            extra = extra.format(y=rng.randint(1800, 1989))
        sentences.insert(rng.randint(1, len(sentences)), extra)
        words += len(extra.split())
    return " ".join(sentences)


@dataclass(frozen=True)
class Prose:
    """A finished title and text, and the words that say each fact, in the order the facts were given."""

    title: str
    text: str
    said: tuple[str, ...]


def write_profile(
    rng: random.Random, style: Style, kind: EntityKind, name: str, role: str, facts: Sequence[Sayable]
) -> Prose:
    """Write a passage that names its subject and, for all but places, tells its role."""
    opener = rng.choice(style.openers[kind]).format(n=name, role=role)
    said = tuple(_say(rng, fact, may_use_pronoun=True) for fact in facts)
    title = rng.choice(_TITLES[kind]).format(n=name)
    return Prose(title, _fit(rng, style, [opener, *said], style.fillers[kind]), said)


def write_sequel(rng: random.Random, style: Style, kind: EntityKind, called: str, facts: Sequence[Sayable]) -> Prose:
    """Write a passage that calls its subject by role, or by another description, and pronoun only."""
    opener = rng.choice(style.role_openers[kind]).format(role=called)
    said = tuple(_say(rng, fact, may_use_pronoun=True) for fact in facts)
    return Prose(rng.choice(_NEUTRAL_TITLES), _fit(rng, style, [opener, *said], style.fillers[kind]), said)


def write_report(rng: random.Random, style: Style, event: str, groups: Sequence[Sequence[Sayable]]) -> Prose:
    """Write a report from an event about several people, each named by role only.

    ``groups`` holds one sequence of facts a person; a person's facts stand together and the first names the role.
    """
    sentences = [rng.choice(style.report_openers).format(n=event)]
    said: list[str] = []
    for group in groups:
        parts = [_say(rng, fact, may_use_pronoun=index > 0, clear=True) for index, fact in enumerate(group)]
        sentences.append(" ".join(parts))
        said += parts
    title = rng.choice(_REPORT_TITLES).format(n=event)
    return Prose(title, _fit(rng, style, sentences, style.fillers["event"]), tuple(said))
