"""Each request's id, its line of JSON in the log, its span, and the counts of its tenant.

The log goes to standard error, without text of documents or questions. The id is in every line that is logged
meanwhile.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from cacheblend_rag.app.server.security.tenants import Caller
from cacheblend_rag.report import BlendReport

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""Id of the request that is served here; empty outside of one."""

ACCESS_LOG = "cacheblend_rag.app.server.access"
"""Name of the logger that has a line for each request."""
_log = logging.getLogger(ACCESS_LOG)
STAGES = ("split", "look_up", "load", "fuse", "first_token")
"""The parts of the time to first token."""
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


class JsonFormatter(logging.Formatter):
    """A record as JSON.

    Of an exception only its kind and where it came from are written: messages of libraries may
    quote what they were working on.
    """

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter.format`."""
        line: dict[str, object] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if mine := request_id.get():
            line["request"] = mine
        line.update(getattr(record, "fields", {}))
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            line["error"] = type(error).__name__
            line["at"] = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)]
        return json.dumps(line, ensure_ascii=False)


def configure_logs(access: str = "json") -> None:
    """Write the process's logs in this form.

    Parameters
    ----------
    access : str
        Form of the access log, one of `ACCESS_LOGS` of the settings.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.getLogger(ACCESS_LOG).disabled = access == "off"
    for name in ("uvicorn", "uvicorn.error", "httpx", "sentence_transformers"):
        logging.getLogger(name).setLevel(logging.WARNING)


try:
    from opentelemetry import trace
except ModuleNotFoundError:  # an older FastAPI, which makes no spans
    trace = None  # type: ignore[assignment]


@dataclass
class ServedRequest:
    """A request that is being served. It holds nothing that a client wrote.

    Parameters
    ----------
    method : str
    path : str
        Template of the path, such as ``/api/documents/{id}``; ``"other"`` where none fits.
    status : int
        499 if the client went away.
    seconds : float
        From its head to the end of its answer; the wait for a slot is in it.
    caller : Caller, optional
        None without a key that fits.
    bytes_in, bytes_out : int
        Of the bodies.
    prompt_tokens, generated_tokens : int
        Of all its answers, each with its prompt; of one that was stopped, the tokens until then.
    reused_tokens : int
        Tokens whose KV was read from the store.
    hits, misses : int
        Chunks that were read from the store, and chunks that were not there.
    charged : int
        Tokens that were taken from the tenant's quota.
    unfinished : int
        Answers that are paid for and not complete.
    stages : dict
        Seconds of the parts of the time to first token, summed over its answers.
    ttft : float, optional
        Time to first token of the first answer, in seconds, from its slot at the model on.
    """

    method: str
    path: str = "other"
    status: int = 0
    seconds: float = 0.0
    caller: Caller | None = None
    bytes_in: int = 0
    bytes_out: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    reused_tokens: int = 0
    hits: int = 0
    misses: int = 0
    charged: int = 0
    unfinished: int = 0
    stages: dict[str, float] = field(default_factory=dict)
    ttft: float | None = None
    _noted: list[BlendReport] = field(default_factory=list)

    def note(self, report: BlendReport) -> bool:
        """Take note of what an answer took; False if it is noted already."""
        if any(one is report for one in self._noted):
            return False
        self._noted.append(report)
        for name in ("prompt_tokens", "generated_tokens", "reused_tokens", "hits", "misses"):
            setattr(self, name, getattr(self, name) + getattr(report, name))
        self.ttft = report.ttft if self.ttft is None else self.ttft
        for name in STAGES:
            self.stages[name] = self.stages.get(name, 0.0) + getattr(report.seconds, name)
        return True

    def embedded(self, tokens: int) -> None:
        """Take note of texts that were embedded."""
        self.prompt_tokens += tokens
        self.unfinished -= 1

    @property
    def unused(self) -> int:
        """Tokens that were charged but not used; an answer that did not finish is charged in full."""
        return 0 if self.unfinished else self.charged - self.prompt_tokens - self.generated_tokens


served: ContextVar[ServedRequest] = ContextVar("served")
"""The request that is served here."""


def log_access(one: ServedRequest) -> None:
    """Write the line of a request; its id is added as to every line."""
    fields: dict[str, Any] = {
        "method": one.method if one.method in _METHODS else "other",  # no word that a client made up
        "path": one.path,
        "status": one.status,
        "seconds": round(one.seconds, 4),
        "tenant": one.caller and one.caller.tenant,
        "key": one.caller and one.caller.key,
        "bytes_in": one.bytes_in,
        "bytes_out": one.bytes_out,
        "tokens_in": one.prompt_tokens,
        "tokens_out": one.generated_tokens,
        "tokens_charged": one.charged - one.unused,
        "hits": one.hits,
        "misses": one.misses,
        "ttft": None if one.ttft is None else round(one.ttft, 4),
    }
    _log.info("request", extra={"fields": fields})


def add_to_span(one: ServedRequest) -> None:
    """Add the request's counts to its FastAPI span, if OpenTelemetry is set up.

    The span ends with the answer's body, so this must be called before. Each answer has a child span with token counts
    under their conventional names; the counts here have other names, so that sums count no token twice.
    """
    if trace is None or not (span := trace.get_current_span()).is_recording():
        return
    took: dict[str, str | int | float] = {
        "cacheblend_rag.tokens_in": one.prompt_tokens,
        "cacheblend_rag.tokens_out": one.generated_tokens,
        "cacheblend_rag.request": request_id.get(),
        "cacheblend_rag.hits": one.hits,
        "cacheblend_rag.misses": one.misses,
    }
    if one.caller is not None:
        took |= {"cacheblend_rag.tenant": one.caller.tenant or "", "cacheblend_rag.key": one.caller.key}
    span.set_attributes({**took, **{f"cacheblend_rag.seconds.{name}": value for name, value in one.stages.items()}})
