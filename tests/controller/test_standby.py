"""A controller that stands by is alive, is not ready, and says who is asked that another one leads."""

from __future__ import annotations

from pathlib import Path

import httpx

from controller.access.guard import Guard
from controller.process.config import ControllerConfig
from controller.process.standby import standing_by


async def test_a_standby_lives_is_not_ready_and_refuses_all_else_over_rest(tmp_path: Path) -> None:
    question = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1.0]}]}
    config = ControllerConfig(port=0, http_port=0, models_dir=tmp_path)
    guard = Guard(config.access)
    async with standing_by(config, guard) as (_, _, port), httpx.AsyncClient(timeout=60) as client:
        url = f"http://127.0.0.1:{port}/v2"
        assert (await client.get(f"{url}/health/live")).json() == {"live": True}
        answer = await client.get(f"{url}/health/ready")
        assert (answer.status_code, answer.json()) == (400, {"ready": False})
        for refused in (
            await client.get(f"{url}/models/m"),
            await client.post(f"{url}/models/m/infer", json=question),
        ):
            assert refused.status_code == 503
            assert refused.json()["reason"] == "NO_WORKER"
            assert "another one leads" in refused.json()["error"]


async def test_a_standby_without_a_port_for_rest_opens_none(tmp_path: Path) -> None:
    config = ControllerConfig(port=0, models_dir=tmp_path)
    async with standing_by(config, Guard(config.access)) as (_, port, http_port):
        assert port
        assert http_port is None
