"""Read a model's folder: Triton's layout, `NAME/VERSION/model.onnx`, optional a `config.toml` and Triton's `config.pbtxt`.

A folder whose `config.toml` has a table `[container]` holds code instead (`clockwright.containers`).
The controller judges here only what it can see without ONNX and without running anything. The worker
judges the rest.
"""

from __future__ import annotations

import functools
import json
import logging
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from clockwright.containers import CONFIG_FILE, ContainerSpec, parse_container, version_folders
from clockwright.errors import ModelError, ModelFaults
from clockwright.units import DEFAULT_BATCH_SIZES, NS_PER_MS, PARTS_MAX, SLO_NS_MAX
from controller.models.digests import FileDigests
from controller.models.stepped import SequenceSettings, StateSetting, read_sequence, read_state
from controller.models.streamed import StreamSettings, read_stream
from controller.models.triton_config import MODEL_FILE, PBTXT, TritonConfig, read_triton_config
from controller.models.versions import Routing, ServedVersions, read_served
from controller.stages.pipelines.core.declaration import PipelineSpec, parse_pipeline

log = logging.getLogger(__name__)

#: Names that a model may have.
NAME_PATTERN = re.compile(r"[A-Za-z0-9_.-]{1,128}")

# A value beyond these is a slip of the pen, not a wish.
LEVELS_MAX = 100
BATCH_SIZE_MAX = 1024
COPIES_MAX = 100_000
#: A table of some lines is read in the event loop's process; this one takes a millisecond.
CONFIG_BYTES_MAX = 64 << 10
#: All labels of a model: twice what the 21,842 classes of ImageNet have.
LABELS_BYTES_MAX = 1 << 20
#: The states of a model before the first step, of one row each: twice what the largest recurrent models have.
INITIAL_BYTES_MAX = 16 << 20
#: An answer has up to 16,384 labels.
LABEL_BYTES_MAX = 1 << 10


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
    """Settings of a model; the defaults are those of a model without a `config.toml`."""

    #: Default latency objective; None: the controller's.
    slo_ns: int | None = None
    #: Compiled sizes, ascending.
    batch_sizes: tuple[int, ...] = DEFAULT_BATCH_SIZES
    #: Most rows of a request; unset: 16 times the largest of `batch_sizes`.
    max_rows: int | None = None
    #: Sizes of open dimensions other than the batch, by symbol or place (`INPUT[INDEX]`): a number, or
    #: `{ max = NUMBER }` for all up to that.
    dimensions: Mapping[str, int] = field(default_factory=dict)
    #: Number of instances. Several are named NAME-0, NAME-1, ... and share the files.
    copies: int = 1
    #: Row of the profile that a modelled device uses; None: the folder's name.
    profile: str | None = None
    #: Answer repeated requests from the prediction cache, also while the model is not loaded. Do not set it if the
    #: model's answers to the same inputs differ. Requests with `explain` always run the model. (Applications use
    #: the cache in any case.)
    cache: bool = False
    #: By output, a file next to this one: what its classes are called, a line each. Clients that ask for
    #: `classification` get the names.
    labels: Mapping[str, str] = field(default_factory=dict)
    #: The model is code, run by container workers; None: it is ONNX.
    container: ContainerSpec | None = None
    #: By input, the output that is its value in the next step. Unset: pairs are recognised by the usual names.
    state: Mapping[str, StateSetting] = field(default_factory=dict)
    #: How sequences of steps are kept: `idle_s`, `max`, and inputs that say where a step is in its sequence.
    sequence: SequenceSettings | None = None
    #: The model answers a request [several times](streams.md), a step each: `final`, `feed`, `max_steps`, `max_open`.
    stream: StreamSettings | None = None
    #: It is no model, but several that are asked together; None: it is a model.
    pipeline: PipelineSpec | None = None
    #: `serve`: a list of versions, "all", or `{ latest = NUMBER }`; unset: the highest alone.
    versions: ServedVersions | None = None
    #: Names of versions: ALIAS = VERSION.
    aliases: Mapping[str, str] = field(default_factory=dict)
    #: Shares of the requests that name no version, by version or alias, 1 together; unset: the highest has all.
    traffic: Mapping[str, float] = field(default_factory=dict)
    #: VERSION = SHARE: this version gets a copy of such a part of the requests, and its answers are dropped.
    shadow: Mapping[str, float] = field(default_factory=dict)
    #: `levels` of priority that requests may have, 1 the highest, and the `default`; unset: the model has none.
    priority: tuple[int, int] | None = None

    @property
    def routing(self) -> Routing:
        """What it says of the versions."""
        return Routing(self.aliases, self.traffic, self.shadow)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """Everything that the controller knows of a model before a worker has seen it."""

    name: str
    #: Name of the numeric version folder.
    version: str
    files: tuple[ModelFile, ...]
    settings: ModelSettings
    #: Text of `config.toml`, which the settings were read from; empty if it is missing.
    config: str = ""
    #: Text of `config.pbtxt`, or the JSON that came in its place; empty if there was neither.
    triton_text: str = ""
    #: What that says.
    triton: TritonConfig = field(default_factory=TritonConfig)
    #: By output, what its classes are called.
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    #: By input, its bytes before the first step, of one row; none: zeros.
    initial: Mapping[str, bytes] = field(default_factory=dict)

    def to_json(self) -> str:
        """Write down what was read, for `from_json`."""
        files = [(file.name, file.num_bytes, file.sha256) for file in self.files]
        record = {"name": self.name, "version": self.version, "files": files, "config": self.config}
        return json.dumps(record | {"triton": self.triton_text})

    @staticmethod
    def from_json(text: str, parent: Path) -> ModelFolder:
        """Take a folder for what `to_json` wrote down; its files are looked for below `parent`, but not read.

        Raises ModelError if the text is something else, or a file is missing or has another size.
        """
        try:
            record = json.loads(text)
            name, version = str(record["name"]), str(record["version"])
            files = tuple(
                ModelFile(str(path), parent / name / version / path, int(num_bytes), str(sha256))
                for path, num_bytes, sha256 in record["files"]
            )
            config, triton_text = str(record["config"]), str(record.get("triton", ""))
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
        read = _with_settings(name, config, triton_text)
        labels = _read_labels(parent / name, read.settings)
        initial = _read_initial(parent / name, read.settings)
        return replace(read, version=version, files=files, labels=labels, initial=initial)

    def alone(self) -> ModelFolder:
        """The same without what it says of other versions, or of all together."""
        settings = replace(self.settings, versions=None, aliases={}, traffic={}, shadow={})
        triton = replace(self.triton, settings={}, ignored=())
        return replace(self, settings=settings, config="", triton_text="", triton=triton)

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


def read_versions(
    folder: Path, digests: FileDigests | None = None, triton_json: str = ""
) -> tuple[ModelFolder, ...]:
    """Read and check a model's folder; hashes every file that is not known, so it takes time.

    Triton's configuration as JSON holds in place of `config.pbtxt`, and before `config.toml`. Returns each version that
    is served, ascending. Raises ModelError that says what is wrong.
    """
    check_name(folder.name)
    try:
        if not folder.is_dir():
            raise ModelError(f"{folder} is not a folder")
        faults = ModelFaults()
        config, triton_text, read, labels, initial = "", triton_json, None, {}, {}
        versions: dict[str, tuple[ModelFile, ...]] = {}
        with faults.collected():
            config = _read_config(folder, CONFIG_FILE)
        with faults.collected():
            triton_text = triton_json or _read_config(folder, PBTXT)
        with faults.collected():
            read = _with_settings(folder.name, config, triton_text)
        with faults.collected():
            chosen: Sequence[str] = ()
            if read is not None and read.settings.pipeline is not None:
                versions[_pipeline_version(folder)] = ()
            # A pipeline whose settings are wrong lacks no version folder.
            elif read is not None or "pipeline" not in config:
                served = _served(config) if read is None else read.settings.versions
                chosen = (served or ServedVersions(1)).choose(version_folders(folder))
            for version in chosen:
                files = _read_files(folder, folder / version, digests or FileDigests())
                versions[version] = files
                if read is not None:
                    _check_files(files, version, read.settings.container)
        with faults.collected():
            labels = _read_labels(folder, read.settings) if read is not None else {}
        with faults.collected():
            initial = _read_initial(folder, read.settings) if read is not None else {}
        faults.check()
    except OSError as error:
        raise ModelError(f"cannot be read: {error}") from error
    assert read is not None
    if ignored := read.triton.ignored:
        log.warning("model %s: %s: not used: %s", folder.name, PBTXT, ", ".join(ignored))
    return tuple(
        replace(read, version=version, files=files, labels=labels, initial=initial)
        for version, files in versions.items()
    )


def _served(config: str) -> ServedVersions | None:
    """Which versions settings speak of that cannot be used, so that what is wrong with those is found too."""
    with suppress(ModelError):
        table = _read_toml(config)
        return read_served(table["versions"]) if "versions" in table else None
    return None


def _pipeline_version(folder: Path) -> str:
    """A pipeline has no files, and needs no version folder. Triton's have an empty one."""
    return max(
        (each.name for each in folder.iterdir() if each.name.isdecimal()), key=int, default="1"
    )


def _read_files(folder: Path, version_folder: Path, digests: FileDigests) -> tuple[ModelFile, ...]:
    root = folder.resolve()
    files = []
    for path in sorted(version_folder.rglob("*")):
        name = path.relative_to(version_folder).as_posix()
        if path.is_symlink() and not path.exists():
            raise ModelError(f"{name} is a link to nothing: {path.readlink()}")
        if not (target := path.resolve()).is_relative_to(root):
            raise ModelError(
                f"{name} leads outside the model's folder, to {target}; put a copy in its place, or make the model's folder"
                " itself the link"
            )
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


def _read_labels(folder: Path, settings: ModelSettings) -> dict[str, tuple[str, ...]]:
    labels, num_bytes = {}, 0
    for output, name in settings.labels.items():
        text = _read_config(folder, name, LABELS_BYTES_MAX)
        where = f"labels of output {output!r}:"
        # Who may set labels need not be allowed to read code and settings.
        first = (folder / name).resolve().relative_to(folder.resolve()).parts[0]
        if first in (CONFIG_FILE, PBTXT) or first.isdigit():
            raise ModelError(f"{where} found {name}, expected a file next to {CONFIG_FILE}")
        if not text.strip():
            raise ModelError(f"{where} expected a line for each class in {name}, found none")
        num_bytes += len(text.encode())
        if num_bytes > LABELS_BYTES_MAX:
            raise ModelError(
                f"labels: found {num_bytes} bytes and more, expected {LABELS_BYTES_MAX} at most"
            )
        # `splitlines` would cut a name at other characters too, and move all names behind it.
        labels[output] = tuple(text.removeprefix("\ufeff").removesuffix("\n").split("\n"))
        longest = max(len(label.encode()) for label in labels[output])
        if longest > LABEL_BYTES_MAX:
            raise ModelError(
                f"{where} found a line of {longest} bytes in {name}, expected {LABEL_BYTES_MAX} at most"
            )
    return labels


def _read_initial(folder: Path, settings: ModelSettings) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for name, said in settings.state.items():
        if not said.initial:
            continue
        path = folder / said.initial
        if not path.resolve().is_relative_to(folder.resolve()):
            raise ModelError(f"state {name!r}: {said.initial} leads outside the model's folder")
        if not path.is_file():
            raise ModelError(
                f"state {name!r}: expected its first value in {said.initial}, found no file"
            )
        room = INITIAL_BYTES_MAX - sum(map(len, found.values()))
        if (num_bytes := path.stat().st_size) > room:
            raise ModelError(
                f"state {name!r}: found {num_bytes} bytes in {said.initial}, expected {INITIAL_BYTES_MAX} at most in"
                " all such files"
            )
        found[name] = path.read_bytes()
    return found


def _read_config(folder: Path, name: str, most: int = CONFIG_BYTES_MAX) -> str:
    """Read a text file of a model's folder; empty if it is missing."""
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise ModelError(f"{name} leads outside the model's folder")
    try:
        if not path.exists():
            return ""
        if (num_bytes := path.stat().st_size) > most:
            raise ModelError(f"{name}: found {num_bytes} bytes, expected {most} at most")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{name}: {error}") from error


def _with_settings(name: str, config: str, triton_text: str) -> ModelFolder:
    """Read a folder's settings; its version and files are still to come.

    Where both say something, `config.toml` holds; but JSON, which a client has sent to load the model, holds before it.
    """
    faults = ModelFaults()
    own, foreign, triton = dict[str, Any](), dict[str, Any](), TritonConfig()
    with faults.collected(CONFIG_FILE):
        own = _read_toml(config)
        _parse_settings(own)
    with faults.collected():
        is_code = not own.keys().isdisjoint(("container", "pipeline"))
        triton = read_triton_config(triton_text, name, is_code=is_code)
    with faults.collected(PBTXT):
        foreign = dict(triton.settings)
        _parse_settings(foreign)
    faults.check()
    if triton.dimensions:
        own["dimensions"] = {**triton.dimensions, **own.get("dimensions", {})}
    is_sent = triton_text.lstrip().startswith("{")
    return ModelFolder(
        name=name,
        version="",
        files=(),
        settings=_parse_settings(own | foreign if is_sent else foreign | own),
        config=config,
        triton_text=triton_text,
        triton=triton,
    )


def _read_toml(text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        # A number of many digits is no TOMLDecodeError, nor is a list that is nested deeply.
        raise ModelError(str(error)) from error


def _parse_settings(table: dict[str, Any]) -> ModelSettings:
    """Check settings. Raises ModelError that names all that cannot be."""
    values: dict[str, Any] = {}
    faults = ModelFaults()
    for key, value in table.items():
        if key not in _READERS:
            faults.found.append(f"unknown key {key!r}; known are {', '.join(_READERS)}")
            continue
        with faults.collected():
            values["slo_ns" if key == "slo_ms" else key] = _READERS[key](value)
    for kind, others in _NOT_WITH.items():
        if kind in table:
            faults.found.extend(
                f"{key} is a setting of {whose}, expected it without [{kind}]"
                for key, whose in others.items()
                if key in table
            )
    if "versions" in table and "copies" in table:
        faults.found.append("found copies and [versions], expected one of them")
    sequence = values.get("sequence")
    if "stream" in values and sequence is not None and sequence.controls:
        faults.found.append(
            f"found sequence.{min(sequence.controls)} and [stream], expected one of them: the steps of a stream are not"
            " marked"
        )
    faults.check()
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
    return ModelError(f"{key} is {found!r}, expected {expected}")


def _profile(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise _unexpected("profile", value, "the name of a row of the profile")
    return value


def _labels(value: object) -> dict[str, str]:
    if not isinstance(value, dict) or not all(
        isinstance(name, str) and name and name.isprintable() for name in value.values()
    ):
        raise _unexpected("labels", value, "a table of OUTPUT = FILE")
    return value


def _cache(value: object) -> bool:
    if not isinstance(value, bool):
        raise _unexpected("cache", value, "true or false")
    return value


def _priority(value: object) -> tuple[int, int]:
    if not isinstance(value, dict) or set(value) != {"levels", "default"}:
        raise _unexpected("priority", value, "a table of levels and default")
    levels = _integer("priority.levels", value["levels"], LEVELS_MAX)
    return levels, _integer("priority.default", value["default"], levels)


_OF_ONNX = dict.fromkeys(("dimensions", "copies", "profile", "versions"), "ONNX models")
_OF_MODELS = dict.fromkeys(
    (
        *("batch_sizes", "cache", "container", "state", "sequence", "stream"),
        *("aliases", "traffic", "shadow", "priority"),
    ),
    "models",
)
#: Settings that make no sense together with a table, and whose they are.
_NOT_WITH: Mapping[str, Mapping[str, str]] = {
    "container": _OF_ONNX,
    "pipeline": _OF_ONNX | _OF_MODELS,
}
#: What reads each setting.
_READERS: Mapping[str, Callable[[Any], Any]] = {
    "slo_ms": _slo_ns,
    "batch_sizes": _batch_sizes,
    "max_rows": functools.partial(_integer, "max_rows", largest=BATCH_SIZE_MAX * PARTS_MAX),
    "dimensions": _dimensions,
    "copies": functools.partial(_integer, "copies", largest=COPIES_MAX),
    "profile": _profile,
    "cache": _cache,
    "labels": _labels,
    "container": parse_container,
    "state": read_state,
    "sequence": read_sequence,
    "stream": read_stream,
    "pipeline": parse_pipeline,
    "versions": read_served,
    "aliases": lambda table: Routing.read(table, {}, {}).aliases,
    "traffic": lambda table: Routing.read({}, table, {}).traffic,
    "shadow": lambda table: Routing.read({}, {}, table).shadow,
    "priority": _priority,
}
