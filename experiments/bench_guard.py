"""What it costs to know who calls: processor time of a request without keys, with keys, TLS, and quotas as well.

One `clockwright up` for each variant, all beside each other, with a modelled device of 1 us; one client process
asks them in turns, in random order, by gRPC's own asyncio client in closed loops. What is counted is the
processor time of the controller's process by the kernel's books, and ratios are taken inside a round, so that a
noisy neighbour hits all variants alike. The variant without keys runs twice: how far its two servers lie
apart says what a ratio here is worth. Writes part `cost` of `guard.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import random
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import trustme
import uvloop

from clockwright.channel import Access
from clockwright.units import DEFAULT_BATCH_SIZES, NS_PER_US
from clockwright.v1 import inference_pb2 as oip
from controller.access.key_file import add_key
from controller.access.roles import Role
from experiments.local_server import LocalServer
from experiments.processor_time import cpu_ns, roles
from experiments.results_file import RESULTS, add_results, write_results
from modelzoo.build import write_model
from modelzoo.profile import Profile, ProfileRow, save_profile

_INFER = "/inference.GRPCInferenceService/ModelInfer"
_SLO_MS = 60_000
_CONCURRENCY = 32
#: Models by the bytes of a request, and what they are made of.
_MODELS = {"small": "mlp-784-8-4", "large": "mlp-150528-4-4"}
_VARIANTS = ("off", "off_again", "keys", "keys_tls", "keys_tls_quotas")


@dataclass(frozen=True, slots=True)
class _Server:
    """One variant while it runs."""

    address: str
    access: Access
    controller: Sequence[int]


def measure(rounds: int, num_requests: int) -> dict[str, float]:
    """Ask all variants in turns.

    Returns:
        Processor time of the controller per request in us, by size and variant; and by how much it is that of
        `off` in the same round, in the middle of all rounds.
    """
    used_us: dict[tuple[str, str], list[float]] = {}
    rng = random.Random(1)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = _start(scratch, stack)
        for number in range(-1, rounds):
            for size in _MODELS:
                for variant in rng.sample(_VARIANTS, len(_VARIANTS)):
                    cost_us = _cost_us(servers[variant], size, num_requests)
                    if number >= 0:  # What is new to a server is looked at longer.
                        used_us.setdefault((size, variant), []).append(cost_us)
    figures: dict[str, float] = {}
    for (size, variant), costs_us in sorted(used_us.items()):
        figures[f"{size}_{variant}_us"] = statistics.median(costs_us)
        if variant != "off":
            ratios = [cost / off for cost, off in zip(costs_us, used_us[size, "off"], strict=True)]
            figures[f"{size}_{variant}_ratio"] = statistics.median(ratios)
    return figures


def _start(scratch: Path, stack: ExitStack) -> dict[str, _Server]:
    row = ProfileRow(
        name="*",
        weights_bytes=1,
        load_ns=NS_PER_US,
        exec_ns=dict.fromkeys(DEFAULT_BATCH_SIZES, NS_PER_US),
    )
    save_profile(Profile(name="instant", rows={"*": row}), scratch / "instant.json")
    for name, architecture in _MODELS.items():
        write_model(architecture, scratch / "models" / name / "1" / "model.onnx")
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    ca, certificate, tls_key = (scratch / name for name in ("ca.pem", "cert.pem", "key.pem"))
    authority.cert_pem.write_to_path(ca)
    issued.cert_chain_pems[0].write_to_path(certificate)
    issued.private_key_pem.write_to_path(tls_key)
    key = add_key(scratch / "keys", "bench", frozenset({Role.INFERENCE, Role.METADATA}))
    keys = ["--keys", str(scratch / "keys")]
    tls = ["--tls-cert", str(certificate), "--tls-key", str(tls_key)]
    quotas = scratch / "quotas.toml"
    quotas.write_text('[""]\nrate_rps = 1000000\nopen_requests = 10000\nslo_ms_max = 100000\n')
    variants = {
        "off": ([], Access()),
        "off_again": ([], Access()),
        "keys": (keys, Access(key=key)),
        "keys_tls": ([*keys, *tls], Access(key=key, ca=ca)),
        "keys_tls_quotas": (
            [*keys, *tls, "--quotas", str(quotas)],
            Access(key=key, ca=ca),
        ),
    }
    servers = {}
    for variant in _VARIANTS:
        flags, access = variants[variant]
        arguments = [
            *("--models", f"{scratch}/models", "--device", f"modelled:{scratch}/instant.json"),
            *("--cache-dir", f"{scratch}/cache", *flags),
        ]
        server = stack.enter_context(LocalServer(arguments))
        servers[variant] = _Server(server.address, access, roles(server.process.pid)["controller"])
    return servers


def _cost_us(server: _Server, size: str, num_requests: int) -> float:
    """Processor time of the controller per request, in us."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    client = context.Process(
        target=_ask, args=(theirs, server.address, server.access, size, num_requests)
    )
    client.start()
    theirs.close()
    try:
        ours.recv()  # It is connected, and its first requests are answered.
        before_ns = cpu_ns(server.controller)
        ours.send(None)
        ours.recv()
        return (cpu_ns(server.controller) - before_ns) / num_requests / NS_PER_US
    finally:
        client.join()


def _ask(
    pipe: Connection,
    address: str,
    access: Access,
    size: str,
    num_requests: int,
) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_ask_all(pipe, address, access, size, num_requests))


async def _ask_all(
    pipe: Connection,
    address: str,
    access: Access,
    size: str,
    num_requests: int,
) -> None:
    columns = int(_MODELS[size].split("-")[1])
    request = oip.ModelInferRequest(model_name=size, raw_input_contents=[bytes(4 * columns)])
    request.parameters["slo_ms"].int64_param = _SLO_MS
    request.inputs.add(name="input", datatype="FP32", shape=(1, columns))
    data = request.SerializeToString()
    async with access.async_channel(address) as channel:
        call = channel.unary_unary(_INFER)
        left = _CONCURRENCY

        async def loop() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                await call(data, metadata=access.metadata)

        for count in (_CONCURRENCY, num_requests):
            left = count
            await asyncio.gather(*(loop() for _ in range(_CONCURRENCY)))
            pipe.send(None)
            if count != num_requests:
                await asyncio.to_thread(pipe.recv)


def produce(rounds: int, num_requests: int, directory: Path = RESULTS) -> dict[str, float]:
    """Measure, and write part `cost` of `guard.json`."""
    figures = measure(rounds, num_requests)
    command = f"python -m experiments.bench_guard --rounds {rounds} --requests {num_requests}"
    if not (directory / "guard.json").exists():
        write_results("guard", {}, command=command, directory=directory)
    cost = {f"cost_{key}": figure for key, figure in figures.items()}
    add_results("guard", cost, part="cost", command=command, directory=directory)
    return figures


def main() -> None:
    """Measure as a command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--requests", type=int, default=2000, help="of each variant and round")
    parser.add_argument("--directory", type=Path, default=RESULTS, help="where the record goes")
    options = parser.parse_args()
    for key, figure in produce(options.rounds, options.requests, options.directory).items():
        print(f"{key:32} {figure:10.3f}")


if __name__ == "__main__":
    main()
