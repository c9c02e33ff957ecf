"""Every block of the documentation runs, every link leads somewhere, and the site builds."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pkgutil
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from markdown.extensions.toc import slugify
from typer.main import get_command

from clockwright.cli.main import app
from clockwright.containers import read_container
from clockwright.errors import ModelError, Refusal
from controller.access.quota_book import read_quota_file
from controller.core.quotas import Quota
from controller.models.model_folder import read_versions
from controller.telemetry.files import ACTION_COLUMNS, REQUEST_COLUMNS
from docs.generated import ELSEWHERE, PARTS, on_page_markdown, whole
from experiments.live.local_server import LocalServer
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
    needs = re.findall(r"^\$ (curl) |^(g\+\+) |\"(node)\"", PAGES[page], re.MULTILINE)
    for tool in {name for names in needs for name in names if name}:
        if shutil.which(tool) is None:
            pytest.skip(f"the page needs {tool}, which is not installed")
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
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", outside_blocks(page)):
            if "://" in target:
                continue
            path, _, anchor = target.partition("#")
            there = (ROOT / page).parent / path if path else ROOT / page
            named = os.path.relpath(there, ROOT)
            if not there.exists() or (anchor and anchor not in anchors_of(named)):
                wrong.append(f"{page}: {target}")
    assert wrong == []


def test_links_of_pages_that_lie_elsewhere_lead_somewhere_on_the_site() -> None:
    for path, place in ELSEWHERE.items():
        if place.endswith(".md"):
            page = on_page_markdown((DOCS / path).read_text(encoding="utf-8"))
            for target in re.findall(r"\]\(([^)#\s]+)", page):
                assert "://" in target or (DOCS / target).exists(), f"{path}: {target}"


def outside_blocks(page: str) -> str:
    text = PAGES[page]
    for block in blocks_of(page, text):
        text = text.replace(block.text, "")
    return text


@functools.cache
def anchors_of(page: str) -> frozenset[str]:
    """Names of a page's headings, as the site makes them."""
    headings = re.findall(r"^#+ (.+)$", outside_blocks(page), re.MULTILINE)
    return frozenset(slugify(heading.replace("`", ""), "-") for heading in headings)


def test_what_code_says_of_itself_stands_in_the_pages() -> None:
    old = [page for page, text in PAGES.items() if whole(text) != text]
    assert old == [], "python -m docs.generated writes them"
    marks = re.findall(r"^<!-- generated: ([\w ]+) -->$", "\n".join(PAGES.values()), re.MULTILINE)
    assert sorted(marks) == sorted(PARTS)


def test_who_leaves_a_block_out_says_why() -> None:
    for blocks in BLOCKS.values():
        for block in blocks:
            assert not block.why_not or len(block.why_not.split()) > 3, block.place


def test_every_command_and_flag_that_help_knows_stands_in_the_reference() -> None:
    sections = dict(
        re.findall(r"^## clockwright (.+?)\n(.*?)(?=^## |\Z)", part("flags"), re.M | re.S)
    )
    server = set(re.findall(r"`(--[\w-]+)", part("flags").split("## clockwright")[0]))
    helped = dict(helped_commands("", get_command(app)))
    assert sections.keys() == helped.keys()
    for name, text in sections.items():
        listed = set(re.findall(r"`(--[\w-]+)", "\n".join(re.findall(r"^\| (.*?) \|", text, re.M))))
        assert listed | (server if "#server" in text else set()) == helped[name], name
        for row in re.findall(r"^\| `--.*", text, re.M):
            assert not row.endswith("|  |"), row


def helped_commands(
    name: str,
    command: Any,  # noqa: ANN401  typer's own copy of click's
) -> Iterator[tuple[str, set[str]]]:
    """Every command, and the flags that its help names."""
    if hasattr(command, "list_commands"):
        for each in command.list_commands(None):
            yield from helped_commands(f"{name} {each}".strip(), command.get_command(None, each))
    else:
        flags = [
            flag
            for parameter in command.params
            if not getattr(parameter, "hidden", False)
            for flag in (*parameter.opts, *parameter.secondary_opts)
        ]
        yield name, {flag for flag in flags if flag.startswith("--")} - {"--help"}


@pytest.mark.parametrize("name", sorted(PARTS.keys() - {"flags"}))
def test_whatever_code_says_in_a_page_has_a_meaning(name: str) -> None:
    rows = [line for line in part(name).splitlines() if line.startswith("| ")]
    assert rows
    assert [row for row in rows if re.search(r"\|\s*\|$", row)] == []


@pytest.mark.parametrize(
    ("name", "table", "read"),
    [
        ("model settings", "unknown = 1", read_versions),
        ("container settings", "[container]\nunknown = 1", read_container),
    ],
)
def test_the_keys_of_a_file_are_those_that_its_reader_knows(
    name: str, table: str, read: Callable[[Path], object], tmp_path: Path
) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "config.toml").write_text(table)
    with pytest.raises(ModelError, match="known are ") as caught:
        read(tmp_path / "m")
    known = str(caught.value).partition("known are ")[2].partition("; ")[0]
    assert columns(name) == set(known.split(", "))


def test_the_keys_of_quotas_are_those_that_their_reader_knows(tmp_path: Path) -> None:
    file = tmp_path / "quotas.toml"
    file.write_text("[gold]\n" + "".join(f"{key} = 1\n" for key in sorted(columns("quotas"))))
    assert read_quota_file(file)
    assert len(columns("quotas")) == len(fields(Quota))


def test_the_columns_of_telemetry_are_those_that_it_writes() -> None:
    assert columns("requests table") == set(REQUEST_COLUMNS) - {"run", "departure_utc"}
    steps = {"load", "input", "exec", "output"}
    written = {c for c in ACTION_COLUMNS if c.split("_")[0] not in steps}
    assert columns("actions table") == written - {"run", "result_utc"} | steps


def test_every_refusal_says_what_to_do() -> None:
    page = PAGES["docs/refusals.md"]
    assert {*re.findall(r"^### (\w+)$", page, re.M)} == Refusal.__members__.keys()
    assert columns("refusals") == Refusal.__members__.keys()


def part(name: str) -> str:
    return "\n".join(PARTS[name]())


def columns(name: str) -> set[str]:
    """What stands in the first column of a part's table."""
    first = "\n".join(re.findall(r"^\| (.*?) \|", part(name), re.MULTILINE))
    return set(re.findall(r"`(\w+)`", first))


def test_a_page_that_says_something_else_than_what_happens_is_found(
    tmp_path: Path, cache: Path
) -> None:
    def read(text: str) -> None:
        with contextlib.chdir(tmp_path), Reader(cache, ENVIRONMENT) as reader:
            for block in blocks_of("page", text):
                reader.run(block)

    read("```console\n$ echo one  two; echo three\none t…\n…\n```\n")
    read("```python\nprint(1)\n```\n\n```text\n1\n```\n")
    read('```csv title="a/b.csv"\n1,2\n```\n```bash\ngrep -q 2 a/b.csv\n```\n')
    for wrong in (
        "```console\n$ echo one\ntwo\n```\n",
        "```console\n$ echo one; echo two\none\n```\n",
        "```console\n$ true\n…\nmore\n```\n",
        "```bash\nfalse\ntrue\n```\n",
        "```python\nprint(1)\n```\n\n```text\n2\n```\n",
        "```\nno language\n```\n",
        "```toml\nno_title = 1\n```\n",
    ):
        with pytest.raises(AssertionError, match="page:"):
            read(wrong)


def test_the_site_has_every_page_and_every_module_that_a_page_describes() -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    named = re.findall(r"[\w/]+\.md", json.dumps(config["nav"]))
    pages = [path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")]
    assert sorted(named) == sorted([*pages, *(p for p in ELSEWHERE.values() if p.endswith(".md"))])
    for path in re.findall(r"^::: (\S+)$", "\n".join(PAGES.values()), re.MULTILINE):
        assert pkgutil.resolve_name(path) is not None


# Half a minute on a busy machine; what it finds beyond the tests above is rare.
@pytest.mark.long
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
