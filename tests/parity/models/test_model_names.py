"""Names by which no model is found: each is refused at once, with what to name instead, and no hub is asked twice."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from huggingface_hub import constants, is_offline_mode

from cacheblend_rag import BlendEngine, Prompt
from cacheblend_rag.app.cli import main
from cacheblend_rag.errors import EmbedderError, ModelLoadError, UnsupportedModelError
from cacheblend_rag.langchain import CacheBlendLLM, ChatCacheBlend
from cacheblend_rag.llama_index import CacheBlendLLM as LlamaIndexLLM
from cacheblend_rag.models.loading import expected_treatment, load_geometry, load_model
from cacheblend_rag.retrieval.embedder import SentenceTransformerEmbeddings
from tests import gguf_files, tiny

WAYS: dict[str, Callable[[str], Any]] = {
    "engine": BlendEngine.from_pretrained,
    "chat": lambda name: ChatCacheBlend(model=name),
    "llm": lambda name: CacheBlendLLM(model=name),
    "llama_index": lambda name: LlamaIndexLLM(model=name),
    "check": expected_treatment,
    "geometry": load_geometry,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders and files that are nearly models."""
    root = tmp_path_factory.mktemp("nearly")
    (root / "empty").mkdir()
    (root / "notes").mkdir()
    (root / "notes" / "notes.txt").write_text("x")
    (root / "whole").mkdir()
    for part in (tiny.model("llama"), tiny.tokenizer()):
        part.save_pretrained(root / "whole")
    for name in ("bare", "cut"):
        (root / name).mkdir()
        for file in (root / "whole").iterdir():
            (root / name / file.name).write_bytes(file.read_bytes())
    (root / "bare" / "model.safetensors").unlink()
    weights = root / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    (root / "gguf").mkdir()
    whole = gguf_files.write(root / "gguf" / "tiny.gguf", tiny.model("llama")).read_bytes()
    for name, content in (("zero", b""), ("head", whole[:200]), ("half", whole[:-3000]), ("text", b"version git-lfs")):
        (root / f"{name}.gguf").write_bytes(content)
    writer = gguf.GGUFWriter(root / "lfm2.gguf", "lfm2")
    writer.add_tensor("token_embd.weight", np.zeros((4, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return root


NAMES = {
    "smolm2": "no such folder; did you mean the starter model 'smollm2'",
    "qwen2.5-coder": "did you mean the starter model 'qwen2.5-coder-1.5b' or 'qwen2.5-coder-0.5b'",
    " ": "name a folder of a saved model, a GGUF file, a hub id or the starter model 'smollm2'",
    "ROOT/emty": "no such file or folder, but there is 'empty'; name a folder",
    "ROOT/none/model": "no such file or folder; name a folder",
    "./nowhere": "no such file or folder; name a folder",
    "nowhere.gguf": "no such file or folder; name a folder",
    "ROOT/empty": "the folder is empty; name a folder",
    "ROOT/notes": "the folder holds no config.json; name a folder",
    "ROOT/gguf": "the folder holds no config.json; name the file in it: 'ROOT/gguf/tiny.gguf'",
    "ROOT/zero.gguf": "is empty; fetch it again",
    "ROOT/head.gguf": "is damaged or incomplete: .*; fetch it again",
    "ROOT/half.gguf": "is damaged or incomplete: .*; fetch it again",
    "ROOT/text.gguf": "is not a GGUF file; name a GGUF file",
    "llama3.2:3b": "a tag of Ollama's library, and its file is not here: fetch it by `ollama pull llama3.2:3b`",
    "llama3.2": "if it is a name of Ollama's, name the model's id .*GGUF file that `ollama show --modelfile llama3.2`",
    "nobody/nothing": "not in the local cache, and no hub may be asked .*; check the name and the network",
}


def test_every_way_to_name_a_model_says_at_once_why_there_is_none(folders: Path) -> None:
    root = str(folders)
    ways = [("engine", name) for name in NAMES] + [(way, "smolm2") for way in WAYS]
    for way, name in ways:
        with pytest.raises(ModelLoadError, match=NAMES[name].replace("ROOT", root)) as caught:
            WAYS[way](name.replace("ROOT", root))
        assert name.replace("ROOT", root) in str(caught.value)
        assert "\n" not in str(caught.value)


def test_folder_without_whole_weights_is_refused(folders: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"bare' could not be loaded: the folder holds no weights, .*; fetch"):
        load_model(folders / "bare")
    with pytest.raises(ModelLoadError, match=r"cut' could not be loaded: its weights are damaged or cut off .*git-lfs"):
        load_model(folders / "cut")


def test_config_alone_says_what_there_will_be_and_that_weights_are_missing(
    folders: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape, _ = load_geometry(folders / "bare")
    assert shape.layers == tiny.model("llama").config.num_hidden_layers
    assert expected_treatment(folders / "bare").how == "blended"
    assert main(["models", "check", str(folders / "bare")]) == 0
    told = capsys.readouterr()
    assert told.out.startswith(f"{folders / 'bare'}: blended\n")
    assert "the folder holds no weights, such as model.safetensors" in told.err


def test_gguf_of_another_architecture_is_refused_with_what_to_load(folders: Path) -> None:
    said = r"lfm2.gguf' is of the architecture 'lfm2', .*; of another, name the folder or hub id of the original"
    with pytest.raises(UnsupportedModelError, match=said):
        load_model(folders / "lfm2.gguf")
    assert expected_treatment(folders / "lfm2.gguf").how == "refused"


def test_command_line_says_it_in_one_line(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [str(folders / "empty"), "smolm2", str(folders / "half.gguf"), str(folders / "whole")]
    assert main(["models", "check", *names]) == 2
    seen = capsys.readouterr()
    empty, slip, half = seen.err.splitlines()
    assert "the folder is empty" in empty
    assert slip.startswith("smolm2: ")
    assert "did you mean the starter model 'smollm2'?" in slip
    assert "fetch it again" in half
    said, meaning = seen.out.splitlines()
    assert said == f"{folders / 'whole'}: blended"
    assert "context window holds 2,048 tokens" in meaning


def test_embedders_are_refused_alike(folders: Path) -> None:
    for name in ("mini-lm", str(folders / "empty"), "nobody/nothing"):
        with pytest.raises(EmbedderError, match=r"'minilm'") as caught:
            SentenceTransformerEmbeddings(name)
        assert name in str(caught.value)


# Hubs ---------------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Paths that a hub was asked for which answers that it is busy; its client would ask again and again."""
    paths: list[str] = []

    class Busy(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            if "resolve" in self.path:  # not what the client asks for its own sake
                paths.append(self.path)
            self.send_response(503)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Busy)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    _point_at(monkeypatch, server.server_port)
    yield paths
    server.shutdown()
    server.server_close()


def _point_at(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
    template = f"http://127.0.0.1:{port}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)

    def slept(seconds: float) -> None:
        raise AssertionError("the hub's client waits to ask again")

    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", slept)


def test_hub_that_does_not_answer_is_asked_once(asked: list[str]) -> None:
    said = r"model 'nobody/nothing' could not be loaded: .*answers with status 503; check the name and the network"
    with pytest.raises(ModelLoadError, match=said):
        ChatCacheBlend(model="nobody/nothing")
    assert asked == ["/nobody/nothing/resolve/main/config.json"]
    assert not is_offline_mode()


def test_hub_that_cannot_be_reached_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    _point_at(monkeypatch, 9)
    for load, error in ((BlendEngine.from_pretrained, ModelLoadError), (SentenceTransformerEmbeddings, EmbedderError)):
        with pytest.raises(error, match=r"the hub http://127.0.0.1:9 cannot be reached \(.*HF_ENDPOINT names a mirror"):
            load("nobody/nothing")


def test_cached_model_is_loaded_without_a_hub(folders: Path, tmp_path: Path, asked: list[str]) -> None:
    cache = tmp_path / "models--some--model"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text("0" * 40)
    snapshot = cache / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    for file in (folders / "whole").iterdir():
        (snapshot / file.name).write_bytes(file.read_bytes())
    loaded = load_model("some/model", device="cpu", cache_dir=str(tmp_path))
    assert loaded.tokenizer("a").input_ids == tiny.tokenizer()("a").input_ids
    assert len(asked) == 1
    assert not is_offline_mode()
    with pytest.raises(ModelLoadError, match="not in the local cache"):
        load_model("some/other", device="cpu", cache_dir=str(tmp_path))


@pytest.mark.parametrize(
    ("tag", "manifest"),
    [
        ("tiny:1b", "registry.ollama.ai/library/tiny/1b"),
        ("someone/tiny:latest", "registry.ollama.ai/someone/tiny/latest"),
        ("hf.co/someone/tiny:Q4_K_M", "hf.co/someone/tiny/Q4_K_M"),
    ],
)
def test_tag_of_ollama_is_the_file_that_it_has_fetched(
    tag: str, manifest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))
    file = tmp_path / "blobs" / "sha256-1234"
    file.parent.mkdir()
    gguf_files.write(file, tiny.model("llama"))
    kinds = {"model": "sha256:1234", "template": "sha256:5678"}
    layers = [{"mediaType": f"application/vnd.ollama.image.{kind}", "digest": one} for kind, one in kinds.items()]
    path = tmp_path / "manifests" / manifest
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"layers": layers}), encoding="utf-8")
    with BlendEngine.from_pretrained(tag) as engine:
        assert engine.generate(Prompt("the", [tiny.text(150, 1)], "the fox"), max_new_tokens=2).token_ids
        assert engine.model.file == file
    file.unlink()
    with pytest.raises(ModelLoadError, match="its file is not here"):
        BlendEngine.from_pretrained(tag)
