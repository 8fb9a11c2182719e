"""Structured logs: one JSON object a line on standard error, without text of documents or questions."""

from __future__ import annotations

import json
import logging
import sys
import traceback

from cacheblend_rag.app.server.accounting import ACCESS_LOG
from cacheblend_rag.app.server.request_ids import request_id


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


class _TextFormatter(logging.Formatter):
    """A line of the access log for people."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter.format`."""
        fields: dict[str, object] = getattr(record, "fields", {})
        told = [f"{name}={value}" for name, value in fields.items() if value is not None]
        return " ".join([self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"), *told, f"request={request_id.get()}"])


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
    requests = logging.getLogger(ACCESS_LOG)
    requests.disabled, requests.propagate = access == "off", access == "json"
    for one in list(requests.handlers):
        requests.removeHandler(one)
    if access == "text":
        lines = logging.StreamHandler(sys.stderr)
        lines.setFormatter(_TextFormatter())
        requests.addHandler(lines)
    for name in ("uvicorn", "uvicorn.error", "httpx", "sentence_transformers"):
        logging.getLogger(name).setLevel(logging.WARNING)
