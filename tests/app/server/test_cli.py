"""``cacheblend-rag serve``: its options, and what it says when it cannot start."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import cacheblend_rag
from cacheblend_rag.app.cli import _parser, configuration, main
from cacheblend_rag.app.cli.configuration import (
    SECTIONS,
    GivenValue,
    given_options,
    given_sections,
    server_settings,
    shown_settings,
)
from cacheblend_rag.app.options import FolderRAGOptions
from cacheblend_rag.app.server.keys_file import write_private
from cacheblend_rag.app.server.services.logs import JsonFormatter, request_id
from cacheblend_rag.app.server.settings import KEYS_VARIABLE, Limits, ServerSettings
from cacheblend_rag.config import BlendConfig, Option
from cacheblend_rag.errors import ConfigError
from tests.toy import EMBEDDER_PATH


def settings_of(*arguments: str) -> ServerSettings:
    return server_settings(given_options(_parser().parse_args(["serve", *arguments])))


def test_options_become_settings(docs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_values_below_zero_follow_their_flag() -> None:
    for given, seconds in (("-1", None), ("-5m", None), ("5m", 300.0)):
        assert settings_of("--keep-alive", given).rag.keep_alive == seconds
        assert settings_of(f"--keep-alive={given}").rag.keep_alive == seconds


def test_further_models_come_from_flags_the_environment_or_a_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text('[server]\nalso_models = ["a=~/one", "two"]', encoding="utf-8")
    assert settings_of("--config", str(file)).models["a"] == str(Path("~/one").expanduser())
    assert list(settings_of("--config", str(file)).models)[1:] == ["a", "two"]
    monkeypatch.setenv("CACHEBLEND_RAG_ALSO_MODELS", "three, b=four")
    assert list(settings_of("--config", str(file)).models)[1:] == ["three", "b"]
    given = settings_of("--also-model", "c=with,comma", "--also-model", "five").models
    assert (given["c"], list(given)[1:]) == ("with,comma", ["c", "five"])


def test_serve_names_bad_arguments(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / "serve.toml"
    path.write_text(FILE, encoding="utf-8")
    return path


def test_file_gives_options_below_the_environment_and_flags(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_serve_names_bad_entries_of_an_options_file(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases: tuple[tuple[Any, str], ...] = (
        ("[limits]\nque = 3", "[limits] que=3 is not usable: there is no such option; did you mean 'queue' under"),
        ("queue = 3", "queue=3 is not usable: write it under [limits]"),
        ("[server]\nqueue = 3", "[server] queue=3 is not usable: write it under [limits]"),
        ("[engin]\nx = 1", "there is no such option; did you mean 'engine'?"),
        ("engine = 1", "engine='…' is not usable: write it as a table, [engine]"),
        ("[limits]\nqueue = '3'", "[limits] queue='3' is not usable: use a whole number, without quotes"),
        ("[limits]\nqueue = true", "[limits] queue=True is not usable: use a whole number"),
        ("[limits]\nqueue = 0", "[limits] queue=0 is not usable: use a whole number, 1 or more"),
        ("[limits]\nanswer_seconds = nan", "[limits] answer_seconds=nan is not usable: use a number above 0"),
        (
            "[limits]\nanswer_seconds = inf",
            "[limits] answer_seconds=inf is not usable: use a number above 0 that is not infinite",
        ),
        ("[limits]\nanswer_seconds = '3'", "answer_seconds='3' is not usable: use a number, without quotes"),
        ("[limits]\nupload_bytes = 'much'", "[limits] upload_bytes='much' is not usable: use a positive number"),
        ("[limits]\nupload_bytes = 1.5", "[limits] upload_bytes=1.5 is not usable"),
        ("[engine]\nsplit_at_separator = 'on'", "[engine] split_at_separator='on' is not usable: use true or false"),
        (
            "[engine]\ncheck_layers = [3]",
            "check_layers=[3] is not usable: there is no such option any more; give it to",
        ),
        ("[engine]\nprefetch = true", "prefetch=True is not usable: there is no such option any more; leave it out"),
        ("[server]\nalso_models = 'x'", "also_models='x' is not usable: use a list"),
        ("[engine]\nrecompute_ratio = 2", "[engine] recompute_ratio=2 is not usable: use a number from 0 to 1"),
        ("[engine]\nselection_options = 3", "use a table, such as {seed = 1}"),
        ("[engine]\nmax_concurrent = 3", "did you mean 'concurrent' under [server]?"),
        ("[rag]\ntop_k = 51", "[rag] top_k=51 is not usable: use a whole number from 1 to 50"),
        ("[rag]\nmodel = 3", "[rag] model=3 is not usable: use a text, in quotes"),
        ("[rag]\nmodel = './none'", "[rag] model='./none' is not usable: there is no such file or folder"),
        ("[server]\nhost = '0.0.0.0'", "[server] host='0.0.0.0' is not usable: others could reach the server"),
        ("port = x", "it is no TOML: Invalid value (at line 1"),
    )
    for text, message in cases:
        file.write_text(text, encoding="utf-8")
        assert main(["serve", "--config", str(file), "--data-dir", str(file.parent / "data")]) == 2, text
        told = capsys.readouterr().err
        assert message in told, text
        assert str(file) in told, text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "selection = 'hkvd'\nselection_options = {check_layers = [99]}",
            "selection_options, check_layers=(99,) is not usable: this model has",
        ),
        ("selection = 'hkdv'", "selection='hkdv' is not usable: "),
    ],
)
def test_serve_names_options_that_only_the_model_can_judge(
    text: str,
    message: str,
    file: Path,
    model: Path,
    docs: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("uvicorn.Server.run", lambda *args: pytest.fail("it listens"))
    file.write_text(f"[engine]\n{text}", encoding="utf-8")
    known = ["--model", str(model), "--embedder", str(EMBEDDER_PATH), "--docs", str(docs), "--device", "cpu"]
    assert main(["serve", "--config", str(file), *known, "--data-dir", str(file.parent / "data")]) == 2
    assert f"{file}, [engine] {message}" in capsys.readouterr().err


def test_missing_or_binary_options_file_is_named(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--config", str(file.parent / "none.toml")]) == 2
    assert "none.toml' is not usable: No such file" in capsys.readouterr().err
    file.write_bytes(b"\xff\xfe")
    assert main(["serve", "--config", str(file)]) == 2
    assert "it is no TOML" in capsys.readouterr().err


def test_print_config_shows_a_file_that_gives_the_same_options(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
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


# Texts of every kind; each option is tried with those that it takes.
VALUES = [
    *["0", "1", "-1", "0.5", "2.5", "1e-7", "on", "off", "auto", "none", "high", "5m", "-5m", "300ms", "7ns", "20GB"],
    *["cuda:1", "localhost", "house/model-1", "s3://bucket/kv", "valkey://host:6379/0"],
    *['{"seed": 1, "ratios": [0.5, Infinity], "a \\"b": {"c": []}}', 'a "b"\\\n\t\x7f\x1b é…', "~/one, b=two"],
]


def test_every_value_of_every_option_is_read_again_as_it_was_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_private(tmp_path / "0", '{"version": 1, "keys": []}')  # a file of keys
    for option in (option for options in SECTIONS.values() for option in options):
        assert_read_again(option, tmp_path)


def assert_read_again(option: Option, tmp_path: Path) -> None:
    others = {} if option.name == "data_dir" else {"data_dir": GivenValue(str(tmp_path), "--data-dir")}
    tried = 0
    for text in [*VALUES, *re.findall(r"'(\w+)'", option.kind.words)]:
        try:
            given = {**others, option.name: GivenValue(option.read(text, "here"), 'a "b"\n.toml')}
            settings = server_settings(given)
        except ConfigError:  # it takes no such value
            continue
        shown = shown_settings(settings, given)
        again = server_settings(given_options(None, given_sections(tomllib.loads(shown), "shown")))
        if option.name != "salt":  # a secret
            assert again == settings, (text, shown)
        tried += f"{option.name} = " in shown
    assert tried or option.name == "salt", option.name


def test_secrets_are_not_shown(file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_variables_that_are_no_options_are_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LIMIT_QUEUE", "MAX_CONCURRENT", "SERVICE_PORT_HTTP_9", "ONEDNN", "ENCRYPTION_KEY", "LIMITS_QUEUE"):
        monkeypatch.setenv(f"CACHEBLEND_RAG_{name}", "3")
    assert main(["serve", "--print-config"]) == 0
    assert capsys.readouterr().err.splitlines() == [
        "cacheblend-rag: CACHEBLEND_RAG_LIMIT_QUEUE is not used; did you mean CACHEBLEND_RAG_LIMITS_QUEUE?",
        "cacheblend-rag: CACHEBLEND_RAG_MAX_CONCURRENT is not used; did you mean CACHEBLEND_RAG_CONCURRENT?",
        "cacheblend-rag: CACHEBLEND_RAG_SERVICE_PORT_HTTP_9 is not used",
    ]


def test_every_variable_that_is_read_is_known() -> None:
    package = Path(cacheblend_rag.__file__).parent
    text = "\n".join(path.read_text(encoding="utf-8") for path in package.rglob("*.py"))
    read = (
        set(re.findall(r"ENV_PREFIX \+ \"(\w+)\"", text))
        | {name.upper() for name in re.findall(r"flag_from_environment\(\"(\w+)\"", text)}
        | set(re.findall(r"CACHEBLEND_RAG_([A-Z]+_KEY)\b", text))
    )
    others = {name.removeprefix("CACHEBLEND_RAG_") for name in configuration.OTHER_VARIABLES}
    assert read == others


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


def test_log_line_has_the_kind_of_an_error_and_not_its_message() -> None:
    try:
        raise ValueError("pineapple")
    except ValueError:
        record = logging.LogRecord("a", logging.ERROR, __file__, 1, "failed", (), sys.exc_info())
    record.fields = {"path": "/x"}
    assert "request" not in json.loads(JsonFormatter().format(record))
    token = request_id.set("mine-17")
    line = json.loads(JsonFormatter().format(record))
    request_id.reset(token)
    assert line["request"] == "mine-17"
    assert (line["message"], line["error"], line["path"], line["level"]) == ("failed", "ValueError", "/x", "error")
    assert "pineapple" not in str(line)
