"""The documentation as a site: it builds without a warning, links lead somewhere, nothing comes from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "docs" / "site" / "mkdocs.yml"
# Addresses that a browser would fetch by itself.
FETCHED = re.compile(r"""<(?:script|img|link|iframe|source)\b[^>]*\b(?:src|href)=["']?(https?:)?//""")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as the file of its settings says."""
    folder = tmp_path_factory.mktemp("site") / "site"
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--config-file",
        str(CONFIG),
        "--site-dir",
        str(folder),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


@pytest.mark.slow
def test_every_page_is_on_the_site(site: Path) -> None:
    for kind in ("tutorial", "how-to", "reference", "explanation", "benchmarks", "decisions"):
        pages = {path.stem for path in (ROOT / "docs" / kind).glob("*.md")} - {"README"}
        assert pages <= {path.stem for path in (site / kind).glob("*.html")}, kind
    assert "makes local RAG answer faster" in (site / "index.html").read_text(encoding="utf-8")
    assert {path.stem for path in ROOT.glob("examples/*.py")} <= {path.stem for path in (site / "project").iterdir()}


@pytest.mark.slow
def test_the_reference_is_made_of_docstrings(site: Path) -> None:
    options = (site / "reference" / "options.html").read_text(encoding="utf-8")
    assert "How prompts are split, which tokens are recomputed" in options
    engine = (site / "reference" / "engine-api.html").read_text(encoding="utf-8")
    for method in ("generate", "stream", "warm", "forget", "with_config"):
        assert f'id="cacheblend_rag.engine.engine.BlendEngine.{method}"' in engine
    assert 'id="cacheblend_rag.report.BlendReport"' in (site / "reference" / "report.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        assert not FETCHED.search(page.read_text(encoding="utf-8")), page
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\(\s*[\"']?https?:|@import", sheet.read_text(encoding="utf-8")), sheet


def test_the_table_of_changes_has_every_name() -> None:
    from cacheblend_rag.report import DocumentUse

    told = (DocumentUse.__doc__ or "").partition("    change : str")[2]
    names = re.findall(r'``"([^"]+)"``', told)
    assert len(names) > 10
    page = (ROOT / "docs" / "how-to" / "langchain.md").read_text(encoding="utf-8")
    assert [name for name in names if f'`"{name}"`' not in page] == []
