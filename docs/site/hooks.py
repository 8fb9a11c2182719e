"""The site's pages from outside ``docs``: the README, the changelog, the toy and the scripts in ``examples``.

Pages link to files as they lie in the repository, so that the links hold there too. Here each link is rewritten to
where the file is on the site.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("examples/*.py"))
# Paths in the repository, and what they are on the site.
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "project/changelog.md",
    "tests/toy/README.md": "project/toy.md",
    **{script: f"project/{Path(script).stem}.md" for script in SCRIPTS},
}
SOURCES = {page: path for path, page in PAGES.items()}
LINK = re.compile(r"\]\((?!https?://|#)([^)#\s]+)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from outside."""
    for path, page in PAGES.items():
        text = (ROOT / path).read_text(encoding="utf-8")
        if path.endswith(".py"):
            text = f"# {path}\n\n```python\n{text}```\n"
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite links to where files are on the site."""
    here = page.file.src_uri
    source = SOURCES.get(here, f"docs/{here}")

    def rewritten(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link[1]))
        if (ROOT / path).is_dir():
            path = f"{path}/README.md"
        target = PAGES.get(path, path.removeprefix("docs/"))
        return f"]({posixpath.relpath(target, posixpath.dirname(here) or '.')}"

    return LINK.sub(rewritten, markdown)
