"""The embedded reference model: a small trained model, its embedder and the archive both were made for.

Importing this package is light: it only names where the bundled files lie.

Attributes
----------
MODEL_PATH : Path
    Folder for ``AutoModelForCausalLM.from_pretrained`` and ``AutoTokenizer.from_pretrained``.
EMBEDDER_PATH : Path
    Folder for ``sentence_transformers.SentenceTransformer``.
DOCUMENTS_PATH : Path
    The bundled archive folder, one passage a file, written from the test split.
QUESTIONS_PATH : Path
    Questions about the bundled archive, one JSON object a line.
BLENDING : dict
    Options of `BlendConfig` that were measured to keep this model's answers (docs/selection.md).
"""

from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent

MODEL_PATH = _HERE / "model"
EMBEDDER_PATH = _HERE / "embedder"
DOCUMENTS_PATH = _HERE / "documents"
QUESTIONS_PATH = _HERE / "questions.jsonl"
BLENDING: dict[str, Any] = {
    "selection": "foreseen",
    "query_layers": (2,),
    "recompute_ratio": 0.5,
    "selection_options": {"bound": 0.9, "following": 1},
}

__all__ = ["BLENDING", "DOCUMENTS_PATH", "EMBEDDER_PATH", "MODEL_PATH", "QUESTIONS_PATH"]
