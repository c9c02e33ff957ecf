"""Requests to the scripted model `double`, and what it answers."""

from __future__ import annotations

import numpy as np

from clockwright.v1 import inference_pb2 as pb

INFER = "/inference.GRPCInferenceService/ModelInfer"
Input = pb.ModelInferRequest.InferInputTensor
# No machine is so slow.
PATIENT_MS = 100_000


def request(
    *rows: float, model: str = "double", slo_ms: int = PATIENT_MS, explain: bool = False
) -> bytes:
    x = np.array([[row, row + 1, row + 2] for row in rows], np.float32)
    return pb.ModelInferRequest(
        model_name=model,
        inputs=[Input(name="x", datatype="FP32", shape=x.shape)],
        raw_input_contents=[x.tobytes()],
        parameters={
            "slo_ms": pb.InferParameter(int64_param=slo_ms),
            "explain": pb.InferParameter(bool_param=explain),
        },
    ).SerializeToString()


def first(answer: bytes) -> float:
    outputs = pb.ModelInferResponse.FromString(answer).raw_output_contents
    return float(np.frombuffer(outputs[0], np.float32)[0])
