"""The wider archive: passages of 100 to 150 words, more ways to say and to ask everything.

It differs from the plain one in the length and variety of its prose and in how passages depend on one another
(`tests.toy.archive`), not in what there is to know.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tests.toy.passages import PLAIN, Style
from tests.toy.relations import ENTITY_KINDS, RELATIONS, EntityKind, Relation

_OPENERS: dict[EntityKind, tuple[str, ...]] = {
    "person": (
        "This page is about {n}, who has been the {role} here for longer than anybody can say.",
        "Ask anyone at the bridge for the {role}, and they will send you to {n}.",
        "The name of {n} stands on the door, and below it, in smaller letters, the word {role}.",
    ),
    "company": (
        "There is only one {role} in the district, and it is called {n}.",
        "This page is about {n}, a {role} that most families have had to do with.",
        "On the old town plan the {role} is marked with the name of {n}.",
    ),
    "place": (
        "This page is about {n}, which most travellers only see from the coach.",
        "There are larger places in the district than {n}, but few that are older at heart.",
        "Nobody comes to {n} by chance.",
    ),
    "event": (
        "This page is about {n}, the {role} that fills every bed in the district.",
        "There has been a {role} here for as long as people remember, and its name is {n}.",
        "Those who have seen the {role} once come back, and all of them call it {n}.",
    ),
}
_ROLE_OPENERS: dict[EntityKind, tuple[str, ...]] = {
    "person": (
        "A second folder about the {role} turned up when the shelves were moved.",
        "Several readers have asked what became of the {role}.",
        "What follows was written down by a friend of the {role}.",
    ),
    "company": (
        "A second folder about the {role} turned up when the shelves were moved.",
        "Several readers have asked for more about the {role}.",
    ),
    "place": (),
    "event": (),
}
_REPORT_OPENERS = (
    "This is what we saw and heard at {n}, as far as the notebook can still be read.",
    "The doors opened late, but then {n} went on until the lamps were put out.",
    "Those who could not come to {n} may like to know how it went.",
)
_FILLERS: dict[EntityKind, tuple[str, ...]] = {
    "person": (
        "For some years the only light in the street after midnight was in that window.",
        "A visitor in {y} wrote home about the tea and the number of clocks in the hall.",
        "There is a story about a lost key and a ladder, but it is told of others too.",
        "The handwriting grew smaller with the years, and the letters longer.",
        "Whoever came with a question was first given a chair and then an answer.",
        "In {y} a flood reached the second step of the house and went no further.",
        "On Sundays there was music, and the windows were left open for those outside.",
        "The garden behind the house was never tidy, and was not meant to be.",
        "Two of the neighbours did not speak to each other, but both came to call.",
        "It is not true, as some have said, that the whole matter was settled in an afternoon.",
    ),
    "company": (
        "The first building was of wood, and nothing is left of it but the cellar.",
        "In {y} the river froze, and for two months goods went out by sledge.",
        "Those who have worked there for ten years are given a clock and a week of rest.",
        "The sign over the gate has been painted over at least four times.",
        "There is a room on the second floor where all letters are answered by hand.",
        "A large order from the coast in {y} kept the lamps burning all night.",
        "The dog at the gate has bitten only one visitor, and he is said to have earned it.",
        "Old account books show more about the weather than about the money.",
    ),
    "place": (
        "In {y} the first coach with four horses came up the hill, to general surprise.",
        "The well in the middle of the square has never been known to run dry.",
        "Those who leave when they are young often come back when they are old.",
        "A wall of grey stone runs around the older part and keeps out the wind.",
        "The baker sells out before eight, and nobody has ever seen him in a hurry.",
        "After the fire of {y} the streets were made wider and the roofs lower.",
        "From the last house it is an hour on foot to the edge of the forest.",
        "There is a bench under the lime tree on which nobody under sixty sits down.",
    ),
    "event": (
        "The oldest visitor had come every year since {y} and had kept all the tickets.",
        "By noon the street was so full that the coaches had to wait on the bridge.",
        "A speech was planned, but the wind took the paper and nobody was sorry.",
        "There was soup for all who had helped, and a second plate for those who asked.",
        "The children were allowed to stay up, and most of them fell asleep on the benches.",
        "In {y} everything had to be put off by a week because of the snow.",
        "Two dogs, one umbrella and a left glove were handed in at the end.",
        "The lamps were hung by the same man as always, from the same ladder.",
    ),
}
_CLOSERS = (
    "Whoever knows more is asked to write to the archive.",
    "A longer version of this page was lost when the archive moved.",
    "The photographs that belong to this page are kept in another drawer.",
    "Some words at the foot of the page can no longer be read.",
)

_SAID: Mapping[tuple[EntityKind, str], tuple[tuple[str, ...], tuple[str, ...]]] = {
    ("person", "birthplace"): (
        ("{S} comes from {v} and was born there.", "{S} first saw the light of day in {v}."),
        ("Where does {n} come from?",),
    ),
    ("person", "birth_year"): (
        ("Church books show that {s} was born in {v}.", "Born in {v}, {s} was the youngest of four."),
        ("What year was {n} born in?",),
    ),
    ("person", "employer"): (
        ("{S} earns a living at {v}.", "Every morning {s} walks to work at {v}."),
        ("Where does {n} earn a living?", "At which company does {n} work?"),
    ),
    ("person", "hobby"): (
        ("Whole cupboards are full of the {v} that {s} has gathered.", "{S} would go a long way for {v}."),
        ("What does {n} gather?",),
    ),
    ("person", "street"): (
        ("Letters for {s_obj} go to {v}.", "{S} took a small house on {v}."),
        ("In which street does {n} live?",),
    ),
    ("person", "pet"): (
        ("{S} shares the house with a {v}.", "The {v} that {s} keeps is known to every child."),
        ("Which animal does {n} share the house with?",),
    ),
    ("person", "book"): (
        ("The book {v} was written by {s_obj}.", "In one long winter {s} wrote {v}."),
        ("What is the name of the book by {n}?",),
    ),
    ("person", "prize"): (
        ("The {v} went to {s_obj}.", "{S} was handed the {v} in front of a full hall."),
        ("Which prize was {n} given?",),
    ),
    ("person", "moved"): (
        ("{S} left for {v} and never came back.", "{S} settled in {v} for good."),
        ("In which place did {n} settle?",),
    ),
    ("person", "teacher"): (
        ("It was {v} who taught {s_obj}.", "{S} owed everything to a teacher, {v}."),
        ("Whose pupil was {n}?",),
    ),
    ("company", "founder"): (
        ("{S} was set up by {v}.", "It all began with {v}, the founder."),
        ("Who set up {n}?",),
    ),
    ("company", "founded"): (
        ("{S} has been in business since {v}.", "The first day of business was in {v}."),
        ("Since which year has {n} been in business?",),
    ),
    ("company", "seat"): (
        ("The head office is in {v}.", "Letters to the owners go to {v}, the seat."),
        ("Where is the head office of {n}?",),
    ),
    ("company", "goods"): (
        ("Besides, {s} sells {v}.", "There is also a trade in {v}."),
        ("Which goods does {n} sell besides?",),
    ),
    ("company", "staff"): (
        ("{S} pays {v} people.", "On a working day {v} people pass the gate."),
        ("How many people are employed by {n}?",),
    ),
    ("company", "emblem"): (
        ("On all its papers there is a {v}.", "The seal shows a {v}."),
        ("What does the emblem of {n} show?",),
    ),
    ("company", "branch"): (
        ("A branch of {s_obj} was opened in {v}.", "{S} sends half of its goods to a branch in {v}."),
        ("Where is the branch of {n}?",),
    ),
    ("place", "river"): (
        ("The water under its bridges is that of the river {v}.", "{S} was built where the river {v} can be crossed."),
        ("What is the river of {n} called?",),
    ),
    ("place", "landmark"): (
        ("Pictures of {s_obj} always show the {v}.", "Nobody leaves without having seen the {v}."),
        ("What do travellers come to see in {n}?",),
    ),
    ("place", "market"): (
        ("Farmers bring their goods to {s_obj} on {v}.", "The stalls are put up early on {v}."),
        ("Which day is market day in {n}?",),
    ),
    ("place", "settled"): (
        ("{S} has had a charter since {v}.", "The oldest paper in the chest is the charter of {v}."),
        ("Since which year has {n} had a charter?",),
    ),
    ("place", "school"): (
        ("The local school has {v} pupils.", "On the first day of term {v} pupils were counted in the school."),
        ("How many pupils are there in {n}?",),
    ),
    ("event", "host"): (
        ("Every year {s} is held in {v}.", "Guests have to travel to {v}."),
        ("Where is {n} held?",),
    ),
    ("event", "organiser"): (
        ("{S} is paid for and organised by {v}.", "All the work is done by {v}, the organiser."),
        ("Which company is the organiser of {n}?",),
    ),
    ("event", "month"): (
        ("{S} falls in {v}.", "Guests come in {v}, when it is held."),
        ("When is {n} held, in which month?",),
    ),
    ("event", "first"): (
        ("{S} has been held since {v}.", "It was held for the first time in {v}."),
        ("Since which year has {n} been held?",),
    ),
    ("event", "visitors"): (
        ("{S} is visited by {v} people.", "The gatekeeper counted {v} visitors."),
        ("How many people visit {n}?",),
    ),
    ("person", "award"): (
        ("A {v} was won by {s_obj}.", "{S} was called to the front and won a {v}."),
        ("What was won by {n} at {e}?",),
    ),
    ("person", "dish"): (
        ("{S} came with a large bowl of {v}.", "The {v} on the long table came from {s_obj}."),
        ("What did {n} bring along to {e}?",),
    ),
    ("person", "topic"): (
        ("{S} talked for an hour about {v}.", "The talk that {s} gave was about {v}."),
        ("What was the talk of {n} at {e} about?",),
    ),
}
"""Further statements and questions of each relation, by kind of entity and key."""


def _wider(kind: EntityKind, relation: Relation) -> Relation:
    statements, questions = _SAID[kind, relation.key]
    return replace(relation, statements=relation.statements + statements, questions=relation.questions + questions)


def _joined(
    first: Mapping[EntityKind, tuple[str, ...]], second: Mapping[EntityKind, tuple[str, ...]]
) -> dict[EntityKind, tuple[str, ...]]:
    return {kind: first[kind] + second[kind] for kind in ENTITY_KINDS}


WIDE_RELATIONS: dict[EntityKind, dict[str, Relation]] = {
    kind: {key: _wider(kind, relation) for key, relation in relations.items()} for kind, relations in RELATIONS.items()
}
WIDE = Style(
    targets=(100, 110, 120, 130),
    openers=_joined(PLAIN.openers, _OPENERS),
    role_openers=_joined(PLAIN.role_openers, _ROLE_OPENERS),
    report_openers=PLAIN.report_openers + _REPORT_OPENERS,
    fillers=_joined(PLAIN.fillers, _FILLERS),
    closers=PLAIN.closers + _CLOSERS,
)
