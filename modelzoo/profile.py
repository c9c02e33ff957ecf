"""Durations of each architecture on some device: they seed every estimate, and a modelled device runs by them.

A profile comes from the paper (`table1`), from a file that a worker measured, or from a bare
duration such as `10ms`. The file is JSON::

    {"name": "my-gpu", "origin": "measured by ...",
     "rows": [{"name": "resnet50_v1b", "weights_bytes": 102100000, "load_ns": 8330000,
               "exec_ns": {"1": 2770000, "2": 3950000}, "input_bytes": 602112, "output_bytes": 4000}],
     "noise": {"exec_sigma": 0.01, "load_sigma": 0.02}, "seed": 1}

`origin`, `noise` and `seed` may be left out, and `pipelines` added, names whose requests are recorded as those of
their models, too. A row named `*` serves every model not named.

What `clockwright models list --json` prints is a profile too: each model costs what its server predicts.
"""

from __future__ import annotations

import csv
import json
import os
import re
import tempfile
from dataclasses import asdict, dataclass, field
from decimal import Decimal
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from clockwright.errors import ConfigError, ModelError
from clockwright.units import NS_PER_MS, NS_PER_S, NS_PER_US, PAGE_BYTES

#: Name of the row for all models that have none of their own.
ANY_MODEL = "*"

# An action of more than an hour is a mistaken unit. Without a bound, one such row would also
# overflow the wire's int64 as soon as durations are added.
_LONGEST_NS = 3_600 * NS_PER_S
# More bytes than any device has, and far fewer than would overflow.
_MOST_BYTES = 1 << 50
# A larger batch size is a mistyped duration.
_LARGEST_BATCH = 1 << 16

_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ns|us|ms|s)")
_UNIT_NS = {"ns": 1, "us": NS_PER_US, "ms": NS_PER_MS, "s": NS_PER_S}
_INSTANCE_SUFFIX = re.compile(r"-\d+$")
# Where several versions are served, each is asked, and recorded, as NAME:VERSION.
_VERSION_SUFFIX = re.compile(r":[^:]*$")
_EXPECTED = "`table1`, the path of a profile (JSON), or a duration such as 10ms, 250us or 0us"


@dataclass(frozen=True, slots=True)
class ProfileRow:
    """Sizes and durations of one architecture."""

    name: str
    #: Size of the weights as they are copied to the device; pages follow from `units.PAGE_BYTES`.
    weights_bytes: int
    #: Duration of a LoadWeights, from host to device.
    load_ns: int
    #: Duration of an Infer's EXEC by batch size, ascending. The keys are the sizes that exist.
    exec_ns: dict[int, int]
    #: Sizes of one row's inputs and outputs; 0 when the profile does not know.
    input_bytes: int = 0
    output_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Noise:
    """Log-normal relative noise: a duration is multiplied by exp(N(0, sigma))."""

    exec_sigma: float = 0.0
    load_sigma: float = 0.0


@dataclass(frozen=True, slots=True)
class Profile:
    """A named set of rows."""

    name: str
    #: Rows by name; `*` serves every model that is not named.
    rows: dict[str, ProfileRow]
    #: Where the numbers come from, in words.
    origin: str = ""
    #: Applied by the modelled device, which seeds its generator with `seed`.
    noise: Noise = field(default_factory=Noise)
    seed: int = 0
    #: Names that run nothing themselves: what they ask of models is recorded as the models' requests.
    pipelines: tuple[str, ...] = ()

    def row_for(self, model_name: str) -> ProfileRow:
        """Find the row of a model.

        The row of exactly that name comes first, then that of the architecture it is a copy of (`resnet50_v1b-17` is a
        copy of `resnet50_v1b`), or whose version it is (`encoder:4`), then the row named `*`. Raises ModelError if the
        profile has none of them.
        """
        copied, whole = _INSTANCE_SUFFIX.sub("", model_name), _VERSION_SUFFIX.sub("", model_name)
        for name in (model_name, copied, whole, ANY_MODEL):
            if name in self.rows:
                return self.rows[name]
        nearest = get_close_matches(model_name, self.rows, n=1)
        hint = f" (nearest: {nearest[0]!r})" if nearest else ""
        raise ModelError(
            f"profile {self.name!r} has no row for model {model_name!r}{hint}: expected one named so, "
            f"up to a suffix -N, or one named '*'"
        )


def load_profile(spec: str) -> Profile:
    """Read a profile.

    Args:
        spec: `table1`; or the path of a profile file; or a duration. With a duration, every model
            takes exactly that long, only batch size 1 exists, weights fill one page and load in
            1 ms, or in no time when the duration is 0. That is for measuring overload and front ends.

    Raises:
        ConfigError: there is no such profile, or it is not a legal one.
    """
    if spec == "table1":
        return _table1()
    if duration := _DURATION.fullmatch(spec):
        return _constant(spec, *duration.groups())
    try:
        text = Path(spec).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"no profile {spec!r}: expected {_EXPECTED}") from None
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a NUL in the path
        raise ConfigError(f"profile {spec!r} cannot be read: {error}") from None
    try:
        document = json.loads(text, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"profile {spec!r} is not JSON: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"profile {spec!r}: {error}") from None
    return _parse(document, where=f"profile {spec!r}")


def save_profile(profile: Profile, path: Path) -> None:
    """Write a profile so that `load_profile` reads an equal one; the file appears whole or not at all.

    Raises ConfigError if it has a row that a file may not have, such as one of duration 0; OSError if the file cannot
    be written.
    """
    document = asdict(profile)
    document["rows"] = [
        {**row, "exec_ns": {str(size): ns for size, ns in sorted(row["exec_ns"].items())}}
        for row in document["rows"].values()
    ]
    _parse(document, where=f"profile {profile.name!r}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, prefix=f".{path.name}.", delete=False, encoding="utf-8"
    ) as file:
        json.dump(document, file, indent=1)
        file.write("\n")
    os.replace(file.name, path)


def _table1() -> Profile:
    text = (resources.files("modelzoo") / "profiles" / "table1.csv").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    rows = {}
    for cells in csv.DictReader(lines):
        rows[cells["model"]] = ProfileRow(
            name=cells["model"],
            weights_bytes=int(Decimal(cells["weights_mb"]) * 1_000_000),
            load_ns=int(Decimal(cells["transfer_ms"]) * NS_PER_MS),
            exec_ns={
                size: int(Decimal(cells[f"b{size}_ms"]) * NS_PER_MS) for size in (1, 2, 4, 8, 16)
            },
            input_bytes=int(Decimal(cells["input_kb"]) * 1_000),
            output_bytes=int(Decimal(cells["output_kb"]) * 1_000),
        )
    return Profile(name="table1", rows=rows, origin="Clockwork, OSDI 2020, Table 1 (Tesla V100)")


def _constant(spec: str, number: str, unit: str) -> Profile:
    exact = Decimal(number) * _UNIT_NS[unit]
    if exact != int(exact) or exact > _LONGEST_NS:
        raise ConfigError(
            f"duration {spec!r}: expected a whole number of ns, at most {_LONGEST_NS // NS_PER_S} s"
        )
    # Only these rows may take no time. In a profile of many rows a zero is a missing measurement, and
    # Clockwork's scheduler takes such a batch size for free.
    row = ProfileRow(
        name=ANY_MODEL,
        weights_bytes=PAGE_BYTES,
        load_ns=NS_PER_MS if exact else 0,
        exec_ns={1: int(exact)},
    )
    return Profile(name=spec, rows={ANY_MODEL: row}, origin="constant, given on the command line")


_Ns = Annotated[int, Meta(ge=1, le=_LONGEST_NS)]
_Bytes = Annotated[int, Meta(ge=0, le=_MOST_BYTES)]
# Beyond 1, one duration in six is more than 2.7 times its profile: not noise but a mistake.
_Sigma = Annotated[float, Meta(ge=0, le=1)]


class _FileRow(msgspec.Struct, forbid_unknown_fields=True):
    name: Annotated[str, Meta(min_length=1)]
    weights_bytes: Annotated[int, Meta(ge=1, le=_MOST_BYTES)]
    load_ns: _Ns
    # Durations need not rise with the batch size: a measured profile may be noisy, and a kernel may happen to suit the
    # larger batch better.
    exec_ns: Annotated[dict[Annotated[int, Meta(ge=1, le=_LARGEST_BATCH)], _Ns], Meta(min_length=1)]
    input_bytes: _Bytes = 0
    output_bytes: _Bytes = 0


class _FileNoise(msgspec.Struct, forbid_unknown_fields=True):
    exec_sigma: _Sigma = 0.0
    load_sigma: _Sigma = 0.0


class _File(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    rows: Annotated[list[_FileRow], Meta(min_length=1)]
    origin: str = ""
    noise: _FileNoise = msgspec.field(default_factory=_FileNoise)
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] = 0
    pipelines: list[str] = []


class _Batch(msgspec.Struct):
    batch_size: int
    exec_ns: int


class _ServedModel(msgspec.Struct):
    """A model as `clockwright models list --json` prints it."""

    model_id: str
    weights_bytes: int
    load_ns: int
    exec: list[_Batch]
    state: str
    version: str = ""


def _rows_of_served(document: object, where: str) -> dict[str, object]:
    """Give what a server says of its models as a file's document; those without a prediction have no row."""
    models = msgspec.convert(document, list[_ServedModel])
    # The last of several versions stands for those that are no longer served, too.
    last = {model.model_id: model.version for model in models if model.exec}
    rows = [
        {
            "name": model.model_id
            if model.version == last[model.model_id]
            else f"{model.model_id}:{model.version}",
            "weights_bytes": max(1, model.weights_bytes),
            # Weights that need not be moved take no time, which no row says.
            "load_ns": max(1, model.load_ns),
            "exec_ns": {str(batch.batch_size): batch.exec_ns for batch in model.exec},
        }
        for model in models
        if model.exec
    ]
    if not rows:
        raise ConfigError(
            f"{where}: found {len(models)} models of a server and no predicted run, expected some: its models have to "
            "be ready"
        )
    return {
        "name": where,
        "rows": rows,
        "origin": "predictions of a server",
        "pipelines": [
            model.model_id for model in models if model.state == "READY" and not model.exec
        ],
    }


def _parse(document: object, *, where: str) -> Profile:
    """Check everything a file may get wrong; a `ConfigError` names the place."""
    try:
        if isinstance(document, list):
            document = _rows_of_served(document, where)
        file = msgspec.convert(document, _File, str_keys=True)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}") from None
    rows: dict[str, ProfileRow] = {}
    for index, row in enumerate(file.rows):
        if row.name in rows:
            raise ConfigError(f"{where}: rows[{index}]: a second row named {row.name!r}")
        row.exec_ns = dict(sorted(row.exec_ns.items()))
        rows[row.name] = ProfileRow(**msgspec.structs.asdict(row))
    noise = Noise(**msgspec.structs.asdict(file.noise))
    return Profile(
        name=file.name,
        rows=rows,
        origin=file.origin,
        noise=noise,
        seed=file.seed,
        pipelines=tuple(file.pipelines),
    )


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    # JSON keeps the last of two equal keys, silently.
    table: dict[str, object] = {}
    for key, value in pairs:
        if key in table:
            raise ConfigError(f"two keys {key!r} in one object")
        table[key] = value
    return table
