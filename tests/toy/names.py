"""Names for the generated archive, partitioned into train, dev and test splits.

Every name is made of two parts. A hash of its distinguishing part decides, once and for all, which split may use
it: two splits therefore share no person, place, company, event, river, book or prize.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from functools import cache
from typing import Literal

from cacheblend_rag.errors import ConfigError

Split = Literal["train", "dev", "test"]
SPLITS: tuple[Split, ...] = ("train", "dev", "test")


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_WOMEN = _words(
    "Mara Ines Greta Lena Signe Clara Edith Nora Alma Tilda Hanna Ruth Vera Iris Paula Judith Selma Agnes "
    "Dora Flora Helga Ida Karin Lydia Maud Nina Olga Petra Rosa Sofia Thea Ursula Wilma Yvonne Astrid Berta "
    "Celia Dagny Elsa Freya Gerda Hedda Irma Jana Kirsten Linnea Martha Nelly Ottilie Pia Ragna Stella Tora "
    "Ulla Viola Wanda Zelda Anneke Britta"
)
_MEN = _words(
    "Jonas Albert Bruno Carl David Emil Felix Georg Hugo Ivan Jakob Karl Lars Martin Nils Oskar Paul "
    "Quentin Robert Simon Theo Ulrich Victor Walter Anton Bernard Conrad Dirk Edgar Frank Gustav Henrik "
    "Isak Jens Knut Leo Magnus Norbert Otto Peter Ralf Stefan Thomas Urban Vidar Werner Axel Bastian Casper "
    "Didrik Elias Finn Gerald Harald Ingmar Jasper Kaspar Ludwig"
)
_SURNAME = (
    _words(
        "Lind Berg Holm Strand Hol Fal Kron Bram Tor Hag Mor Wal Sten Bjor Grim Har Kel Lor Mel Nor Ost Pel "
        "Quar Ros Sand Thal Ul Ven Wes Yar Zan Al Bor Cal Den El Fen Gar Hel Is Jor Kar Len Mar Nel Or Per "
        "Ram Sol Tam"
    ),
    _words(
        "qvist strom gren dahl mann stad well ford wick son sen feld hart land by lund mark ner rup sby vik "
        "wood worth ley more dorf bach inger ham ton berger ski ova etti ard"
    ),
)
_PLACE = (
    _words(
        "Oster Wester Nord Sunder Havel Marsh Alder Birken Crow Dun Elm Fair Gold Hazel Iron Kings Lang "
        "Mill New Oak Penn Quill Raven Silver Thorn Under Vale White Yew Ash Black Cold Deep Even Fox Grey "
        "High Ivy Kirk Lime Moss"
    ),
    _words(
        "by haven mouth bridge field minster wold gate port stead cliff dale burgh shaw firth moor hurst "
        "beck combe thorpe holt mere ness brook"
    ),
)
_COMPANY = (
    _words(
        "Cor Vel Tar Bel Dra Fer Gal Hex Jun Kor Lum Mer Nov Pra Quo Ris Sar Tel Umb Var Wen Xan Zor Bal "
        "Cren Dol Eth Fin Gan Hul Jas Kas Lir Mon Nor Ort Pol Rad Sil Tru"
    ),
    _words(
        "vane dex mont lane tec dor rum nix bar cote dane fax gard ium kin lon mex nor pax quin rell sett "
        "tura vex wyn zell"
    ),
)
_EVENT = (
    _words(
        "Marrow Lantern Candle Harvest Apple Barley Copper Drum Ember Feather Garland Honey Juniper Kettle "
        "Ladder Maple Nettle Orchard Pepper Quince Ribbon Saffron Thimble Velvet Willow Amber Bramble "
        "Clover Damson Elder"
    ),
    _words("tide mas fest wake night morn rush song walk call week turn round fire light feast"),
)
_RIVER = (
    _words("Al Br Car Dor Es Fal Gren Hal In Jar Kel Lor Mor Nar Ol Pir Quen Ral Ser Tav Ur Vor Wend Yar Zil"),
    _words("ow en a eth ine aw ull ber mer ot esk une ith avon"),
)
_BOOK = (
    _words(
        "Silver Hollow Quiet Broken Scarlet Winter Golden Hidden Narrow Patient Paper Wooden Distant Yellow "
        "Tender Crooked Burning Drowned Painted Restless Salted Velvet Wandering Borrowed"
    ),
    _words(
        "Orchard Staircase Harbour Lamp Garden Mirror Bridge Sparrow Window Letter Kitchen Valley Tower "
        "Needle Ferry Clock Market Meadow Anchor Ladder Piano Forest Island Thread"
    ),
)
_PRIZE = (
    _words(
        "Amber Cobalt Crimson Ivory Jade Onyx Pearl Ruby Sable Topaz Umber Violet Walnut Zinc Coral Ebony "
        "Indigo Laurel Maroon Bronze"
    ),
    _words("Medal Cup Ribbon Plate Crown Star Wreath Shield Trophy Seal Badge Palm Rose Key Laurels"),
)

_PARTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "surname": _SURNAME,
    "place": _PLACE,
    "company": _COMPANY,
    "event": _EVENT,
    "river": _RIVER,
    "book": _BOOK,
    "prize": _PRIZE,
}
NAME_KINDS: tuple[str, ...] = tuple(_PARTS)
_SPACED = ("book", "prize")  # a space joins their parts


def split_of(kind: str, name: str) -> Split:
    """Return the one split that may use ``name`` (for people: their surname)."""
    bucket = hashlib.sha256(f"{kind}:{name}".encode()).digest()[0] % 10
    return "test" if bucket == 9 else "dev" if bucket == 8 else "train"


@cache
def pool(kind: str, split: Split) -> tuple[str, ...]:
    """Return every name of ``kind`` that ``split`` may use, in a fixed order.

    Raises
    ------
    ConfigError
        If the kind or the split is unknown.
    """
    if kind not in _PARTS:
        raise ConfigError("kind", kind, f"choose one of {', '.join(NAME_KINDS)}")
    if split not in SPLITS:
        raise ConfigError("split", split, f"choose one of {', '.join(SPLITS)}")
    joint = " " if kind in _SPACED else ""
    starts, ends = _PARTS[kind]
    names = (start + joint + end for start in starts for end in ends)
    return tuple(name for name in names if split_of(kind, name) == split)


@dataclass(frozen=True)
class PersonName:
    """A person's full name and the pronoun that goes with it."""

    text: str
    pronoun: Literal["she", "he"]


def part_pattern() -> str:
    """Return a regular expression that matches the second part of a two-part name within a word.

    A tokenizer that splits there gives every name of a kind as many ids, also names it never saw.
    """
    joined = [parts for kind, parts in _PARTS.items() if kind not in _SPACED]
    starts = sorted({start for parts in joined for start in parts[0]})
    ends = sorted({end for parts in joined for end in parts[1]})
    return f"(?<={'|'.join(starts)})(?:{'|'.join(ends)})(?![A-Za-z])"


def draw(rng: random.Random, kind: str, split: Split, count: int) -> list[str]:
    """Draw ``count`` different names of one kind."""
    return rng.sample(pool(kind, split), count)


def draw_people(rng: random.Random, split: Split, count: int) -> list[PersonName]:
    """Draw ``count`` people; within one draw no first name and no surname is used twice."""
    women = [PersonName(first, "she") for first in _WOMEN]
    men = [PersonName(first, "he") for first in _MEN]
    firsts = rng.sample(women + men, count)
    surnames = draw(rng, "surname", split, count)
    return [PersonName(f"{first.text} {last}", first.pronoun) for first, last in zip(firsts, surnames, strict=True)]
