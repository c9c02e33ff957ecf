"""Applications on the command line: settings in, tables out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console

from clockwright.errors import ConfigError
from clockwright.units import format_ns

if TYPE_CHECKING:
    from clockwright.v1 import control_pb2 as pb


def settings(
    name: str,
    models: Sequence[str],
    *,
    options: Sequence[str],
    **fields: Any,  # noqa: ANN401
) -> pb.Application:
    """Make the message of an application's settings; `fields` are the rest of it.

    Options are of the policy, NAME=VALUE each, the value in JSON or, failing that, a text. Raises ConfigError if one
    has another form, or a number is out of range.
    """
    from clockwright.v1 import control_pb2 as pb

    values: dict[str, object] = {}
    for option in options:
        key, equals, text = option.partition("=")
        if not equals or not key:
            raise ConfigError(f"--option: found {option!r}, expected NAME=VALUE")
        try:
            values[key] = json.loads(text)
        except (ValueError, RecursionError):
            values[key] = text
    try:
        return pb.Application(
            name=name, models=models, options_json=json.dumps(values) if values else "", **fields
        )
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the settings do not fit into a message: {error}") from None


def print_applications(infos: Sequence[pb.ApplicationInfo]) -> None:
    """Print all, one after another."""
    if not infos:
        print("no applications")
    for info in infos:
        print_application(info)


def print_application(info: pb.ApplicationInfo) -> None:
    """Print settings, outcomes of queries, and a bar per model."""
    console = Console(highlight=False, markup=False)
    application = info.application
    slo = format_ns(application.slo_ns) if application.slo_ns else "the server's"
    options = f" {application.options_json}" if application.options_json else ""
    console.print(
        f"{application.name}, revision {info.revision}: {info.state}; policy {application.policy}{options},"
        f" combination {application.combination}, SLO {slo}",
        soft_wrap=True,
    )
    console.print(
        f"  queries: {info.queries}, defaults: {_counts(info.defaults)},"
        f" refused: {_counts(info.refusals)}, feedback: {_counts(info.feedbacks)}",
        soft_wrap=True,
    )
    width = max((len(row.model) for row in info.weights), default=0)
    for row in info.weights:
        note = f"  does not fit: {row.misfit}" if row.misfit else ""
        missing = f"  {row.missing} missing" if row.missing else ""
        bar = "#" * round(20 * min(max(0.0, row.weight), 1.0))
        console.print(
            f"  {row.model:{width}} {row.weight:6.3f} {bar:20}{missing}{note}".rstrip(),
            soft_wrap=True,
        )
    if info.remark:
        console.print(f"  {info.remark}", soft_wrap=True)


def _counts(counts: Iterable[pb.ReasonCount]) -> str:
    return ", ".join(f"{row.count} {row.reason}" for row in counts) or "none"
