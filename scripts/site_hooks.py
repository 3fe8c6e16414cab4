"""Hooks of the documentation site (mkdocs.yml): pages of `research/`, and links to files that are
no pages.

`research/NAME/README.md` becomes the page `research/NAME.md`. A link to such a file leads to its
page; one to anything else outside `docs/` (a source file) becomes its text, since the site has no
copy of it. A file that does not exist is a warning, and so is whatever a page would load from
another host; `mkdocs build --strict` takes warnings for errors."""

import logging
import re
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any

from mkdocs.structure.files import File, Files

logger = logging.getLogger("mkdocs.plugins.site_hooks")
ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(!?)\[([^\]\[]*)\]\(([^)#\s:]+)(#[^)\s]*)?\)")
LOADED = re.compile(
    r"""<(?:script|link|img|iframe)\b[^>]*?\b(?:src|href)=["']?((?:https?:)?//[^"'\s>]+)"""
)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of research."""
    for readme in sorted(ROOT.glob("research/*/README.md")):
        uri = f"research/{readme.parent.name}.md"
        files.append(File.generated(config, uri, content=readme.read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links of the repository into links of the site."""
    here = page.file.src_uri
    return LINK.sub(lambda link: _on_site(link, here), markdown)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Look for what a reader without a network would miss."""
    for address in sorted({*LOADED.findall(output)}):
        logger.warning("%s loads %s", page.file.src_uri, address)
    return output


def _on_site(link: re.Match[str], here: str) -> str:
    """What stands on the page `here` instead of a link."""
    image, text, target, anchor = link.groups()
    path = normpath(str(PurePosixPath(_in_repository(here)).parent / target))
    if not (ROOT / path).exists():
        logger.warning("%s links to %s, which does not exist", here, path)
        return link.group()
    page = _as_page(path)
    if page is None:
        return text
    return f"{image}[{text}]({relpath(page, PurePosixPath(here).parent)}{anchor or ''})"


def _in_repository(page: str) -> str:
    """Where a page's text lies."""
    return (
        f"{page.removesuffix('.md')}/README.md" if page.startswith("research/") else f"docs/{page}"
    )


def _as_page(path: str) -> str | None:
    """The page or file of the site that a file of the repository is; None if it is none."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    research = re.fullmatch(r"(research/\w+)(/README\.md)?", path)
    return f"{research[1]}.md" if research else None
