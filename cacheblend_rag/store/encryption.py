"""Encryption of records at rest: AES-GCM by the package ``cryptography``."""

from __future__ import annotations

import base64
import os
from typing import Any

from cacheblend_rag.errors import ConfigError, MissingExtraError, RecordError

KEY_VARIABLE = "CACHEBLEND_RAG_ENCRYPTION_KEY"
_NONCE_BYTES = 12
SEAL_BYTES = _NONCE_BYTES + 16
"""Bytes a sealed piece is longer than its content: a nonce and a tag."""


class Seal:
    """Encrypts pieces of a record, each bound to its place.

    Parameters
    ----------
    key : bytes
        32 bytes.

    Raises
    ------
    ConfigError
        If the key is not of that length.
    MissingExtraError
        If ``cryptography`` is not installed.
    """

    def __init__(self, key: bytes) -> None:
        if len(key) != 32:
            raise ConfigError(KEY_VARIABLE, f"{len(key)} bytes", "use 32 bytes in base64, as `openssl rand -base64 32`")
        self._cipher = _cipher(key)

    @classmethod
    def from_environment(cls) -> Seal | None:
        """A seal of the key in ``CACHEBLEND_RAG_ENCRYPTION_KEY`` (base64), or None if it is not set."""
        text = os.environ.get(KEY_VARIABLE)
        if not text:
            return None
        try:
            key = base64.b64decode(text, validate=True)
        except ValueError:
            # The value is a secret, so it is not shown.
            raise ConfigError(KEY_VARIABLE, "…", "use 32 bytes in base64, as `openssl rand -base64 32`") from None
        return cls(key)

    def close(self, content: bytes, place: str) -> bytes:
        """Encrypt; ``place`` names what this is, and is needed again to open it."""
        nonce = os.urandom(_NONCE_BYTES)
        sealed: bytes = self._cipher.encrypt(nonce, content, place.encode())
        return nonce + sealed

    def open(self, sealed: Any, place: str) -> bytearray:
        """Decrypt.

        Raises
        ------
        RecordError
            If it was sealed with another key or for another place, or was altered.
        """
        from cryptography.exceptions import InvalidTag

        data = bytes(sealed)
        try:
            return bytearray(self._cipher.decrypt(data[:_NONCE_BYTES], data[_NONCE_BYTES:], place.encode()))
        except (InvalidTag, ValueError) as error:
            raise RecordError("it was encrypted with another key, or altered") from error


def _cipher(key: bytes) -> Any:
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError as error:
        raise MissingExtraError("cryptography", "encryption") from error
    return AESGCM(key)
