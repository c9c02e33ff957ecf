"""Prose uses the agreed words, comments and docstrings name what they describe, class names are unique.

A comment that begins with "Of" leaves its subject to the line below it, and a docstring that begins with
"See" sends its reader away. A name that two classes share makes a reader look at the imports to learn
which one is meant. `GLOSSARY` lists words that readers had to read twice, each with a better one.
"""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("clockwright", "controller", "worker", "engines", "modelzoo", "traces", "experiments")

#: Names that several classes share, and why they may.
SHARED_NAMES = {
    "Policy": (
        "Clockwork's word for a scheduling policy and Clipper's for a selection policy; no file imports both"
    ),
    "Setting": "the numbers of one figure or measurement, varied in tests: the same idea in each of the files",
}

#: Words to avoid, as regular expressions, and what to write instead.
GLOSSARY = {
    r"who(?:so)?ever|whose?soever|whosever": "the noun: a caller that, the process that",
    r"nobody|nobody's|no one": "the noun, or the passive: no client, no worker, is not used",
    r"somebody|someone|anybody": "the noun: a client, an operator, another process",
    r"everybody|everybody's": "all callers, all users; shared; public",
    r"there (?:is|are) none": "Returns None if ...; does not exist; is missing",
    r"for none": "the number: for no model; without",
    r"good no more|of before|no more is": "expired; of the previous generation; is not ... any more",
    r"strangers?|stranger's|strangers'": "an untrusted client, a client without credentials",
    r"believed?|believes": "trust (a token), predict (a duration), assume",
    r"what (?:be|has be)?comes? of|what became of|became of": "what happened to; the outcome of",
    r"haste|in a hurry": "a short deadline",
    r"(?:hangs?|hung) up on": "the connection is closed",
    r"(?:at|inside|every|the) doors?": "at the front, the listener, the limits on admission",
    r"the way (?:back|there|out)|ways to": "the response path, the link, the network",
    r"beside": "next to, in addition to, compared with, while",
    r"anew": "again",
    r"slow beats never": "a slow worker is better than none",
    r"next to nothing": "cheap, with its figure",
    r"says? nothing more|says? no more|said no more": "is silent, sends nothing",
    r"whatever (?:he|she|it|they) (?:say|said)s?": "the input, the answer",
    r"mean(?:s)? harm|do harm": "attack, unsafe",
}
BANNED = re.compile("|".join(rf"\b(?:{words})\b" for words in GLOSSARY), re.IGNORECASE)

#: What stands between two words of a comment or a string that goes on in the next line. Where not even the whole text of
#: a source has a word to avoid, none of its comments and strings has, and it need not be taken apart.
JOINS = re.compile(r"(?:\s|#|\\n|(?:\b[bfru]{1,2})?[\"'])+", re.IGNORECASE)

#: Folders and patterns of files whose prose still has words of the glossary.
NOT_YET = (
    # One message to operators stands in the digests of transcripts.
    "controller/core/results.py",
    "experiments/clipper_paper/fig10.py",  # the record names a method with such a word
)

#: Pages that people read, where code blocks and `code` do not count.
PAGES = sorted(
    [
        *(ROOT / name for name in ("README.md", "CHANGELOG.md", "SECURITY.md", "CONTRIBUTING.md")),
        *(ROOT / "docs").rglob("*.md"),
    ]
)


def files_of(*folders: str) -> list[Path]:
    """All Python files below the folders but the stubs, which protoc writes."""
    generated = ROOT / "clockwright" / "v1"
    return sorted(
        path
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        if not path.is_relative_to(generated)
    )


PRODUCT = files_of(*PACKAGES)
EVERYTHING = [*PRODUCT, *files_of("tests", "proto", "docs")]


def comments_in(source: str) -> Iterator[tuple[int, str]]:
    """First line of every block of comments, without `#` and `#:`, and its line number.

    A comment behind code is a block of its own.
    """
    above = None
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            line, column = token.start
            alone = not token.line[:column].strip()
            if not alone or above != (line - 1, column):
                yield line, token.string.lstrip("#:").strip()
            above = (line, column) if alone else None


def docstrings_in(source: str) -> Iterator[tuple[int, str]]:
    """Every docstring in one line, and the line on which its module, class or function begins."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text is not None:
                yield getattr(node, "lineno", 1), " ".join(text.split())


#: What a source has somewhere that is broken; to take one apart takes a hundred times as long as to look for it.
SUSPECT = re.compile(r"#:?\s*Of\b|\"\"\"\s*(Of|See)\b")


def broken_prose(source: str) -> Iterator[tuple[int, str]]:
    """Line and complaint for every comment and docstring that does not name what it describes."""
    if not SUSPECT.search(source):
        return
    for line, text in comments_in(source):
        if re.match(r"Of\b", text):
            yield line, f"found the comment {text!r}, expected one that names its subject"
    for line, text in docstrings_in(source):
        if re.match(r"Of\b", text):
            yield line, f"found the docstring {text!r}, expected one that names its subject"
        if re.match(r"See\b", text):
            yield line, f"found the docstring {text!r}, expected @override and none, or a sentence"


def messages_in(source: str) -> Iterator[tuple[int, str]]:
    """Every string of more than one word that is no docstring, and its line."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, " ".join(node.value.split())


def text_of(page: str) -> Iterator[tuple[int, str]]:
    """Every line of a Markdown page outside its code, and its number."""
    text = re.sub(
        r"^```.*?^```$|<!--.*?-->|`[^`\n]+`|\]\([^)]*\)",
        lambda code: "\n" * code[0].count("\n"),
        page,
        flags=re.MULTILINE | re.DOTALL,
    )
    yield from enumerate(text.splitlines(), 1)


def may_have_words_to_avoid(source: str) -> bool:
    """Whether comments or strings may have one, also where they go on in the next line."""
    return bool(BANNED.search(JOINS.sub(" ", source)))


def words_to_avoid(place: str, texts: Iterable[tuple[int, str]]) -> Iterator[str]:
    """Complain about each word of the glossary in these texts, and say which word is better."""
    for line, text in texts:
        for found in BANNED.finditer(text):
            better = next(
                better
                for words, better in GLOSSARY.items()
                if re.fullmatch(words, found[0], re.IGNORECASE)
            )
            yield f"{place}:{line}: found {found[0]!r}, expected a plainer word ({better})"


def public_classes(source: str) -> Iterator[tuple[int, str]]:
    """Line and name of every class without a leading underscore."""
    for found in re.finditer(r"^ *class ([A-Za-z]\w*)", source, re.MULTILINE):
        yield source.count("\n", 0, found.start(1)) + 1, found[1]


@functools.cache
def places_by_class() -> dict[str, list[str]]:
    """Where each public class name of the product is defined."""
    places = defaultdict(list)
    for path in PRODUCT:
        for line, name in public_classes(path.read_text(encoding="utf-8")):
            places[name].append(f"{path.relative_to(ROOT)}:{line}")
    return places


def test_every_comment_and_docstring_names_what_it_describes() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {complaint}"
        for path in EVERYTHING
        for line, complaint in broken_prose(path.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(["", *found])


def test_prose_uses_no_word_of_the_glossary() -> None:
    found: list[str] = []
    for path in [*PRODUCT, *PAGES]:
        place = path.relative_to(ROOT)
        if any(place.match(room) or place.is_relative_to(room) for room in NOT_YET):
            continue
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".md":
            found.extend(words_to_avoid(str(place), text_of(text)))
        elif may_have_words_to_avoid(text):
            # Docstrings are strings too.
            found.extend(words_to_avoid(str(place), [*comments_in(text), *messages_in(text)]))
    assert not found, "\n".join(["", *found])


def test_a_class_name_stands_for_one_idea() -> None:
    found = [
        f"{places[0]}: found class {name} again at {', '.join(places[1:])}, expected a name of its own"
        for name, places in places_by_class().items()
        if len(places) > 1 and name not in SHARED_NAMES
    ]
    assert not found, "\n".join(["", *found])


def test_every_exception_among_the_class_names_is_still_needed() -> None:
    places = places_by_class()
    assert [name for name in SHARED_NAMES if len(places.get(name, ())) < 2] == []


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("# Of the worker.\nx = 1\n", 1),
        ("class A:\n    #: Of one row.\n    x: int\n", 2),
        ("x = 1  # Of the link.\n", 1),
        ("x = 1  # An end.\n# Of another block.\n", 2),
        ("x = 1  # An end.\ny = 2  # Of another.\n", 2),
        ('"""Of one link."""\n', 1),
        ('def f():\n    """Of all\n    rows."""\n', 1),
        ('def f():\n    """See `Device`."""\n', 1),
        ('class A:\n    """See the module. Satisfies `B`."""\n', 1),
    ],
)
def test_words_without_a_subject_are_found(source: str, line: int) -> None:
    assert [where for where, _ in broken_prose(source)] == [line]


def test_a_word_of_the_glossary_is_found_in_messages_and_pages_but_not_in_code() -> None:
    source = 'x = "whoever asks"\ny = "nobody"\n'
    assert len(list(words_to_avoid("x.py", messages_in(source)))) == 1
    assert may_have_words_to_avoid(source)
    assert may_have_words_to_avoid('x = "it asks nobody"\n')
    assert may_have_words_to_avoid('x = ("it asks no "\n     f"one")\n')
    page = "Whoever asks.\n```bash\nnobody\n```\n`nobody` [link](beside.md)\nnobody's\n"
    assert [found.split(":")[1] for found in words_to_avoid("x.md", text_of(page))] == ["1", "6"]


@pytest.mark.parametrize(
    "source",
    [
        "# The rate is that\n# Of all workers.\n",
        "# Often empty.\n",
        '"""Seed of the source."""\n',
        'x = "# Of a string."\n',
        'def f():\n    """Mean of the rows. See `g`."""\n',
    ],
)
def test_sentences_with_a_subject_are_left_alone(source: str) -> None:
    assert list(broken_prose(source)) == []
