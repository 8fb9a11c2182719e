"""Numbers of a small office's files: right answers of the blended pass and of full prefill.

``python -m docs.benchmarks.scripts.contracts --model qwen2.5-coder-0.5b --out docs/benchmarks/contracts-0.5b.json``

48 made-up files (supplier contracts, leases in German, invoices, minutes) are indexed as ``cacheblend-rag ask`` does
it. Twelve questions are asked, each about a number of one file that many others have a like one of. Each is answered by
the chain of ``ask`` with all passages stored, and then with ``verify="always"``, whose answer is full prefill's. Full
prefill also answers with the passages in another order.
"""

from __future__ import annotations

import argparse
import random
import re
import tempfile
from pathlib import Path
from typing import Any

from cacheblend_rag import BlendConfig
from cacheblend_rag.app.folder_rag import FolderRAG
from cacheblend_rag.app.options import FolderRAGOptions
from cacheblend_rag.calibration.quality import another_order
from docs.benchmarks.scripts.common import machine, table, write_json

_FIRMS = ("Aldern", "Birkholt", "Corvane", "Dunmore", "Eskild", "Farrow", "Grendel", "Hallam")
_PLACES = ("Ahornweg", "Birkenallee", "Dorfstrasse", "Eichenhof", "Fliederweg", "Gartenweg", "Hafenstrasse", "Im Tal")
_CONTRACT = """# Supply agreement with {firm} {kind}

Between Norrland Trading and {firm} {kind} of 3 May 2024. {firm} delivers {goods} in the quantities that are ordered.

## Payment

Invoices of {firm} must be paid within {days} days of receipt. For early payment within ten days, {firm} grants a
discount of {discount} per cent. Interest on arrears is {interest} per cent a year.

## Term

The agreement runs for {years} years. It may be ended with a notice period of {notice} weeks. A penalty of {penalty} EUR
is due for each delivery that is late by more than five working days. {firm} is liable up to {liable},000 EUR.
"""
_LEASE = """# Mietvertrag {place} {house}

Zwischen Norrland Trading und der Hausverwaltung Seidel. Gegenstand ist das Lager {place} {house}.

Die Miete beträgt {rent} EUR im Monat, die Kaution {deposit} EUR. Die Kündigungsfrist beträgt {notice} Monate zum
Quartalsende. Die Mietfläche misst {area} Quadratmeter. Nebenkosten werden mit {extra} EUR im Monat abgerechnet.
"""
_INVOICE = """Invoice RE-2025-{number} of {firm} Steel to Norrland Trading

Delivered: {pieces} pieces of {goods}. Net amount {net}.00 EUR. Due on {day} June 2025. Order B-{order}. {paid}
"""
_MINUTES = """Minutes of the meeting of {day} March 2025

Present: Ines Kramer, Tom Weller, Ada Voss. The budget for {topic} is {budget},000 EUR. {who} reports by {until} April.
The next meeting takes place in room {room}. Decided with {votes} votes.
"""


def write_office(folder: Path) -> list[tuple[str, str]]:
    """Write the files; questions, each with the number of its right answer."""
    dice, asked = random.Random(7), list[tuple[str, str]]()
    goods = ("steel pipes", "timber", "paint", "glass")
    for at in range(20):
        firm, kind = _FIRMS[at % 8], ("Metals", "Logistics", "Paper")[at // 8]
        facts = {
            "days": dice.randint(12, 60), "discount": dice.randint(2, 5), "interest": dice.randint(5, 11),
            "years": dice.randint(2, 9), "notice": dice.randint(3, 26), "penalty": dice.randint(11, 99) * 10,
            "liable": dice.randint(20, 400),
        }  # fmt: skip
        text = _CONTRACT.format(firm=firm, kind=kind, goods=goods[at % 4], **facts)
        (folder / f"contract-{firm}-{kind}.md".lower()).write_text(text, encoding="utf-8")
        if at % 10 == 0:
            asked.append((f"Within how many days must invoices of {firm} {kind} be paid?", str(facts["days"])))
        if at % 5 == 2:
            asked.append(
                (f"What is the notice period of the agreement with {firm} {kind}, in weeks?", str(facts["notice"]))
            )
    for at, place in enumerate(_PLACES):
        facts = {"rent": dice.randint(700, 2900), "deposit": dice.randint(3000, 8000), "notice": dice.randint(3, 12)}
        facts |= {"area": dice.randint(90, 700), "extra": dice.randint(80, 390), "house": at + 3}
        text = _LEASE.format(place=place, **facts)
        (folder / f"mietvertrag-{place}.md".lower().replace(" ", "-")).write_text(text, encoding="utf-8")
        if at % 4 == 1:
            asked.append((f"Wie hoch ist die Miete für das Lager {place} {at + 3}?", str(facts["rent"])))
    for at in range(12):
        facts = {"pieces": dice.randint(20, 900), "net": dice.randint(200, 9900), "order": dice.randint(1000, 9999)}
        facts |= {"day": dice.randint(1, 28), "number": 1010 + at}
        paid = "Paid in full." if at % 2 else "Not paid yet."
        text = _INVOICE.format(firm=_FIRMS[at % 8], goods=goods[at % 4], paid=paid, **facts)
        (folder / f"invoice-{1010 + at}.txt").write_text(text, encoding="utf-8")
        if at % 6 == 4:
            asked.append((f"What is the net amount of invoice RE-2025-{1010 + at}?", str(facts["net"])))
    return asked + _write_minutes(folder, dice)


def _write_minutes(folder: Path, dice: random.Random) -> list[tuple[str, str]]:
    asked = []
    topics = ("the roof", "new shelves", "training", "the website", "two vans", "insurance", "heating", "the archive")
    for at, topic in enumerate(topics):
        facts = {"day": at * 3 + 1, "budget": dice.randint(4, 90), "until": dice.randint(2, 28)}
        facts |= {"room": dice.randint(101, 420), "votes": dice.randint(2, 3)}
        who = ("Ines Kramer", "Tom Weller")[at % 2]
        text = _MINUTES.format(topic=topic, who=who, **facts)
        (folder / f"minutes-{at}.txt").write_text(text, encoding="utf-8")
        if at in (2, 5):
            asked.append((f"How much is the budget for {topic}?", f"{facts['budget']}000"))
    return asked


def measure(model: str, folder: Path) -> dict[str, Any]:
    """Answers to all questions."""
    (docs := folder / "docs").mkdir()
    questions = write_office(docs)
    rows = []
    config = BlendConfig(min_tokens=0, prompt_cache=0)  # short prompts are blended, too
    options = FolderRAGOptions(docs=docs, model=model, data_dir=folder / "data", max_new_tokens=32, config=config)
    with FolderRAG(options) as rag:
        rag.update()
        rag.warm(progress=False)
        plain = rag.engine.with_config(min_tokens=1_000_000)
        for question, number in questions:
            blended = rag.ask(question)
            verified = rag.engine.generate(blended.prompt, max_new_tokens=32, verify="always")
            there = any(is_in(number, source.page_content) for source in blended.sources)
            row = {"question": question, "number": number, "found": there, "blended": blended.text}
            row["another order"] = plain.generate(another_order(blended.prompt), max_new_tokens=32).text.strip()
            row |= {"full": verified.text.strip(), "fidelity": verified.report.fidelity, "plain": blended.report.plain}
            rows.append(row | {"prompt_tokens": blended.report.prompt_tokens})
            print(row, flush=True)
    return {"model": model, "files": len(list(docs.iterdir())), "rows": rows, "machine": machine("cpu")}


def is_in(number: str, text: str) -> bool:
    """Whether a text has a number, which may have a comma or a point for thousands."""
    return number in re.findall(r"\d+", re.sub(r"(?<=\d)[.,](?=\d{3})", "", text.replace(".00", "")))


def counts(result: dict[str, Any]) -> str:
    """The table of a model."""
    rows = result["rows"]
    right = {way: sum(is_in(row["number"], row[way]) for row in rows) for way in ("full", "another order", "blended")}
    other = sum(set(re.findall(r"\d+", row["blended"])) != set(re.findall(r"\d+", row["full"])) for row in rows)
    lines = [
        ["passage found", sum(row["found"] for row in rows)],
        ["full prefill is right", right["full"]],
        ["with the passages in another order", right["another order"]],
        ["blended is right", right["blended"]],
        ["blended has other numbers than full prefill", other],
        ["corrected", sum(row["fidelity"] == "corrected" for row in rows)],
    ]
    return table([result["model"], f"of {len(rows)}"], [[one, str(count)] for one, count in lines])


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-coder-0.5b")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(options.model, Path(folder))
    print(counts(result))
    if options.out is not None:
        write_json(options.out, result)


if __name__ == "__main__":
    main()
