"""``cacheblend-rag serve``: its options, and what it says when it cannot start."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from cacheblend_rag.app.cli import _parser, main
from cacheblend_rag.app.cli.configuration import SECTIONS, given_options, server_settings
from cacheblend_rag.app.options import FolderRAGOptions
from cacheblend_rag.app.server import app
from cacheblend_rag.app.server.services.service import open_service
from cacheblend_rag.app.server.settings import KEYS_VARIABLE, Limits, ServerSettings
from cacheblend_rag.config import BlendConfig
from tests.app.server.common import settings_for
from tests.toy import EMBEDDER_PATH

Capture, Patch = pytest.CaptureFixture[str], pytest.MonkeyPatch


def settings_of(*arguments: str) -> ServerSettings:
    return server_settings(given_options(_parser().parse_args(["serve", *arguments])))


def test_options_become_settings(docs: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv(KEYS_VARIABLE, "ada=0123456789abcdef")
    options = ["--host", "0.0.0.0", "--port", "0", "--upload-limit", "5MB", "--queue", "3", "--ratio", "0.2"]
    settings = settings_of("--docs", str(docs), *options, "--max-new-tokens", "9")
    assert (settings.host, settings.port) == ("0.0.0.0", 0)
    assert (settings.limits.upload_bytes, settings.limits.queue) == (5_000_000, 3)
    assert (settings.rag.config.recompute_ratio, settings.rag.max_new_tokens) == (0.2, 9)
    assert settings.rag.docs == str(docs)
    assert settings.served_model_name is None
    named = settings_of("--served-model-name", "house/model-1")
    assert named.served_model_name == "house/model-1"
    assert "0123456789abcdef" not in repr(settings)


def test_further_models_come_from_flags_the_environment_or_a_file(file: Path, monkeypatch: Patch) -> None:
    file.write_text('[server]\nalso_models = ["a=~/one", "two"]', encoding="utf-8")
    assert settings_of("--config", str(file)).models["a"] == str(Path("~/one").expanduser())
    assert list(settings_of("--config", str(file)).models)[1:] == ["a", "two"]
    monkeypatch.setenv("CACHEBLEND_RAG_ALSO_MODELS", "three, b=four")
    assert list(settings_of("--config", str(file)).models)[1:] == ["three", "b"]
    given = settings_of("--also-model", "c=with,comma", "--also-model", "five").models
    assert (given["c"], list(given)[1:]) == ("with,comma", ["c", "five"])


def test_serve_names_bad_arguments(model: Path, tmp_path: Path, capsys: Capture) -> None:
    cases: tuple[tuple[Any, str], ...] = (
        (["--host", "0.0.0.0"], KEYS_VARIABLE),
        (["--port", "70000"], "--port='70000'"),
        (["--queue", "0"], "--queue='0'"),
        (["--served-model-name", "two words"], "--served-model-name='two words'"),
        (["--also-model", "other=nowhere.gguf"], "--also-model='nowhere.gguf'"),
        (["--also-model", "one=smollm2", "--also-model", "one=minilm"], "--also-model='one=minilm'"),
        (["--upload-limit", "much"], "--upload-limit='much'"),
        (["--docs", "nowhere"], "nowhere"),
    )
    known = ["--model", str(model), "--embedder", str(EMBEDDER_PATH), "--data-dir", str(tmp_path)]
    for arguments, message in cases:
        assert main(["serve", *known, *arguments]) == 2, arguments
        assert message in capsys.readouterr().err, arguments


FILE = """
[rag]
docs = "~/contracts"
top_k = 3
[server]
port = 9000
concurrent = 2
[limits]
upload_bytes = "5MB"
answer_seconds = 30
queue = 7
[engine]
size_limit = "20GB"
split_at_separator = true
selection_options = {check_layers = [1, 3]}
recompute_ratio = 0.25
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: Patch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / "serve.toml"
    path.write_text(FILE, encoding="utf-8")
    return path


def test_file_gives_options_below_the_environment_and_flags(file: Path, monkeypatch: Patch) -> None:
    settings = settings_of("--config", str(file))
    assert (settings.rag.docs, settings.rag.top_k) == (str(file.parent / "contracts"), 3)
    assert (settings.port, settings.concurrent) == (9000, 2)
    limits, engine = settings.limits, settings.rag.config
    assert (limits.upload_bytes, limits.answer_seconds, limits.queue) == (5_000_000, 30.0, 7)
    assert (engine.size_limit, engine.split_at_separator, engine.recompute_ratio) == (20 * 10**9, True, 0.25)
    assert engine.selection_options == {"check_layers": (1, 3)}
    monkeypatch.setenv("CACHEBLEND_RAG_LIMITS_QUEUE", "8")
    monkeypatch.setenv("CACHEBLEND_RAG_PORT", "9001")
    monkeypatch.setenv("CACHEBLEND_RAG_RECOMPUTE_RATIO", "0.3")
    settings = settings_of("--config", str(file), "--port", "9002", "--ratio", "0.4")
    assert (settings.limits.queue, settings.port, settings.rag.config.recompute_ratio) == (8, 9002, 0.4)
    assert settings_of("--config", str(file)).rag.config.recompute_ratio == 0.3


def test_serve_names_bad_entries_of_an_options_file(file: Path, capsys: Capture) -> None:
    cases: tuple[tuple[Any, str], ...] = (
        ("[limits]\nque = 3", "[limits] que=3 is not usable: there is no such option; did you mean 'queue' under"),
        ("[server]\nqueue = 3", "[server] queue=3 is not usable: write it under [limits]"),
        ("[engin]\nx = 1", "there is no such option; did you mean 'engine'?"),
        ("engine = 1", "engine='…' is not usable: write it as a table, [engine]"),
        ("[limits]\nqueue = '3'", "[limits] queue='3' is not usable: use a whole number, without quotes"),
        ("[limits]\nqueue = 0", "[limits] queue=0 is not usable: use a whole number, 1 or more"),
        (
            "[limits]\nanswer_seconds = inf",
            "[limits] answer_seconds=inf is not usable: use a number above 0 that is not infinite",
        ),
        ("[limits]\nupload_bytes = 'much'", "[limits] upload_bytes='much' is not usable: use a positive number"),
        ("[engine]\nsplit_at_separator = 'on'", "[engine] split_at_separator='on' is not usable: use true or false"),
        (
            "[engine]\ncheck_layers = [3]",
            "check_layers=[3] is not usable: there is no such option any more; give it to",
        ),
        ("[limits]\ncollections = 3", "collections=3 is not usable: there is no such option any more; leave it out"),
        ("[engine]\nprefetch = true", "prefetch=True is not usable: there is no such option any more; leave it out"),
        ("[server]\nalso_models = 'x'", "also_models='x' is not usable: use a list"),
        ("[engine]\nrecompute_ratio = 2", "[engine] recompute_ratio=2 is not usable: use a number from 0 to 1"),
        ("[engine]\nmax_concurrent = 3", "did you mean 'concurrent' under [server]?"),
        ("[rag]\ntop_k = 51", "[rag] top_k=51 is not usable: use a whole number from 1 to 50"),
        ("[rag]\nmodel = 3", "[rag] model=3 is not usable: use a text, in quotes"),
        ("[rag]\nmodel = './none'", "[rag] model='./none' is not usable: there is no such file or folder"),
        ("[server]\nhost = '0.0.0.0'", "[server] host='0.0.0.0' is not usable: others could reach the server"),
        ("port = x", "it is not valid TOML: Invalid value (at line 1"),
    )
    for text, message in cases:
        file.write_text(text, encoding="utf-8")
        assert main(["serve", "--config", str(file), "--data-dir", str(file.parent / "data")]) == 2, text
        told = capsys.readouterr().err
        assert message in told, text
        assert str(file) in told, text


def test_serve_names_what_the_model_refuses(
    file: Path, model: Path, docs: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    monkeypatch.setattr("uvicorn.Server.run", lambda *args: pytest.fail("it listens"))
    known = ["--model", str(model), "--embedder", str(EMBEDDER_PATH), "--docs", str(docs), "--device", "cpu"]
    file.write_text("[engine]\nselection = 'hkvd'\nselection_options = {check_layers = [99]}", encoding="utf-8")
    assert main(["serve", "--config", str(file), *known, "--data-dir", str(file.parent / "data")]) == 2
    said = f"{file}, [engine] selection_options, check_layers=(99,) is not usable: this model has"
    assert said in capsys.readouterr().err


def test_print_config_shows_a_file_that_gives_the_same_options(file: Path, capsys: Capture, monkeypatch: Patch) -> None:
    monkeypatch.setenv("CACHEBLEND_RAG_LIMITS_QUEUE", "8")
    assert main(["serve", "--config", str(file), "--port", "9002", "--print-config"]) == 0
    shown = capsys.readouterr().out
    for line, origin in (
        ("port = 9002", "--port"),
        ("queue = 8", "CACHEBLEND_RAG_LIMITS_QUEUE"),
        ("upload_bytes = 5000000", f"{file}, [limits] upload_bytes"),
        ('codec = "int8"', "default"),
        ("# served_model_name: its id", "default"),
    ):
        assert [one.split(" # ")[-1] for one in shown.splitlines() if one.startswith(line)] == [origin], line
    monkeypatch.delenv("CACHEBLEND_RAG_LIMITS_QUEUE")
    before = settings_of("--config", str(file), "--port", "9002", "--queue", "8")
    file.write_text(shown, encoding="utf-8")
    assert settings_of("--config", str(file)) == before


def test_secrets_are_not_shown(file: Path, capsys: Capture, monkeypatch: Patch) -> None:
    monkeypatch.setenv(KEYS_VARIABLE, "ada=pineapple-0123456789")
    monkeypatch.setenv("CACHEBLEND_RAG_ENCRYPTION_KEY", "pineapple")
    file.write_text('[engine]\nsalt = "pineapple"', encoding="utf-8")
    assert main(["serve", "--config", str(file), "--print-config"]) == 0
    shown = capsys.readouterr().out
    for part in ("# keys of ada are in the environment", "# salt is set", "ENCRYPTION_KEY is set"):
        assert part in shown
    assert "pineapple" not in shown
    for text in ('[server]\napi_keys = "pineapple"', "[engine]\nsalt = ['pineapple']", "[keys]\nada = 'pineapple'"):
        file.write_text(text, encoding="utf-8")
        assert main(["serve", "--config", str(file)]) == 2
        assert "pineapple" not in capsys.readouterr().err


def test_the_file_of_the_documents_can_be_used(file: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "how-to" / "server.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"^```toml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    file.write_text(text, encoding="utf-8")
    settings = settings_of("--config", str(file))
    assert (settings.port, settings.limits.queue, settings.limits.upload_bytes) == (9000, 16, 50_000_000)


def test_unknown_variables_are_named(capsys: Capture, monkeypatch: Patch) -> None:
    for name in ("LIMIT_QUEUE", "MAX_CONCURRENT", "SERVICE_PORT_HTTP_9", "ONEDNN", "ENCRYPTION_KEY", "LIMITS_QUEUE"):
        monkeypatch.setenv(f"CACHEBLEND_RAG_{name}", "3")
    assert main(["serve", "--print-config"]) == 0
    assert capsys.readouterr().err.splitlines() == [
        "cacheblend-rag: CACHEBLEND_RAG_LIMIT_QUEUE is not used; did you mean CACHEBLEND_RAG_LIMITS_QUEUE?",
        "cacheblend-rag: CACHEBLEND_RAG_MAX_CONCURRENT is not used; did you mean CACHEBLEND_RAG_CONCURRENT?",
        "cacheblend-rag: CACHEBLEND_RAG_SERVICE_PORT_HTTP_9 is not used",
    ]


def test_every_option_of_the_server_can_stand_in_a_file() -> None:
    """And none in two sections."""
    named = {section: {option.name for option in options} for section, options in SECTIONS.items()}
    assert sum(map(len, named.values())) == len(set().union(*named.values()))
    assert named["limits"] == {one.name for one in dataclasses.fields(Limits)}
    assert named["engine"] == {*BlendConfig.names()} - {"max_concurrent"}
    assert named["rag"] == {one.name for one in dataclasses.fields(FolderRAGOptions)} - {"config"}
    of_server = {one.name for one in dataclasses.fields(ServerSettings)}
    assert named["server"] == of_server - {"rag", "limits", "api_keys", "data"}
    defaults = Limits()
    assert all(option.default == getattr(defaults, option.name) for option in SECTIONS["limits"])


def test_start_names_what_is_left_out(
    model: Path, docs: Path, tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    settings = settings_for(model, docs, tmp_path / "data")
    for name, content in {"broken.pdf": b"%PDF-1.4", "empty.md": b"", "one.png": b"x"}.items():
        Path(settings.rag.docs, name).write_bytes(content)
    opened: list[Any] = []
    monkeypatch.setattr(app, "configure_logs", lambda access: None)
    monkeypatch.setattr(app, "open_service", lambda given: opened.append(open_service(given)) or opened[-1])
    monkeypatch.setattr(app._AnnouncingServer, "run", lambda self: None)
    for _ in ("read now", "known already"):
        app.serve(settings)
        opened[-1].close()
        said = capsys.readouterr().err
        assert said.count("broken.pdf cannot be read as PDF") == 1
        assert "cacheblend-rag: skipped: empty.md holds no text" in said
        assert "cacheblend-rag: 1 files of other kinds left out (1 .png): one.png" in said
