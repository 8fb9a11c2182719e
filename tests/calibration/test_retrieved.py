"""Long prompts for the yardstick: articles joined anew, and the chunks that are retrieved for a question."""

from __future__ import annotations

from pathlib import Path

from cacheblend_rag.calibration.datasets import EvalCase, Passage
from cacheblend_rag.retrieval.embedder import SentenceTransformerEmbeddings
from cacheblend_rag.retrieval.index import build_index
from docs.benchmarks.scripts.retrieved import joined_articles, with_retrieved
from tests.toy import EMBEDDER_PATH


def case(number: int, text: str, *others: str) -> EvalCase:
    passages = (Passage("Mill", text, True), *(Passage("Mill", other) for other in others))
    return EvalCase(str(number), f"question {number}", ("1931",), passages, group=f"Mill-{number}")


def test_passages_stand_in_the_order_of_their_article_and_each_once() -> None:
    cases = [case(10, "tenth", "first", "loose"), case(2, "second", "tenth"), case(1, "first")]
    assert joined_articles(cases) == {"Mill": "first\n\nsecond\n\ntenth\n\nloose"}


def test_question_gets_the_nearest_chunks_if_an_answer_is_in_them(tmp_path: Path) -> None:
    documents = tmp_path / "documents"
    documents.mkdir()
    for name, text in (("mill", "The mill burned down in 1931."), ("harbour", "The harbour was dredged in 1912.")):
        (documents / f"{name}.txt").write_text(text, encoding="utf-8")
    embedder = SentenceTransformerEmbeddings(str(EMBEDDER_PATH))
    index = build_index(documents, embedder=embedder, index_dir=tmp_path / "index").index
    right = EvalCase("a", "When did the mill burn down?", ("1931",), (), group="Mill-1")
    (found,) = with_retrieved([right, EvalCase("b", "When was the war?", ("1066",), ())], index, 2)
    assert (found.id, found.group) == ("a", "Mill-1")
    assert {(passage.text[-5:], passage.support) for passage in found.passages} == {("1931.", True), ("1912.", False)}
