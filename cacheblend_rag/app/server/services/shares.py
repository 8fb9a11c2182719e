"""Conversations that a tenant shares: read-only copies, which all who hold a key of the server read by a link."""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Callable, Collection
from typing import Any

from cacheblend_rag.app.server.problems import Problem
from cacheblend_rag.app.server.services.conversations import Conversations
from cacheblend_rag.app.server.services.library import Library
from cacheblend_rag.app.server.settings import Limits
from cacheblend_rag.app.server.storage.shares import Share

_SECRET, _SIGN = 16, 8  # bytes of what is drawn by chance, and of what tells the tenant


class SharedConversations:
    """The copies that one tenant shares.

    Parameters
    ----------
    library : Library
        Its documents; the copies lie beside them.
    conversations : Conversations
        Those that are copied.
    limits : Limits
    clock : callable
        Seconds since 1970.

    Attributes
    ----------
    sign : str
        How the ids of the tenant's copies begin. It tells nothing of its name.
    """

    def __init__(
        self, library: Library, conversations: Conversations, limits: Limits, clock: Callable[[], float] = time.time
    ) -> None:
        self._library, self._conversations, self._limits, self._clock = library, conversations, limits, clock
        self._store = library.catalogue.shares
        self.sign = hashlib.sha256(f"share {library.tenant.salt}".encode()).hexdigest()[: 2 * _SIGN]

    def listed(self) -> list[Share]:
        """All of them, the latest first.

        Raises
        ------
        Problem
            403 if the server keeps no conversations, as of every method.
        """
        self._conversations.check_kept()
        return self._store.listed()

    def add(self, conversation: str, title: str, content: Any, copied: Collection[str]) -> Share:
        """Share a copy of a conversation.

        Parameters
        ----------
        conversation : str
        title : str
            Name of the copy.
        content : object
            The copy, as JSON.
        copied : collection of str
            Ids of the turns in it.

        Raises
        ------
        Problem
            409 if there is nothing to be shared or too much is shared, or something was deleted meanwhile; 507 if all
            that is kept takes too much, or the disk is full.
        """
        written = json.dumps(content, ensure_ascii=False)
        size = len(written.encode()) + len(title.encode())
        self._conversations.check_room(size)
        if not copied:
            raise Problem(409, "nothing_to_share", "no question of this conversation has an answer yet")
        if len(self.listed()) >= self._limits.conversations:
            most = self._limits.conversations
            raise Problem(409, "too_many_shares", f"you share {most:,} conversations, which is the most; end some")
        id = f"{self.sign}_{secrets.token_hex(_SECRET)}"
        made = Share(id, conversation, title, int(self._clock() * 1000), len(copied))
        if not self._store.add(made, written, size, copied):
            raise Problem(409, "changed", "something of it was deleted just now; share what is left")
        return made

    def end(self, id: str) -> None:
        """Let nobody read a copy any more.

        Raises
        ------
        Problem
            404 if the tenant shares none of this id, 507 if the disk is so full that this cannot be written down.
        """
        self._conversations.check_kept()
        if not self._library.catalogue.deletions.with_reserve(lambda: self._store.end(id)):
            raise no_share()

    def read(self, id: str) -> tuple[Share, Any]:
        """A copy with what it holds.

        Raises
        ------
        Problem
            404 if the tenant shares none of this id.
        """
        self._conversations.check_kept()
        found = self._store.get(id)
        if found is None:
            raise no_share()
        return found


def no_share() -> Problem:
    """The answer to an id that opens nothing, whatever the reason."""
    return Problem(404, "no_share", "nothing is shared under this link, or not any more")
