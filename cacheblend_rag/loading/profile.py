"""Measurements of this machine and its storage devices: numbers, no measuring."""

from __future__ import annotations

import dataclasses
import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from cacheblend_rag.config import BlendConfig, plain_options
from cacheblend_rag.errors import ConfigError, StoreError


@dataclass(frozen=True)
class PrefillProfile:
    """Seconds of a full prefill by the number of tokens, and of a blended pass as section 5 of the paper assumes.

    Parameters
    ----------
    constant, linear, quadratic : float
        Seconds, seconds a token, seconds a token squared.
    """

    constant: float
    linear: float
    quadratic: float

    def seconds(self, tokens: int) -> float:
        """Time of a full prefill: ``Prefill(LLM, L)`` in section 5 of the paper."""
        return self.constant + self.linear * tokens + self.quadratic * tokens * tokens

    def blended_seconds(self, tokens: int, fixed_share: float, ratio: float) -> float:
        """Time of a blended pass with nothing to load: ``T_recompute`` in section 5 of the paper.

        Parameters
        ----------
        tokens : int
        fixed_share : float
            Share of a full prefill that is done at any ratio.
        ratio : float
            Recompute ratio, of the rest.
        """
        return (fixed_share + ratio * (1 - fixed_share)) * self.seconds(tokens)

    def ratio_of(self, seconds: float, tokens: int, fixed_share: float) -> float:
        """The recompute ratio at which a blended pass takes so long; 0 or less if none is small enough."""
        whole = (1 - fixed_share) * self.seconds(tokens)
        return (seconds - self.blended_seconds(tokens, fixed_share, 0.0)) / whole if whole > 0 else 0.0


@dataclass(frozen=True)
class Device:
    """A storage device.

    Parameters
    ----------
    name : str
    throughput : float
        Bytes a second.
    latency : float
        Seconds before the first byte of each read.
    price : float
        Of keeping a GB (10^9 bytes) a month.
    """

    name: str
    throughput: float
    latency: float = 0.0
    price: float = 0.0

    def __post_init__(self) -> None:
        if not self.throughput > 0:
            raise ConfigError(
                "throughput", self.throughput, f"use a positive number of bytes a second for {self.name!r}"
            )
        if not self.latency >= 0 or not self.price >= 0:
            raise ConfigError("latency, price", (self.latency, self.price), f"use 0 or more for {self.name!r}")

    def seconds(self, size: float, reads: int = 0) -> float:
        """Time to load so many bytes in so many reads: ``T_load`` in section 5 of the paper."""
        return self.latency * reads + size / self.throughput

    def cost(self, size: float, months: float) -> float:
        """Price of keeping so many bytes: ``C_store`` in section 5 of the paper."""
        return self.price * size / 1e9 * months


@dataclass(frozen=True)
class BlendSettings:
    """How prompts of a model are to be blended, as ``cacheblend-rag calibrate`` found it.

    Parameters
    ----------
    selection : str
        Name of the rule; ``"all"`` for a model that does not tolerate blending.
    recompute_ratio, selection_options
        Its options, as in `BlendConfig`.
    condition : str
        The condition of chunks, as in `BlendConfig`.
    tolerance : float
        Mean KL divergence from full prefill that was allowed, in nats a token.
    divergence, highest : float
        The divergence, and the upper end of its 95% interval over prompts.
    work : float
        Mean work as a share of full prefill's.
    prompts : int
        Prompts that this was measured on.
    """

    selection: str
    recompute_ratio: float = 0.15
    selection_options: Mapping[str, Any] = field(default_factory=dict)
    condition: str = BlendConfig.default("condition")
    tolerance: float = 0.0
    divergence: float = 0.0
    highest: float = 0.0
    work: float = 1.0
    prompts: int = 0

    @property
    def tolerates(self) -> bool:
        """Whether the model tolerates blending at all."""
        return self.selection != "all"

    @property
    def least_ratio(self) -> float:
        """Share that stays on the last layers: what a controller may raise but not lower."""
        ratios = self.selection_options.get("recompute_ratios")
        return float(ratios[-1]) if ratios else self.recompute_ratio


@dataclass(frozen=True)
class MachineProfile:
    """Measurements of a machine.

    Parameters
    ----------
    prefill : mapping of str to PrefillProfile
        By fingerprint of the model.
    devices : mapping of str to Device
        By the name stores give their tier: ``"disk"``, ``"memory"``, ``"s3"``, ``"valkey"``; ``"gpu"`` is the copy
        from host to GPU.
    blends : mapping of str to BlendSettings
        By fingerprint of the model.
    """

    prefill: Mapping[str, PrefillProfile] = field(default_factory=dict)
    devices: Mapping[str, Device] = field(default_factory=dict)
    blends: Mapping[str, BlendSettings] = field(default_factory=dict)

    def merge(self, other: MachineProfile) -> MachineProfile:
        """Both, where both know a model or device what the other has measured later."""
        return MachineProfile(
            {**self.prefill, **other.prefill}, {**self.devices, **other.devices}, {**self.blends, **other.blends}
        )

    def save(self, path: Path) -> None:
        """Write it as JSON, readable for the user alone.

        Raises
        ------
        StoreError
            If the file cannot be written.
        """
        content = {
            "prefill": {name: dataclasses.asdict(found) for name, found in self.prefill.items()},
            "devices": {name: dataclasses.asdict(found) for name, found in self.devices.items()},
        }
        if self.blends:
            content["blends"] = {name: dataclasses.asdict(found) for name, found in self.blends.items()}
        try:
            draft = path.with_suffix(f".{os.getpid()}.draft")  # who reads meanwhile sees the old file or the new one
            with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
                json.dump(content, file, indent=1)
            os.replace(draft, path)
        except OSError as error:
            raise StoreError(f"cannot write the profile {str(path)!r}: {error}") from error

    @classmethod
    def load(cls, path: Path) -> MachineProfile | None:
        """Read a profile; None if the file does not exist.

        Raises
        ------
        StoreError
            If the file is not a profile.
        """
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            return cls(
                {
                    # Earlier versions saved more.
                    name: PrefillProfile(*(float(found[part]) for part in ("constant", "linear", "quadratic")))
                    for name, found in content["prefill"].items()
                },
                {name: Device(str(found.pop("name")), **_numbers(found)) for name, found in content["devices"].items()},
                {name: _settings(found) for name, found in content.get("blends", {}).items()},
            )
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            remedy = "remove it or run `cacheblend-rag profile` again"
            raise StoreError(f"{str(path)!r} is not a profile: {error!r}; {remedy}") from error


def load_devices(path: str | os.PathLike[str] | None = None) -> dict[str, Device]:
    """Storage devices by name, from a TOML file; by default the package's own.

    Raises
    ------
    ConfigError
        If the file cannot be read or a device in it is not described.
    """
    try:
        if path is None:
            text = resources.files("cacheblend_rag.loading").joinpath("devices.toml").read_text(encoding="utf-8")
        else:
            text = Path(path).read_text(encoding="utf-8")
        return {name: Device(name, **_numbers(found)) for name, found in tomllib.loads(text).items()}
    except ConfigError:
        raise
    except (OSError, ValueError, TypeError, AttributeError) as error:
        remedy = "use a TOML file with throughput, latency and price in a table for each device"
        raise ConfigError("devices", os.fspath(path or ""), f"{remedy} ({error})") from error


def _numbers(found: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in found.items()}


def _settings(found: Mapping[str, Any]) -> BlendSettings:
    """Settings as they were saved; what a later version added is left out."""
    known = {option.name: found[option.name] for option in dataclasses.fields(BlendSettings) if option.name in found}
    options = dict(found.get("selection_options", {}))
    if found["selection"] in ("hkvd", "gradual"):  # earlier versions saved these two beside the others
        options |= {name: found[name] for name in ("check_layers", "recompute_ratios") if found.get(name)}
    known["selection_options"] = plain_options(options)
    return BlendSettings(**known)
