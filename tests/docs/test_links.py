"""Every link in the pages leads to a file or to a heading that exists."""

import re
from pathlib import Path
from urllib.parse import unquote

import pytest
from support import REPO_ROOT
from test_style import tracked

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives the headings."""
    names: set[str] = set()
    for heading in re.findall(r"^#+ +(.*)$", CODE.sub("", page.read_text()), re.MULTILINE):
        text = re.sub(r"[^\w\- ]", "", heading.lower())
        names.add(text.replace(" ", "-"))
    return names


def links(page: Path) -> list[str]:
    """Those within the repository; the badge of the tests leads to the page of its host."""
    text = CODE.sub("", page.read_text())
    return [link for link in LINK.findall(text) if not re.match(r"[a-z]+:|\.\./\.\./actions/", link)]


@pytest.mark.parametrize("name", tracked("*.md"))
def test_links_lead_somewhere(name: str):
    page = REPO_ROOT / name
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / unquote(path)).resolve() if path else page
        assert target.exists(), link
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), link
