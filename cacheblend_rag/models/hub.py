"""Loading by a hub's id where no hub answers: the cache is used at once, or the error says at once that it has nothing.

The hub's client asks again and again for each of a dozen files, which takes minutes.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from cacheblend_rag.errors import ModelLoadError
from cacheblend_rag.models.model_names import CONFIGS, name_remedy
from cacheblend_rag.models.ollama import local_path

_log = logging.getLogger(__name__)
_SECONDS = 5.0
_lock = threading.Lock()
_loading, _before = 0, False  # how many loads have found no hub, and what was said of hubs before the first


@contextmanager
def hub_asked_once(
    model: str | os.PathLike[str], where: Mapping[str, Any], kind: str = "language model"
) -> Iterator[None]:
    """Within this, a model is loaded from what is cached if no hub answers.

    Parameters
    ----------
    model : str or path
        An id; of a file or folder that is there, nothing is asked.
    where : mapping
        Arguments of loading. ``cache_dir``, ``revision``, ``subfolder``, ``token`` and ``local_files_only`` count.
    kind : {"language model", "embedder"}
        The kind of model that an error names others of.

    Raises
    ------
    ModelLoadError
        If no hub answers, and the model is not cached.
    """
    name = os.fspath(model)
    if local_path(model).exists():
        yield
        return
    forbidden = constants.is_offline_mode() or where.get("local_files_only")
    why = "no hub may be asked (HF_HUB_OFFLINE or local_files_only)" if forbidden else _unreached(name, where)
    if why is None:
        yield
        return
    if not _is_cached(name, where):
        raise ModelLoadError(
            f"model {name!r} could not be loaded: there is no such folder, it is not in the local cache, and {why}; "
            "check the name and the network (HF_ENDPOINT names a mirror, HTTPS_PROXY a proxy), or "
            f"{name_remedy(kind, name)}"
        )
    if not forbidden:
        _log.warning("%s; model %r is loaded from the local cache", why, name)
    with _no_hub():
        yield


def _unreached(name: str, where: Mapping[str, Any]) -> str | None:
    """Why the hub does not answer; None if it does, whatever it says of the model."""
    try:
        url = hf_hub_url(name, CONFIGS[0], subfolder=where.get("subfolder"), revision=where.get("revision"))
        get_hf_file_metadata(url, token=where.get("token"), timeout=_SECONDS)
    except HFValidationError:  # no id at all, which loading tells
        return None
    except HfHubHTTPError as error:
        status = error.response.status_code
        return None if status < 500 else f"the hub {constants.ENDPOINT} answers with status {status}"
    except Exception as error:  # of the network, by whatever library the hub's client uses
        return f"the hub {constants.ENDPOINT} cannot be reached ({str(error) or type(error).__name__})"
    return None


def _is_cached(name: str, where: Mapping[str, Any]) -> bool:
    own = {"cache_dir": where.get("cache_dir"), "revision": where.get("revision")}
    files = [os.path.join(where.get("subfolder") or "", one) for one in CONFIGS]
    names = (name,) if "/" in name else (name, f"sentence-transformers/{name}")  # an embedder's own place
    try:
        return any(isinstance(try_to_load_from_cache(id_, one, **own), str) for id_ in names for one in files)
    except HFValidationError:
        return False


@contextmanager
def _no_hub() -> Iterator[None]:
    """Meanwhile the hub's client asks nothing; the last of several threads leaves it as it was."""
    global _loading, _before
    with _lock:
        if not _loading:
            _before = constants.HF_HUB_OFFLINE
        _loading += 1
        constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        with _lock:
            _loading -= 1
            if not _loading:
                constants.HF_HUB_OFFLINE = _before
