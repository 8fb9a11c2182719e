"""Keep alive: memory of a model that nobody has used for a while is given back, and the model stays as it is."""

from __future__ import annotations

import logging
import threading
import weakref
from typing import Any

from cacheblend_rag.config import default_data_path, read_keep_alive
from cacheblend_rag.engine.scheduler import held_if_idle, idle_seconds, is_wanted
from cacheblend_rag.engine.turns import Turns
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.models.weight_file import WeightFile, why_kept

_log = logging.getLogger(__name__)
# Seconds between two looks at the least.
_LEAST = 1.0


def check_keep_alive(seconds: float | None, model: Any) -> None:
    """Refuse to give memory back that cannot be given back.

    Raises
    ------
    ConfigError
        If the weights of this model cannot be put away.
    """
    if seconds is not None and (reason := why_kept(model)) is not None:
        raise ConfigError("keep_alive", seconds, f"leave it out; this model stays in memory: {reason}")


def check_for_ever(given: float | str | None) -> None:
    """Refuse to give back the memory of a model that comes as an object.

    Raises
    ------
    ConfigError
        If it is no time, or any but for ever.
    """
    if read_keep_alive("keep_alive", given) is not None:
        remedy = "leave it out; a model given as an object stays in memory, as others may hold it"
        raise ConfigError(
            "keep_alive", given, f"{remedy}; from_pretrained (or from_model_id) takes its name and a time"
        )


class KeepAlive:
    """Gives the memory of a model's weights back once nobody has had the model, or waited for it, for a while.

    Parameters
    ----------
    seconds : float or None
        None for never; then it does nothing, and has no thread.
    model : Module, optional
    device : torch.device, optional
        Where it computes.
    turns : Turns, optional
        Those of an engine over the model. Other models may be behind the same scheduler: a use of one is a use of all.
    """

    def __init__(
        self, seconds: float | None = None, model: Any = None, device: Any = None, turns: Turns | None = None
    ) -> None:
        self.seconds = seconds
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        if seconds is None or turns is None:
            return
        self._scheduler = turns.scheduler
        weakref.finalize(turns.lifetime, self.stop).atexit = False
        self._weights = WeightFile(model, device, default_data_path())
        # As long as the model is there, whoever uses it: it may outlive the engine.
        preparations = self._scheduler.preparations
        preparations.append(self._weights.bring_back)
        weakref.finalize(model, preparations.remove, self._weights.bring_back).atexit = False
        self._thread = threading.Thread(target=self._watch, name="keep-alive", daemon=True)
        self._thread.start()

    @property
    def away(self) -> bool:
        """Whether the memory was given back, and nobody has used the model since."""
        return self.seconds is not None and self._weights.away

    def look(self) -> float:
        """Give the memory back if it is time; seconds until it may be time again."""
        if self.seconds is None:
            return threading.TIMEOUT_MAX
        if not self.away:
            with held_if_idle(self._scheduler, self.seconds) as held:
                if held and self._weights.put_away(lambda: self._ended.is_set() or is_wanted(self._scheduler)):
                    _log.info("the model was not used for %g s; the memory of its weights is free", self.seconds)
        return self.seconds - idle_seconds(self._scheduler) if not self.away else self.seconds

    def _watch(self) -> None:
        pause = self.seconds or 0.0
        while not self._ended.wait(min(max(_LEAST, pause), threading.TIMEOUT_MAX)):
            try:
                pause = self.look()
            except (OSError, RuntimeError) as error:
                _log.warning("keep_alive does nothing any more, the model stays in memory: %s", error)
                return

    def stop(self) -> None:
        """Give no memory back any more."""
        self._ended.set()

    def close(self) -> None:
        """`stop`, and wait for what is under way."""
        self.stop()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
