"""Read a model's folder: Triton's layout, `NAME/VERSION/model.onnx`, and an optional `config.toml`.

A folder whose `config.toml` has a table `[container]` holds code instead (`clockwright.containers`).
The controller judges here only what it can see without ONNX and without running anything. The worker
judges the rest.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clockwright.containers import CONFIG_FILE, ContainerSpec, latest_version, parse_container
from clockwright.errors import ModelError
from clockwright.units import DEFAULT_BATCH_SIZES, NS_PER_MS, SLO_NS_MAX
from controller.models.digests import FileDigests

#: Names that a model may have.
NAME_PATTERN = re.compile(r"[A-Za-z0-9_.-]{1,128}")

MODEL_FILE = "model.onnx"

# A value beyond these is a slip of the pen, not a wish.
BATCH_SIZE_MAX = 1024
COPIES_MAX = 100_000
#: A table of some lines is read in the event loop's process; this one takes a millisecond.
CONFIG_BYTES_MAX = 64 << 10


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A file that workers need."""

    #: Path relative to the version folder, with "/".
    name: str
    path: Path
    num_bytes: int
    #: Digest in hexadecimal.
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """Settings in `config.toml`; the defaults are those of a model without one."""

    #: Default latency objective; None: the controller's.
    slo_ns: int | None = None
    #: Compiled sizes, ascending.
    batch_sizes: tuple[int, ...] = DEFAULT_BATCH_SIZES
    #: Sizes of symbolic dimensions other than the batch: a number, or `{ max = NUMBER }` for all up to that.
    dimensions: Mapping[str, int] = field(default_factory=dict)
    #: Number of instances. Several are named NAME-0, NAME-1, ... and share the files.
    copies: int = 1
    #: Row of the profile that a modelled device uses; None: the folder's name.
    profile: str | None = None
    #: Answer repeated requests from the prediction cache, also while the model is not loaded. Do not set it if the
    #: model's answers to the same inputs differ. Requests with `explain` always run the model. (Applications use
    #: the cache in any case.)
    cache: bool = False
    #: The model is code, run by container workers; None: it is ONNX.
    container: ContainerSpec | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """Everything that the controller knows of a model before a worker has seen it."""

    name: str
    #: Name of the highest numeric version folder, the one that is served.
    version: str
    files: tuple[ModelFile, ...]
    settings: ModelSettings
    #: Text of `config.toml`, which the settings were read from; empty if it is missing.
    config: str = ""

    def to_json(self) -> str:
        """Write down what was read, for `from_json`."""
        files = [(file.name, file.num_bytes, file.sha256) for file in self.files]
        return json.dumps(
            {"name": self.name, "version": self.version, "files": files, "config": self.config}
        )

    @staticmethod
    def from_json(text: str, parent: Path) -> ModelFolder:
        """Take a folder for what it was when it was written down; its files are looked for, but not read.

        Args:
            text: what `to_json` made.
            parent: where the folder lies now.

        Raises:
            ModelError: the text is something else, or a file is missing or has another size.
        """
        try:
            record = json.loads(text)
            name, version = str(record["name"]), str(record["version"])
            files = tuple(
                ModelFile(str(path), parent / name / version / path, int(num_bytes), str(sha256))
                for path, num_bytes, sha256 in record["files"]
            )
            config = str(record["config"])
        except (ValueError, KeyError, TypeError) as error:
            raise ModelError(f"the record of its files is damaged: {error!r}") from None
        check_name(name)
        for file in files:
            try:
                found = file.path.stat().st_size
            except OSError as error:
                raise ModelError(f"{version}/{file.name}: {error.strerror}") from None
            if found != file.num_bytes:
                raise ModelError(
                    f"{version}/{file.name}: found {found} bytes, expected {file.num_bytes} as they came"
                )
        settings = _settings_in(config)
        return ModelFolder(
            name=name, version=version, files=files, settings=settings, config=config
        )

    @property
    def instance_names(self) -> tuple[str, ...]:
        """Public names of the models that this folder makes."""
        copies = self.settings.copies
        if copies == 1:
            return (self.name,)
        return tuple(f"{self.name}-{index}" for index in range(copies))


def check_name(name: str) -> None:
    """Raise ModelError unless `name` may name a model."""
    if not NAME_PATTERN.fullmatch(name) or name.startswith((".", "-")):
        raise ModelError(
            f"model name {name[:200]!r}: expected 1 to 128 of A-Z a-z 0-9 _ . -, not starting with . or -"
        )


def read_model_folder(folder: Path, digests: FileDigests | None = None) -> ModelFolder:
    """Read and check a model's folder; hashes every file that is not known, so it takes time.

    Args:
        folder: its last component is the model's name.
        digests: know files that were read before.

    Raises:
        ModelError: what is wrong with it.
    """
    check_name(folder.name)
    try:
        if not folder.is_dir():
            raise ModelError(f"{folder} is not a folder")
        config = _read_config(folder / CONFIG_FILE)
        settings = _settings_in(config)
        version = latest_version(folder)
        files = _read_files(folder, folder / version, digests or FileDigests())
        _check_files(files, version, settings.container)
    except OSError as error:
        raise ModelError(f"cannot be read: {error}") from error
    return ModelFolder(
        name=folder.name, version=version, files=files, settings=settings, config=config
    )


def _read_files(folder: Path, version_folder: Path, digests: FileDigests) -> tuple[ModelFile, ...]:
    root = folder.resolve()
    files = []
    for path in sorted(version_folder.rglob("*")):
        name = path.relative_to(version_folder).as_posix()
        if not path.resolve().is_relative_to(root):
            raise ModelError(f"{name} leads outside the model's folder")
        # `__pycache__`, which Python leaves next to code, comes and goes and is no part of the model.
        if path.is_dir() or path.parent.name == "__pycache__":
            continue
        if not path.is_file():
            raise ModelError(f"{name} is not a regular file")
        digest, num_bytes = digests.of(path)
        files.append(ModelFile(name, path, num_bytes, digest))
    return tuple(files)


def _check_files(files: Sequence[ModelFile], version: str, container: ContainerSpec | None) -> None:
    by_name = {file.name: file for file in files}
    if container is not None and MODEL_FILE in by_name:
        raise ModelError(
            f"found {version}/{MODEL_FILE} and a [container] in {CONFIG_FILE}, expected one of them"
        )
    needed = MODEL_FILE if container is None else container.file
    if needed is None:
        return  # An import path needs no file.
    if needed not in by_name:
        found = ", ".join(file.name for file in files[:5]) or "nothing"
        raise ModelError(f"expected {version}/{needed}, found {found}")
    if by_name[needed].num_bytes == 0:
        raise ModelError(f"{version}/{needed} is empty")


def _read_config(path: Path) -> str:
    if not path.exists():
        return ""
    if not path.resolve().is_relative_to(path.parent.resolve()):
        raise ModelError(f"{CONFIG_FILE} leads outside the model's folder")
    try:
        if (num_bytes := path.stat().st_size) > CONFIG_BYTES_MAX:
            raise ModelError(
                f"{CONFIG_FILE}: found {num_bytes} bytes, expected {CONFIG_BYTES_MAX} at most"
            )
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(f"{CONFIG_FILE}: {error}") from error


def _settings_in(config: str) -> ModelSettings:
    try:
        return _parse_settings(tomllib.loads(config))
    except (ValueError, RecursionError) as error:
        # A number of many digits is no TOMLDecodeError, nor is a list that is nested deeply.
        raise ModelError(f"{CONFIG_FILE}: {error}") from error


def _parse_settings(table: dict[str, Any]) -> ModelSettings:
    values: dict[str, Any] = {}
    for key, value in table.items():
        match key:
            case "slo_ms":
                values["slo_ns"] = _slo_ns(value)
            case "batch_sizes":
                values["batch_sizes"] = _batch_sizes(value)
            case "dimensions":
                values["dimensions"] = _dimensions(value)
            case "copies":
                values["copies"] = _integer("copies", value, COPIES_MAX)
            case "profile":
                if not isinstance(value, str) or not value:
                    raise _unexpected("profile", value, "the name of a row of the profile")
                values["profile"] = value
            case "cache":
                if not isinstance(value, bool):
                    raise _unexpected("cache", value, "true or false")
                values["cache"] = value
            case "container":
                try:
                    values["container"] = parse_container(value)
                except ModelError as error:
                    raise ModelError(f"{CONFIG_FILE}: {error}") from None
            case _:
                raise ModelError(
                    f"{CONFIG_FILE}: unknown key {key!r}; "
                    "known are slo_ms, batch_sizes, dimensions, copies, profile, cache, container"
                )
    if "container" in values:
        for key in ("dimensions", "copies", "profile"):
            if key in table:
                raise ModelError(
                    f"{CONFIG_FILE}: {key} is a setting of ONNX models, expected it without [container]"
                )
    return ModelSettings(**values)


def _slo_ns(value: object) -> int:
    # The upper bound also keeps infinity and NaN out.
    most = SLO_NS_MAX // NS_PER_MS
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= most:
        raise _unexpected("slo_ms", value, f"a positive number of milliseconds, {most} at most")
    return round(value * NS_PER_MS)


def _batch_sizes(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not value:
        raise _unexpected("batch_sizes", value, "a list of batch sizes")
    sizes = sorted({_integer("batch_sizes", size, BATCH_SIZE_MAX) for size in value})
    if len(sizes) != len(value):
        raise _unexpected("batch_sizes", value, "each size once")
    return tuple(sizes)


def _dimensions(value: object) -> dict[str, int]:
    if not isinstance(value, dict):
        raise _unexpected("dimensions", value, "a table of name = size")
    sizes = {}
    for name, size in value.items():
        if isinstance(size, dict) and list(size) == ["max"]:
            sizes[name] = -_integer(f"dimensions.{name}.max", size["max"], 2**31)
        else:
            sizes[name] = _integer(f"dimensions.{name}", size, 2**31)
    return sizes


def _integer(key: str, value: object, largest: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= largest:
        raise _unexpected(key, value, f"a whole number from 1 to {largest}")
    return value


def _unexpected(key: str, found: object, expected: str) -> ModelError:
    return ModelError(f"{CONFIG_FILE}: {key} is {found!r}, expected {expected}")
