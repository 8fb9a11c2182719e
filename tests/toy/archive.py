"""The town archive: entities, facts and passages, all made from a seed.

A passage either names its subject (a profile), or names it by its role alone and so depends on the profile that
tells whose role it is (a sequel about one subject, or a report from an event about several people). In a wide town
passages are longer, and some sequels call their subject by what it is to another ("the founder of Hulwyn"): these
depend on the profile of that other, which tells who it is.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

from cacheblend_rag.errors import ConfigError
from tests.toy.names import SPLITS, Split, draw, draw_people
from tests.toy.passages import PLAIN, Sayable, Style, write_profile, write_report, write_sequel
from tests.toy.relations import BRIDGES, PROFILE_RELATIONS, RELATIONS, REPORT_RELATIONS, VALUES, EntityKind, Relation
from tests.toy.wide import WIDE, WIDE_RELATIONS


@dataclass(frozen=True)
class Entity:
    """A person, company, place or event. ``role`` is unique within a town; a place has none."""

    kind: EntityKind
    name: str
    role: str
    pronoun: str


@dataclass(frozen=True)
class Fact:
    """One thing the archive says, and in which passage (its index)."""

    subject: Entity
    relation: Relation
    value: str
    passage: int
    event: str = ""
    called: str = ""
    """What the passage calls the subject, without an article, where it does not name it."""
    whose: int = -1
    """The passage that tells who is called so."""

    @property
    def named(self) -> bool:
        """Whether the passage names the subject."""
        return not self.called

    @property
    def described(self) -> bool:
        """Whether the passage calls the subject by what it is to another, not by its role."""
        return self.called not in ("", self.subject.role)


def bridges_in(facts: Iterable[Fact]) -> list[tuple[Fact, str]]:
    """Return the named facts whose value is another entity, each with what that one is by it: "founder of Hulwyn"."""
    return [
        (fact, BRIDGES[fact.subject.kind, fact.relation.key].format(n=fact.subject.name))
        for fact in facts
        if fact.named and (fact.subject.kind, fact.relation.key) in BRIDGES
    ]


@dataclass(frozen=True)
class Passage:
    """A titled passage.

    ``needs`` are the passages that say who is meant; ``said`` holds the words for each of the passage's facts.
    """

    index: int
    title: str
    text: str
    needs: tuple[int, ...] = ()
    said: tuple[str, ...] = ()

    @property
    def chunk(self) -> str:
        """The passage as it stands in a prompt."""
        return f"{self.title}\n{self.text}"


@dataclass(frozen=True)
class TownSize:
    """How much a town holds; ``facts`` a passage and subject at most, ``wide`` for longer passages of more kinds."""

    people: int = 22
    companies: int = 8
    places: int = 8
    events: int = 6
    sequels: int = 14
    company_sequels: int = 4
    facts: int = 4
    wide: bool = False

    def __post_init__(self) -> None:
        limits = {"people": (3, 45), "companies": (2, 20), "places": (2, 30), "events": (1, 12), "facts": (1, 5)}
        for name, (low, high) in limits.items():
            if not low <= getattr(self, name) <= high:
                raise ConfigError(name, getattr(self, name), f"use a number from {low} to {high}")
        if not 0 <= self.sequels <= self.people:
            raise ConfigError("sequels", self.sequels, "use at most one per person")
        if not 0 <= self.company_sequels <= self.companies:
            raise ConfigError("company_sequels", self.company_sequels, "use at most one per company")


@dataclass(frozen=True)
class Town:
    """A whole archive; its first passages are the profiles, in the order of the entities."""

    split: Split
    seed: int
    wide: bool
    entities: tuple[Entity, ...]
    facts: tuple[Fact, ...]
    passages: tuple[Passage, ...]


WIDE_SIZE = TownSize(companies=12, sequels=18, company_sequels=10, wide=True)
"""A town of the wider archive."""
NUMBERS = {"year": (1800, 1989), "number": (12, 980)}
"""Lowest and highest of the numbers that relations have for values."""
_DESCRIBED = 0.7
"""Share of a wide town's sequels that describe their subject, of those that can."""


@dataclass
class _Draft:
    rng: random.Random
    split: Split
    size: TownSize
    entities: list[Entity] = field(default_factory=list)
    facts: list[Fact] = field(default_factory=list)
    passages: list[Passage] = field(default_factory=list)
    spare: dict[str, list[str]] = field(default_factory=dict)

    @property
    def style(self) -> Style:
        return WIDE if self.size.wide else PLAIN

    def of_kind(self, kind: EntityKind) -> list[Entity]:
        return [entity for entity in self.entities if entity.kind == kind]

    def value(self, relation: Relation, subject: Entity) -> str:
        source = relation.value
        if source.startswith("@"):
            return self.rng.choice([entity.name for entity in self.entities if entity.kind == source[1:]])
        if source in NUMBERS:
            return str(self.rng.randint(*NUMBERS[source]))
        if source in self.spare:
            return self.rng.choice([name for name in self.spare[source] if name != subject.name])
        return self.rng.choice(VALUES[source])

    def tell(
        self, subject: Entity, keys: list[str], event: str = "", called: str = "", whose: int = -1
    ) -> list[Sayable]:
        """Invent a fact for each relation and record it for the passage about to be written."""
        sayable = []
        relations = WIDE_RELATIONS if self.size.wide else RELATIONS
        for key in keys:
            relation = relations[subject.kind][key]
            value = self.value(relation, subject)
            self.facts.append(Fact(subject, relation, value, len(self.passages), event, called, whose))
            said = f"the {called}" if called else subject.name
            sayable.append(Sayable(relation.statements, value, (said,), subject.pronoun))
        return sayable

    def by_role(self, subject: Entity, keys: list[str], event: str = "") -> list[Sayable]:
        """Invent facts of somebody named by role alone."""
        return self.tell(subject, keys, event, subject.role, self.entities.index(subject))

    def description(self, subject: Entity) -> tuple[str, int] | None:
        """What a subject is to another, and which profile tells it; of several one at random."""
        known = [(words, fact.passage) for fact, words in bridges_in(self.facts) if fact.value == subject.name]
        return self.rng.choice(known) if known else None


def _people_the_town(draft: _Draft) -> None:
    rng, split, size = draft.rng, draft.split, draft.size
    people = draw_people(rng, split, size.people + 8)
    professions = rng.sample(VALUES["profession"], size.people)
    for person, role in zip(people, professions, strict=False):
        draft.entities.append(Entity("person", person.text, role, person.pronoun))
    trades = rng.sample(VALUES["trade"], size.companies)
    for name, role in zip(draw(rng, "company", split, size.companies), trades, strict=True):
        draft.entities.append(Entity("company", name, role, "it"))
    places = draw(rng, "place", split, size.places + 4)
    draft.entities += [Entity("place", name, "", "it") for name in places[: size.places]]
    gatherings = rng.sample(VALUES["gathering"], size.events)
    for name, role in zip(draw(rng, "event", split, size.events), gatherings, strict=True):
        draft.entities.append(Entity("event", name, role, "it"))
    draft.spare = {
        "outsider": [person.text for person in people[size.people :]],
        "place": places,
        **{kind: draw(rng, kind, split, 20) for kind in ("river", "book", "prize")},
    }


def _write_profiles(draft: _Draft) -> dict[Entity, list[str]]:
    """Write one profile an entity and return which relations each has left."""
    left = {}
    for entity in draft.entities:
        keys = list(PROFILE_RELATIONS[entity.kind])
        draft.rng.shuffle(keys)
        count = min(len(keys), draft.size.facts)
        told, left[entity] = keys[:count], keys[count:]
        prose = write_profile(draft.rng, draft.style, entity.kind, entity.name, entity.role, draft.tell(entity, told))
        draft.passages.append(Passage(len(draft.passages), prose.title, prose.text, said=prose.said))
    return left


def _write_dependents(draft: _Draft, left: dict[Entity, list[str]]) -> None:
    """Write the passages that name their subjects by role only."""
    size = draft.size
    subjects = draft.of_kind("person")[: size.sequels] + draft.of_kind("company")[: size.company_sequels]
    for entity in subjects:
        keys = left[entity][: size.facts]
        if not keys:
            continue
        described = draft.description(entity) if size.wide and draft.rng.random() < _DESCRIBED else None
        called, whose = described or (entity.role, draft.entities.index(entity))
        facts = draft.tell(entity, keys, called=called, whose=whose)
        prose = write_sequel(draft.rng, draft.style, entity.kind, called, facts)
        draft.passages.append(Passage(len(draft.passages), prose.title, prose.text, (whose,), prose.said))
    report_keys = [relation.key for relation in REPORT_RELATIONS]
    for event in draft.of_kind("event"):
        people = draft.rng.sample(draft.of_kind("person"), 3)
        keys = draft.rng.sample(report_keys, 2)
        groups = [draft.by_role(person, keys, event.name) for person in people]
        prose = write_report(draft.rng, draft.style, event.name, groups)
        needs = tuple(draft.entities.index(person) for person in people)
        draft.passages.append(Passage(len(draft.passages), prose.title, prose.text, needs, prose.said))


def build_town(seed: int, split: Split = "train", size: TownSize | None = None) -> Town:
    """Make a town archive.

    Parameters
    ----------
    seed : int
        The same seed, split and size give the same town.
    split : {"train", "dev", "test"}
        Which names may be used; no name occurs in two splits.
    size : TownSize, optional
        How much the town holds.

    Raises
    ------
    ConfigError
        If the split is unknown.
    """
    if split not in SPLITS:
        raise ConfigError("split", split, f"choose one of {', '.join(SPLITS)}")
    size = size or TownSize()
    draft = _Draft(random.Random(f"town/{split}/{seed}"), split, size)
    _people_the_town(draft)
    _write_dependents(draft, _write_profiles(draft))
    return Town(split, seed, size.wide, tuple(draft.entities), tuple(draft.facts), tuple(draft.passages))
