"""An agent's steps and a chat asked again, beside transformers' own cache cut to the common beginning.

An agent has a system prompt and the schemas of some tools, and calls its model five times: each prompt is the one
before, with an answer and a tool's result behind it. A chat of a thousand tokens is asked twice, the second time for
another answer. Both go through LangChain's ``invoke``; beside them stands a loop of one's own over transformers, which
keeps one `DynamicCache` and cuts it to the ids that two prompts have in common; with ``--plain`` also one that keeps
nothing. Measured is the whole call: seconds of the processor, which other work on the machine does not lengthen, and
those of the clock.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage
from transformers import DynamicCache

from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.langchain import ChatCacheBlend
from cacheblend_rag.prompt.tokenizer import common_length
from docs.benchmarks.scripts.common import greedy, reported, script_parser, write_json
from docs.benchmarks.scripts.measuring import table

_TOOLS = (
    ("search_tickets", "Find support tickets by words, state, owner and age, the newest first."),
    ("read_ticket", "Give one ticket with its messages, its history and the devices that it names."),
    ("find_device", "Find devices by serial number, model, site or the person who uses them."),
    ("list_orders", "List orders of spare parts by supplier, by state and by the ticket they are for."),
    ("stock_of", "Say how many pieces of a spare part each warehouse holds, and when more are expected."),
    ("write_note", "Add a note to a ticket, which its owner sees and the customer does not."),
)
_STEP = "Tool result: ticket {n} of the Bergen site is open since {d} days; its printer needs a fuser unit, part 4{n}1."


@dataclass(frozen=True)
class _Options:
    """Settings of a run."""

    model: str
    dtype: str
    rounds: int
    new_tokens: int
    plain: bool


def system_prompt() -> str:
    """The instructions of an agent, with the schemas of its tools."""
    fields = "site, owner, state (one of open, waiting, done), since (a date), limit (a number from 1 to 50)"
    schemas = (
        f"## {name}\n{about}\nArguments, as a JSON object: {fields}. It gives a list of objects, at most as many as "
        f"the limit says, each with an id, a title and a state. An empty list means that nothing was found: say so, "
        f"and do not call {name} again with the same arguments."
        for name, about in _TOOLS
    )
    return "You help the service desk of a firm that repairs printers. Use these tools:\n\n" + "\n\n".join(schemas)


def agent_calls() -> list[list[BaseMessage]]:
    """The messages of five calls; each begins with those of the call before."""
    messages: list[BaseMessage] = [SystemMessage(system_prompt()), HumanMessage("Which parts does Bergen wait for?")]
    calls = [[*messages]]
    for step in range(1, 5):
        messages += [AIMessage(f"I call read_ticket for {step}."), HumanMessage(_STEP.format(n=step, d=3 * step))]
        calls.append([*messages])
    return calls


def chat_calls(tokenizer: Any, tokens: int = 1256) -> list[list[BaseMessage]]:
    """A chat of so many tokens, asked twice."""
    messages: list[BaseMessage] = [SystemMessage("You answer questions about orders of spare parts.")]
    number = 0
    while len(_ids(tokenizer, messages)) < tokens - 60:
        number += 1
        messages += [
            HumanMessage(f"And order {number}? " + _STEP.format(n=number, d=number)),
            AIMessage("It is noted."),
        ]
    messages.append(HumanMessage("Which of these orders is the oldest?"))
    return [messages, messages]


def _turns(messages: Sequence[BaseMessage]) -> list[dict[str, str]]:
    roles = {"system": "system", "human": "user", "ai": "assistant"}
    return [{"role": roles[one.type], "content": str(one.content)} for one in messages]


def _ids(tokenizer: Any, messages: Sequence[BaseMessage]) -> list[int]:
    text = tokenizer.apply_chat_template(_turns(messages), tokenize=False, add_generation_prompt=True)
    return [int(one) for one in tokenizer.encode(text, add_special_tokens=False)]


class _Transformers:
    """Transformers' ``generate``, with a cache that is cut to the common beginning, or none."""

    def __init__(self, model: Any, tokenizer: Any, new_tokens: int, keeps: bool) -> None:
        self._model, self._tokenizer, self._keeps = model, tokenizer, keeps
        self._config = greedy(tokenizer, new_tokens)
        self._ids, self._cache = list[int](), DynamicCache(config=model.config)

    def __call__(self, messages: Sequence[BaseMessage]) -> int:
        """Answer; how many tokens were in the cache already."""
        ids = _ids(self._tokenizer, messages)
        common = common_length(ids[:-1], self._ids) if self._keeps else 0
        if common:
            self._cache.crop(common - self._cache.get_seq_length())
        else:
            self._cache = DynamicCache(config=self._model.config)
        inputs = torch.tensor([ids])
        out = self._model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            generation_config=self._config,
            past_key_values=self._cache,
            use_cache=True,
        )
        self._ids = out[0].tolist()[: self._cache.get_seq_length()]
        return common


def _through_langchain(engine: BlendEngine, new_tokens: int) -> Callable[[Sequence[BaseMessage]], int]:
    chat = ChatCacheBlend.from_engine(engine, generation_config=greedy(engine.tokenizer, new_tokens))

    def call(messages: Sequence[BaseMessage]) -> int:
        return int(chat.invoke(list(messages)).response_metadata["resumed_tokens"])

    return call


def measure(options: _Options) -> dict[str, Any]:
    """Seconds and reused tokens of each call, way by way, in turn."""
    with BlendEngine.from_pretrained(options.model, dtype=options.dtype) as engine:
        model, tokenizer = engine.model, engine.tokenizer
        cases = {"agent": agent_calls(), "chat asked again": chat_calls(tokenizer)}
        found: dict[str, Any] = {
            name: {"tokens": [len(_ids(tokenizer, call)) for call in calls], "ways": {}}
            for name, calls in cases.items()
        }
        for turn in range(options.rounds + 1):  # the first is not counted
            for name, calls in cases.items():
                ways = {
                    "ours": _through_langchain(engine.with_config(salt=f"{name} {turn}"), options.new_tokens),
                    "transformers, common beginning": _Transformers(model, tokenizer, options.new_tokens, True),
                }
                if options.plain:
                    ways["transformers"] = _Transformers(model, tokenizer, options.new_tokens, False)
                order = list(ways.items())
                for number, call in enumerate(calls):
                    first = (turn + number) % len(order)
                    for way, answer in order[first:] + order[:first]:
                        began, worked = time.perf_counter(), time.process_time()
                        reused = answer(call)
                        worked, took = time.process_time() - worked, time.perf_counter() - began
                        of_way = found[name]["ways"].setdefault(way, [])
                        if len(of_way) <= number:
                            of_way.append({"reused": reused, "seconds": [], "processor": []})
                        if turn:
                            of_way[number]["seconds"].append(took)
                            of_way[number]["processor"].append(worked)
    return found


def table_of(found: dict[str, Any]) -> str:
    """Median seconds of the processor in each call."""
    rows = []
    for name, case in found.items():
        for way, calls in case["ways"].items():
            times = " / ".join(f"{statistics.median(call['processor']):.2f}" for call in calls)
            reused = " / ".join(str(call["reused"]) for call in calls)
            whole = sum(statistics.median(call["processor"]) for call in calls)
            rows.append([name, way, times, f"{whole:.1f}", reused])
    return table(["case", "way", "seconds of each call", "all", "tokens reused"], rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, and write the JSON."""
    parser = script_parser("agents", __doc__)
    parser.add_argument("--model", default="smollm2", help="a starter's name, a folder or a GGUF file")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--plain", action="store_true", help="also transformers without a kept cache")
    parser.add_argument("--out", metavar="FILE")
    parsed = parser.parse_args(argv)

    def run() -> None:
        torch.set_num_threads(parsed.threads)
        found = measure(_Options(parsed.model, parsed.dtype, parsed.rounds, parsed.new_tokens, parsed.plain))
        print(table_of(found))
        if parsed.out:
            settings = {name: value for name, value in vars(parsed).items() if name not in ("model", "out")}
            write_json(parsed.out, {"model": Path(parsed.model).name, **settings, "cases": found})

    return reported(parser, run)


if __name__ == "__main__":
    sys.exit(main())
