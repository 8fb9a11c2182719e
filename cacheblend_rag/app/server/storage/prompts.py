"""Prompts that a tenant has saved, to be asked again."""

from __future__ import annotations

from dataclasses import dataclass, fields

from sqlalchemy import delete, func, insert, select, update

from cacheblend_rag.app.server.storage.tables import Backend, prompts


@dataclass(frozen=True)
class SavedPrompt:
    """A text for the question's place, and what it is called."""

    id: str
    title: str
    text: str


_ALL = select(*(prompts.c[one.name] for one in fields(SavedPrompt))).order_by(prompts.c.title, prompts.c.id)


class SavedPrompts:
    """The prompts of one tenant.

    Parameters
    ----------
    backend : Backend
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def all(self) -> list[SavedPrompt]:
        """All of them, by title."""
        return [SavedPrompt(*row) for row in self._backend.read(_ALL)]

    def put(self, prompt: SavedPrompt, most: int) -> bool:
        """Save one, or another text and title in its place; False if there are as many as may be."""
        with self._backend.changing() as db:
            values = {"title": prompt.title, "text": prompt.text}
            known = db.execute(update(prompts).where(prompts.c.id == prompt.id).values(values)).rowcount
            if not known:
                if db.execute(select(func.count()).select_from(prompts)).scalar_one() >= most:
                    return False
                db.execute(insert(prompts).values(id=prompt.id, **values))
        if known:
            self._backend.overwrite()
        return True

    def delete(self, id: str | None) -> int:
        """Delete one, or all, and overwrite them; how many there were."""
        with self._backend.changing() as db:
            done = db.execute(delete(prompts) if id is None else delete(prompts).where(prompts.c.id == id)).rowcount
        self._backend.overwrite()
        return done
