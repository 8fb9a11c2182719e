"""The page at ``/docs``: the OpenAPI document as plain HTML, without scripts or files from elsewhere."""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from typing import Any

_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color-scheme:light dark}"
    "summary{cursor:pointer;padding:.3rem 0}code,pre{font-family:ui-monospace,monospace;font-size:.9em}"
    "pre{overflow:auto;padding:.8rem;border:1px solid #8886;border-radius:.4rem}"
    "b{display:inline-block;min-width:4.5rem;text-transform:uppercase}"
)


def docs_page(document: dict[str, Any]) -> str:
    """HTML of an OpenAPI document."""
    title = escape(f"{document['info']['title']} {document['info']['version']}")
    rows = "\n".join(_operations(document))
    schemas = "\n".join(
        _details(f'<code id="{escape(name)}">{escape(name)}</code>', schema)
        for name, schema in document.get("components", {}).get("schemas", {}).items()
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>'
        f'<h1>{title}</h1><p>The same for programs: <a href="/openapi.json">openapi.json</a>.</p>'
        f"<h2>Requests</h2>{rows}<h2>Bodies</h2>{schemas}</body></html>"
    )


def _operations(document: dict[str, Any]) -> Iterator[str]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            about = escape(operation.get("description", operation.get("summary", "")))
            head = f"<b>{escape(method)}</b> <code>{escape(path)}</code> {about}"
            shown = {name: operation[name] for name in ("parameters", "requestBody", "responses") if name in operation}
            yield _details(head, shown)


def _details(head: str, content: Any) -> str:
    text = escape(json.dumps(content, indent=1, ensure_ascii=False))
    return f"<details><summary>{head}</summary><pre>{text}</pre></details>"
