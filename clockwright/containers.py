"""The declaration of a model that is code: table `[container]` of `config.toml`.

    [container]
    load = "model.py"                 # a file in the version folder, or "package.module:name"
    inputs = { image = "FP32[64]" }   # datatype and shape of one row, in the order of the arguments; BYTES: text;
                                      # "<=512" in place of a size: each request has its own, up to that
    outputs = { digit = "INT64[]" }

In place of `load`, `command` names a program in any language, and `address` one that runs elsewhere, or another server.
The controller reads it to judge the folder, the worker to run it. Nothing here runs or imports anything.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any

from clockwright.errors import ModelError, ModelFaults
from clockwright.wire.tensors import PLAIN_DATATYPES, TensorSpec, Variable

CONFIG_FILE = "config.toml"

#: Suffixes of files that can be loaded. All of them run code when they are: pickles too.
LOADABLE_SUFFIXES = (".py", ".joblib", ".pkl", ".pickle")

_SPEC = re.compile(r"([A-Z0-9]+)\[([-<=0-9, ]*)\]")
_ADDRESS = re.compile(r"(grpc|grpcs|tcp)://[^/\s]+:([0-9]{1,5})|unix:///[^\s]+")
_IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
# A value beyond these is a typing error.
_DIMENSION_MAX = 2**31
_REPLICAS_MAX = 256
_TIME_LIMIT_S_MAX = 3600.0
_MEMORY_MIB_MAX = 2**30
# With unix://; Linux has no longer paths of sockets.
_UNIX_BYTES_MAX = 7 + 107
# The kernel takes no quota below a millisecond of each tenth of a second.
_CPUS_LEAST = 0.01
_CPUS_MAX = 2**16


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerSpec:
    """A model that is code."""

    #: Python: a file of the version folder, or an import path `package.module:name`.
    load: str = ""
    #: Instead of `load`, a program in any language and its arguments. It starts in the version folder; one of its files
    #: begins with `./`.
    command: tuple[str, ...] = ()
    #: Instead of `load`, where it runs already: `tcp://HOST:PORT` or `unix:///PATH` for a program;
    #: `grpc://HOST:PORT`, or `grpcs` with TLS, for a server of the Open Inference Protocol.
    address: str = ""
    #: The model's name at that server; unset: the folder's name.
    model: str = ""
    #: What is called with the rows: a function of a `.py` file, or a method of an object that is not
    #: callable itself.
    method: str = "predict"
    #: One row's tensors, in the order of the arguments.
    inputs: tuple[TensorSpec, ...]
    #: One row's tensors, in the order of the returned values.
    outputs: tuple[TensorSpec, ...]
    #: Time limit of a batch; after it the process is killed and restarted. If it is too small, a slow batch
    #: costs a restart. If it is too large, a hang delays everything in the queue; the controller's own limit is
    #: 5 s past the prediction.
    time_limit_s: float = 3.0
    #: Processes that `clockwright up` starts; each is a worker.
    replicas: int = 1
    #: The most memory of each process, in MiB; past it the kernel ends the process. Only where the worker may write to a
    #: cgroup v2; elsewhere the log says that nothing holds it.
    memory_mib: int | None = None
    #: The most processor time of each process, in processors; 0.5 is half of one. As with `memory_mib`.
    cpus: float | None = None

    @property
    def file(self) -> str | None:
        """The file of the version folder that is loaded or started; None: it needs none."""
        if self.command:
            first = self.command[0]
            return first.removeprefix("./") if first.startswith("./") else None
        return None if ":" in self.load or not self.load else self.load

    @property
    def title(self) -> str:
        """What is loaded, started or asked, for messages."""
        return self.load or " ".join(self.command) or self.address


def version_folders(folder: Path) -> list[str]:
    """List the names of a model folder's version folders, which are numbers.

    Raises ModelError if the folder has no version folder; OSError if the folder cannot be read.
    """
    entries = sorted(folder.iterdir())
    versions = [p.name for p in entries if re.fullmatch("[0-9]{1,18}", p.name) and p.is_dir()]
    if not versions:
        found = ", ".join(p.name for p in entries[:5]) or "nothing"
        raise ModelError(f"expected a version folder with a number as its name, found {found}")
    return versions


def read_container(folder: Path) -> tuple[ContainerSpec, Path]:
    """Read what a model's folder declares, and find the version that is served.

    Raises ModelError if it declares no container, or a malformed one.
    """
    try:
        table = tomllib.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        version = max(version_folders(folder), key=int)
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{CONFIG_FILE}: {error}") from None
    if "container" not in table:
        raise ModelError(f"{CONFIG_FILE}: found no table [container]")
    return parse_container(table["container"]), folder / version


def parse_container(table: object) -> ContainerSpec:
    """Read the table. Raises ModelError that names all that was found amiss, and what is expected."""
    if not isinstance(table, Mapping):
        raise _unexpected("container", table, "a table with load, inputs and outputs")
    known = [each.name for each in fields(ContainerSpec)]
    faults = ModelFaults()
    faults.found += [
        f"container: unknown key {key!r}; known are {', '.join(known)}"
        for key in table
        if key not in known
    ]
    kinds = [key for key in ("load", "command", "address") if key in table]
    if len(kinds) != 1:
        found = " and ".join(kinds) or "none"
        faults.found.append(f"container: found {found} of load, command and address, expected one")
    for key, others in _ONLY_WITH.items():
        if key in table and len(kinds) == 1 and kinds[0] not in others:
            faults.found.append(
                f"container.{key} is not for {kinds[0]}, expected {' or '.join(others)}"
            )
    read: dict[str, Any] = {}
    for key, reader in _READERS.items():
        with faults.collected():
            if key in table or key in ("inputs", "outputs"):
                read[key] = reader(key, table.get(key))
    faults.check()
    return ContainerSpec(**read)


def _method(key: str, value: object) -> str:
    if not isinstance(value, str) or not value.isidentifier():
        raise _unexpected(f"container.{key}", value, "the name of a function or method")
    return value


def _command(key: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not value or not all(map(_is_word, value)):
        raise _unexpected(f"container.{key}", value, 'a program and its arguments, as ["./server"]')
    return tuple(value)


def _is_word(value: object) -> bool:
    return isinstance(value, str) and value != "" and "\0" not in value


def _address(key: str, value: object) -> str:
    found = _ADDRESS.fullmatch(value) if isinstance(value, str) else None
    if found is not None and found[1] is None and len(found[0].encode()) > _UNIX_BYTES_MAX:
        expected = f"unix:// and a path of {_UNIX_BYTES_MAX - 7} bytes at most"
        raise _unexpected(f"container.{key}", value, expected)
    # A larger port would be cut to 16 bits.
    if found is None or (found[2] and int(found[2]) not in range(1, 1 << 16)):
        expected = "grpc://HOST:PORT, grpcs://HOST:PORT, tcp://HOST:PORT or unix:///PATH"
        raise _unexpected(f"container.{key}", value, expected)
    return found[0]


def _name(key: str, value: object) -> str:
    if not _is_word(value):
        raise _unexpected(f"container.{key}", value, "the name of a model")
    return str(value)


def _amount(key: str, value: object, least: float, most: float, of: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise _unexpected(f"container.{key}", value, f"{of}, from {least:g} to {most:g}")
    return float(value)


def _whole(key: str, value: object, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise _unexpected(f"container.{key}", value, f"a whole number from 1 to {most}")
    return value


def _load(key: str, value: object) -> str:
    expected = (
        f"a file of the version folder ({', '.join(LOADABLE_SUFFIXES)}) or package.module:name"
    )
    if not isinstance(value, str):
        raise _unexpected(f"container.{key}", value, expected)
    if _IMPORT_PATH.fullmatch(value):
        return value
    path = PurePosixPath(value)
    inside = not path.is_absolute() and ".." not in path.parts and "\\" not in value
    if ":" in value or not inside or path.suffix not in LOADABLE_SUFFIXES:
        raise _unexpected(f"container.{key}", value, expected)
    return str(path)


def _specs(key: str, table: object) -> tuple[TensorSpec, ...]:
    if not isinstance(table, Mapping) or not table:
        raise _unexpected(f"container.{key}", table, 'a table such as { image = "FP32[64]" }')
    faults, specs = ModelFaults(), list[TensorSpec]()
    for name, value in table.items():
        with faults.collected():
            specs.append(_spec(f"container.{key}.{name}", name, value))
    faults.check()
    return tuple(specs)


#: What reads each setting.
_READERS: Mapping[str, Callable[[str, Any], Any]] = {
    "load": _load,
    "command": _command,
    "address": _address,
    "model": _name,
    "method": _method,
    "time_limit_s": partial(_amount, least=1e-3, most=_TIME_LIMIT_S_MAX, of="seconds"),
    "replicas": partial(_whole, most=_REPLICAS_MAX),
    "memory_mib": partial(_whole, most=_MEMORY_MIB_MAX),
    "cpus": partial(_amount, least=_CPUS_LEAST, most=_CPUS_MAX, of="processors"),
    "inputs": _specs,
    "outputs": _specs,
}
#: The kinds that some settings are for.
_ONLY_WITH = {
    "method": ("load",),
    "model": ("address",),
    "memory_mib": ("load", "command"),
    "cpus": ("load", "command"),
}


def _spec(key: str, name: str, value: object) -> TensorSpec:
    match = _SPEC.fullmatch(value) if isinstance(value, str) else None
    kinds = (*PLAIN_DATATYPES, "BYTES")
    if match is None or match[1] not in kinds:
        raise _unexpected(
            key, value, f'the shape of one row, as "FP32[3, 224]", of {", ".join(kinds)}'
        )
    sizes = [size.strip() for size in match[2].split(",")] if match[2].strip() else []
    most = [size.removeprefix("<=").strip() for size in sizes]
    if not all(size.isdecimal() and 1 <= int(size) <= _DIMENSION_MAX for size in most):
        expected = (
            'sizes of 1 or more, with commas between them; "<=512" for one that is open up to 512'
        )
        raise _unexpected(key, value, expected)
    row_shape = tuple(-1 if size.startswith("<=") else int(size) for size in sizes)
    spec = TensorSpec(name, match[1], row_shape)
    if -1 not in row_shape:
        return spec
    open_ones = [index for index, size in enumerate(row_shape) if size < 0]
    room = replace(spec, row_shape=tuple(map(int, most))).batch_bytes(1)
    vary = Variable(
        # Without what stands before a tensor; those who prepare the container add it.
        room or prod(map(int, most)),
        tuple(f"{name}[{index + 1}]" for index in open_ones),
        tuple(int(most[index]) for index in open_ones),
    )
    return replace(spec, vary=vary)


def _unexpected(key: str, found: object, expected: str) -> ModelError:
    return ModelError(f"{key} is {found!r}, expected {expected}")
