"""The contract of every catalogue: that in a file of its own, and that in a database which servers share."""

from __future__ import annotations

import gzip
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from itertools import count
from pathlib import Path

import numpy as np
import psycopg
import pytest
from langchain_core.documents import Document
from sqlalchemy import delete

from cacheblend_rag.app.folder_rag import FolderRAGOptions
from cacheblend_rag.app.server.problems import Problem
from cacheblend_rag.app.server.settings import ServerSettings
from cacheblend_rag.app.server.storage.catalogue import Catalogue, PendingFile
from cacheblend_rag.app.server.storage.postgres import Database, Peers, PostgresBackend, servers
from cacheblend_rag.app.server.storage.sqlite import SqliteBackend
from cacheblend_rag.config import BlendConfig
from cacheblend_rag.errors import ConfigError, DocumentError
from cacheblend_rag.retrieval.vectors import Vectors
from docs.benchmarks.scripts.servers import PostgresServer, Proxy

_names = count()
OLD = Path(__file__).parent / "data"


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL server."""
    with pytest.MonkeyPatch.context() as patch, PostgresServer() as server:
        patch.setenv("PGUSER", "postgres")
        yield server


def database_of(server: PostgresServer | Proxy, folder: Path) -> Database:
    """The database as a server with this data folder uses it."""
    made = Database(f"postgresql://127.0.0.1:{server.port}/postgres", folder, lambda: None)
    made.register()
    return made


def peers_of(catalogue: Catalogue) -> Peers:
    assert isinstance(catalogue.backend, PostgresBackend)
    return Peers(catalogue.backend)


def file(id: str, name: str = "", job: str = "job", size: int = 10) -> PendingFile:
    return PendingFile(id, name or f"{id}.txt", size, "5a", job, "mine")


def read(*texts: str) -> tuple[list[Document], Vectors]:
    chunks = [Document(page_content=text, metadata={"page": at + 1}) for at, text in enumerate(texts)]
    return chunks, np.arange(len(texts) * 4, dtype=np.float32).reshape(-1, 4)


def take(catalogue: Catalogue, id: str, *texts: str, name: str = "") -> None:
    """Make a document by way of an upload."""
    one = file(id, name, f"job of {id}")
    catalogue.uploads.accept(one.job, "mine", [one])
    assert id in [waiting.id for waiting in catalogue.uploads.waiting(32)]
    assert id in catalogue.uploads.mine("mine")
    catalogue.add([(one, *read(*texts))])


class CatalogueContract:
    """Inherited by the tests of each catalogue, which give ``catalogue``: an empty one with a collection."""

    def test_collection_is_created_with_its_name_and_embedder(self, catalogue: Catalogue) -> None:
        catalogue.create("other", "Ängste", [1.5, 2])
        assert sorted(catalogue.collections()) == [("mine", "Mine"), ("other", "Ängste")]
        assert catalogue.embedder_fingerprint("other") == [1.5, 2]

    def test_documents_and_passages(self, catalogue: Catalogue) -> None:
        take(catalogue, "b", "one", "two ✓", name="B.txt")
        take(catalogue, "a", "three", name="a.txt")
        assert [one.name for one in catalogue.documents("mine")] == ["B.txt", "a.txt"]  # by code point
        assert catalogue.counts("mine") == (2, 3)
        assert catalogue.ids_by_name("mine", ["a.txt", "c.txt"]) == ["a"]
        assert catalogue.holds("a", "mine")
        assert not catalogue.holds("a", "other")
        assert not catalogue.holds("b\0", "mine") if not catalogue.backend.shared else True
        assert catalogue.texts_of("b") == ["one", "two ✓"]
        assert catalogue.latest_texts(100) == ["one", "two ✓", "three"]
        assert catalogue.latest_texts(11) == ["two ✓", "three"]
        ids, vectors = catalogue.vectors("mine")
        assert [one.shape for one in vectors] == [(1, 4)] * 3
        assert [one.tolist() for one in catalogue.vectors("mine", ["b"])[1]] == [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]
        found = catalogue.passages([*ids, 10**9])
        assert [found[id].text for id in ids] == ["one", "two ✓", "three"]
        one = catalogue.passage("mine", "b", 1)
        assert one is not None
        assert (one.text, one.page, one.document, one.number) == ("two ✓", 2, "B.txt", 1)
        assert catalogue.passage("other", "b", 1) is None
        assert catalogue.held_by_others(["one", "three", "four"], ["b"]) == {"three"}
        catalogue.embed_anew("mine", [7], {ids[0]: np.full(4, 9, dtype=np.float32)})
        assert catalogue.vectors("mine", ["b"])[1][0].tolist() == [[9, 9, 9, 9]]
        assert catalogue.embedder_fingerprint("mine") == [7]

    def test_passage_may_have_vectors_of_several_parts(self, catalogue: Catalogue) -> None:
        catalogue.uploads.accept("job", "mine", [one := file("a")])
        chunks, parts = read("one", "two")[0], [np.eye(3, 4, dtype=np.float32), np.full(4, 7, dtype=np.float32)]
        catalogue.add([(one, chunks, parts)])
        ids, vectors = catalogue.vectors("mine")
        assert [vector.tolist() for vector in vectors] == [parts[0].tolist(), [[7, 7, 7, 7]]]
        assert catalogue.bytes_used() == sum(len(f"{text}{{'page': 1}}") for text in ("one", "two")) + 4 * 16
        catalogue.embed_anew("mine", [7], dict(zip(ids, reversed(parts), strict=True)))
        assert [len(vector) for vector in catalogue.vectors("mine")[1]] == [1, 3]
        assert [catalogue.passages(ids)[id].page for id in ids] == [1, 2]

    def test_upload_is_listed_until_its_files_are_done(self, catalogue: Catalogue) -> None:
        catalogue.uploads.accept("job", "mine", [file("1"), file("2"), file("3")])
        assert catalogue.uploads.jobs() == [("job", "mine")]
        assert catalogue.uploads.job("job") == "mine"
        assert catalogue.uploads.job("no") is None
        assert catalogue.uploads.jobs_waiting() == 1
        assert catalogue.bytes_used() == 30
        assert [one.id for one in catalogue.uploads.waiting(2)] == ["1", "2"]
        catalogue.uploads.fail("1", "it is broken")
        assert catalogue.uploads.files(job="job") == catalogue.uploads.files(collection="mine")
        assert [one.error for one in catalogue.uploads.files(job="job")] == ["it is broken", "", ""]
        assert catalogue.uploads.dismiss("mine", "3")
        assert not catalogue.uploads.dismiss("mine", "3")
        assert [one.id for one in catalogue.uploads.waiting(9)] == ["2"]
        catalogue.add([(file("2"), *read("text"))])
        assert catalogue.bytes_used() == 10 + len(b'text{"page": 1}') + 16
        assert (
            catalogue.uploads.jobs_waiting(),
            catalogue.uploads.count_taken("job"),
            catalogue.uploads.count_unwarmed("job"),
        ) == (0, 1, 1)
        assert catalogue.uploads.to_warm(9) == [("2", "2.txt", "job")]
        catalogue.uploads.mark_warmed(["2"])
        assert (catalogue.uploads.to_warm(9), catalogue.uploads.count_unwarmed("job")) == ([], 0)
        catalogue.uploads.end_job("job")
        assert catalogue.uploads.jobs() == []
        assert catalogue.uploads.job("job") == "mine"

    def test_ended_uploads_are_forgotten_in_the_end(
        self, catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("cacheblend_rag.app.server.storage.catalogue._REMEMBERED", 2)
        for number in range(4):
            catalogue.uploads.accept(f"job {number}", "mine", [one := file(str(number), job=f"job {number}")])
            catalogue.add([(one, *read("text"))])
            catalogue.uploads.mark_warmed([str(number)])
            catalogue.uploads.end_job(f"job {number}")
        assert [catalogue.uploads.job(f"job {number}") for number in range(4)] == [None, None, "mine", "mine"]
        assert len(catalogue.documents("mine")) == 4

    def test_failed_file_is_listed_until_it_is_dismissed(
        self, catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("cacheblend_rag.app.server.storage.catalogue._REMEMBERED", 2)
        monkeypatch.setattr("cacheblend_rag.app.server.storage.catalogue._FAILED", 4)

        def failed(number: int) -> None:
            catalogue.uploads.accept(f"job {number}", "mine", [file(str(number), job=f"job {number}")])
            catalogue.uploads.fail(str(number), "no")
            catalogue.uploads.end_job(f"job {number}")

        for number in range(4):
            failed(number)
        assert [one.id for one in catalogue.uploads.files(collection="mine")] == ["0", "1", "2", "3"]
        assert catalogue.uploads.job("job 0") == "mine", "its upload is known as long"
        assert catalogue.uploads.dismiss("mine", "1")
        failed(4)
        failed(5)
        failed(6)  # there are bounds, and the latest stay
        assert [one.id for one in catalogue.uploads.files(collection="mine")] == [
            "2",
            "3",
            "4",
            "5",
            "6",
        ]  # bounded as one comes
        assert catalogue.uploads.job("job 1") is None

    def test_deletion_removes_documents_at_once_and_keeps_tombstones(self, catalogue: Catalogue) -> None:
        take(catalogue, "a", "one", "two")
        take(catalogue, "b", "three")
        used = catalogue.bytes_used()
        assert not catalogue.deletions.has_unfinished()
        catalogue.deletions.delete(["a"], ["k1", "k2"])
        assert [one.id for one in catalogue.documents("mine")] == ["b"]
        assert catalogue.deletions.has_unfinished()
        assert sorted(catalogue.deletions.tombstones()) == ["k1", "k2"]
        assert len(catalogue.deletions.tombstones(1)) == 1
        assert catalogue.texts_of("a") == ["one", "two"]
        assert catalogue.passage("mine", "a", 0) is None
        assert catalogue.latest_texts(100) == ["three"]
        catalogue.deletions.purge(10)
        assert catalogue.texts_of("a"), "its KV is not erased yet"
        catalogue.deletions.mark_erased(["k1", "k2"])
        catalogue.deletions.purge(1)
        assert len(catalogue.texts_of("a")) == 1
        catalogue.deletions.purge(10)
        assert not catalogue.deletions.has_unfinished()
        assert catalogue.texts_of("a") == []
        assert catalogue.bytes_used() < used

    def test_collection_goes_with_all_it_holds(self, catalogue: Catalogue) -> None:
        take(catalogue, "a", "one")
        catalogue.uploads.accept("job", "mine", [file("1")])
        catalogue.deletions.delete(["a"], ["k"], "mine")
        assert catalogue.collections() == []
        assert catalogue.uploads.waiting(9) == []
        assert catalogue.uploads.jobs() == []
        catalogue.deletions.mark_erased(["k"])
        catalogue.deletions.purge(9)
        assert catalogue.bytes_used() == 0

    def test_document_replaces_another_and_returning_texts_are_not_erased(self, catalogue: Catalogue) -> None:
        take(catalogue, "a", "one", name="n.txt")
        one = file("b", "n.txt")
        catalogue.uploads.accept("job", "mine", [one])
        catalogue.uploads.waiting(9)
        catalogue.add([(one, *read("two"))], ["a"], ["k1", "k2"], ["k2", "k3"])
        assert [one.id for one in catalogue.documents("mine")] == ["b"]
        assert catalogue.deletions.tombstones() == ["k1"]

    def test_failed_change_changes_nothing(self, catalogue: Catalogue) -> None:
        take(catalogue, "a", "one")
        catalogue.uploads.accept("job", "mine", [file("b"), file("c")])
        with pytest.raises(Exception, match=r"(?i)unique"):
            catalogue.add([(file("b"), *read("two")), (file("a"), *read("three"))])
        assert [one.id for one in catalogue.documents("mine")] == ["a"]
        assert [one.id for one in catalogue.uploads.waiting(9)] == ["b", "c"]


class TestCatalogue(CatalogueContract):
    @pytest.fixture
    def catalogue(self, tmp_path: Path) -> Iterator[Catalogue]:
        made = Catalogue(SqliteBackend(tmp_path / "documents"))
        made.create("mine", "Mine", [])
        yield made
        made.close()


class TestSharedCatalogue(CatalogueContract):
    @pytest.fixture
    def catalogue(self, postgres: PostgresServer, tmp_path: Path) -> Iterator[Catalogue]:
        database = database_of(postgres, tmp_path)
        with database.connection() as connection:
            connection.execute(delete(servers).where(servers.c.id != database.server))
        made = Catalogue(PostgresBackend(database, f"tenant-{next(_names)}"))
        made.create("mine", "Mine", [])
        yield made
        database.close()

    def test_all_or_nothing(self, catalogue: Catalogue) -> None:
        def fails() -> None:
            with catalogue.backend.exclusive():
                catalogue.uploads.accept("job", "mine", [file("a")])
                peers_of(catalogue).keep_bytes("a", b"\0\xff" * 10)
                assert peers_of(catalogue).bytes_of("a") == b"\0\xff" * 10
                raise KeyError

        with pytest.raises(KeyError):
            fails()
        assert catalogue.uploads.jobs() == []
        assert peers_of(catalogue).bytes_of("a") == b""

    def test_bytes_stay_as_long_as_the_file_waits(self, catalogue: Catalogue) -> None:
        catalogue.uploads.accept("job", "mine", [file("a"), file("b"), file("c")])
        for id in "abc":
            peers_of(catalogue).keep_bytes(id, b"bytes")
        catalogue.uploads.fail("a", "broken")
        catalogue.uploads.dismiss("mine", "b")
        catalogue.add([(file("c"), *read("text"))])
        assert [peers_of(catalogue).bytes_of(id) for id in "abc"] == [b"", b"", b""]

    def test_text_with_nul_is_refused(self, catalogue: Catalogue) -> None:
        with pytest.raises(DocumentError, match="NUL"):
            take(catalogue, "a", "one\0")
        with pytest.raises(DocumentError):
            catalogue.holds("\0")
        assert catalogue.documents("mine") == []

    def test_file_is_read_by_one_server(self, postgres: PostgresServer, tmp_path: Path) -> None:
        tenant = f"tenant-{next(_names)}"
        databases = [database_of(postgres, tmp_path / name) for name in ("a", "b")]
        a, b = [Catalogue(PostgresBackend(one, tenant)) for one in databases]
        assert a.backend.salt == b.backend.salt
        a.create("mine", "Mine", [])
        a.uploads.accept("job", "mine", [file(id) for id in "12345"])
        assert [one.id for one in a.uploads.waiting(2)] == ["1", "2"]
        assert [one.id for one in b.uploads.waiting(2)] == ["3", "4"]
        assert [one.id for one in a.uploads.waiting(9)] == ["1", "2", "5"]
        assert b.uploads.mine("mine") == {"3", "4"}
        a.add([(file("1"), *read("text"))])
        assert b.uploads.to_warm(9) == []
        databases[0].close()  # which lets others take up what is left
        assert [one.id for one in b.uploads.waiting(9)] == ["2", "3", "4", "5"]
        assert a.uploads.mine("mine") == set(), "it was only slow"
        assert [id for id, _, _ in b.uploads.to_warm(9)] == ["1"]
        databases[1].close()
        databases[0].close()

    def test_follower_sees_all_changes_in_their_order(self, catalogue: Catalogue) -> None:
        at, registered = peers_of(catalogue).position()
        assert registered == 1
        take(catalogue, "a", "one")
        take(catalogue, "b", "two")
        catalogue.deletions.delete(["a"], ["k"])
        changes = peers_of(catalogue).changes(at)
        assert changes is not None
        assert [(what, about) for _, what, about in changes if what in ("in", "out")] == [
            ("in", "a"),
            ("in", "b"),
            ("out", "a"),
        ]
        assert peers_of(catalogue).position()[0] == changes[-1][0]
        assert peers_of(catalogue).changes(changes[-1][0]) == []
        assert peers_of(catalogue).changes(changes[-1][0] + 1) is None, "a backup was restored"

    def test_two_processes_with_one_id(self, postgres: PostgresServer, tmp_path: Path) -> None:
        first = database_of(postgres, tmp_path)
        second = database_of(postgres, tmp_path)
        second.register()
        with pytest.raises(Problem, match="data folder of its own") as raised:
            first.register()
        assert raised.value.status == 503
        for one in (first, second):
            one.close()


def test_catalogue_of_the_first_version_is_read_and_changed(tmp_path: Path) -> None:
    """It was written by statements that knew SQLite alone."""
    folder = tmp_path / "documents"
    folder.mkdir()
    (folder / "catalogue.db").write_bytes(gzip.decompress((OLD / "catalogue-1.db.gz").read_bytes()))
    catalogue = Catalogue(SqliteBackend(folder))
    assert catalogue.collections() == [("mine", "Mine ✓")]
    assert catalogue.embedder_fingerprint("mine") == [1.5, 2]
    assert [one.id for one in catalogue.documents("mine")] == ["a", "b"]
    assert catalogue.latest_texts(100) == ["one", "two ✓", "three"]
    ids, vectors = catalogue.vectors("mine")
    assert [one.tolist() for one in vectors] == [[[1] * 4], [[2] * 4], np.eye(3, 4).tolist()]
    assert [catalogue.passages(ids)[id].page for id in ids] == [1, 2, 1]
    assert catalogue.bytes_used() == 174
    assert [(one.id, one.error) for one in catalogue.uploads.files(collection="mine")] == [
        ("d", ""),
        ("e", "it is broken"),
    ]
    assert [id for id, _, _ in catalogue.uploads.to_warm(9)] == ["b"]
    assert sorted(catalogue.deletions.tombstones()) == ["k1", "k2"]
    catalogue.deletions.mark_erased(["k1", "k2"])
    catalogue.deletions.purge(9)
    take(catalogue, "f", "five")
    assert catalogue.passages([max(ids) + 2])[max(ids) + 2].text == "five", "no number of a passage comes twice"
    assert catalogue.deletions.has_unfinished() is False
    catalogue.close()
    with closing(sqlite3.connect(folder / "catalogue.db")) as file:
        assert file.execute("PRAGMA user_version").fetchone() == (1,), "programs before this one still read it"


def test_schema_of_the_first_version_is_used(postgres: PostgresServer, tmp_path: Path) -> None:
    address = f"postgresql://127.0.0.1:{postgres.port}"
    with psycopg.connect(f"{address}/postgres", autocommit=True) as connection:
        connection.execute("CREATE DATABASE old")
    with psycopg.connect(f"{address}/old", autocommit=True, options="-c cacheblend_rag.server=a") as connection:
        connection.execute((OLD / "catalogue-1.sql").read_bytes())
    database = Database(f"{address}/old", tmp_path, lambda: None)
    database.register()
    catalogue = Catalogue(backend := PostgresBackend(database, "old"))
    assert backend.salt == "5a17"
    catalogue.create("mine", "Mine", [])
    take(catalogue, "a", "one", "two")
    take(catalogue, "b", "three")
    assert catalogue.bytes_used() > 0
    catalogue.deletions.delete(["a"], ["k"])
    assert catalogue.deletions.tombstones() == ["k"]
    changes = peers_of(catalogue).changes(0)
    assert changes is not None
    assert [(what, about) for _, what, about in changes if what in ("in", "out")] == [
        ("in", "a"),
        ("in", "b"),
        ("out", "a"),
    ]
    catalogue.deletions.mark_erased(["k"])
    catalogue.deletions.purge(9)
    assert not catalogue.deletions.has_unfinished()
    database.close()


def test_new_tables_are_those_of_the_first_version(postgres: PostgresServer, tmp_path: Path) -> None:
    """Programs before this one use them, too."""
    database = database_of(postgres, tmp_path)
    new = PostgresBackend(database, f"tenant-{next(_names)}")
    address = f"postgresql://127.0.0.1:{postgres.port}"
    with psycopg.connect(f"{address}/postgres", autocommit=True) as connection:
        connection.execute("CREATE DATABASE first")
        columns = (
            "SELECT table_name, column_name, data_type, is_nullable, column_default, is_identity, collation_name "
            "FROM information_schema.columns WHERE table_schema = %s"
        )
        made = set(connection.execute(columns, (new.schema,)))
    with psycopg.connect(f"{address}/first", autocommit=True, options="-c cacheblend_rag.server=a") as connection:
        connection.execute((OLD / "catalogue-1.sql").read_bytes())
        first = set(connection.execute(columns, ("cacheblend_rag_1",)))
    added = {str(table) for table, *_ in made - first}
    assert first <= made
    assert added.isdisjoint(table for table, *_ in first), "a table that programs before this one use has new columns"
    assert added == {"conversations", "turns", "quotes", "prompts", "shares", "share_quotes"}
    database.close()


def test_unusable_database_is_refused_without_its_password(postgres: PostgresServer, tmp_path: Path) -> None:
    rag = FolderRAGOptions(docs=tmp_path, data_dir=tmp_path, config=BlendConfig())
    for address in ("postgresql://u:hush@host/db", "postgresql://host/db?password=hush", "mysql://host/db"):
        with pytest.raises(ConfigError, match="database") as refused:
            ServerSettings(rag=rag, database=address)
        assert "hush" not in str(refused.value)
    for address in ("postgresql://127.0.0.1:1/postgres", f"postgresql://127.0.0.1:{postgres.port}/nothing"):
        with pytest.raises(ConfigError, match="it cannot be used"):
            Database(address, tmp_path, lambda: None)
