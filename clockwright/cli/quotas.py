"""`clockwright quotas`: what each tenant may have, at a server that is running."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from clockwright.cli.flags import Json, ServerFlags, ns, takes_flags
from clockwright.cli.show import show
from clockwright.foreign import printable
from clockwright.units import format_ns

if TYPE_CHECKING:
    from clockwright.v1 import control_pb2 as pb

quotas = typer.Typer(no_args_is_help=True, help="Set, list and remove quotas of tenants.")

_Tenant = Annotated[
    str,
    typer.Argument(
        help="Name of the tenant. '*': each tenant without a quota of its own; '': requests without a "
        "tenant."
    ),
]


@quotas.command("set")
@takes_flags
def set_quota(
    tenant: _Tenant,
    rate_rps: Annotated[float, typer.Option(help="Requests per second; 0: unlimited.")] = 0,
    burst: Annotated[
        int,
        typer.Option(help="Requests that may arrive at once; 0: one second's worth of the rate."),
    ] = 0,
    open_requests: Annotated[int, typer.Option(help="Open requests; 0: unlimited.")] = 0,
    open_mib: Annotated[
        float, typer.Option(help="Input size of all open requests; 0: unlimited.")
    ] = 0,
    slo_ms_min: Annotated[float, typer.Option(help="Smallest SLO; 0: any.")] = 0,
    slo_ms_max: Annotated[float, typer.Option(help="Largest SLO; 0: any.")] = 0,
    weight: Annotated[
        float,
        typer.Option(
            help="Weight of its share when GPU time is short, relative to other tenants; only with policy "
            "edf_mh."
        ),
    ] = 1,
    request_weight_max: Annotated[
        float,
        typer.Option(help="Largest weight of a request, which says what its answer is worth."),
    ] = 1,
    *,
    to: ServerFlags,
) -> None:
    """Set a tenant's quota, from its next request on. It replaces the previous quota."""
    from clockwright.v1 import control_pb2 as pb

    for name, value in (("--burst", burst), ("--open-requests", open_requests)):
        if not 0 <= value < 1 << 53:
            raise typer.BadParameter(f"found {value}, expected 0 or more", param_hint=name)
    if not 0 <= open_mib < 1 << 33:
        raise typer.BadParameter(f"found {open_mib:g}, expected 0 or more", param_hint="--open-mib")
    quota = pb.Quota(
        rate_rps=rate_rps,
        burst=burst,
        open_requests=open_requests,
        open_bytes=round(open_mib * (1 << 20)),
        slo_ns_min=ns(slo_ms_min, "--slo-ms-min") if slo_ms_min else 0,
        slo_ns_max=ns(slo_ms_max, "--slo-ms-max") if slo_ms_max else 0,
        weight=weight,
        request_weight_max=request_weight_max,
    )
    with to.operator() as operator:
        remark = operator.set_quota(tenant, quota)
    print(f"{_name(tenant)}: {_bounds(quota)}")
    if remark:
        print(f"warning: {printable(remark)}", file=sys.stderr)


@quotas.command("list")
@takes_flags
def list_quotas(*, to: ServerFlags, json: Json = False) -> None:
    """List quotas and their current use."""
    with to.operator() as operator:
        show(operator.quotas(), _print_quotas, as_json=json)


@quotas.command("remove")
@takes_flags
def remove_quota(tenant: _Tenant, *, to: ServerFlags) -> None:
    """Remove a tenant's quota."""
    with to.operator() as operator:
        operator.remove_quota(tenant)
    print(f"removed the quota of {_name(tenant)}")


def _print_quotas(infos: Sequence[pb.QuotaInfo]) -> None:
    if not infos:
        print("no quotas")
        return
    table = Table("tenant", "may have", "open", "MiB", "admitted", "refused", box=box.SIMPLE)
    for info in infos:
        table.add_row(
            escape(_name(info.tenant)),
            _bounds(info.quota),
            str(info.open_requests),
            f"{info.open_bytes / (1 << 20):.1f}",
            str(info.admitted),
            str(info.refused),
        )
    Console(soft_wrap=True, markup=False).print(table)


def _name(tenant: str) -> str:
    return {"": "(no tenant)", "*": "(others, each)"}.get(tenant, printable(tenant))


def _bounds(quota: pb.Quota) -> str:
    parts = []
    if quota.rate_rps:
        burst = f", {quota.burst} at once" if quota.burst else ""
        parts.append(f"{quota.rate_rps:g} requests/s{burst}")
    if quota.open_requests:
        parts.append(f"{quota.open_requests} open")
    if quota.open_bytes:
        parts.append(f"{quota.open_bytes / (1 << 20):g} MiB open")
    if quota.slo_ns_min:
        parts.append(f"SLO {format_ns(quota.slo_ns_min)} or more")
    if quota.slo_ns_max:
        parts.append(f"SLO {format_ns(quota.slo_ns_max)} at most")
    if quota.weight not in (0, 1):
        parts.append(f"weight {quota.weight:g}")
    if quota.request_weight_max not in (0, 1):
        parts.append(f"requests of weight {quota.request_weight_max:g} at most")
    return "; ".join(parts) or "anything"
