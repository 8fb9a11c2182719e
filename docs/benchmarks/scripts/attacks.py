"""Attacks on a running server by tools that are not ours: ``python -m docs.benchmarks.scripts.attacks``.

It needs schemathesis (extra ``test``), and zzuf and slowhttptest from the system's packages. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx

from docs.benchmarks.scripts.served import served

__all__ = ["PATIENCE", "Line", "asking", "fuzzed_uploads", "generated_requests", "main", "slow_clients"]

KEY = "ada-0123456789abcdef"
HEADERS = {"Authorization": f"Bearer {KEY}"}
# Forbidden answers of the server, whatever it is sent.
_CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "use_after_free",
    "ensure_resource_availability",
    "ignored_auth",
)
_SLOW = {"-H": "heads that do not end", "-B": "bodies that do not end", "-X": "answers that are read a byte at a time"}
_CONNECTIONS = 1_000
PATIENCE = 5.0
"""Seconds within which another client must be answered meanwhile."""


@dataclass(frozen=True)
class Line:
    """One attack.

    Parameters
    ----------
    attack : str
    tried : int
        Requests or connections.
    wrong : int
        Failures of the server: a 5xx, a broken promise of the API, a client beside it that was not answered.
    detail : str
    """

    attack: str
    tried: int
    wrong: int
    detail: str


def generated_requests(url: str, seconds: float, key: str = KEY) -> Line:
    """Requests and chains of requests made from the OpenAPI document by schemathesis; that none were made is wrong."""
    command = ["schemathesis", "run", f"{url}/openapi.json", "--phases", "examples,coverage,fuzzing,stateful"]
    command += ["--max-time", f"{seconds:.0f}", "--checks", ",".join(_CHECKS), "--header"]
    command += [f"Authorization: Bearer {key}", "--suppress-health-check", "all", "--continue-on-failure"]
    command += ["--request-timeout", "300"]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    if said.returncode:
        print(said.stdout[-6_000:], said.stderr[-2_000:], file=sys.stderr)
    made, passed = (_last(pattern, said.stdout) for pattern in (r"(\d+) generated", r"(\d+) passed"))
    operations, chains = (_last(pattern, said.stdout) for pattern in (r"Tested: (\d+)", r"Scenarios: +(\d+)"))
    detail = f"{operations} operations, {chains} chains of requests"
    failed = said.returncode != 0 or not made  # in a few seconds it makes none, and ends well
    return Line("requests made by schemathesis", made, max(made - passed, int(failed)), detail)


def _last(pattern: str, text: str) -> int:
    found = re.findall(pattern, text)
    return int(found[-1]) if found else 0


def fuzzed_uploads(url: str, times: int) -> Line:
    """Uploads whose bytes zzuf has altered: the form around the files, and the files."""
    with httpx.Client(base_url=url, headers=HEADERS, timeout=60) as client:
        path = f"/api/collections/{client.post('/api/collections', json={'name': 'Fuzzed'}).json()['id']}/documents"
        files = [("files", (f"letter-{n}.{kind}", _FILES[kind])) for n, kind in enumerate(_FILES)]
        whole = client.build_request("POST", path, files=files)
        body, statuses, broken = whole.read(), Counter[int](), 0
        for seed in range(times):
            ratio = (0.0005, 0.004, 0.03)[seed % 3]
            altered = subprocess.run(
                ["zzuf", "-s", str(seed), "-r", str(ratio)], input=body, capture_output=True, check=True
            ).stdout
            while True:
                try:
                    answer = client.post(path, content=altered, headers={"Content-Type": whole.headers["Content-Type"]})
                except httpx.HTTPError:
                    broken += 1
                    break
                if answer.status_code != 429:
                    statuses[answer.status_code] += 1
                    break
                time.sleep(0.2)
        wrong = broken + sum(count for status, count in statuses.items() if status >= 500)
        while (states := Counter(one["state"] for one in client.get(path).json()))["indexing"]:
            time.sleep(1)
        wrong += client.get("/readyz").status_code != 200
    told = ", ".join(f"{count} answered {status}" for status, count in sorted(statuses.items()))
    return Line("uploads altered by zzuf", times, wrong, f"{told}; documents: {dict(states)}")


_FILES = {
    "md": b"# A letter\n\nThe painter Nils Dorhaven lives in Olsted and keeps a goat.\n" * 20,
    "html": b"<html><head><title>A letter</title></head><body><table><tr><td>Olsted</td></tr></table></body></html>",
    "csv": b"name,town\nNils Dorhaven,Olsted\n" * 20,
}


def slow_clients(url: str, mode: str, seconds: float) -> Line:
    """Connections of slowhttptest, while another client on another address goes on asking."""
    command = ["slowhttptest", mode, "-c", str(_CONNECTIONS), "-r", "200", "-i", "2", "-l", f"{seconds:.0f}"]
    command += ["-u", f"{url}/v1/models" if mode != "-X" else f"{url}/", "-p", "3"]
    with asking(url) as seen:
        said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    plain = re.sub(r"\x1b\[[0-9;]*m", "", said)
    closed = _last(r"closed: +(\d+)", plain)
    detail = f"{closed} were closed; {len(seen)} requests beside them, the slowest took {max(seen):.2f} s"
    return Line(f"slowhttptest: {_SLOW[mode]}", _CONNECTIONS, sum(one > PATIENCE for one in seen), detail)


@contextmanager
def asking(url: str, path: str = "/v1/models", key: str = KEY) -> Iterator[list[float]]:
    """Seconds of each request of a client on an address of its own; one that fails took for ever."""
    seen, ended, headers = list[float](), threading.Event(), {"Authorization": f"Bearer {key}"}

    def ask() -> None:
        transport = httpx.HTTPTransport(local_address="127.0.0.2")
        while not ended.is_set():
            began = time.monotonic()
            try:
                with httpx.Client(transport=transport, base_url=url, headers=headers, timeout=30) as client:
                    fine = client.get(path).status_code == 200
            except httpx.HTTPError:
                fine = False
            seen.append(time.monotonic() - began if fine else float("inf"))
            time.sleep(0.1)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        yield seen
    finally:
        ended.set()
        asking.join()


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line an attack; 1 if the server failed in one."""
    parser = argparse.ArgumentParser(prog="python -m docs.benchmarks.scripts.attacks", description=__doc__)
    parser.add_argument("--seconds", type=float, default=180.0, help="of schemathesis; slow clients take a third")
    parser.add_argument("--uploads", type=int, default=2_000)
    parser.add_argument("--serve", nargs=argparse.REMAINDER, default=[], help="more options of the server")
    parsed = parser.parse_args(arguments)
    if missing := [name for name in ("schemathesis", "slowhttptest", "zzuf") if shutil.which(name) is None]:
        parser.error(f"install {', '.join(missing)}: schemathesis by pip, the others by the system's packages")
    with tempfile.TemporaryDirectory() as folder, served(Path(folder), {"ada": KEY}, parsed.serve) as url:
        attacks: list[Callable[[], Line]] = [
            *(lambda mode=mode: slow_clients(url, mode, parsed.seconds / 3) for mode in _SLOW),
            lambda: fuzzed_uploads(url, parsed.uploads),
            lambda: generated_requests(url, parsed.seconds),
        ]
        lines = []
        for attack in attacks:
            lines.append(attack())
            print(
                f"{lines[-1].attack}: {lines[-1].tried} tried, {lines[-1].wrong} wrong; {lines[-1].detail}", flush=True
            )
    print(json.dumps([asdict(line) for line in lines]))
    return 1 if any(line.wrong for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
