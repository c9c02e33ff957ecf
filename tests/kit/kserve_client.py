"""KServe's clients of REST and of gRPC, as KServe publishes them, in a process of their own (`tests/kserve.txt`).

Each line of the input is the addresses of a server, `HTTP GRPC`, of which everything is asked that these clients can
ask; what comes out is a line of `ok`, or the error that ends the process.
"""

from __future__ import annotations

import asyncio
import sys

import grpc
import httpx
import numpy as np
import pytest
from kserve import (
    InferenceGRPCClient,
    InferenceRESTClient,
    InferInput,
    InferRequest,
    RESTConfig,
)

ROWS = np.array([[1, 2, 3], [4, 5, 6]], np.float32)


def request(*, slo_ms: float = 60_000, sent: bool, asked: bool) -> InferRequest:
    """Ask for twice the rows, which are `sent` as bytes or as JSON and `asked` for likewise."""
    x = InferInput("x", list(ROWS.shape), "FP32")
    x.set_data_from_numpy(ROWS, binary_data=sent)
    # As a text: over gRPC this client sends no fractions of a number.
    parameters = {"slo_ms": f"{slo_ms:g}", "binary_data_output": asked}
    return InferRequest("double", [x], request_id="9", parameters=parameters)


async def ask_rest(url: str) -> None:
    """Ask for all that there is over REST."""
    async with InferenceRESTClient(config=RESTConfig(protocol="v2", timeout=60)) as client:
        assert await client.is_server_live(url)
        assert await client.is_server_ready(url)
        assert await client.is_model_ready(url, "double")
        for sent in (False, True):
            for asked in (False, True):
                question = request(sent=sent, asked=asked)
                answer = await client.infer(url, question, model_name="double")
                assert (answer.id, answer.model_name) == ("9", "double")
                assert answer.outputs[0].as_numpy().tolist() == (2 * ROWS).tolist()
        for model, slo_ms, words in (
            ("none", 60_000, "there is no model 'none', '404 Not Found'"),
            ("double", 0.01, "INFEASIBLE: model double cannot be that fast"),
        ):
            question = request(sent=True, asked=False, slo_ms=slo_ms)
            with pytest.raises(httpx.HTTPStatusError, match=words):
                await client.infer(url, question, model_name=model)


async def ask_grpc(address: str) -> None:
    """Ask for all that there is over gRPC."""
    async with InferenceGRPCClient(address) as client:
        assert await client.is_server_live()
        assert await client.is_server_ready()
        assert await client.is_model_ready("double")
        for sent in (False, True):
            answer = await client.infer(request(sent=sent, asked=True))
            assert (answer.id, answer.model_name) == ("9", "double")
            assert answer.outputs[0].as_numpy().tolist() == (2 * ROWS).tolist()
        with pytest.raises(grpc.RpcError, match="INFEASIBLE"):
            await client.infer(request(sent=True, asked=True, slo_ms=0.01))


async def ask(http: str, address: str) -> None:
    """Ask a server over both."""
    await ask_rest(f"http://{http}")
    await ask_grpc(address)


def main() -> None:
    """Ask the servers of the input."""
    for line in sys.stdin:
        http, address = line.split()
        asyncio.run(ask(http, address))
        print("ok", flush=True)


if __name__ == "__main__":
    main()
