"""What the archive knows: entity kinds, relations between them and how each is said and asked.

In every template ``{S}`` is a subject at the start of a sentence, ``{n}`` a name inside one, ``{v}`` the value,
``{av}`` the value with its article and ``{e}`` the event a fact belongs to. Predicates serve answers
("{n} was born in {v}.") and relative clauses ("..., who was born in {v}.").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

EntityKind = Literal["person", "company", "place", "event"]
ENTITY_KINDS: tuple[EntityKind, ...] = ("person", "company", "place", "event")


@dataclass(frozen=True)
class Relation:
    """One thing that can be said of one kind of entity.

    Parameters
    ----------
    key : str
        Its name within the entity kind.
    value : str
        Where values come from: a name kind, ``year``, ``number``, a closed list of `VALUES`, or ``@kind`` for an
        entity of the same town.
    predicate : str
        The answer without its subject and full stop.
    statements, questions : tuple of str
        The ways to say and to ask it.
    """

    key: str
    value: str
    predicate: str
    statements: tuple[str, ...]
    questions: tuple[str, ...]


@dataclass(frozen=True)
class Comparison:
    """A question which of two entities has the smaller or larger value of a numeric relation."""

    relation: str
    larger: bool
    verdict: str
    questions: tuple[str, ...]


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _pairs(firsts: str, seconds: str) -> tuple[str, ...]:
    return tuple(f"{first} {second}" for first in firsts.split() for second in seconds.split())


PROFESSIONS = _words(
    "violinist baker surveyor painter weaver botanist clockmaker dentist ferryman gardener harpist innkeeper jeweller "
    "librarian mason notary organist pilot potter printer sailor sculptor singer smith tailor teacher translator "
    "trumpeter vintner watchman carpenter chemist cellist dancer engraver florist geologist historian journalist "
    "locksmith midwife miller nurse pharmacist poet saddler shepherd stonecutter tanner thatcher"
)
TRADES = _words(
    "brewery tannery shipyard glassworks foundry bakery sawmill laundry cannery quarry pottery ropeworks dairy "
    "distillery bindery brickyard smithy winery spinnery nursery"
)
GATHERINGS = _words(
    "regatta fair marathon banquet parade concert auction tournament pageant exhibition carnival symposium"
)

VALUES: dict[str, tuple[str, ...]] = {
    "profession": PROFESSIONS,
    "trade": TRADES,
    "gathering": GATHERINGS,
    "month": _words("January February March April May June July August September October November December"),
    "weekday": _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday"),
    "pet": _words(
        "heron goat parrot hedgehog tortoise raven ferret donkey spaniel kitten goose pony rabbit terrier lizard "
        "magpie badger canary poodle hamster"
    ),
    "hobby": _pairs("pressed painted antique foreign tiny", "ferns buttons stamps maps bells spoons coins keys"),
    "street": _pairs(
        "Copper Rope Mill Church Bell Tanner Linden Harbour Castle Garden Rose Salt Smith Tower Water",
        "Lane Street Row Square Hill Walk",
    ),
    "goods": _pairs(
        "wooden silver woollen paper leather painted", "toys gloves lamps chairs boxes flutes clocks hats drums tiles"
    ),
    "emblem": _pairs("blue green red white golden", "heron fox crown anchor lion tower rose bell"),
    "landmark": _pairs(
        "round leaning stone wooden painted white", "tower bridge windmill chapel lighthouse fountain gate archway"
    ),
    "award": _pairs("copper silver wooden glass painted", "kettle spoon bowl clock mirror flute plate lantern"),
    "dish": _pairs("plum cherry onion leek honey walnut", "pie soup cake bread pudding stew"),
    "topic": _words(
        "beekeeping tides comets glaciers orchards lighthouses mosses volcanoes railways fossils pigeons earthquakes "
        "canals whales mushrooms telescopes windmills dialects harvests sundials"
    ),
}

ROLES: dict[EntityKind, str] = {"person": "profession", "company": "trade", "event": "gathering", "place": "place"}

_PERSON = (
    Relation(
        "birthplace",
        "@place",
        "was born in {v}",
        (
            "{S} was born in {v}.",
            "{S} was born in {v}, in a house that no longer stands.",
            "According to the parish book, {s} was born in {v}.",
        ),
        ("Where was {n} born?", "In which place was {n} born?", "What is the birthplace of {n}?"),
    ),
    Relation(
        "birth_year",
        "year",
        "was born in the year {v}",
        ("{S} was born in the year {v}.", "The year of birth is given as {v}.", "{S} came into the world in {v}."),
        ("In which year was {n} born?", "When was {n} born?", "What is the year of birth of {n}?"),
    ),
    Relation(
        "employer",
        "@company",
        "works for {v}",
        ("{S} works for {v}.", "For some time now {s} has been on the books of {v}.", "{S} is employed by {v}."),
        ("Which company does {n} work for?", "Who employs {n}?", "What is the employer of {n}?"),
    ),
    Relation(
        "hobby",
        "hobby",
        "collects {v}",
        ("{S} collects {v}.", "In the evenings {s} sorts a collection of {v}.", "{S} is known to collect {v}."),
        ("What does {n} collect?", "Which things does {n} collect?"),
    ),
    Relation(
        "street",
        "street",
        "lives on {v}",
        ("{S} lives on {v}.", "{S} has rooms on {v}.", "The address is on {v}."),
        ("Which street does {n} live on?", "Where does {n} live?", "On which street is the home of {n}?"),
    ),
    Relation(
        "pet",
        "pet",
        "keeps a {v}",
        ("{S} keeps a {v}.", "Visitors are greeted by a tame {v} there.", "{S} is often seen with a {v}."),
        ("Which animal does {n} keep?", "What kind of animal does {n} keep?"),
    ),
    Relation(
        "book",
        "book",
        "wrote the book {v}",
        ("{S} wrote the book {v}.", "{S} published a book called {v}.", "{S} is the author of {v}."),
        ("Which book did {n} write?", "What is the title of the book that {n} wrote?"),
    ),
    Relation(
        "prize",
        "prize",
        "won the {v}",
        ("{S} won the {v}.", "The judges gave {s_obj} the {v}.", "{S} was awarded the {v}."),
        ("Which prize did {n} win?", "What did the judges award to {n}?", "Which award went to {n}?"),
    ),
    Relation(
        "moved",
        "place",
        "moved to {v}",
        ("{S} moved to {v}.", "In the end {s} moved to {v}.", "{S} packed a trunk and left for {v}."),
        ("Where did {n} move to?", "To which place did {n} move?"),
    ),
    Relation(
        "teacher",
        "outsider",
        "studied under {v}",
        ("{S} studied under {v}.", "{S} learned a great deal from {v}.", "{S} was a pupil of {v}."),
        ("Who taught {n}?", "Under whom did {n} study?", "Who was the teacher of {n}?"),
    ),
)

_COMPANY = (
    Relation(
        "founder",
        "@person",
        "was founded by {v}",
        ("{S} was founded by {v}.", "The founder was {v}.", "It was {v} who founded the firm."),
        ("Who founded {n}?", "Who is the founder of {n}?", "By whom was {n} founded?"),
    ),
    Relation(
        "founded",
        "year",
        "was founded in {v}",
        ("{S} was founded in {v}.", "{S} opened its doors in {v}.", "The founding year is given as {v}."),
        ("In which year was {n} founded?", "When was {n} founded?"),
    ),
    Relation(
        "seat",
        "@place",
        "has its seat in {v}",
        ("{S} has its seat in {v}.", "The main office is in {v}.", "{S} is run from {v}."),
        ("Where does {n} have its seat?", "In which place is the seat of {n}?"),
    ),
    Relation(
        "goods",
        "goods",
        "also sells {v}",
        ("{S} also sells {v}.", "On the side {s} trades in {v}.", "Its shop window is full of {v}."),
        ("What else does {n} sell?", "Which goods does {n} also sell?"),
    ),
    Relation(
        "staff",
        "number",
        "employs {v} people",
        ("{S} employs {v} people.", "The staff counts {v} people.", "There are {v} people on the payroll."),
        ("How many people does {n} employ?", "How many people work at {n}?"),
    ),
    Relation(
        "emblem",
        "emblem",
        "uses a {v} as its emblem",
        ("{S} uses a {v} as its emblem.", "A {v} is painted over the door.", "The emblem is a {v}."),
        ("What is the emblem of {n}?", "Which emblem does {n} use?"),
    ),
    Relation(
        "branch",
        "place",
        "opened a branch in {v}",
        ("{S} opened a branch in {v}.", "A second branch stands in {v}.", "{S} has also set up in {v}."),
        ("Where did {n} open a branch?", "In which place did {n} open a branch?"),
    ),
)

_PLACE = (
    Relation(
        "river",
        "river",
        "lies on the river {v}",
        ("{S} lies on the river {v}.", "The river {v} runs past its walls.", "Boats come up the river {v}."),
        ("Which river does {n} lie on?", "On which river does {n} lie?"),
    ),
    Relation(
        "landmark",
        "landmark",
        "is known for its {v}",
        ("{S} is known for its {v}.", "Travellers come to see the {v}.", "The {v} is its best known sight."),
        ("What is {n} known for?", "Which sight is {n} known for?"),
    ),
    Relation(
        "market",
        "weekday",
        "holds its market on {v}",
        ("{S} holds its market on {v}.", "Market day is {v}.", "Every {v} the market fills the square."),
        ("On which day does {n} hold its market?", "When is market day in {n}?"),
    ),
    Relation(
        "settled",
        "year",
        "received its charter in {v}",
        ("{S} received its charter in {v}.", "The charter dates from {v}.", "Its charter was sealed in {v}."),
        ("In which year did {n} receive its charter?", "When did {n} receive its charter?"),
    ),
    Relation(
        "school",
        "number",
        "has a school with {v} pupils",
        ("{S} has a school with {v} pupils.", "The school counts {v} pupils.", "There are {v} pupils in the school."),
        ("How many pupils does the school in {n} have?", "How many pupils go to school in {n}?"),
    ),
)

_EVENT = (
    Relation(
        "host",
        "@place",
        "takes place in {v}",
        ("{S} takes place in {v}.", "{S} is held in {v}.", "The setting is {v}."),
        ("Where does {n} take place?", "In which place is {n} held?"),
    ),
    Relation(
        "organiser",
        "@company",
        "is organised by {v}",
        ("{S} is organised by {v}.", "The organiser is {v}.", "It is {v} that organises everything."),
        ("Who organises {n}?", "Which company organises {n}?"),
    ),
    Relation(
        "month",
        "month",
        "is held in {v}",
        ("{S} is held in {v}.", "The month is always {v}.", "{S} comes round each {v}."),
        ("In which month is {n} held?", "Which month is {n} held in?"),
    ),
    Relation(
        "first",
        "year",
        "was first held in {v}",
        ("{S} was first held in {v}.", "The first one was held in {v}.", "{S} goes back to {v}."),
        ("In which year was {n} first held?", "When was {n} first held?"),
    ),
    Relation(
        "visitors",
        "number",
        "draws {v} visitors",
        ("{S} draws {v} visitors.", "About {v} visitors come.", "In a good year {s} draws {v} visitors."),
        ("How many visitors does {n} draw?", "How many visitors come to {n}?"),
    ),
)

REPORT_RELATIONS = (
    Relation(
        "award",
        "award",
        "won a {v} at {e}",
        ("{S} won a {v}.", "{S} went home with a {v}.", "The prize for {s_obj} was a {v}."),
        ("What did {n} win at {e}?", "Which prize did {n} take home from {e}?"),
    ),
    Relation(
        "dish",
        "dish",
        "brought {v} to {e}",
        ("{S} brought {v}.", "{S} had made {v}.", "{S} shared {v} with everyone."),
        ("What did {n} bring to {e}?", "Which dish did {n} bring to {e}?"),
    ),
    Relation(
        "topic",
        "topic",
        "spoke about {v} at {e}",
        ("{S} spoke about {v}.", "{S} gave a talk on {v}.", "{S} told the guests about {v}."),
        ("What did {n} speak about at {e}?", "Which topic did {n} choose at {e}?"),
    ),
)
"""What people did at an event; the report names them by their role only."""

RELATIONS: dict[EntityKind, dict[str, Relation]] = {
    "person": {relation.key: relation for relation in (*_PERSON, *REPORT_RELATIONS)},
    "company": {relation.key: relation for relation in _COMPANY},
    "place": {relation.key: relation for relation in _PLACE},
    "event": {relation.key: relation for relation in _EVENT},
}
PROFILE_RELATIONS: dict[EntityKind, tuple[str, ...]] = {
    "person": tuple(relation.key for relation in _PERSON),
    "company": tuple(relation.key for relation in _COMPANY),
    "place": tuple(relation.key for relation in _PLACE),
    "event": tuple(relation.key for relation in _EVENT),
}

BRIDGES: dict[tuple[EntityKind, str], str] = {
    ("company", "founder"): "founder of {n}",
    ("person", "employer"): "employer of {n}",
    ("person", "birthplace"): "birthplace of {n}",
    ("event", "organiser"): "organiser of {n}",
    ("event", "host"): "host of {n}",
}
"""Relations whose value is another entity of the town, and what that entity is then."""

COMPARISONS: dict[EntityKind, tuple[Comparison, ...]] = {
    "person": (
        Comparison("birth_year", False, "is older", ("Who is older, {a} or {b}?", "Who was born first, {a} or {b}?")),
        Comparison("birth_year", True, "is younger", ("Who is younger, {a} or {b}?",)),
    ),
    "company": (
        Comparison("founded", False, "is older", ("Which company is older, {a} or {b}?",)),
        Comparison("staff", True, "is larger", ("Which company is larger, {a} or {b}?",)),
    ),
    "place": (
        Comparison("settled", False, "is older", ("Which place is older, {a} or {b}?",)),
        Comparison("school", True, "has the larger school", ("Which place has the larger school, {a} or {b}?",)),
    ),
    "event": (
        Comparison("first", False, "is older", ("Which event is older, {a} or {b}?",)),
        Comparison("visitors", True, "is larger", ("Which event is larger, {a} or {b}?",)),
    ),
}
