"""The command for this orchestrator: `clockwright scaler`."""

from __future__ import annotations

import asyncio
import logging
import signal
from typing import Annotated

import typer

from clockwright.cli.flags import SERVER, CallerFlags, LogFlags, takes_flags
from clockwright.errors import ConfigError
from clockwright.process import outlive_hangups

# The cluster's API answers in milliseconds; a call is tried again by the next look.
_API_LIMIT_S = 10.0


@takes_flags
def scaler(
    *,
    controller: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            help="A controller; or a front, which hands on to the controller that leads.",
        ),
    ] = SERVER,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where KEDA and probes ask; port 0: any.")
    ] = "0.0.0.0:8005",
    kubernetes: Annotated[
        str | None,
        typer.Option(
            metavar="NAMESPACE",
            help="Take workers away, too: those of Deployments in this namespace with the annotation "
            "clockwright/min-workers. Unset: it only answers KEDA.",
        ),
    ] = None,
    api: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="URL of Kubernetes' API, as `kubectl proxy` serves it; by default that of the Pod's cluster.",
        ),
    ] = "",
    caller: CallerFlags,
    logs: LogFlags,
) -> None:
    """Tell KEDA how many workers a controller wants, and take away from Deployments those that it does not."""
    outlive_hangups()
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"--listen is {listen!r}, expected HOST:PORT, such as 0.0.0.0:8005")
    logs.apply()
    # What it does to a cluster, an operator wants to see.
    logging.getLogger("engines.kubernetes").setLevel(logging.INFO)
    asyncio.run(_serve(controller, listen, kubernetes, api, caller))


async def _serve(
    controller: str,
    listen: str,
    namespace: str | None,
    url: str,
    caller: CallerFlags,
) -> None:
    from clockwright.client.channel import check_dialled
    from clockwright.kubernetes import NAME, KubernetesApi
    from engines.kubernetes.keda import Scaler
    from engines.kubernetes.scale_in import ScaleIn
    from engines.kubernetes.wanted import WantedFeed

    told = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, told.set)
    access = caller.access()
    check_dialled(controller, access)
    wanted = WantedFeed(controller, access)
    work = [told.wait(), wanted.follow()]
    if namespace is not None:
        if not NAME.fullmatch(namespace):
            raise ConfigError(f"--kubernetes is {namespace!r}, expected the name of a namespace")
        cluster = KubernetesApi(url, limit_s=_API_LIMIT_S)
        work.append(ScaleIn(wanted, cluster, namespace).keep())
    server = Scaler(wanted, takes_away=namespace is not None).server()
    try:
        port = server.add_insecure_port(listen)
    except RuntimeError as error:
        raise ConfigError(f"cannot listen on {listen}: {error}") from error
    await server.start()
    print(f"listening on {listen.rpartition(':')[0]}:{port}", flush=True)
    tasks = [asyncio.ensure_future(each) for each in work]
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await server.stop(0)
    for task in done:
        task.result()
