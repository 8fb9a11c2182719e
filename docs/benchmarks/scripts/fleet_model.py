"""A simulated fleet: replicas of the engine, and four routers before them.

It is a simulation of discrete events. A replica works as the engine's scheduler does: it prefills one prompt after
another, takes the decoding steps of all answers under way together in between and between the layers of a long prefill,
and stores what was missing when nothing else waits, or for a fifth of its time. How long each part takes was measured
by `service_times`, and how far single prompts are off. A replica has memory over disk, and beneath them lies one remote
store that all share over one link.
"""

from __future__ import annotations

import heapq
import random
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from cacheblend_rag.app.fleet.routing import HeldChunks, RoutingRule, rank_replicas
from docs.benchmarks.scripts.service_times import ServiceTimes

__all__ = [
    "CHUNK_TOKENS",
    "ROUTERS",
    "Change",
    "FleetOptions",
    "Job",
    "Replica",
    "Request",
    "Router",
    "Simulation",
]

CHUNK_TOKENS, OTHER_TOKENS, PREFIX_TOKENS = 256, 40, 20
_ENDLESS = float("inf")
_RULE = RoutingRule()
_REMEMBERED = 10.0  # seconds
# As in the engine's scheduler.
_REQUESTS_SHARE, _REQUESTS_FIRST = 4.0, 10.0
_GAP, _LAYERS, _LEAST = 0.2, 30, 1e-9


@dataclass(frozen=True)
class FleetOptions:
    """A fleet.

    Parameters
    ----------
    replicas : int
    memory, disk : float
        Tokens that fit each replica's memory and disk.
    slots : int
        Answers under way at once in a replica.
    shared : bool
        Whether a remote store lies beneath all.
    bandwidth, latency : float
        Of the link to the remote store, in bytes a second and in seconds.
    cores : float
        Cores on which all replicas run together, with a thread each.
    overhead : tuple of float
        Seconds that a request is on its way, one of which is drawn.
    period : float
        Seconds between two summaries of a replica.
    """

    replicas: int = 64
    memory: float = 200 * CHUNK_TOKENS
    disk: float = 1000 * CHUNK_TOKENS
    slots: int = 4
    shared: bool = True
    bandwidth: float = 1.25e9
    latency: float = 0.001
    cores: float = _ENDLESS
    overhead: tuple[float, ...] = (0.02,)
    period: float = 1.0


@dataclass(frozen=True)
class Request:
    """A request: chunks with their tokens by digest, and tokens in no chunk and of the answer.

    ``prefix`` of those in no chunk are the same in all requests, as routers see them.
    """

    arrival: float
    chunks: Mapping[int, int]
    other: int = OTHER_TOKENS
    new: int = 32
    prefix: int = PREFIX_TOKENS

    @property
    def tokens(self) -> int:
        """Of its chunks."""
        return sum(self.chunks.values())


@dataclass(frozen=True)
class Change:
    """A replica that is lost, or added."""

    at: float
    lost: str = ""
    added: str = ""


@dataclass
class Job:
    """A request on its way: where it was answered, what was there, and what is left to do."""

    request: Request
    left: int
    replica: str = ""
    hit: int = 0
    remote: int = 0
    ttft: float = -1.0
    answered: int = 0


class Replica:
    """One replica: its tiers, and what waits for it."""

    def __init__(self, name: str, options: FleetOptions) -> None:
        self.name = name
        self.memory, self.disk = OrderedDict[int, int](), OrderedDict[int, int]()
        self._limits, self._used = (options.memory, options.disk), [0, 0]
        self.queue, self.under = deque[Job](), list[Job]()
        self.missing: OrderedDict[int, int] = OrderedDict()
        self.owed, self.busy, self.ongoing = _REQUESTS_FIRST, 0.0, 0
        self.running, self.changed = False, True

    def find(self, digest: int) -> str:
        """The tier that has a chunk, which is thereby used; empty if none has it."""
        if digest in self.memory:
            self.memory.move_to_end(digest)
            return "memory"
        if digest not in self.disk:
            return ""
        self.disk.move_to_end(digest)
        self._keep(0, digest, self.disk[digest])
        return "disk"

    def put(self, digest: int, tokens: int) -> None:
        """Store a chunk in both tiers."""
        self._keep(1, digest, tokens)
        self._keep(0, digest, tokens)

    def _keep(self, level: int, digest: int, tokens: int) -> None:
        tier = (self.memory, self.disk)[level]
        if digest in tier or tokens > self._limits[level]:
            return
        tier[digest] = tokens
        self._used[level] += tokens
        self.changed = True
        while self._used[level] > self._limits[level]:
            oldest, size = tier.popitem(last=False)
            self._used[level] -= size
            if level == 0:
                self._keep(1, oldest, size)


class Router(ABC):
    """Says which replica answers a request.

    Parameters
    ----------
    chooser : Random
    rule : RoutingRule
    """

    summaries = False  # whether it reads them

    def __init__(self, chooser: random.Random, rule: RoutingRule) -> None:
        self.chooser, self.rule = chooser, rule

    @abstractmethod
    def choose(self, request: Request, replicas: Mapping[str, Replica], held: Mapping[str, HeldChunks]) -> str:
        """The name of the replica."""

    def lost(self, replica: str) -> None:  # noqa: B027
        """Forget one."""


class RandomRouter(Router):
    """Any replica."""

    def choose(self, request: Request, replicas: Mapping[str, Replica], held: Mapping[str, HeldChunks]) -> str:
        """See `Router.choose`."""
        return self.chooser.choice(list(replicas))


class PowerOfTwo(Router):
    """The less loaded of two drawn ones: what Ray Serve does by itself."""

    def choose(self, request: Request, replicas: Mapping[str, Replica], held: Mapping[str, HeldChunks]) -> str:
        """See `Router.choose`."""
        drawn = self.chooser.sample(list(replicas), min(2, len(replicas)))
        return min(drawn, key=lambda name: replicas[name].ongoing)


class _Node:
    """A place in the prefix tree, with the replicas that were sent a prompt through it."""

    def __init__(self) -> None:
        self.replicas: set[str] = set()
        self.children: dict[int, _Node] = {}


class PrefixAffinity(PowerOfTwo):
    """Ray's `PrefixCacheAffinityRouter`, with tokens for characters and without eviction, which is its default.

    Among the replicas that were sent the longest prefix of the prompt, the least loaded wins. If the prefix is less
    than a tenth, those win that were sent the least text. It has the same imbalance limit as our rule: if two replicas
    differ by more, the power of two choices decides. Ray sets no limit by default.
    """

    def __init__(self, chooser: random.Random, rule: RoutingRule) -> None:
        super().__init__(chooser, rule)
        self._root, self._sent = _Node(), dict[str, int]()

    def choose(self, request: Request, replicas: Mapping[str, Replica], held: Mapping[str, HeldChunks]) -> str:
        """See `Router.choose`."""
        parts = [(-1, request.prefix), *request.chunks.items()] if request.prefix else [*request.chunks.items()]
        loads = [replica.ongoing for replica in replicas.values()]
        if max(loads) - min(loads) > self.rule.imbalance_limit:
            chosen = super().choose(request, replicas, held)
        else:
            matched, those = self._longest(parts, replicas)
            if matched < 0.1 * (request.tokens + request.other):
                least = min(self._sent.get(name, 0) for name in replicas)
                those = [name for name in replicas if self._sent.get(name, 0) == least]
            chosen = min(those, key=lambda name: replicas[name].ongoing)
        self._insert(parts, chosen)
        self._sent[chosen] = self._sent.get(chosen, 0) + request.other - request.prefix
        return chosen

    def _longest(self, parts: Sequence[tuple[int, int]], replicas: Mapping[str, Replica]) -> tuple[int, list[str]]:
        node, matched = self._root, 0
        for digest, tokens in parts:
            below = node.children.get(digest)
            if below is None or not below.replicas:
                break
            node, matched = below, matched + tokens
        return matched, [name for name in replicas if name in node.replicas]

    def _insert(self, parts: Sequence[tuple[int, int]], chosen: str) -> None:
        node = self._root
        for digest, tokens in parts:
            node = node.children.setdefault(digest, _Node())
            if chosen not in node.replicas:
                node.replicas.add(chosen)
                self._sent[chosen] = self._sent.get(chosen, 0) + tokens

    def lost(self, replica: str) -> None:
        """See `Router.lost`."""
        nodes = [self._root]
        while nodes:
            node = nodes.pop()
            node.replicas.discard(replica)
            nodes += node.children.values()


class Ours(Router):
    """The rule of `cacheblend_rag.app.fleet.routing`, with summaries as old as they are.

    For ten seconds a replica counts as holding what was sent to it, as in `ChunkRouter`.
    """

    summaries = True

    def __init__(self, chooser: random.Random, rule: RoutingRule) -> None:
        super().__init__(chooser, rule)
        self._sent: dict[int, dict[str, float]] = {}  # by chunk, when it was last sent to each replica

    def choose(self, request: Request, replicas: Mapping[str, Replica], held: Mapping[str, HeldChunks]) -> str:
        """See `Router.choose`."""
        asked, sent = {digest >> 32 for digest in request.chunks}, dict[str, set[int]]()
        for digest in request.chunks:
            for name, at in self._sent.get(digest, {}).items():
                if at > request.arrival - _REMEMBERED:
                    sent.setdefault(name, set()).add(digest >> 32)
        known = dict(held)
        for name, keys in sent.items():
            told = held.get(name, HeldChunks())
            known[name] = HeldChunks(told.memory, (told.disk & asked) | keys)
        ongoing = {name: replica.ongoing for name, replica in replicas.items()}
        chosen = rank_replicas(request.chunks, known, ongoing, self.rule)[0]
        for digest in request.chunks:
            self._sent.setdefault(digest, {})[chosen] = request.arrival
        return chosen


ROUTERS: dict[str, type[Router]] = {
    "random": RandomRouter,
    "power of two": PowerOfTwo,
    "prefix affinity": PrefixAffinity,
    "ours": Ours,
}


class Simulation:
    """One run of a fleet.

    All replicas that work do so at the same speed: 1, or less if they share fewer cores. ``_work`` is the work that one
    of them could have done so far, in seconds at full speed. Ends of work stand in a heap by it, everything else
    happens by the clock.

    Parameters
    ----------
    options : FleetOptions
    router : str
        A key of `ROUTERS`.
    times : ServiceTimes
    rule : RoutingRule
    seed : int
    names : sequence of str
        Of the replicas; made up by default.
    """

    def __init__(
        self,
        options: FleetOptions,
        router: str,
        times: ServiceTimes,
        rule: RoutingRule = _RULE,
        seed: int = 0,
        names: Sequence[str] = (),
    ) -> None:
        self.options, self._times = options, times
        self._router = ROUTERS[router](random.Random(f"{router} {seed}"), rule)
        self._chance = random.Random(seed)
        names = names or [f"r{number}" for number in range(options.replicas)]
        self.replicas = {name: Replica(name, options) for name in names}
        self.first = frozenset(names)  # of those that are not added later
        self.remote: set[int] = set()
        self.network = 0.0  # bytes both ways
        self._held: dict[str, HeldChunks] = {}
        self._now = self._work = self._link_free = 0.0
        self._next_summary, self._working, self._number = 0.0, 0, 0
        self._ends: list[tuple[float, int, Replica, Callable[[], None]]] = []

    def run(self, requests: Sequence[Request], changes: Sequence[Change] = (), warm_up: int = 0) -> list[Job]:
        """Answer all requests; what is counted so far is set to 0 when the request of number ``warm_up`` arrives."""
        jobs = [Job(request, request.new) for request in requests]
        happenings: list[tuple[float, Callable[[], None]]] = [
            (job.request.arrival, partial(self._arrive, job)) for job in jobs
        ]
        happenings += [(change.at, partial(self._change, change)) for change in changes]
        if warm_up:
            happenings.append((requests[warm_up].arrival, self._count_anew))
        for at, happen in sorted(happenings, key=lambda one: one[0]):
            self._until(at)
            happen()
        self._until(_ENDLESS)
        return jobs

    @property
    def _speed(self) -> float:
        return min(1.0, self.options.cores / self._working) if self._working else 1.0

    def _until(self, at: float) -> None:
        """Let all work end that ends before a moment."""
        while self._ends:
            work, _, replica, end = self._ends[0]
            ends = self._now + max(0.0, work - self._work) / self._speed
            if ends > at:
                break
            self._now, self._work = ends, max(work, self._work)
            heapq.heappop(self._ends)
            if replica.running:  # it is lost otherwise
                replica.running = False
                self._working -= 1
                end()
                self._go_on(replica)
        if at < _ENDLESS:
            self._work += (at - self._now) * self._speed
            self._now = at

    def _count_anew(self) -> None:
        self.network = 0.0
        for replica in self.replicas.values():
            replica.busy = 0.0

    def _arrive(self, job: Job) -> None:
        if self._router.summaries and self._now >= self._next_summary:
            self._next_summary = self._now + self.options.period - self._now % self.options.period
            for replica in self.replicas.values():
                if replica.changed:
                    self._held[replica.name] = HeldChunks.from_digests(reversed(replica.memory), reversed(replica.disk))
                    replica.changed = False
        job.replica = self._router.choose(job.request, self.replicas, self._held)
        replica = self.replicas[job.replica]
        replica.ongoing += 1
        replica.queue.append(job)
        self._go_on(replica)

    def _change(self, change: Change) -> None:
        if change.added:
            self.replicas[change.added] = Replica(change.added, self.options)
            return
        replica = self.replicas.pop(change.lost)
        self._held.pop(change.lost, None)
        self._router.lost(change.lost)
        self._working -= replica.running
        replica.running = False
        for job in [*replica.under, *replica.queue]:
            job.left = job.request.new
            self._arrive(job)

    # A replica ----------------------------------------------------------------------------------

    def _go_on(self, replica: Replica) -> None:
        """Begin what the scheduler would let in next."""
        if replica.running:
            return
        if replica.missing and replica.owed <= 0:
            self._store(replica)
        elif replica.queue and len(replica.under) < self.options.slots:
            self._prefill(replica)
        elif replica.under:
            self._begin(replica, self._step(len(replica.under)), self._stepped)
        elif replica.missing:
            self._store(replica)

    def _begin(self, replica: Replica, seconds: float, end: Callable[[Replica], None]) -> None:
        replica.running = True
        replica.busy += seconds
        replica.owed -= seconds if replica.missing else 0.0
        self._working += 1
        self._number += 1
        heapq.heappush(self._ends, (self._work + seconds, self._number, replica, lambda: end(replica)))

    def _prefill(self, replica: Replica) -> None:
        job, under = replica.queue.popleft(), list(replica.under)
        replica.under.append(job)
        found = {"memory": 0, "disk": 0, "remote": 0, "": 0}
        for digest, tokens in job.request.chunks.items():
            tier = replica.find(digest)
            if not tier and digest in self.remote:
                tier = "remote"
                replica.put(digest, tokens)
            elif not tier:
                replica.missing[digest] = tokens
            found[tier] += tokens
        job.hit, job.remote = found["memory"] + found["disk"], found["remote"]
        seconds = self._times.prefill(found[""] + job.request.other, found["memory"], found["disk"], found["remote"])
        if found["remote"]:
            size = found["remote"] * self._times.bytes
            self._link_free = max(self._link_free, self._work) + size / self.options.bandwidth
            seconds += self._link_free - self._work + self.options.latency
            self.network += size
        seconds *= self._chance.choice(self._times.spread)
        left = [other.left for other in under]
        # Between layers, so that tokens come in time; they count when the prefill ends.
        piece = max(_GAP * self._speed - self._step(len(under)), seconds / _LAYERS, _LEAST)
        for number in range(steps := min(int(seconds / piece), max(left, default=0))):
            seconds += self._step(sum(other > number for other in left))
        self._begin(replica, seconds, partial(self._prefilled, job, under, steps))

    def _step(self, answers: int) -> float:
        return self._times.step + self._times.beside * answers

    def _prefilled(self, job: Job, others: Sequence[Job], steps: int, replica: Replica) -> None:
        if job.ttft < 0:
            job.ttft = self._now - job.request.arrival + self._chance.choice(self.options.overhead)
        for other in others if steps else ():
            self._decoded(other, replica, steps)
        self._decoded(job, replica)

    def _stepped(self, replica: Replica) -> None:
        for job in list(replica.under):
            self._decoded(job, replica)

    def _decoded(self, job: Job, replica: Replica, steps: int = 1) -> None:
        job.left = max(0, job.left - steps)
        if job.left <= 0:
            replica.under.remove(job)
            replica.ongoing -= 1
            job.answered += 1

    def _store(self, replica: Replica) -> None:
        digest, tokens = replica.missing.popitem(last=False)
        known = digest in self.remote or digest in replica.disk or digest in replica.memory
        seconds = 0.0 if known else self._times.stored * tokens
        replica.owed = 0.0 if replica.ongoing else _REQUESTS_FIRST
        self._begin(replica, seconds, partial(self._stored, digest, tokens, seconds))
        replica.owed = max(replica.owed, _REQUESTS_SHARE * seconds)

    def _stored(self, digest: int, tokens: int, seconds: float, replica: Replica) -> None:
        if not seconds:
            return
        replica.put(digest, tokens)
        if self.options.shared and digest not in self.remote:
            self.remote.add(digest)
            self.network += tokens * self._times.bytes
