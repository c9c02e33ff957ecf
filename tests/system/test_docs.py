"""Every block of the documentation runs, every link leads somewhere, and the site builds."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from markdown.extensions.toc import slugify

from docs.generated import whole
from experiments.local_server import LocalServer
from tests.kit.pages import SERVED, Reader, blocks_of, serve

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
}
BLOCKS = {page: blocks_of(page, text) for page, text in PAGES.items()}


TUTORIAL = [block for block in BLOCKS["docs/tutorial.md"] if block.language in ("python", "toml")]
ENVIRONMENT = {"PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Iterator[LocalServer]:
    """A server of the tutorial's model, as the tutorial makes it."""
    folder = tmp_path_factory.mktemp("tutorial")
    with contextlib.chdir(folder), Reader(cache, ENVIRONMENT) as reader:
        for block in TUTORIAL[:2]:
            reader.run(block)
    arguments = ["--models", str(folder / "models"), "--cache-dir", str(cache / "clockwright")]
    server = serve("up", arguments, ENVIRONMENT)
    yield server
    server.stop()


@pytest.mark.parametrize("page", [page for page, blocks in BLOCKS.items() if blocks])
def test_the_blocks_of_a_page_do_what_it_says(
    page: str, cache: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    served = request.getfixturevalue("served") if SERVED in PAGES[page] else None
    with contextlib.chdir(tmp_path), Reader(cache, ENVIRONMENT, served) as reader:
        for block in BLOCKS[page]:
            reader.run(block)


def test_every_fence_is_a_block_and_no_block_stands_indented() -> None:
    for page, text in PAGES.items():
        fences = [line for line in text.splitlines() if line.lstrip().startswith("```")]
        assert len(fences) == 2 * len(BLOCKS[page]), page
        # Options of mkdocstrings stand indented.
        rest = re.sub(r"^:::.*\n(    .*\n)*", "", text, flags=re.MULTILINE)
        for block in BLOCKS[page]:
            rest = rest.replace(block.text, "")
        assert [line for line in rest.splitlines() if line.startswith("    ")] == [], page


def test_every_link_leads_to_a_page_that_is_there_and_to_a_heading_of_it() -> None:
    wrong = []
    for page, text in PAGES.items():
        for target in re.findall(r"\]\(([^)\s]+)\)", outside_blocks(page)):
            if "://" in target:
                continue
            path, _, anchor = target.partition("#")
            there = (ROOT / page).parent / path if path else ROOT / page
            named = os.path.relpath(there, ROOT)
            if not there.exists() or (anchor and anchor not in anchors_of(named)):
                wrong.append(f"{page}: {target}")
    assert wrong == []


def outside_blocks(page: str) -> str:
    text = whole(PAGES[page])
    for block in blocks_of(page, text):
        text = text.replace(block.text, "")
    return text


@functools.cache
def anchors_of(page: str) -> frozenset[str]:
    """Names of a page's headings, as the site makes them."""
    headings = re.findall(r"^#+ (.+)$", outside_blocks(page), re.MULTILINE)
    return frozenset(slugify(heading.replace("`", ""), "-") for heading in headings)


def test_who_leaves_a_block_out_says_why() -> None:
    for blocks in BLOCKS.values():
        for block in blocks:
            assert not block.why_not or len(block.why_not.split()) > 3, block.place


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=180,
    )
    assert built.returncode == 0, built.stdout
    assert (tmp_path / "index.html").exists()
