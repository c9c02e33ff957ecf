"""Runs the blocks of a page of documentation, in order, as somebody would who reads it.

What a block is stands in its first line:

* ``bash``: commands, which must succeed. A line that begins with `clockwright up` (or `controller`, `worker`,
  `front`) is started beside the others; it ends where the page ends, or where the next `up` begins.
* ``console``: likewise, each command behind `$ `, and below it what it prints. `…` stands for anything within a
  line, and alone on a line for any lines.
* ``python``: a program in this process. Programs of a page share their names.
* ``text``: what the block above prints, as with ``console``.
* any with ``title="PATH"``: a file, which is written.

Where a reader has ports of his own machine, each run has free ones: the page's are translated. So are latency
objectives of 20 ms and more, to some that no busy machine misses. A block is only left out where a comment above it
says why: `<!-- not run: REASON -->`. Below `<!-- figures differ -->`, numbers are another machine's. Where a page says `<!-- served: the tutorial's model -->`, somebody has started
that server already.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from experiments.live.local_server import LocalServer
from tests.kit.processes import PATIENCE_S

_BLOCK = re.compile(
    r"(?:^<!-- not run: (?P<why_not>[^>]+) -->\n|(?P<figures>^<!-- figures differ -->\n))?"
    r"^```(?P<language>\w*)(?: title=\"(?P<title>[^\"]+)\")?\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
# As it stands in a pattern, where dots, signs and spaces are escaped.
_FIGURE = re.compile(
    r"(?<![\w\\])(?:\\[+-])?\d(?:[\d,e]|\\[.-](?=\d))*(?:\\ (?:us|ms|s)\b)?(?![\w:])"
)
#: A page that says so is read beside a server that has the tutorial's model.
SERVED = "<!-- served: the tutorial's model -->"
_OBJECTIVE = re.compile(r"(slo[_-]ms[\"'*]*\W{1,4})(\d+)\b")
_PATIENT_MS = "30000"
_SERVES = re.compile(r"clockwright (up|controller|front|worker)\b(?!.* --help)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One block of a page."""

    page: str
    #: The line of its fence.
    line: int
    language: str
    #: Path of the file that it is; empty: none.
    title: str
    text: str
    #: The reason not to run it; empty: it is run.
    why_not: str
    #: The figures that it shows are another machine's.
    figures_differ: bool

    @property
    def place(self) -> str:
        """Where it stands, for people."""
        return f"{self.page}:{self.line}"


def blocks_of(page: str, text: str) -> list[Block]:
    """Find the blocks of a page."""
    return [
        Block(
            page=page,
            line=text.count("\n", 0, found.start("language")) + 1,
            language=found["language"],
            title=found["title"] or "",
            text=found["text"],
            why_not=found["why_not"] or "",
            figures_differ=found["figures"] is not None,
        )
        for found in _BLOCK.finditer(text)
    ]


def mismatch(expected: str, found: str, *, figures_differ: bool = False) -> str:
    """Say how an output differs from what a page says of it; empty: it does not.

    How wide the columns of a table are is nobody's business, nor are empty lines.

    Args:
        expected: what the page says.
        found: what was printed.
        figures_differ: any number will do for a number, and any unit of time for such a one.
    """
    lines = [" ".join(line.split()) for line in expected.strip().splitlines() if line.strip()]
    pattern = "".join(
        r"(?:.*\n)*?" if line == "…" else re.escape(line).replace("…", ".*?") + " ?\n"
        for line in lines
    )
    if figures_differ:
        pattern = _FIGURE.sub(r"[\\d.,e+-]+(?:\\ (?:us|ms|s))?", pattern)
    told = "".join(f"{' '.join(line.split())}\n" for line in found.splitlines() if line.strip())
    if re.fullmatch(pattern, told):
        return ""
    return f"found\n{told}\nexpected\n{expected}"


def serve(command: str, arguments: Sequence[str], environment: Mapping[str, str]) -> LocalServer:
    """Start a server on free ports, and wait until it is ready, or a controller until it listens."""
    flags = ["--http-port", "0", "--metrics-port", "0", *arguments]
    if command == "up" and "--pages" not in arguments:
        # A gigabyte of them costs a second to take.
        flags += ["--pages", "8"]
    server = LocalServer(flags, command=command, environment=environment)
    try:
        server.wait_for("ready: " if command == "up" else "metrics on ")
    except BaseException:
        server.stop()
        raise
    return server


class Reader:
    """Somebody who does what a page says, in an empty folder, which has to be the current one."""

    def __init__(
        self, cache: Path, variables: Mapping[str, str], served: LocalServer | None = None
    ) -> None:
        """Begin to read.

        Args:
            cache: for compiled models; several pages may share it.
            variables: what the environment has besides.
            served: the server that runs already.
        """
        self._folder = Path.cwd()
        self._stack = ExitStack()
        self._server: LocalServer | None = None
        self._said = ""
        self._names: dict[str, Any] = {"__name__": "__main__"}
        self._ports: dict[str, str] = {}
        self._environment = {
            **{name: value for name, value in os.environ.items() if "CLOCKWRIGHT" not in name},
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(self._folder),
            "XDG_CACHE_HOME": str(cache),
            "XDG_STATE_HOME": str(self._folder / ".state"),
            "COLUMNS": "120",
            **variables,
        }
        if served is not None:
            self._ask(served)

    def run(self, block: Block) -> None:
        """Do what a block says.

        Raises:
            AssertionError: it does something else than the page says.
        """
        if block.why_not:
            return
        text = self._translated(block)
        match block.language:
            case _ if block.title:
                path = self._folder / block.title
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
            case "bash":
                self._said = ""
                for command in _commands(text):
                    self._said += self._command(command, block)
            case "console":
                for command, expected in _session(text):
                    self._expect(expected, self._command(command, block), block)
            case "python":
                self._said = self._program(text, block)
            case "text":
                self._expect(text, self._said, block)
            case _:
                raise AssertionError(
                    f"{block.place}: found a block of {block.language!r}, expected bash, console, python, text, a "
                    "title, or the reason why it is not run"
                )

    def _expect(self, expected: str, found: str, block: Block) -> None:
        for theirs, ours in self._ports.items():
            found = found.replace(ours, theirs)
            expected = expected.replace(ours, theirs)
        words = mismatch(expected, found, figures_differ=block.figures_differ)
        assert not words, f"{block.place}: {words}"

    def _command(self, command: str, block: Block) -> str:
        if serving := _SERVES.match(command):
            arguments = shlex.split(command, comments=True)[2:]
            if serving[1] == "worker":
                self._stack.enter_context(self._worker(arguments))
                return ""
            return self._serve(serving[1], arguments)
        if command.startswith("pip install ."):
            self._install()
            command = command.partition("\n")[2]
        done = subprocess.run(
            ["bash", "-ec", command],
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE_S,
        )
        # In a session the page shows what a failure says.
        assert block.language == "console" or done.returncode == 0, (
            f"{block.place}: {command}\n{done.stdout}"
        )
        return done.stdout

    @contextlib.contextmanager
    def _worker(self, arguments: Sequence[str]) -> Iterator[None]:
        process = subprocess.Popen(
            [sys.executable, "-m", "clockwright.cli", "worker", *arguments], env=self._environment
        )
        try:
            yield
        finally:
            process.kill()
            process.wait()

    def _install(self) -> None:
        """Make the folder's package known, without a change of the environment that the tests run in."""
        project = tomllib.loads((self._folder / "pyproject.toml").read_text())["project"]
        about = self._folder / f"{project['name']}-{project['version']}.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Name: {project['name']}\nVersion: {project['version']}\n")
        (about / "entry_points.txt").write_text(
            "".join(
                f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in points.items())
                for group, points in project["entry-points"].items()
            )
        )
        path = self._environment.get("PYTHONPATH", "")
        self._environment["PYTHONPATH"] = os.pathsep.join([str(self._folder), path])

    def _serve(self, command: str, arguments: list[str]) -> str:
        if self._server is not None:
            self._server.stop()
        # Not entered: a controller is not ready before its workers come.
        self._server = server = serve(command, arguments, self._environment)
        self._stack.callback(server.stop)
        self._ask(server)
        return "\n".join(server.output)

    def _ask(self, server: LocalServer) -> None:
        """Take a page's addresses for those of a server."""
        rest, metrics = (
            line.rpartition("//")[2].split("/")[0]
            for begin in ("REST on", "metrics on")
            for line in server.output
            if line.startswith(begin)
        )
        self._ports = {
            f"{host}:{port}": address
            for port, address in ((8001, server.address), (8000, rest), (8002, metrics))
            for host in ("127.0.0.1", "localhost")
        }
        self._environment["CLOCKWRIGHT_SERVER"] = server.address

    def _program(self, text: str, block: Block) -> str:
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            # Empty lines, so that a traceback names the line of the page.
            exec(compile("\n" * block.line + text, block.page, "exec"), self._names)
        return said.getvalue()

    def _translated(self, block: Block) -> str:
        text = block.text
        for theirs, ours in self._ports.items():
            text = text.replace(theirs, ours)
        if block.title == "case.toml":
            return text
        return _OBJECTIVE.sub(
            lambda found: found[1] + (_PATIENT_MS if int(found[2]) >= 20 else found[2]), text
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _commands(text: str) -> Iterator[str]:
    """Take the commands of a script apart where one of them serves: those of each part run in one shell."""
    part: list[str] = []
    for line in text.replace("\\\n", " ").splitlines():
        if _SERVES.match(line):
            if part:
                yield "\n".join(part)
            part = []
            yield line
        else:
            part.append(line)
    if part:
        yield "\n".join(part)


def _session(text: str) -> Iterator[tuple[str, str]]:
    """Commands of a session, and what each prints."""
    for part in re.split(r"^\$ ", text.replace("\\\n", " "), flags=re.MULTILINE)[1:]:
        command, _, printed = part.partition("\n")
        yield command, printed
