"""Networks by name, as ONNX, with seeded random weights.

What a network costs does not depend on what its weights say, so random ones serve wherever time and
memory are measured; where answers matter, a model is compared with itself run alone. All of Table 1's
architectures are here, with Table 1's names and, within 0.5 %, its weight sizes.

Besides the fixed names of `ARCHITECTURES` there are two families:

* `mlp-A-B-...-Z`: dense layers of these sizes, ReLU between them;
* `echo-N`: gives back its row of N float32.

Inputs and outputs are called `input` and `output` (in `two_by_two`: `a`, `b`, `sum`, `doubled`), are
float32 in NCHW order and have a symbolic first dimension, `batch`. The encoders (`bert_...`) take
`input` and `segment`, which are tokens: INT64.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from functools import partial
from pathlib import Path

import onnx

from clockwright.errors import ConfigError
from modelzoo import (
    bert,
    densenet,
    dla,
    inception,
    mobilenet,
    pose,
    resnet,
    small,
    squeezenet,
    xception,
)
from modelzoo.graph import Graph

# A protobuf message, hence an ONNX file without external data, ends at 2 GiB.
_MOST_WEIGHT_BYTES = 2**31 - 2**20


def build_model(name: str, *, seed: int = 0) -> onnx.ModelProto:
    """Build a model.

    Args:
        name: an architecture: one of `ARCHITECTURES`, `mlp-A-...-Z` or `echo-N`.
        seed: seed of the weights; not negative. Models that differ in the seed only share their graph.

    Returns:
        The same model, byte for byte, for the same name, seed and version of numpy.

    Raises:
        ConfigError: there is no such architecture, or its weights do not fit an ONNX file.
    """
    if seed < 0:
        raise ConfigError(f"model {name!r}: found seed {seed}, expected 0 or more")
    return _graph(name).model(seed=seed)


def write_model(name: str, path: Path, *, seed: int = 0) -> None:
    """Build a model into a file, which appears whole or not at all; makes its folder.

    Raises ConfigError as `build_model`; OSError if the file cannot be written.
    """
    model = build_model(name, seed=seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(
        dir=path.parent, prefix=f".{path.name}.", delete=False
    ) as file:
        file.write(model.SerializeToString(deterministic=True))
    os.replace(file.name, path)


def weights_bytes(name: str) -> int:
    """Bytes of an architecture's weights, without drawing them. Raises ConfigError as `build_model`."""
    return _graph(name).weight_bytes


def operators(name: str) -> frozenset[str]:
    """ONNX's names of the operators that an architecture is made of. Raises ConfigError as `build_model`."""
    return _graph(name).operators


def _resnets() -> Iterator[tuple[str, Callable[[str], Graph]]]:
    for name, variant in resnet.VARIANTS.items():
        yield name, partial(resnet.classifier, variant=variant)
        if name.endswith("_v1b"):
            yield (
                f"tsn_{name}_kinetics400",
                partial(resnet.classifier, variant=variant, classes=400),
            )
        if variant.preactivation:
            yield f"winograd_{name}", partial(resnet.winograd_classifier, variant=variant)
    for depth in (20, 56, 110):
        yield (
            f"cifar_resnet{depth}_v1",
            partial(
                resnet.cifar_classifier,
                blocks_per_stage=(depth - 2) // 6,
                width=16,
                preactivation=False,
            ),
        )
    for depth, factor in ((16, 10), (28, 10), (40, 8)):
        yield (
            f"cifar_wideresnet{depth}_{factor}",
            partial(
                resnet.cifar_classifier,
                blocks_per_stage=(depth - 4) // 6,
                width=16 * factor,
                preactivation=True,
            ),
        )


def _poses() -> Iterator[tuple[str, Callable[[str], Graph]]]:
    def trunk(name: str) -> pose.Trunk:
        return partial(resnet.trunk, variant=resnet.VARIANTS[name])

    yield "simple_pose_resnet18_v1b", partial(pose.simple_pose, trunk=trunk("resnet18_v1b"))
    for name in ("resnet18_v1", "resnet50_v1"):
        yield f"mobile_pose_{name}", partial(pose.mobile_pose, trunk=trunk(name))
    yield (
        "mobile_pose_mobilenet1.0",
        partial(pose.mobile_pose, trunk=partial(mobilenet.trunk, multiplier=1.0)),
    )
    yield "mobile_pose_mobilenetv3", partial(pose.mobile_pose, trunk=mobilenet.trunk_v3)


def _inceptions() -> Iterator[tuple[str, Callable[[str], Graph]]]:
    yield "googlenet", inception.googlenet
    # Table 1 gives both of TSN's Inceptions the input size of v3.
    yield "tsn_inceptionv1_kinetics400", partial(inception.googlenet, size=299, classes=400)
    yield "inceptionv3", inception.inception_v3
    yield "tsn_inceptionv3_kinetics400", partial(inception.inception_v3, classes=400)


_BUILDERS: dict[str, Callable[[str], Graph]] = {
    **dict(_resnets()),
    **dict(_inceptions()),
    **dict(_poses()),
    **{
        f"densenet{depth}": partial(densenet.classifier, depth=depth) for depth in densenet.VARIANTS
    },
    **{
        f"mobilenet{multiplier}": partial(mobilenet.classifier, multiplier=multiplier)
        for multiplier in mobilenet.MULTIPLIERS
    },
    **{
        f"squeezenet{version}": partial(squeezenet.classifier, version=version)
        for version in squeezenet.VARIANTS
    },
    **{name: partial(bert.encoder, variant=variant) for name, variant in bert.VARIANTS.items()},
    "dla34": dla.classifier,
    "xception": xception.classifier,
    "tiny_conv": small.tiny_conv,
    "two_by_two": small.two_by_two,
}

#: Every fixed name, in order.
ARCHITECTURES: tuple[str, ...] = tuple(sorted(_BUILDERS))


def _graph(name: str) -> Graph:
    if builder := _BUILDERS.get(name):
        return builder(name)
    if re.fullmatch(r"mlp(-[1-9][0-9]{0,8}){2,64}", name):
        sizes = [int(size) for size in name.split("-")[1:]]
        graph = small.mlp(name, sizes)
    elif re.fullmatch(r"echo-[1-9][0-9]{0,8}", name):
        graph = small.echo(name, int(name.removeprefix("echo-")))
    else:
        raise ConfigError(f"no architecture {name!r}{_hint(name)}")
    if graph.weight_bytes > _MOST_WEIGHT_BYTES:
        raise ConfigError(
            f"architecture {name!r}: found {graph.weight_bytes} bytes of weights, "
            f"expected at most {_MOST_WEIGHT_BYTES}"
        )
    return graph


def _hint(name: str) -> str:
    nearest = get_close_matches(name, ARCHITECTURES, n=3)
    nearby = f" (nearest: {', '.join(nearest)})" if nearest else ""
    return f"{nearby}: expected one of modelzoo.build.ARCHITECTURES, mlp-A-...-Z or echo-N"
