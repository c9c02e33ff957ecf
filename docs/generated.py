"""Generates parts of the pages from code: each of `PARTS`, from `<!-- generated: NAME -->` to `<!-- end: NAME -->`.

`make docs` and `python -m docs.generated` write them into the pages, and a test compares. mkdocs calls the two
hooks at the end while it builds the site.
"""

from __future__ import annotations

import ast
import enum
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import typer
from typer.models import ArgumentInfo, OptionInfo

from clockwright.cli.flags import ServerFlags
from clockwright.containers import ContainerSpec
from clockwright.errors import Denial, Refusal
from controller.core.quotas import Quota
from controller.front.http.rest import HTTP_STATUSES
from controller.front.methods import METHODS, ROUTES, AtFront
from controller.front.oip.statuses import CODES
from controller.models.model_folder import ModelSettings
from controller.process.policies_cli import known
from controller.telemetry.rows import ActionRow, RequestRow

DOCS = Path(__file__).resolve().parent

#: Files outside of docs, by the path that pages use, and where they are on the site.
ELSEWHERE = {
    "../SECURITY.md": "security.md",
    "../experiments/results/overload.png": "pictures/overload.png",
    "../experiments/results/lanes.png": "pictures/lanes.png",
}

_PART = re.compile(
    r"^<!-- generated: ([\w ]+) -->\n.*?^<!-- end: \1 -->$", re.MULTILINE | re.DOTALL
)

_NAMES = {bool: "", int: "N", float: "X", str: "TEXT", Path: "PATH"}


# --- flags ----------------------------------------------------------------------------------------


def commands() -> dict[str, Callable[..., None]]:
    """Returns every command of this project by its name after `clockwright`; groups are split."""
    found: dict[str, Callable[..., None]] = {}
    for point in entry_points(group="clockwright.commands"):
        if point.dist is None or point.dist.name != "clockwright":
            continue
        made = point.load()
        if not isinstance(made, typer.Typer):
            found[point.name] = made
            continue
        for info in made.registered_commands:
            assert info.callback is not None
            name = info.name or info.callback.__name__.replace("_", "-")
            found[f"{point.name} {name}"] = info.callback
    return dict(sorted(found.items()))


def _flags() -> Iterator[str]:
    yield "## Server\n"
    yield from _table(("", "default", "meaning"), _SERVER)
    for name, command in commands().items():
        yield f"## clockwright {name}\n"
        yield f"{inspect.getdoc(command)}\n"
        rows = list(_parameters(command))
        asks = set(_SERVER) <= set(rows)
        own = [row for row in rows if not asks or row not in _SERVER]
        if own:
            yield from _table(("", "default", "meaning"), own)
        if asks:
            yield "It also takes the flags of [Server](#server).\n"


def _parameters(command: Callable[..., object]) -> Iterator[tuple[str, str, str]]:
    for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
        kind, *rest = typing.get_args(parameter.annotation) or (parameter.annotation,)
        info = next((item for item in rest if isinstance(item, ArgumentInfo | OptionInfo)), None)
        if info is not None and info.hidden:
            continue
        needed = parameter.default is parameter.empty
        if isinstance(info, ArgumentInfo) or (info is None and needed):
            shown, default = f"`{(info and info.metavar) or name.upper()}`", ""
        else:
            shown, default = _flag(name, kind, parameter.default, info), _default(parameter.default)
        words = [info.help or ""] if info is not None else []
        if info is not None and info.envvar:
            words.append(f"Environment: `{info.envvar}`.")
        yield shown, "needed" if needed else default, " ".join(words)


def _flag(name: str, kind: Any, default: object, info: OptionInfo | None) -> str:  # noqa: ANN401
    # In an annotation, typer takes the first name for a default until it makes the command.
    spelled = [] if info is None else [info.default, *(info.param_decls or ())]
    flags = [flag for flag in spelled if isinstance(flag, str) and flag.startswith("-")]
    if not flags:
        flags = [f"--{name.replace('_', '-')}"]
        if kind is bool:
            flags.append(f"--no-{flags[0][2:]}")
    value = (info and info.metavar) or _value(kind)
    flags[0] = f"{flags[0]} {value}".strip()
    return ", ".join(f"`{flag}`" for flag in flags)


def _value(kind: Any) -> str:  # noqa: ANN401
    """Write the values that a flag takes."""
    if isinstance(kind, types.UnionType):
        (kind,) = (one for one in typing.get_args(kind) if one is not type(None))
    if typing.get_origin(kind) is list:
        (kind,) = typing.get_args(kind)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return "|".join(str(member.value) for member in kind)
    return _NAMES[kind]


def _default(value: object) -> str:
    if value is None or value is False or value == "":
        return ""
    if value is True:
        return "on"
    return f"`{value.value if isinstance(value, enum.Enum) else value}`"


_SERVER = list(_parameters(ServerFlags))


# --- fields of records -------------------------------------------------------------


def described(record: type[Any]) -> list[tuple[list[str], str]]:
    """Read the `#:` comments above the fields of a class or the members of an enumeration.

    Returns:
        Names and text; fields without a comment of their own share that of the field above.
    """
    source = inspect.getsource(record)
    lines = source.splitlines()
    (tree,) = ast.parse(source).body
    assert isinstance(tree, ast.ClassDef)
    found: list[tuple[list[str], str]] = []
    for node in tree.body:
        match node:
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
                words = _above(lines, node.lineno)
                if words or not found:
                    found.append(([name], words))
                else:
                    found[-1][0].append(name)
    return found


def _above(lines: list[str], lineno: int) -> str:
    words: list[str] = []
    for line in reversed(lines[: lineno - 1]):
        if not line.strip().startswith("#:"):
            break
        words.append(line.strip().removeprefix("#:").strip())
    return " ".join(reversed(words))


def _defaults(record: type[Any]) -> Mapping[str, object]:
    """Defaults of a dataclass by field; fields without one are needed."""
    parameters = inspect.signature(record).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}


def _settings(record: type[Any]) -> Iterator[str]:
    defaults = _defaults(record)
    rows = []
    for names, words in described(record):
        shown = ", ".join(_code(_of_file(name)) for name in names)
        default = "needed" if names[0] not in defaults else _toml(defaults[names[0]])
        # A record's None is a file without the key.
        rows.append((shown, default, words.replace("None: ", "unset: ")))
    yield from _table(("key", "default", "meaning"), rows)


def _of_file(name: str) -> str:
    """Files have milliseconds where records have nanoseconds."""
    return name.replace("_ns", "_ms")


def _toml(value: object) -> str:
    match value:
        case None | "":
            return ""
        case bool():
            return f"`{str(value).lower()}`"
        case tuple():
            return f"`{list(value)}`"
        case int() | float() | str():
            return f"`{value!r}`".replace("'", '"')
    return ""


def _columns(record: type[Any]) -> Iterator[str]:
    rows = [(", ".join(map(_code, names)), words) for names, words in described(record)]
    yield from _table(("column", "meaning"), rows)


def _code(text: str) -> str:
    return f"`{text}`"


# --- refusals -------------------------------------------------------------------------------------


def _refusals() -> Iterator[str]:
    rows = [
        (
            f"[`{name}`](#{name.lower()})",
            f"`{CODES[Refusal(name)].name}`",
            str(HTTP_STATUSES.get(CODES[Refusal(name)], 500)),
            words,
        )
        for (name,), words in described(Refusal)
    ]
    yield from _table(("reason", "gRPC status", "HTTP", "meaning"), rows)


def _denials() -> Iterator[str]:
    rows = [(_code(name), words) for (name,), words in described(Denial)]
    yield from _table(("reason", "meaning"), rows)


# --- policies -------------------------------------------------------------------------------------


def _policies(kind: str) -> Iterator[str]:
    for policy in known():
        if policy.kind != kind or policy.words == "a package brings it":
            continue
        yield f"**`{policy.name}`**: {policy.words}\n"
        rows = [
            (_code(option.name), _code(option.default) if option.default else "", option.words)
            for option in policy.options
        ]
        if rows:
            yield from _table(("option", "default", "meaning"), rows)


def _table(titles: Iterable[str], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    titles = list(titles)
    yield f"| {' | '.join(titles)} |"
    yield f"|{'---|' * len(titles)}"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"
    yield ""


def _paths() -> Iterator[str]:
    rows = [(route.verb, f"`{route.pattern}`", method.role.value) for route, method in ROUTES]
    yield from _table(("verb", "path", "role"), rows)


def _methods() -> Iterator[str]:
    words = {
        AtFront.ANSWERED: "answers",
        AtFront.FORWARDED: "asks the controller",
        AtFront.ABSENT: "does not have it",
    }
    rows = [
        (f"`{method.path[1:]}`", method.role.value, words[method.at_front])
        for method in METHODS.values()
    ]
    yield from _table(("method", "role", "a front"), rows)


PARTS: dict[str, Callable[[], Iterable[str]]] = {
    "rest paths": _paths,
    "methods": _methods,
    "flags": _flags,
    "model settings": lambda: _settings(ModelSettings),
    "container settings": lambda: _settings(ContainerSpec),
    "quotas": lambda: _settings(Quota),
    "refusals": _refusals,
    "denials": _denials,
    "requests table": lambda: _columns(RequestRow),
    "actions table": lambda: _columns(ActionRow),
    "scheduling policies": lambda: _policies("scheduling"),
    "selection policies": lambda: _policies("selection"),
}


def whole(text: str) -> str:
    """Replace the generated parts of a page.

    Raises:
        KeyError: the page names an unknown part.
    """
    return _PART.sub(lambda part: _part(part[1]), text)


def _part(name: str) -> str:
    said = "\n".join(PARTS[name]()).strip()
    return f"<!-- generated: {name} -->\n\n{said}\n\n<!-- end: {name} -->"


# --- hooks of mkdocs ------------------------------------------------------------------------------


def on_page_markdown(markdown: str, **_: object) -> str:
    """Rewrite a page's links for the site."""
    for path, place in ELSEWHERE.items():
        markdown = markdown.replace(f"]({path})", f"]({place})")
    # SECURITY.md links to pages from the repository's root.
    return markdown.replace("](docs/", "](")


def on_files(files: Any, config: Any) -> Any:  # noqa: ANN401  mkdocs has no types for its hooks
    """Add the files outside of docs."""
    from mkdocs.structure.files import File

    for path, place in ELSEWHERE.items():
        files.append(File.generated(config, place, abs_src_path=str((DOCS / path).resolve())))
    return files


if __name__ == "__main__":
    for page in sorted(DOCS.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        if (new := whole(text)) != text:
            page.write_text(new, encoding="utf-8")
            print(f"written: {page.relative_to(DOCS.parent)}")
