"""The application as configurations describe it, and what is refused before anything starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from cacheblend_rag.app.cli import main
from cacheblend_rag.app.cli.configuration import GivenValue
from cacheblend_rag.app.fleet import FleetArguments, app
from cacheblend_rag.errors import ConfigError

# Ray 2.60 declares its own models so.
pytestmark = pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`:DeprecationWarning")

EXAMPLE = Path(__file__).parents[3] / "docs" / "how-to" / "deploy" / "fleet.yaml"


def example() -> dict[str, Any]:
    """The committed example."""
    content: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
    return content


def deployments(built: Any) -> dict[str, Any]:
    """The deployments of an application, by name."""
    ingress = built._bound_deployment
    replicas = ingress.init_args[0]._bound_deployment
    return {one.name: one for one in (ingress, replicas)}


def test_the_example_is_a_configuration_of_ray_serve(tmp_path: Path) -> None:
    from ray.serve.schema import ServeDeploySchema

    schema = ServeDeploySchema.model_validate(example())
    (one,) = schema.applications
    assert one.import_path == f"{app.__module__}:{app.__name__}"
    arguments = FleetArguments.model_validate(one.args)
    keys = tmp_path / "keys.json"
    assert main(["keys", "add", "ada", "--keys-file", str(keys)]) == 0
    arguments.options["server"]["keys_file"] = str(keys)
    found = deployments(app(arguments))
    replicas = found["replicas"]
    assert replicas.ray_actor_options["num_gpus"] == 1
    assert replicas._deployment_config.autoscaling_config.max_replicas == 6
    router = replicas._deployment_config.request_router_config
    assert router.request_router_class.endswith("ChunkRouter")
    given: dict[str, GivenValue] = replicas.init_args[0]
    assert given["dtype"].value == "bfloat16"


def test_fleet_refuses_bad_arguments_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"autoscaling": {"max_replicas": 2}}, "dtype"),
        ({"options": {"rag": {"modle": "smollm2"}}}, "args.options, [rag] modle"),
        ({"options": {"server": {"also_models": ["smollm2"]}}}, "args.options, [server] also_models"),
    ]
    for arguments, field in wrong:
        with pytest.raises(ConfigError) as caught:
            app(FleetArguments.model_validate(arguments))
        assert caught.value.field == field
    for command in (["--replicas", "2"], ["--ray", "--replicas", "0"]):
        assert main(["serve", *command]) == 2
        assert "--replicas" in capsys.readouterr().err


def test_only_replicas_import_what_is_heavy() -> None:
    """Ray's controller, the ingress and whoever builds the application import these modules too."""
    script = "import cacheblend_rag.app.fleet.application, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split()[-1] == "False"
