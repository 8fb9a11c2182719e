"""The loading controller: how much to recompute, and where to keep KV (section 5 of the paper).

Numbers in, a plan out: nothing is measured, read or computed here.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from cacheblend_rag.config import LEAST_RATIO
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.loading.profile import BlendSettings, Device, MachineProfile, PrefillProfile

_log = logging.getLogger(__name__)
# Answers of another machine that a chunk waits for: its header, and its first layers. The others come meanwhile.
_REMOTE_READS = 2


@dataclass(frozen=True)
class RatioBounds:
    """Within what a recompute ratio is chosen.

    Parameters
    ----------
    lowest : float
        r*, what quality needs; 0.15 in the paper.
    highest : float
        Beyond this, more recompute would only cost energy.
    step : float
        Ratios are multiples of this above the lowest, so that requests alike get one ratio.
    """

    lowest: float = LEAST_RATIO
    highest: float = 0.5
    step: float = 0.05

    def __post_init__(self) -> None:
        if not 0 <= self.lowest <= self.highest <= 1 or not self.step > 0:
            raise ConfigError("bounds", self, "use 0 <= lowest <= highest <= 1 and a positive step")

    def round_down(self, ratio: float) -> float:
        """The highest allowed ratio up to the given ratio, or else the lowest allowed ratio."""
        steps = math.floor((min(ratio, self.highest) - self.lowest) / self.step + 1e-9)
        return round(self.lowest + max(0, steps) * self.step, 6)


@dataclass(frozen=True)
class ChunkKV:
    """Stored KV of a chunk.

    Parameters
    ----------
    tokens : int
    bytes : int
        That must be read.
    device : str
        The other machine that it is read from; empty if it is not.
    """

    tokens: int
    bytes: int
    device: str = ""


@dataclass(frozen=True)
class LoadingPlan:
    """Decision about the stored KV of a prompt.

    Parameters
    ----------
    recompute_ratio : float
    device : str
        Where it is loaded from.
    load_seconds, recompute_seconds, prefill_seconds : float
        Expected: loading, the blended pass by itself, and a full prefill.
    recomputed_chunks : tuple of int
        Numbers of chunks that are computed faster than they are loaded; all of them if a full
        prefill takes no longer than the blended pass.
    """

    recompute_ratio: float
    device: str
    load_seconds: float
    recompute_seconds: float
    prefill_seconds: float
    recomputed_chunks: tuple[int, ...] = ()


class LoadingController:
    """Chooses recompute ratios and storage devices.

    Parameters
    ----------
    profile : MachineProfile
        Measurements of the machine.
    devices : mapping of str to Device
        Further devices to choose from; those of the profile come first.
    """

    def __init__(self, profile: MachineProfile, devices: Mapping[str, Device] | None = None) -> None:
        self.devices: dict[str, Device] = {**(devices or {}), **profile.devices}
        self.blends: Mapping[str, BlendSettings] = profile.blends
        self._prefill: Mapping[str, PrefillProfile] = profile.prefill
        self._seen: dict[str, deque[float]] = {}

    def knows(self, model: str, device: str) -> bool:
        """Whether a plan can be made for this model and device."""
        return model in self._prefill and device in self.devices

    def plan(
        self,
        model: str,
        chunks: Sequence[ChunkKV],
        tokens: int,
        *,
        device: str | None = None,
        ratio: float | None = None,
        bounds: RatioBounds | None = None,
        fixed_share: float = 0.0,
        reads: int = 0,
        read_before: float = 0.0,
    ) -> LoadingPlan:
        """Plan the loading of a prompt's chunks.

        Given a device, chooses the ratio at which recompute takes as long as the loading that it can hide, within
        bounds. Given a ratio, chooses the cheapest device whose loading hides behind recompute, or the nearest to that.
        Given both, only predicts the times.

        Parameters
        ----------
        model : str
            Fingerprint.
        chunks : sequence of ChunkKV
        tokens : int
            Of the whole prompt: L in the paper.
        device : str, optional
            Where the chunks of this machine are. Those that name a device of the profile are read from there.
        ratio : float, optional
            Recompute ratio, if it is given.
        bounds : RatioBounds, optional
            By default those of `RatioBounds`.
        fixed_share : float
            Share of a full prefill's work that is done at any ratio (the layers before the check,
            the question). With 0, and a profile that knows full prefills only, the arithmetic is
            exactly the paper's: ``T_recompute = r * Prefill(L)``.
        reads : int
            Reads per chunk of this machine, each with the device's latency.
        read_before : float
            Share of the layers that are read before the first is computed, as a scoring pass needs it. Recompute
            does not hide this loading.

        Raises
        ------
        ConfigError
            If model or device is not in the profile, or neither device nor ratio is given.
        """
        bounds = bounds or RatioBounds()
        if model not in self._prefill:
            raise ConfigError("model", model, "run `cacheblend-rag profile` for it first")
        known = self._prefill[model]
        prefill = known.seconds(tokens)
        if device is None:
            if ratio is None:
                raise ConfigError("ratio", ratio, "use a recompute ratio, or name the device")
            device = self.cheapest_device(chunks, known.blended_seconds(tokens, fixed_share, ratio), reads=reads)
        computed, computed_tokens, load = self._split(self._device_of(device), chunks, prefill / max(tokens, 1), reads)
        # Chunks that are computed instead add to what is done at any ratio.
        fixed = min(1.0, fixed_share + computed_tokens / max(tokens, 1) * (1 - fixed_share))
        before, hidden = read_before * load, (1 - read_before) * load
        if ratio is None:
            ratio = bounds.round_down(known.ratio_of(hidden, tokens, fixed))
        recompute = known.blended_seconds(tokens, fixed, ratio)
        # Nothing is gained by loading.
        if len(computed) == len(chunks) or before + max(hidden, recompute) >= prefill:
            return LoadingPlan(ratio, device, 0.0, prefill, prefill, tuple(range(len(chunks))))
        return LoadingPlan(ratio, device, load, recompute, prefill, computed)

    def cheapest_device(self, chunks: Sequence[ChunkKV], recompute: float, *, reads: int = 0) -> str:
        """The cheapest device from which loading takes no longer than recompute, else the fastest.

        Parameters
        ----------
        chunks : sequence of ChunkKV
        recompute : float
            Seconds of recompute.
        reads : int
            Reads per chunk.
        """
        if not self.devices:
            raise ConfigError("devices", {}, "use at least one device")
        size, count = sum(chunk.bytes for chunk in chunks), reads * len(chunks)
        times = {name: device.seconds(size, count) for name, device in self.devices.items()}
        hidden = [name for name, seconds in times.items() if seconds <= recompute]
        if not hidden:
            return min(times, key=times.__getitem__)
        return min(hidden, key=lambda name: (self.devices[name].price, times[name]))

    def cost(self, device: str, size: float, months: float) -> float:
        """Price of keeping bytes on a device for so many months."""
        return self._device_of(device).cost(size, months)

    def note(self, device: str, expected: float, actual: float) -> None:
        """Compare a loading time with what was expected; a large drift is logged and corrected.

        Large is a median of the last eight beyond twice or below half of what was expected.
        """
        if expected <= 0 or actual <= 0 or device not in self.devices:
            return
        seen = self._seen.setdefault(device, deque(maxlen=8))
        seen.append(actual / expected)
        drift = statistics.median(seen)
        if len(seen) < 8 or 0.5 <= drift <= 2:
            return
        before = self.devices[device]
        self.devices[device] = replace(before, throughput=before.throughput / drift, latency=before.latency * drift)
        seen.clear()
        _log.log(
            logging.WARNING if drift > 1 else logging.INFO,
            "loading from %s takes %.2g times what the profile says and is planned with %.3g MB/s from now on; "
            "run `cacheblend-rag profile` again",
            device,
            drift,
            self.devices[device].throughput / 1e6,
        )

    def _split(
        self, here: Device, chunks: Sequence[ChunkKV], token_seconds: float, reads: int
    ) -> tuple[tuple[int, ...], int, float]:
        """Chunks that are computed faster, at so many seconds a token, than read; their tokens; loading the others."""
        places = [chunk.device if chunk.device in self.devices else "" for chunk in chunks]

        def seconds(place: str, numbers: Sequence[int]) -> float:
            size = sum(chunks[number].bytes for number in numbers)
            if place:  # another machine is asked for all chunks at once
                return self.devices[place].seconds(size, _REMOTE_READS)
            return here.seconds(size, reads * len(numbers))

        computed = tuple(
            number
            for number, (chunk, place) in enumerate(zip(chunks, places, strict=True))
            if seconds(place, [number]) > token_seconds * chunk.tokens
        )
        loaded: dict[str, list[int]] = {}
        for number, place in enumerate(places):
            if number not in computed:
                loaded.setdefault(place, []).append(number)
        load = sum(seconds(place, numbers) for place, numbers in loaded.items())
        return computed, sum(chunks[number].tokens for number in computed), load

    def _device_of(self, name: str) -> Device:
        if name not in self.devices:
            raise ConfigError("device", name, "use one of " + ", ".join(map(repr, self.devices)))
        return self.devices[name]
