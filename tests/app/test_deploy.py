"""The files that servers are deployed by: what they name exists, and is spelled as the program spells it."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from cacheblend_rag.app.cli import _parser
from cacheblend_rag.app.cli.configuration import SECTIONS, given_options, server_settings
from cacheblend_rag.app.server import app as server_app

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "docs" / "how-to" / "deploy"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
VARIABLES = {option.variable for options in SECTIONS.values() for option in options}


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions with their arguments, in order."""
    text = re.sub(r"^\s*#.*\n", "", (DEPLOY / "Dockerfile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    found = [line.partition(" ") for line in re.sub(r"\\\n\s*", "", text).splitlines() if line.strip()]
    return [(name, rest.strip()) for name, _, rest in found]


def of(name: str) -> list[str]:
    return [rest for instruction, rest in instructions() if instruction == name]


def environment() -> dict[str, str]:
    return dict(pair.split("=", 1) for rest in of("ENV") for pair in shlex.split(rest))


def command_of(arguments: list[str], config: Path | None = None) -> Any:
    """Arguments as the program reads them; its file of options may lie elsewhere here."""
    parsed = _parser().parse_args(arguments)
    if config is not None:
        parsed.config = str(config)
    return parsed


def check_variables(names: set[str]) -> None:
    ours = {name for name in names if name.startswith("CACHEBLEND_RAG_")}
    assert ours <= VARIABLES


def test_the_image_is_built_from_what_there_is() -> None:
    known = {"FROM", "ARG", "WORKDIR", "RUN", "ENV", "COPY", "USER", "VOLUME", "EXPOSE", "STOPSIGNAL"}
    assert {name for name, _ in instructions()} == known | {"HEALTHCHECK", "ENTRYPOINT", "CMD"}
    stages = [re.fullmatch(r"python:(3\.\d+)-slim-bookworm( AS build)?", rest) for rest in of("FROM")]
    assert [stage is not None for stage in stages] == [True, True]
    assert PYPROJECT["project"]["requires-python"] == f">={stages[0][1]}"  # type: ignore[index]
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    assert "*" in ignored
    sources = {part for rest in of("COPY") if "--from" not in rest for part in shlex.split(rest)[:-1]}
    for source in sources:
        assert (ROOT / source).exists(), source
        assert f"!{source}" in ignored, source
    needed = {PYPROJECT["project"]["readme"], *PYPROJECT["project"]["license-files"], "constraints.txt"}
    assert {path for path in needed if not any(Path(path).is_relative_to(source) for source in sources)} == set()
    (install,) = [rest for rest in of("RUN") if "pip install" in rest]
    assert "-c constraints.txt" in install
    extras = re.search(r"\"\.\[([\w,]+)\]\"", install)
    assert extras is not None
    assert set(extras[1].split(",")) <= set(PYPROJECT["project"]["optional-dependencies"])


def test_the_image_runs_the_server_as_nobody_in_particular() -> None:
    entry, command = json.loads(of("ENTRYPOINT")[0]), json.loads(of("CMD")[0])
    assert entry[0] in PYPROJECT["project"]["scripts"]
    command_of([*entry[1:], *command])
    check_variables(set(environment()))
    (user,) = of("USER")
    uid, gid = user.split(":")
    (made,) = [rest for rest in of("RUN") if "useradd" in rest]
    assert int(uid) > 1000
    assert [part in made for part in (f"--uid {uid}", f"--gid {gid}")] == [True, True]
    (volume,) = of("VOLUME")
    assert re.search(rf"install -d -o \w+ -g \w+ -m 700 {volume}$", made)
    values = environment()
    assert all(values[name].startswith(volume) for name in ("XDG_CACHE_HOME", "HF_HOME"))
    assert of("EXPOSE") == [values["CACHEBLEND_RAG_PORT"]]


def test_compose_runs_the_image_with_its_hands_tied() -> None:
    content = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
    (server,) = content["services"].values()
    build = server["build"]
    context = (DEPLOY / build["context"]).resolve()
    assert context == ROOT
    assert (context / build["dockerfile"]).is_file()
    assert server["image"] == PYPROJECT["project"]["name"]
    mounted = dict(volume.split(":")[:2] for volume in server["volumes"])
    assert mounted["data"] == of("VOLUME")[0]
    assert "data" in content["volumes"]
    parsed = command_of(server["command"])
    (file,) = [source for source, target in mounted.items() if target == parsed.config]
    assert (DEPLOY / file).is_file()
    assert server["user"] == of("USER")[0]
    assert server["read_only"] is True
    assert server["cap_drop"] == ["ALL"]
    assert server["security_opt"] == ["no-new-privileges:true"]
    assert [one.split(":")[0] for one in server["tmpfs"]] == ["/tmp"]
    assert server["ports"] == [f"127.0.0.1:8000:{of('EXPOSE')[0]}"]
    assert int(server["stop_grace_period"].removesuffix("s")) > server_app._LAST


def test_the_file_of_options_can_be_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    settings = server_settings(given_options(command_of(["serve"], DEPLOY / "serve.toml")))
    assert settings.limits.tokens_per_minute == 200_000


def test_the_unit_runs_the_server_with_its_hands_tied(tmp_path: Path) -> None:
    text = (DEPLOY / "cacheblend-rag.service").read_text(encoding="utf-8")
    unit = configparser.RawConfigParser()
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(text)
    service = unit["Service"]
    program, *arguments = shlex.split(service["ExecStart"])
    assert Path(program).name in PYPROJECT["project"]["scripts"]
    assert Path(command_of(arguments).config).name == "serve.toml"
    check_variables({one.split("=")[0] for one in service["Environment"].split()})
    assert service["User"] not in ("", "root")
    state = f"/var/lib/{service['StateDirectory']}"
    assert all(one.split("=")[1].startswith(state) for one in service["Environment"].split())
    assert int(service["TimeoutStopSec"]) > server_app._LAST
    assert service["ProtectSystem"] == "strict"
    assert service["NoNewPrivileges"] == "yes"
    assert service["CapabilityBoundingSet"] == ""
    assert "MemoryDenyWriteExecute" not in service  # oneDNN could not run its code
    assert service["SystemCallFilter"] == "@system-service"
    if shutil.which("systemd-analyze"):
        # The program it starts must be there to be verified.
        there = tmp_path / "cacheblend-rag.service"
        there.write_text(text.replace(program, "/bin/true"), encoding="utf-8")
        done = subprocess.run(["systemd-analyze", "verify", there], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        # A call that an older systemd does not know yet is no fault.
        assert not re.search(r"Unknown (key|lvalue|section)|Failed to parse", done.stderr)
