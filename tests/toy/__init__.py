"""The toy: a small model trained to read across chunks, its embedder and the archive that both were made for.

Tests use it where they need answers of a trained model within milliseconds. Importing this package is light: it only
names where the files lie.

Attributes
----------
MODEL_PATH : Path
    Folder for ``AutoModelForCausalLM.from_pretrained`` and ``AutoTokenizer.from_pretrained``.
EMBEDDER_PATH : Path
    Folder for ``sentence_transformers.SentenceTransformer``.
DOCUMENTS_PATH : Path
    The archive folder, one passage a file, of a town that the model never saw.
QUESTIONS_PATH : Path
    Questions about the archive, one JSON object a line.
CASES_PATH : Path
    Questions with twelve passages each, of towns that the model never saw, as ``eval --data`` reads them.
BLENDING : dict
    Options of `BlendConfig` that were measured to keep this model's answers (docs/reference/selection.md).
ARGUMENTS : list of str
    What names model, embedder and archive on the command line.
ENVIRONMENT : dict
    `BLENDING` as environment variables, for commands.
"""

import json
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent

MODEL_PATH = _HERE / "model"
EMBEDDER_PATH = _HERE / "embedder"
DOCUMENTS_PATH = _HERE / "documents"
QUESTIONS_PATH = _HERE / "questions.jsonl"
CASES_PATH = _HERE / "cases.jsonl"
BLENDING: dict[str, Any] = {
    "selection": "hkvd",
    "selection_options": {"check_layers": (3,)},
    "recompute_ratio": 0.15,
    "condition": "sink",
}
ARGUMENTS = ["--model", str(MODEL_PATH), "--embedder", str(EMBEDDER_PATH), "--docs", str(DOCUMENTS_PATH)]
ENVIRONMENT = {
    "CACHEBLEND_RAG_SELECTION": BLENDING["selection"],
    "CACHEBLEND_RAG_SELECTION_OPTIONS": json.dumps(BLENDING["selection_options"]),
    "CACHEBLEND_RAG_RECOMPUTE_RATIO": str(BLENDING["recompute_ratio"]),
    "CACHEBLEND_RAG_CONDITION": BLENDING["condition"],
}

__all__ = [
    "ARGUMENTS",
    "BLENDING",
    "CASES_PATH",
    "DOCUMENTS_PATH",
    "EMBEDDER_PATH",
    "ENVIRONMENT",
    "MODEL_PATH",
    "QUESTIONS_PATH",
]
