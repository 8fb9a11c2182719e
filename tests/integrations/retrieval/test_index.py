from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.documents import Document

from cacheblend_rag.errors import ConfigError, DocumentError, EmbedderError
from cacheblend_rag.retrieval.documents import SourceFile
from cacheblend_rag.retrieval.embedder import SentenceTransformerEmbeddings
from cacheblend_rag.retrieval.index import FolderIndex, IndexReport
from cacheblend_rag.retrieval.splitting import SplitSettings, split
from cacheblend_rag.retrieval.vectorstore import FaissVectorStore
from cacheblend_rag.retrieval.words import scores_by_words
from tests.integrations.retrieval.conftest import static_model

FILES = {
    "people/anna.txt": "Anna was born in Oslo.",
    "people/ben.md": "Ben lives in Bergen.",
    "mill.txt": "The old mill by the river.",
}


class CountingEmbedder(SentenceTransformerEmbeddings):
    """Remembers which documents it embedded."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.seen: list[str] = []

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        self.seen += [text for text in texts if "quick brown" not in text and len(text) < 60]
        return super().embed_documents(texts)


# Nothing that could be text.
BYTES = bytes(range(256)) * 4


class Folder:
    """A folder of documents, its index, and what was forgotten."""

    def __init__(self, place: Path, model: Any) -> None:
        self.docs, self.index_dir = place / "docs", place / "index"
        self.model = model
        self.forgotten: list[str] = []
        for path, text in FILES.items():
            self.write(path, text)

    def write(self, path: str, text: str | bytes) -> None:
        (self.docs / path).parent.mkdir(parents=True, exist_ok=True)
        (self.docs / path).write_bytes(text.encode() if isinstance(text, str) else text)

    def index(self, **options: Any) -> FolderIndex:
        options.setdefault("embedder", SentenceTransformerEmbeddings(self.model))
        options.setdefault("on_delete", self.forgotten.extend)
        return FolderIndex(self.docs, index_dir=self.index_dir, **options)

    def update(self, **options: Any) -> IndexReport:
        """Bring the index up to date as a new process would."""
        self.forgotten.clear()
        return self.index(**options).update()


@pytest.fixture
def folder(tmp_path: Path, model: Any) -> Folder:
    return Folder(tmp_path, model)


def report(**values: Any) -> IndexReport:
    empty = dict.fromkeys(("files", "unchanged", "added", "changed", "removed", "chunks", "embedded"), 0)
    return IndexReport(**{**empty, "skipped": {}, "empty": (), "others": (), "forgotten": 0, "rebuilt": "", **values})


def vector(index: FolderIndex, query: str) -> list[float]:
    return index.store.embeddings.embed_query(query)


def sharing(index: FolderIndex, words: str) -> list[str]:
    """Files that hold some of the words."""
    found = index.store.candidates(vector(index, words), 4, None, scores_by_words(words, [index.store]))
    return [document.metadata["source"] for document, _, score in found if score > 0]


def found(index: FolderIndex, query: str) -> list[str]:
    return [one.metadata["source"] for one in index.store.similarity_search(query, 1)]


def test_only_what_changed_is_embedded(folder: Folder) -> None:
    folder.update()
    folder.write("people/anna.txt", "Anna works in Bergen.")
    folder.write("new.md", "Clara plays the violin.")
    (folder.docs / "mill.txt").unlink()
    embedder = CountingEmbedder(folder.model)
    assert folder.update(embedder=embedder) == report(
        files=3, unchanged=1, added=1, changed=1, removed=1, chunks=3, embedded=2, forgotten=2
    )
    assert sorted(embedder.seen) == ["Anna works in Bergen.", "Clara plays the violin."]
    assert sorted(folder.forgotten) == ["Anna was born in Oslo.", "The old mill by the river."]


def test_retriever_sees_what_an_update_brings(folder: Folder) -> None:
    index = folder.index()
    index.update()
    retriever = index.store.as_retriever(search_kwargs={"k": 1})
    folder.write("violin.txt", "Clara plays the violin.")
    assert index.update().added == 1
    assert retriever.invoke("clara violin")[0].metadata["source"] == "violin.txt"


def test_numbers_and_names_are_found_by_their_words(folder: Folder) -> None:
    for number in range(1000, 1060):  # which the embedder does not tell apart
        folder.write(f"{number}.txt", f"Invoice RE-2025-{number} is for Lieferantenvertrag {number}.")
    folder.update()
    index = folder.index()  # what is saved
    index.update()
    retriever = index.store.as_retriever(search_kwargs={"k": 4})
    for query in ("Is invoice RE-2025-1058 paid?", "LIEFERANTENVERTRAG 1058"):
        assert "1058.txt" in [one.metadata["source"] for one in retriever.invoke(query)]
        nearest = [one for one, _ in index.store.similarity_search_with_score_by_vector(vector(index, query))]
        threshold: dict[str, Any] = {
            "search_type": "similarity_score_threshold",
            "search_kwargs": {"score_threshold": 0.0},
        }
        assert index.store.as_retriever(**threshold).invoke(query) == nearest, "scores know no words"
    assert index.store.similarity_search("1058", 4, filter={"source": "1059.txt"})[0].metadata["source"] == "1059.txt"
    folder.write("1057.txt", "Invoice ４０７１")
    (folder.docs / "1058.txt").unlink()
    index.update()
    assert (sharing(index, "1057"), sharing(index, "1058"), sharing(index, "4071")) == ([], [], ["1057.txt"])


# Two sentences and a word of the first, in scripts whose words stand together or have marks.
SCRIPTS = {
    "Chinese": ("合同由王小明签署。", "合同由李建国签署。", "王小明"),
    "Japanese": ("契約書は佐々木さくらが署名した。", "契約書は田中一郎が署名した。", "佐々木"),
    "Thai": ("สัญญาลงนามโดยสมชายเมื่อวานนี้", "สัญญาลงนามโดยวิภาเมื่อวานนี้", "สมชาย"),
    "Korean": ("계약서는 김민수에게 보냈다.", "계약서는 이영희에게 보냈다.", "김민수"),
    "Hindi": ("अनुबंध पर किशोरी ने हस्ताक्षर किए।", "अनुबंध पर शेखर को राशि मिली।", "किशोरी"),
}


def test_words_are_found_in_scripts_without_spaces(folder: Folder) -> None:
    for language, (text, other, _) in SCRIPTS.items():
        folder.write(f"{language}.txt", text)
        folder.write(f"{language}-other.txt", other)
    index = folder.index()
    index.update()
    assert {language: sharing(index, word) for language, (_, _, word) in SCRIPTS.items()} == {
        language: [f"{language}.txt"] for language in SCRIPTS
    }


def test_words_count_by_their_rarity_in_all_folders_that_are_searched(tmp_path: Path, model: Any) -> None:
    many, few = (Folder(tmp_path / name, model) for name in ("many", "few"))
    for number in range(20):
        many.write(f"{number}.txt", f"Minutes of meeting {number}.{' The invoice was paid.' if number == 3 else ''}")
    few.write("mine.txt", "Was invoice RE-77 paid? It was.")
    indexes, query = [many.index(), few.index()], "invoice RE-77 paid"
    assert [one.update().files for one in indexes] == [23, 4]
    stores, asked = [one.store for one in indexes], vector(indexes[0], query)
    scores = scores_by_words(query, stores)
    of_many, of_few = (max(hit[2] for hit in one.candidates(asked, 4, None, scores)) for one in stores)
    assert of_many < of_few, "the number stands in the smaller folder"


def test_text_that_is_still_somewhere_is_not_forgotten(folder: Folder) -> None:
    folder.write("copy.txt", FILES["mill.txt"])
    folder.update()
    (folder.docs / "mill.txt").unlink()
    (folder.docs / "people" / "ben.md").rename(folder.docs / "renamed.md")
    assert folder.update() == report(files=3, unchanged=2, added=1, removed=2, chunks=3, embedded=1)
    assert folder.forgotten == []
    (folder.docs / "copy.txt").unlink()
    assert folder.update().forgotten == 1
    assert folder.forgotten == [FILES["mill.txt"]]


def test_another_embedding_model_rebuilds_all(folder: Folder) -> None:
    folder.update()
    assert folder.update(embedder=SentenceTransformerEmbeddings(static_model(seed=1))).rebuilt
    embedder = SentenceTransformerEmbeddings(static_model(dimension=24))
    assert folder.update(embedder=embedder) == report(
        files=3, changed=3, chunks=3, embedded=3, rebuilt="the embedding model changed"
    )
    assert folder.forgotten == []
    index = folder.index(embedder=embedder)
    assert index.update() == report(files=3, unchanged=3, chunks=3)
    assert found(index, "anna was born in oslo") == ["people/anna.txt"]


def test_damaged_index_is_built_anew(folder: Folder, caplog: pytest.LogCaptureFixture) -> None:
    folder.update()
    for damage in (lambda data: data[:-9], lambda data: b"", lambda data: data.replace(b"PK", b"KP")):
        caplog.clear()
        (path,) = folder.index_dir.iterdir()
        path.write_bytes(damage(path.read_bytes()))
        assert folder.update() == report(files=3, added=3, chunks=3, embedded=3, rebuilt="the saved index is damaged")
        assert "the index is rebuilt" in caplog.text
        assert folder.forgotten == []
    assert folder.update() == report(files=3, unchanged=3, chunks=3)


def test_another_vector_store_is_not_overwritten(folder: Folder, embedder: Any) -> None:
    FaissVectorStore.from_texts(["mine"], embedder).save(folder.index_dir)
    index = folder.index()
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"index_dir=.*another vector store is here"):
            index.update()
    assert len(FaissVectorStore.load(folder.index_dir, embedder)) == 1


def test_unreadable_file_leaves_the_index_as_it_was(folder: Folder) -> None:
    folder.update()
    folder.write("mill.txt", BYTES)
    folder.write("new.txt", "Clara plays the violin.")
    index = folder.index()
    with pytest.raises(DocumentError, match=r"mill\.txt holds bytes that are not text"):
        index.update()
    assert len(index.store) == 3
    assert folder.forgotten == []
    skipped = {"mill.txt": "mill.txt holds bytes that are not text in any known encoding; save it as UTF-8"}
    assert folder.update(on_error="skip") == report(
        files=3, unchanged=2, added=1, removed=1, skipped=skipped, chunks=3, embedded=1, forgotten=1
    )
    assert folder.update(on_error="skip") == report(files=3, unchanged=3, skipped=skipped, chunks=3)
    folder.write("mill.txt", FILES["mill.txt"])
    assert folder.update().added == 1


def test_failed_callback_is_called_again(folder: Folder) -> None:
    folder.update()
    (folder.docs / "mill.txt").unlink()
    calls: list[Sequence[str]] = []

    def fail_once(texts: Sequence[str]) -> None:
        calls.append(texts)
        if len(calls) == 1:
            raise RuntimeError("the KV store is busy")

    with pytest.raises(RuntimeError, match="busy"):
        folder.update(on_delete=fail_once)
    assert folder.update(on_delete=fail_once).forgotten == 1
    assert calls == [[FILES["mill.txt"]]] * 2


def test_failing_embedder_changes_nothing(folder: Folder) -> None:
    folder.update()
    folder.write("new.txt", "nothing finite")

    class Broken(SentenceTransformerEmbeddings):
        def embed_documents(self, texts: list[str]) -> list[list[float]]:
            vectors = super().embed_documents(texts)
            return [[float("nan")] * len(one) for one in vectors] if "nothing finite" in texts else vectors

    with pytest.raises(EmbedderError, match="not finite"):
        folder.update(embedder=Broken(folder.model))
    assert folder.update() == report(files=4, unchanged=3, added=1, chunks=4, embedded=1)


def test_folders_without_text(folder: Folder) -> None:
    folder.update()
    for path in FILES:
        folder.write(path, " \n")
    with pytest.raises(DocumentError, match="hold no text"):
        folder.update()
    folder.write("mill.txt", "words")
    empty = ("people/anna.txt", "people/ben.md")
    assert folder.update() == report(files=3, changed=3, empty=empty, chunks=1, embedded=1, forgotten=3)
    assert folder.update() == report(files=3, unchanged=3, empty=empty, chunks=1)
    for path in FILES:
        (folder.docs / path).unlink()
    with pytest.raises(DocumentError, match="holds no"):
        folder.update()


NAMES = st.sampled_from(["a.txt", "b.md", "sub/c.txt"])
CONTENTS = st.sampled_from(["", "anna was born", "ben lives in oslo", "the old mill by the river", "a b c d e"])


@settings(deadline=None, max_examples=15)
@given(versions=st.lists(st.dictionaries(NAMES, CONTENTS, min_size=1), min_size=1, max_size=4))
def test_any_history_ends_like_a_fresh_build(versions: list[dict[str, str]], model: Any) -> None:
    """Whatever the folder went through, the index equals one of the folder as it is now."""
    embedder = SentenceTransformerEmbeddings(model)
    settings = SplitSettings(chunk_size=12)
    kept: set[str] = set()
    with tempfile.TemporaryDirectory() as place:
        docs = Path(place, "docs")
        for version in versions:
            for old in docs.rglob("*.*"):
                old.unlink()
            for name, text in version.items():
                (docs / name).parent.mkdir(parents=True, exist_ok=True)
                (docs / name).write_text(text)
            index = FolderIndex(
                docs,
                embedder=embedder,
                index_dir=Path(place, "index"),
                settings=settings,
                on_delete=kept.difference_update,
            )
            expected: list[Document] = split(
                [SourceFile(name, "", (text,)) for name, text in sorted(version.items())], settings
            )
            if not expected:
                with pytest.raises(DocumentError, match="hold no text"):
                    index.update()
                continue
            report = index.update()
            kept |= {one.page_content for one in index.chunks()}
            ours, theirs = ([(one.page_content, one.metadata) for one in some] for some in (index.chunks(), expected))
            assert ours == theirs
            assert kept == {one.page_content for one in expected}
            assert (report.files, report.chunks) == (len(version), len(expected))
            fresh = FaissVectorStore(embedder)
            fresh.add_documents(index.chunks())
            for query in ("oslo", "old", ""):
                near, far = (one.similarity_search_with_score(query, 9) for one in (index.store, fresh))
                assert near == far
