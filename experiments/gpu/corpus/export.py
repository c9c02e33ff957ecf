"""Exports the networks and writes the archive: `python -m experiments.gpu.corpus.export FOLDER`.

Needs torch, torchvision, transformers, onnxscript, onnx and onnxruntime, and nothing of Clockwright's but this
folder. The archive was made by torch 2.14.1, torchvision 0.29.1, transformers 5.24.0, onnxscript 0.7.2, onnx 1.23.2
and onnxruntime 1.32.0. Nothing is downloaded: weights are as each network first draws them.

The folder gets the files as they were exported. Those that it has already are not exported again.
"""

from __future__ import annotations

import inspect
import io
import logging
import lzma
import sys
import tarfile
import warnings
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import torch
from onnx import numpy_helper
from onnxruntime.quantization import (
    CalibrationDataReader,
    QuantFormat,
    quantize_dynamic,
    quantize_static,
)
from torch import nn

from experiments.gpu.corpus import ARCHIVE, Array, empty, rows, tensors
from experiments.gpu.corpus.networks import NETWORKS, Network

# torch.export takes ten seconds a network and more. These are those whose graphs differ most from the other exporter's.
_DYNAMO = """
bert gpt2 vit unet_bilinear lstm distilbert roberta albert mpnet minilm_sentence mpnet_sentence electra deberta deberta_v2
mobilebert squeezebert convbert bert_classifier llama segformer gru yolo whisper_encoder clip_text t5_encoder tv_fcn
wav2vec2 tv_resnet lstm_both_ways bart denoiser experts style tv_mobilenet_v3_small swin detr t5_decoder tv_swin_v2
tv_maxvit beit gru_both_ways clip_vision qwen2 tv_retinanet_heads tv_efficientnet convnextv2 yolos rnn wavenet
autoencoder super_resolution enlarged_bicubic points
"""
# The network that the other exporter has no operators for.
_DYNAMO_ONLY = "fnet"
# Attention and RMSNormalization are single operators from this set on.
_NEWEST = {"llama": 23, "vit": 23, "denoiser": 23}
_QUANTISED = {
    "transformer_encoder": "int8_dynamic",
    "zfnet": "int8_qdq",
    "autoencoder": "int8_qoperator",
}
_SCRIPT_OPSET, _DYNAMO_OPSET = 17, 18

# A constant of so few different numbers is part of the structure, as masks are, and is small when compressed.
_MOST_KEPT = 16


def _draw(model: nn.Module) -> None:
    """Draw weights at which signals neither vanish nor grow, and channels differ, as in trained networks.

    First ones are often so small that an answer hardly depends on the input, and all ones or zeros in norms.
    """
    parameters, buffers = list(model.named_parameters()), list(model.named_buffers())
    for number, (name, tensor) in enumerate([*parameters, *buffers]):
        if not tensor.is_floating_point() or tensor.numel() < 2:
            continue
        if tensor.dim() > 1 and number < len(parameters):
            gain = 1 if tensor.dim() == 2 else 2
            tensor.normal_(0, (gain * tensor.shape[0] / tensor.numel()) ** 0.5)
        elif tensor.dim() == 1 and (name.endswith("weight") or bool((tensor == tensor[0]).all())):
            centre = 1 if name.endswith("weight") or tensor[0] else 0
            tensor.copy_(
                torch.rand_like(tensor) + 0.5 if centre else torch.randn_like(tensor) * 0.1
            )


def _by_script(network: Network, path: Path) -> None:
    """Export by recording what TorchScript sees."""
    model, inputs = network
    torch.onnx.export(
        model, tuple(inputs.values()), path, dynamo=False, opset_version=_SCRIPT_OPSET, input_names=list(inputs),
        dynamic_axes={name: {0: "batch"} for name in inputs},
    )  # fmt: skip


def _by_dynamo(network: Network, path: Path, opset: int = _DYNAMO_OPSET) -> None:
    """Export by torch.export."""
    model, inputs = network
    batch = torch.export.Dim("batch", max=512)
    shapes: tuple[object, ...] = tuple({0: batch} for _ in inputs)
    first = next(iter(inspect.signature(model.forward).parameters.values()))
    if first.kind is inspect.Parameter.VAR_POSITIONAL:
        shapes = (shapes,)
    torch.onnx.export(
        model, tuple(inputs.values()), path, dynamo=True, opset_version=opset, input_names=list(inputs),
        dynamic_shapes=shapes, external_data=False, verbose=False,
    )  # fmt: skip


class _Calibration(CalibrationDataReader):  # type: ignore[misc]  # onnxruntime is not type-checked
    """A few rows, by which onnxruntime finds the scales of what it quantises."""

    def __init__(self, path: Path) -> None:
        self._batches: Iterator[dict[str, Array]] = iter([rows(onnx.load(path), 4)])

    def get_next(self) -> dict[str, Array] | None:
        return next(self._batches, None)


def _quantise(source: Path, target: Path, how: str) -> None:
    """Replace a network's products by those of small integers."""
    if how == "int8_dynamic":
        quantize_dynamic(source, target)
    else:
        form = QuantFormat.QDQ if how == "int8_qdq" else QuantFormat.QOperator
        quantize_static(source, target, _Calibration(source), quant_format=form)


def _export(name: str, exporter: str, path: Path) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        model, inputs = NETWORKS[name]()
        model.eval()
        _draw(model)
        if exporter == "script":
            _by_script((model, inputs), path)
        elif exporter == "dynamo":
            _by_dynamo((model, inputs), path)
        else:
            _by_dynamo((model, inputs), path, _NEWEST[name])


def slim(model: onnx.ModelProto) -> onnx.ModelProto:
    """Take out of an exported model what does not decide how it computes: weights, notes, long names."""
    for tensor in tensors(model):
        numbers = numpy_helper.to_array(tensor)
        tensor.doc_string = ""
        drawn = numbers.dtype.kind == "f" or numbers.dtype.itemsize == 1
        if drawn and len(np.unique(numbers)) > _MOST_KEPT and np.isfinite(numbers).all():
            empty(tensor, numbers)
    numbers_of_names = count()
    kept = {value.name: value.name for value in (*model.graph.input, *model.graph.output)}

    def short(name: str) -> str:
        return kept.setdefault(name, f"value{next(numbers_of_names)}") if name else ""

    def strip(graph: onnx.GraphProto) -> None:
        graph.ClearField("doc_string")
        del graph.metadata_props[:], graph.value_info[:]
        for tensor in graph.initializer:
            tensor.name = short(tensor.name)
            del tensor.metadata_props[:]
        for node in graph.node:
            node.ClearField("name")
            node.ClearField("doc_string")
            del node.metadata_props[:]
            node.input[:] = map(short, node.input)
            node.output[:] = map(short, node.output)
            for attribute in node.attribute:
                if attribute.HasField("g"):
                    strip(attribute.g)
        for value in (*graph.input, *graph.output):
            value.name = short(value.name)
            value.ClearField("doc_string")
            del value.metadata_props[:]

    assert not model.functions
    del model.metadata_props[:]
    strip(model.graph)
    return model


def pack(paths: Iterable[Path]) -> None:
    """Write the archive of these files."""
    with (
        lzma.open(ARCHIVE, "wb", preset=9 | lzma.PRESET_EXTREME) as file,
        tarfile.open(fileobj=file, mode="w") as archive,
    ):
        for path in sorted(paths):
            content = slim(onnx.load(path)).SerializeToString(deterministic=True)
            entry = tarfile.TarInfo(path.name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))


def main(folder: Path) -> None:
    """Export what the folder lacks, and write the archive."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    ort.set_default_logger_severity(4)
    # Both exporters lack operators for torch's shortcuts through attention.
    torch.backends.mha.set_fastpath_enabled(False)
    folder.mkdir(exist_ok=True)
    wanted = [
        *((name, "script") for name in NETWORKS if name != _DYNAMO_ONLY),
        *((name, "dynamo") for name in (*_DYNAMO.split(), _DYNAMO_ONLY)),
        *((name, "newest") for name in _NEWEST),
    ]
    for name, exporter in wanted:
        path = folder / f"{name}.{exporter}.onnx"
        if not path.exists():
            print(path.stem, flush=True)
            _export(name, exporter, folder / "unfinished")
            (folder / "unfinished").rename(path)
    for name, how in _QUANTISED.items():
        _quantise(folder / f"{name}.script.onnx", folder / f"{name}.{how}.onnx", how)
    pack(folder / f"{name}.{how}.onnx" for name, how in (*wanted, *_QUANTISED.items()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
