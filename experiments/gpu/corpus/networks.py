"""Common networks, small: few layers, few channels and small images, with the operators of the full size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
import torchvision.models as tv
import transformers as hf
from torch import nn
from torchvision.models.detection.ssdlite import _mobilenet_extractor
from torchvision.ops import FeaturePyramidNetwork

Tensor: TypeAlias = torch.Tensor
#: A network and a batch of two of each of its inputs.
Network: TypeAlias = tuple[nn.Module, Mapping[str, Tensor]]

_HIDDEN, _HEADS, _LAYERS, _VOCABULARY, _LENGTH = 32, 4, 2, 64, 8


class Net(nn.Module):
    """Modules, and a function that runs them on inputs."""

    def __init__(self, run: Callable[..., Any], *parts: nn.Module) -> None:
        super().__init__()
        self._run = run
        self.parts = nn.ModuleList(parts)

    def forward(self, *inputs: Tensor) -> Any:
        """Give the modules and then the inputs to the function."""
        return self._run(*self.parts, *inputs)


# --- inputs ---------------------------------------------------------------------------------------------


def image(size: int = 32, channels: int = 3) -> dict[str, Tensor]:
    return {"image": torch.randn(2, channels, size, size)}


def signal(length: int, channels: int = 0) -> dict[str, Tensor]:
    return {"signal": torch.randn(2, channels, length) if channels else torch.randn(2, length)}


def sequence(length: int = _LENGTH, width: int = _HIDDEN) -> dict[str, Tensor]:
    return {"sequence": torch.randn(2, length, width)}


def tokens(*, masked: bool = True) -> dict[str, Tensor]:
    ids = {"input_ids": torch.randint(0, _VOCABULARY, (2, _LENGTH))}
    return {**ids, "attention_mask": torch.ones(2, _LENGTH, dtype=torch.int64)} if masked else ids


# --- transformers ---------------------------------------------------------------------------------------

_SIZES: dict[str, Any] = {
    "vocab_size": _VOCABULARY,
    "hidden_size": _HIDDEN,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": _HEADS,
    "intermediate_size": 2 * _HIDDEN,
    "max_position_embeddings": 4 * _LENGTH,
    "use_cache": False,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
_IMAGE_SIZES: dict[str, Any] = {
    **{name: _SIZES[name] for name in list(_SIZES)[1:5]},
    "image_size": 32,
    "patch_size": 8,
}
_SPEECH_SIZES: dict[str, Any] = {
    **{name: _SIZES[name] for name in list(_SIZES)[:5]},
    "conv_dim": (16, 16),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}


def _first(output: Any) -> Tensor:
    return output[0]


def hugging(
    name: str,
    config: str,
    inputs: Mapping[str, Tensor],
    sizes: Mapping[str, Any] = _SIZES,
    /,
    pick: Callable[[Any], Any] = _first,
    as_argument: Mapping[str, str] | None = None,
    **more: Any,
) -> Network:
    """Build one of Hugging Face's from its configuration.

    Args:
        name: its class.
        config: the class of its configuration.
        inputs: its inputs.
        sizes: the configuration.
        pick: what to take of its answer.
        as_argument: the names of its arguments, where they are not those of the inputs.
        more: further configuration.
    """
    model = getattr(hf, name)(getattr(hf, config)(**{**sizes, **more}))
    names = [(as_argument or {}).get(each, each) for each in inputs]

    def run(model: nn.Module, *tensors: Tensor) -> Any:
        return pick(model(**dict(zip(names, tensors, strict=True)), return_dict=True))

    return Net(run, model), inputs


def text(family: str, suffix: str = "Model", **more: Any) -> Callable[[], Network]:
    """A model of Hugging Face's that reads tokens."""
    return lambda: hugging(family + suffix, f"{family}Config", tokens(), **more)


def vision(name: str, family: str, **more: Any) -> Callable[[], Network]:
    """A model of Hugging Face's that looks at an image."""
    return lambda: hugging(
        name,
        f"{family}Config",
        image(),
        _IMAGE_SIZES,
        as_argument={"image": "pixel_values"},
        **more,
    )


def speech(family: str, **more: Any) -> Callable[[], Network]:
    return lambda: hugging(
        f"{family}Model",
        f"{family}Config",
        signal(400),
        _SPEECH_SIZES,
        as_argument={"signal": "input_values"},
        **more,
    )


def sentence(family: str) -> Callable[[], Network]:
    """An encoder of sentences: the mean of the tokens that are there, of length one."""

    def build() -> Network:
        model, inputs = text(family)()

        def run(model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
            weights = mask.unsqueeze(-1).float()
            mean = (model(ids, mask) * weights).sum(1) / weights.sum(1).clamp(min=1e-9)
            return F.normalize(mean, dim=1)

        return Net(run, model), inputs

    return build


def _t5(which: str) -> Network:
    config = hf.T5Config(
        vocab_size=_VOCABULARY, d_model=_HIDDEN, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
        use_cache=False, feed_forward_proj="gated-gelu" if which == "decoder" else "relu", decoder_start_token_id=0,
    )  # fmt: skip
    if which == "encoder":
        return Net(
            lambda m, ids, mask: m(input_ids=ids, attention_mask=mask)[0], hf.T5EncoderModel(config)
        ), tokens()
    model = hf.T5Model(config)
    inputs = {**tokens(), **sequence(6)}
    return Net(
        lambda m, ids, mask, states: m(
            input_ids=ids, attention_mask=mask, encoder_hidden_states=states, use_cache=False
        )[0],
        model.decoder,
    ), inputs


_BART: dict[str, Any] = {
    "vocab_size": _VOCABULARY,
    "d_model": _HIDDEN,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 32,
    "use_cache": False,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}


def seq2seq(family: str, **more: Any) -> Callable[[], Network]:
    """An encoder and a decoder, run once."""
    return lambda: hugging(
        f"{family}Model",
        f"{family}Config",
        {**tokens(), "decoder_input_ids": tokens()["input_ids"]},
        _BART,
        **more,
    )


def _whisper(which: str) -> Network:
    config = hf.WhisperConfig(
        **_BART, num_mel_bins=16, max_source_positions=20, max_target_positions=16
    )
    model = hf.WhisperModel(config)
    if which == "encoder":
        return Net(lambda m, x: m(x)[0], model.encoder), signal(40, 16)
    inputs = {**tokens(), **sequence(20)}
    return Net(
        lambda m, ids, mask, states: m(
            input_ids=ids, attention_mask=mask, encoder_hidden_states=states, use_cache=False
        )[0],
        model.decoder,
    ), inputs


def _small_resnet() -> Any:
    return hf.ResNetConfig(
        embedding_size=16,
        hidden_sizes=[16, 32],
        depths=[1, 1],
        layer_type="basic",
        out_features=["stage2"],
    )


def _detr() -> Network:
    return hugging(
        "DetrForObjectDetection", "DetrConfig", image(64), {**_BART, "num_queries": 10},
        pick=lambda o: (o.logits, o.pred_boxes), as_argument={"image": "pixel_values"},
        use_timm_backbone=False, use_pretrained_backbone=False, backbone=None, backbone_config=_small_resnet(),
    )  # fmt: skip


def _swin_backbone(**more: Any) -> Any:
    return hf.SwinConfig(image_size=64, patch_size=4, embed_dim=16, depths=[1, 1, 1, 1], num_heads=[2, 2, 4, 4],
        window_size=4, **more)  # fmt: skip


def _mask2former() -> Network:
    config = hf.Mask2FormerConfig(
        backbone_config=_swin_backbone(out_features=["stage1", "stage2", "stage3", "stage4"]), feature_size=32, mask_feature_size=32, hidden_dim=32,
        encoder_feedforward_dim=64, encoder_layers=1, decoder_layers=2, num_attention_heads=4, dim_feedforward=64,
        num_queries=8, num_labels=5,
    )  # fmt: skip
    model = hf.Mask2FormerForUniversalSegmentation(config)
    return Net(
        lambda m, x: (lambda o: (o.class_queries_logits, o.masks_queries_logits))(
            m(pixel_values=x)
        ),
        model,
    ), image(64)


def _maskformer() -> Network:
    config = hf.MaskFormerConfig(
        backbone_config=_swin_backbone(out_features=["stage1", "stage2", "stage3", "stage4"]), fpn_feature_size=32, mask_feature_size=32,
        decoder_config=hf.DetrConfig(**{**_BART, "num_queries": 10}, use_timm_backbone=False, backbone_config=_small_resnet()), num_labels=5,
    )  # fmt: skip
    model = hf.MaskFormerForInstanceSegmentation(config)
    return Net(
        lambda m, x: (lambda o: (o.class_queries_logits, o.masks_queries_logits))(
            m(pixel_values=x)
        ),
        model,
    ), image(64)


def _dpt() -> Network:
    return hugging(
        "DPTForDepthEstimation", "DPTConfig", image(32), {**_IMAGE_SIZES, "num_hidden_layers": 4},
        as_argument={"image": "pixel_values"}, backbone_out_indices=[0, 1, 2, 3], neck_hidden_sizes=[8, 16, 16, 16],
        fusion_hidden_size=16, is_hybrid=False, backbone_config=None,
    )  # fmt: skip


def _depth_anything() -> Network:
    backbone = hf.Dinov2Config(
        **{**_IMAGE_SIZES, "num_hidden_layers": 4, "image_size": 28, "patch_size": 14},
        out_indices=[1, 2, 3, 4],
        reshape_hidden_states=False,
    )
    return hugging(
        "DepthAnythingForDepthEstimation", "DepthAnythingConfig", image(56), {},
        as_argument={"image": "pixel_values"}, backbone_config=backbone, reassemble_hidden_size=_HIDDEN,
        patch_size=14, neck_hidden_sizes=[8, 16, 16, 16], fusion_hidden_size=16, head_hidden_size=8,
    )  # fmt: skip


def _upernet() -> Network:
    backbone = hf.ConvNextConfig(
        hidden_sizes=[8, 16, 16, 32],
        depths=[1, 1, 1, 1],
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )
    return hugging(
        "UperNetForSemanticSegmentation", "UperNetConfig", image(64), {}, as_argument={"image": "pixel_values"},
        backbone_config=backbone, hidden_size=16, auxiliary_in_channels=16, auxiliary_channels=16, num_labels=5, pool_scales=[1, 2],
    )  # fmt: skip


# --- torchvision ----------------------------------------------------------------------------------------


def seen(
    build: Callable[[], nn.Module], size: int = 32, pick: Callable[[Any], Any] | None = None
) -> Callable[[], Network]:
    """A network of torchvision's that looks at an image."""

    def network() -> Network:
        model = build()
        return (model if pick is None else Net(lambda m, x: pick(m(x)), model)), image(size)

    return network


def _resnet(block: Any, **more: Any) -> tv.ResNet:
    return tv.ResNet(block, [1, 1, 1, 1], num_classes=10, **more)


def _vgg(*, norm: bool) -> nn.Module:
    model = tv.vgg11_bn(num_classes=10) if norm else tv.vgg11(num_classes=10)
    model.avgpool = nn.Identity()
    model.classifier = nn.Sequential(nn.Linear(512, 32), nn.ReLU(), nn.Dropout(), nn.Linear(32, 10))
    return model


def _alexnet() -> nn.Module:
    model = tv.alexnet(num_classes=10)
    model.avgpool = nn.Identity()
    model.classifier = nn.Sequential(nn.Dropout(), nn.Linear(256, 32), nn.ReLU(), nn.Linear(32, 10))
    return model


def _features(dilated: bool) -> nn.Module:
    model = _resnet(tv.resnet.Bottleneck, replace_stride_with_dilation=[False, dilated, dilated])
    return tv._utils.IntermediateLayerGetter(model, {"layer4": "out"})


def _efficientnet() -> nn.Module:
    block = tv.efficientnet.MBConvConfig
    settings = [block(1, 3, 1, 16, 16, 1), block(4, 3, 2, 16, 24, 2), block(4, 5, 2, 24, 40, 1)]
    return tv.EfficientNet(settings, 0.2, stochastic_depth_prob=0.0, num_classes=10)


def _efficientnet_v2() -> nn.Module:
    fused, block = tv.efficientnet.FusedMBConvConfig, tv.efficientnet.MBConvConfig
    settings = [fused(1, 3, 1, 16, 16, 1), fused(4, 3, 2, 16, 24, 2), block(4, 3, 2, 24, 40, 1)]
    return tv.EfficientNet(settings, 0.2, last_channel=64, num_classes=10)


def _convnext() -> nn.Module:
    block = tv.convnext.CNBlockConfig
    return tv.ConvNeXt([block(16, 32, 1), block(32, 64, 1), block(64, None, 1)], num_classes=10)


def _swin(version: int) -> nn.Module:
    v2 = {
        "block": tv.swin_transformer.SwinTransformerBlockV2,
        "downsample_layer": tv.swin_transformer.PatchMergingV2,
    }
    return tv.SwinTransformer(
        [4, 4],
        16,
        [2, 2],
        [2, 4],
        [4, 4],
        num_classes=10,
        stochastic_depth_prob=0.0,
        **(v2 if version == 2 else {}),
    )


def _maxvit() -> nn.Module:
    return tv.MaxVit((32, 32), 16, 4, [16, 32], [1, 1], 8, 0.0, num_classes=10)


def _retinanet_heads() -> Network:
    body = tv._utils.IntermediateLayerGetter(
        _resnet(tv.resnet.BasicBlock), {"layer2": "0", "layer3": "1", "layer4": "2"}
    )
    pyramid = FeaturePyramidNetwork([128, 256, 512], 32)
    head = tv.detection.retinanet.RetinaNetHead(32, 3, 5)

    def run(body: nn.Module, pyramid: nn.Module, head: nn.Module, x: Tensor) -> Any:
        found = head(list(pyramid(body(x)).values()))
        return found["cls_logits"], found["bbox_regression"]

    return Net(run, body, pyramid, head), image(64)


def _ssdlite_heads() -> Network:
    norm = nn.BatchNorm2d
    body = _mobilenet_extractor(tv.mobilenet_v3_small(norm_layer=norm), 6, norm)
    channels = [each.shape[1] for each in body.eval()(torch.zeros(1, 3, 64, 64)).values()]
    head = tv.detection.ssdlite.SSDLiteHead(channels, [3] * len(channels), 5, norm)

    def run(body: nn.Module, head: nn.Module, x: Tensor) -> Any:
        found = head(list(body(x).values()))
        return found["cls_logits"], found["bbox_regression"]

    return Net(run, body, head), image(64)


def _ssd_heads() -> Network:
    features = nn.ModuleList([_conv(3, 16, 2), _conv(16, 32, 2), _conv(32, 32, 2)])
    head = tv.detection.ssd.SSDHead([32, 32], [4, 4], 5)
    scale = nn.Conv2d(32, 32, 1)

    def run(features: nn.ModuleList, scale: nn.Module, head: nn.Module, x: Tensor) -> Any:
        first = features[1](features[0](x))
        found = head([F.normalize(scale(first)), features[2](first)])
        return found["cls_logits"].softmax(-1), found["bbox_regression"]

    return Net(run, features, scale, head), image(32)


def _raft() -> Network:
    model = tv.optical_flow.raft_small(weights=None)
    inputs = {"first": torch.randn(2, 3, 128, 128), "second": torch.randn(2, 3, 128, 128)}
    return Net(lambda m, a, b: m(a, b, num_flow_updates=2)[-1], model), inputs


def _r3d() -> Network:
    video = tv.video.resnet
    makers = [video.Conv3DSimple, video.Conv2Plus1D, video.Conv3DSimple, video.Conv3DNoTemporal]
    return video.VideoResNet(video.BasicBlock, makers, [1, 1, 1, 1], video.BasicStem, 10), {
        "video": torch.randn(2, 3, 8, 32, 32)
    }


# --- our own, after common ones -------------------------------------------------------------------------


def _conv(
    inputs: int,
    outputs: int,
    stride: int = 1,
    width: int = 3,
    act: Callable[[], nn.Module] = nn.SiLU,
) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, width, stride, width // 2, bias=False),
        nn.BatchNorm2d(outputs),
        act(),
    )


class _Halves(nn.Module):
    """YOLOv8's block: halves of the channels, each new one from the last, and all of them joined."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.begin, self.inner = (
            _conv(channels, channels, 1, 1),
            _conv(channels // 2, channels // 2),
        )
        self.end = _conv(channels * 3 // 2, channels, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.begin(x).chunk(2, 1)
        return self.end(torch.cat([first, second, second + self.inner(second)], 1))


class _Pooled(nn.Module):
    """Spatial pyramid pooling: one pooling after the other, all joined."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.end = _conv(4 * channels, channels, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        pooled = [x]
        for _ in range(3):
            pooled.append(F.max_pool2d(pooled[-1], 5, 1, 2))
        return self.end(torch.cat(pooled, 1))


class _Yolo(nn.Module):
    """A detector of YOLOv8's kind: two scales up and down, boxes from distributions of distances, anchors."""

    def __init__(self, classes: int = 4, bins: int = 8) -> None:
        super().__init__()
        self.one = nn.Sequential(_conv(3, 16, 2), _conv(16, 32, 2), _Halves(32), _conv(32, 32, 2))
        self.two = nn.Sequential(_Halves(32), _conv(32, 32, 2), _Pooled(32))
        self.up, self.down, self.low = _Halves(64), _conv(64, 32, 2), _Halves(64)
        self.heads = nn.ModuleList(nn.Conv2d(64, 4 * bins + classes, 1) for _ in range(2))
        self.bins, self.classes = bins, classes

    def forward(self, x: Tensor) -> Tensor:
        high = self.one(x)
        low = self.two(high)
        high = self.up(torch.cat([F.interpolate(low, scale_factor=2.0, mode="nearest"), high], 1))
        low = self.low(torch.cat([self.down(high), low], 1))
        maps = [head(each) for head, each in zip(self.heads, (high, low), strict=True)]
        centres, strides = [], []
        for each, stride in zip(maps, (8.0, 16.0), strict=True):
            rows, columns = torch.meshgrid(
                torch.arange(each.shape[2]) + 0.5, torch.arange(each.shape[3]) + 0.5, indexing="ij"
            )
            centres.append(torch.stack((columns, rows), -1).reshape(-1, 2))
            strides.append(torch.full((centres[-1].shape[0], 1), stride))
        found = torch.cat([each.flatten(2) for each in maps], 2)
        boxes, classes = found.split((4 * self.bins, self.classes), 1)
        shape = (boxes.shape[0], 4, self.bins, boxes.shape[2])
        numbers = torch.arange(self.bins, dtype=torch.float32)
        distances = (
            boxes.reshape(shape).transpose(1, 2).softmax(1) * numbers.view(1, -1, 1, 1)
        ).sum(1)
        begin, end = distances.chunk(2, 1)
        anchors = torch.cat(centres).t().unsqueeze(0)
        low_corner, high_corner = anchors - begin, anchors + end
        centre, size = (low_corner + high_corner) / 2, high_corner - low_corner
        return torch.cat(
            [torch.cat([centre, size], 1) * torch.cat(strides).t(), classes.sigmoid()], 1
        )


class _UNet(nn.Module):
    """Down, up, and across; `mode` is how it gets larger."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode = mode
        self.down = nn.ModuleList([_conv(3, 8), _conv(8, 16), _conv(16, 32)])
        self.wider = nn.ModuleList(
            [nn.ConvTranspose2d(32, 16, 2, 2), nn.ConvTranspose2d(16, 8, 2, 2)]
        )
        self.narrow = nn.ModuleList([nn.Conv2d(32, 16, 1), nn.Conv2d(16, 8, 1)])
        self.up = nn.ModuleList([_conv(32, 16), _conv(16, 8)])
        self.end = nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        across = []
        for index, block in enumerate(self.down):
            x = block(x if index == 0 else F.max_pool2d(x, 2))
            across.append(x)
        for index, block in enumerate(self.up):
            other = across[-2 - index]
            if self.mode == "transposed":
                x = self.wider[index](x)
            else:
                corners = (
                    {} if self.mode == "nearest" else {"align_corners": self.mode == "bilinear"}
                )
                x = self.narrow[index](
                    F.interpolate(x, size=other.shape[2:], mode=self.mode, **corners)
                )
            x = block(torch.cat([other, x], 1))
        return self.end(x)


class _Denoiser(nn.Module):
    """What diffusion runs: an image and a time, group normalisation, attention over places."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.begin, self.end = (
            nn.Conv2d(3, channels, 3, padding=1),
            nn.Conv2d(channels, 3, 3, padding=1),
        )
        self.time = nn.Sequential(
            nn.Linear(channels, channels), nn.SiLU(), nn.Linear(channels, channels)
        )
        self.norm, self.conv = (
            nn.GroupNorm(4, channels),
            nn.Conv2d(channels, channels, 3, padding=1),
        )
        self.attend_norm = nn.GroupNorm(4, channels)
        self.attend = nn.MultiheadAttention(channels, 2, batch_first=True)
        self.down = nn.Conv2d(channels, channels, 3, 2, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        half = self.time[0].in_features // 2
        angles = time[:, None] * torch.exp(torch.arange(half) * (-9.2 / half))[None]
        told = self.time(torch.cat([angles.sin(), angles.cos()], 1))[:, :, None, None]
        first = self.begin(x)
        x = self.down(first + self.conv(F.silu(self.norm(first) + told)))
        rows = self.attend_norm(x).flatten(2).transpose(1, 2)
        x = x + self.attend(rows, rows, rows, need_weights=False)[0].transpose(1, 2).reshape(
            x.shape
        )
        return self.end(first + F.interpolate(x, scale_factor=2.0, mode="nearest"))


class _Pyramid(nn.Module):
    """EfficientDet's pyramid: features of three sizes join in both directions with learnt weights."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.begin = nn.ModuleList(
            [_conv(3, channels, 4), _conv(channels, channels, 2), _conv(channels, channels, 2)]
        )
        self.mix = nn.ModuleList(_conv(channels, channels) for _ in range(4))
        self.weights = nn.Parameter(torch.rand(4, 3))
        self.head = nn.Conv2d(channels, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Any:
        sizes = []
        for block in self.begin:
            x = block(x)
            sizes.append(x)
        small, middle, large = sizes[::-1]
        share = F.relu(self.weights)
        share = share / (share.sum(1, keepdim=True) + 1e-4)
        mid = self.mix[0](
            share[0, 0] * middle + share[0, 1] * F.interpolate(small, scale_factor=2.0)
        )
        out_large = self.mix[1](
            share[1, 0] * large + share[1, 1] * F.interpolate(mid, scale_factor=2.0)
        )
        out_mid = self.mix[2](
            share[2, 0] * middle
            + share[2, 1] * mid
            + share[2, 2] * F.max_pool2d(out_large, 3, 2, 1)
        )
        out_small = self.mix[3](share[3, 0] * small + share[3, 1] * F.max_pool2d(out_mid, 3, 2, 1))
        found = [
            self.head(each).permute(0, 2, 3, 1).flatten(1, 2)
            for each in (out_large, out_mid, out_small)
        ]
        return torch.cat(found, 1).sigmoid()


class _WaveNet(nn.Module):
    """Causal convolutions that see ever further, gates, and sums across."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.begin, self.end = nn.Conv1d(1, channels, 1), nn.Conv1d(channels, 8, 1)
        self.layers = nn.ModuleList(
            nn.Conv1d(channels, 2 * channels, 2, dilation=2**i) for i in range(3)
        )
        self.across = nn.ModuleList(nn.Conv1d(channels, channels, 1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x, total = self.begin(x), 0.0
        for index, (layer, across) in enumerate(zip(self.layers, self.across, strict=True)):
            tanh, gate = layer(F.pad(x, (2**index, 0))).chunk(2, 1)
            step = across(tanh.tanh() * gate.sigmoid())
            x, total = x + step, total + step
        return self.end(F.relu(total))


class _Residual(nn.Module):
    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(*parts)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class _Swapped(nn.Module):
    """Runs a module with the last two dimensions exchanged."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.transpose(1, 2)).transpose(1, 2)


def _mixer() -> Network:
    def mlp(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    layers = [
        each
        for _ in range(2)
        for each in (
            _Residual(nn.LayerNorm(32), _Swapped(mlp(16))),
            _Residual(nn.LayerNorm(32), mlp(32)),
        )
    ]
    model = Net(
        lambda patches, body, end, x: end(body(patches(x).flatten(2).transpose(1, 2)).mean(1)),
        nn.Conv2d(3, 32, 8, 8), nn.Sequential(*layers, nn.LayerNorm(32)), nn.Linear(32, 10),
    )  # fmt: skip
    return model, image()


def recurrent(kind: type[nn.Module], **more: Any) -> Callable[[], Network]:
    """A recurrent layer, of which the whole sequence and the last state are used."""

    def build() -> Network:
        cell = kind(_HIDDEN, 16, batch_first=True, **more)

        def run(cell: nn.Module, end: nn.Module, x: Tensor) -> Any:
            found, state = cell(x)
            last = (state[0] if isinstance(state, tuple) else state).transpose(0, 1)
            return end(found), last

        return Net(run, cell, nn.Linear(32 if more.get("bidirectional") else 16, 10)), sequence()

    return build


def _reader() -> Network:
    """Reads a line of letters: convolutions, then both directions of an LSTM."""
    model = Net(
        lambda conv, cell, end, x: end(cell(conv(x).mean(2).transpose(1, 2))[0]).log_softmax(-1),
        nn.Sequential(_conv(1, 8, act=nn.ReLU), nn.MaxPool2d(2), _conv(8, 16, act=nn.ReLU)),
        nn.LSTM(16, 16, bidirectional=True, batch_first=True), nn.Linear(32, 12),
    )  # fmt: skip
    return model, image(32, 1)


def _tagger() -> Network:
    """Tags words, and attends to them for the whole sentence."""

    def run(
        table: nn.Module, cell: nn.Module, score: nn.Module, end: nn.Module, ids: Tensor
    ) -> Any:
        states = cell(table(ids))[0]
        share = score(states.tanh()).softmax(1)
        return end(states), end((states * share).sum(1))

    parts = nn.Embedding(64, 32), nn.GRU(32, 16, 2, batch_first=True, bidirectional=True)
    return Net(run, *parts, nn.Linear(32, 1), nn.Linear(32, 10)), tokens(masked=False)


def _zfnet() -> Network:
    return nn.Sequential(
        nn.Conv2d(3, 16, 7, 2, 1), nn.ReLU(), nn.MaxPool2d(3, 2, 1), nn.LocalResponseNorm(5, 1e-2),
        nn.Conv2d(16, 32, 5, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1), nn.LocalResponseNorm(5, 1e-2), nn.Conv2d(32, 32, 3, 1, 1), nn.ReLU(),
        nn.Flatten(), nn.Linear(128, 64), nn.ReLU(), nn.Dropout(), nn.Linear(64, 10), nn.Softmax(1),
    ), image(48)  # fmt: skip


def _tcn() -> Network:
    def block(step: int) -> nn.Module:
        return _Residual(
            nn.ConstantPad1d((2 * step, 0), 0.0), nn.utils.parametrizations.weight_norm(nn.Conv1d(16, 16, 3, dilation=step)), nn.ReLU(),
            nn.BatchNorm1d(16),
        )  # fmt: skip

    return nn.Sequential(nn.Conv1d(4, 16, 1), block(1), block(2), block(4), nn.AdaptiveAvgPool1d(1), nn.Flatten(),
        nn.Linear(16, 5)), signal(24, 4)  # fmt: skip


def _autoencoder() -> Network:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 49, 16),
        nn.Linear(16, 16 * 49), nn.Unflatten(1, (16, 7, 7)), nn.ConvTranspose2d(16, 8, 3, 2, 1, 1), nn.ReLU(),
        nn.ConvTranspose2d(8, 1, 3, 2, 1, 1), nn.Sigmoid(),
    ), image(28, 1)  # fmt: skip


def _super_resolution() -> Network:
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 9, 3, padding=1), nn.PixelShuffle(3),
    ), image(16, 1)  # fmt: skip


def _enlarged(mode: str) -> Callable[[], Network]:
    def run(conv: nn.Module, x: Tensor) -> Tensor:
        large = F.interpolate(x, scale_factor=2.0, mode=mode, align_corners=False)
        return large + conv(large)

    return lambda: (
        Net(
            run,
            nn.Sequential(
                nn.Conv2d(3, 16, 3, padding=1), nn.PReLU(16), nn.Conv2d(16, 3, 3, padding=1)
            ),
        ),
        image(16),
    )


def _style() -> Network:
    """Transfers style: reflected borders, instance normalisation, nearest neighbours."""

    def block(inputs: int, outputs: int, stride: int = 1) -> nn.Module:
        return nn.Sequential(
            nn.ReflectionPad2d(1),
            nn.Conv2d(inputs, outputs, 3, stride),
            nn.InstanceNorm2d(outputs, affine=True),
            nn.ReLU(),
        )

    return nn.Sequential(
        block(3, 8), block(8, 16, 2), _Residual(block(16, 16)), nn.Upsample(scale_factor=2.0), block(16, 8),
        nn.Conv2d(8, 3, 3, padding=1), nn.Tanh(),
    ), image(24)  # fmt: skip


def _generator() -> Network:
    return nn.Sequential(
        nn.Linear(16, 32 * 16), nn.Unflatten(1, (32, 4, 4)), nn.ConvTranspose2d(32, 16, 4, 2, 1, bias=False), nn.BatchNorm2d(16),
        nn.ReLU(), nn.ConvTranspose2d(16, 3, 4, 2, 1), nn.Tanh(),
    ), {"noise": torch.randn(2, 16)}  # fmt: skip


def _discriminator() -> Network:
    return nn.Sequential(
        nn.Conv2d(3, 16, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(16, 32, 4, 2, 1, bias=False), nn.InstanceNorm2d(32),
        nn.LeakyReLU(0.2), nn.ZeroPad2d((1, 0, 1, 0)), nn.Conv2d(32, 1, 4, padding=1),
    ), image()  # fmt: skip


def _recommender() -> Network:
    """Numbers and categories, and the products of all pairs."""

    def run(
        tables: nn.ModuleList, bottom: nn.Module, top: nn.Module, numbers: Tensor, ids: Tensor
    ) -> Tensor:
        dense = bottom(numbers)
        rows = [dense, *(table(ids[:, index]) for index, table in enumerate(tables))]
        stacked = torch.stack(rows, 1)
        products = torch.bmm(stacked, stacked.transpose(1, 2))
        row, column = torch.tril_indices(len(rows), len(rows), -1)
        return top(torch.cat([dense, products[:, row, column]], 1)).sigmoid()

    tables = nn.ModuleList(nn.Embedding(64, 8) for _ in range(3))
    bottom = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8))
    top = nn.Sequential(nn.Linear(14, 16), nn.ReLU(), nn.Linear(16, 1))
    return Net(run, tables, bottom, top), {
        "numbers": torch.randn(2, 6),
        "ids": torch.randint(0, 64, (2, 3)),
    }


def _experts() -> Network:
    """Two of four experts per token, weighed."""

    def run(gate: nn.Module, experts: nn.ModuleList, x: Tensor) -> Tensor:
        share, chosen = gate(x).softmax(-1).topk(2, -1)
        weights = torch.zeros_like(gate(x)).scatter(-1, chosen, share / share.sum(-1, keepdim=True))
        return x + torch.stack(
            [each(x) * weights[..., i : i + 1] for i, each in enumerate(experts)]
        ).sum(0)

    experts = nn.ModuleList(
        nn.Sequential(nn.Linear(32, 32), nn.Mish(), nn.Linear(32, 32)) for _ in range(4)
    )
    return Net(run, nn.Linear(32, 4), experts), sequence()


def _points() -> Network:
    """A cloud of points: turned by a matrix that it has learnt to choose, then the largest of each feature."""

    def run(turn: nn.Module, body: nn.Module, end: nn.Module, x: Tensor) -> Tensor:
        matrix = turn(x).amax(2).view(-1, 3, 3) + torch.eye(3)
        return end(body(torch.bmm(matrix, x)).max(2)[0]).log_softmax(1)

    body = nn.Sequential(nn.Conv1d(3, 16, 1), nn.BatchNorm1d(16), nn.ReLU(), nn.Conv1d(16, 32, 1))
    turn = nn.Sequential(nn.Conv1d(3, 16, 1), nn.ReLU(), nn.Conv1d(16, 9, 1))
    return Net(run, turn, body, nn.Linear(32, 5)), {"points": torch.randn(2, 3, 20)}


def _graph() -> Network:
    """Nodes and which of them are joined: attention over neighbours."""

    def run(first: nn.Module, second: nn.Module, x: Tensor, joined: Tensor) -> Tensor:
        for layer in (first, second):
            hidden = layer(x)
            scores = F.leaky_relu(torch.einsum("bik,bjk->bij", hidden, hidden), 0.2)
            x = F.elu(scores.masked_fill(joined <= 0, -1e9).softmax(-1) @ hidden)
        return x.mean(1)

    return Net(run, nn.Linear(8, 16), nn.Linear(16, 16)), {
        "nodes": torch.randn(2, 6, 8),
        "joined": torch.randn(2, 6, 6),
    }


def _text_cnn() -> Network:
    def run(table: nn.Module, convs: nn.ModuleList, end: nn.Module, ids: Tensor) -> Tensor:
        x = table(ids).transpose(1, 2)
        return end(torch.cat([F.relu(conv(x)).max(2)[0] for conv in convs], 1))

    convs = nn.ModuleList(nn.Conv1d(16, 8, width) for width in (2, 3, 4))
    return Net(run, nn.Embedding(64, 16), convs, nn.Linear(24, 4)), tokens(masked=False)


def _table() -> Network:
    """Rows of a table, in and out of layers that normalise themselves."""
    return nn.Sequential(
        nn.Linear(12, 32), nn.SELU(), nn.Linear(32, 32), nn.Softsign(), nn.Linear(32, 32), nn.CELU(), nn.Linear(32, 16),
        nn.Softplus(), nn.Linear(16, 16), nn.Hardtanh(), nn.Linear(16, 3), nn.Softmax(1),
    ), {"row": torch.randn(2, 12)}  # fmt: skip


def _separator() -> Network:
    """Separates voices: masks over a learnt spectrum, normalised over all of it."""

    def run(
        encode: nn.Module, norm: nn.Module, masks: nn.Module, decode: nn.Module, x: Tensor
    ) -> Tensor:
        found = F.relu(encode(x))
        shares = masks(norm(found)).sigmoid().view(x.shape[0], 2, 16, -1)
        parts = (shares * found.unsqueeze(1)).flatten(0, 1)
        return decode(parts).view(x.shape[0], 2, -1)

    masks = nn.Sequential(
        nn.Conv1d(16, 16, 3, padding=1, groups=16), nn.PReLU(), nn.Conv1d(16, 32, 1)
    )
    return Net(
        run, nn.Conv1d(1, 16, 8, 4), nn.GroupNorm(1, 16), masks, nn.ConvTranspose1d(16, 1, 8, 4)
    ), signal(64, 1)


def _forecast() -> Network:
    """Forecasts a series by what is left of it after each block."""

    def run(blocks: nn.ModuleList, x: Tensor) -> Tensor:
        mean, deviation = x.mean(1, keepdim=True), x.std(1, keepdim=True) + 1e-5
        left, total = (x - mean) / deviation, 0.0
        for block in blocks:
            back, ahead = block(left).split((24, 6), 1)
            left, total = left - back, total + ahead
        return total * deviation + mean

    blocks = nn.ModuleList(
        nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 30)) for _ in range(3)
    )
    return Net(run, blocks), signal(24)


def _embedder() -> Network:
    """Faces as points on a sphere: depthwise convolutions, PReLU, length one."""
    body = nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1), nn.PReLU(16), nn.Conv2d(16, 16, 3, 1, 1, groups=16), nn.BatchNorm2d(16), nn.PReLU(16),
        nn.Conv2d(16, 32, 1), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, 16),
    )  # fmt: skip
    return Net(lambda body, x: F.normalize(body(x)), body), image()


def _transformer(which: str) -> Network:
    sizes: dict[str, Any] = {"dropout": 0.0, "batch_first": True}
    if which == "encoder":
        layer = nn.TransformerEncoderLayer(32, 4, 64, activation="gelu", norm_first=True, **sizes)
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), sequence()
    model = nn.Transformer(32, 4, 1, 1, 64, **sizes)

    def run(model: nn.Module, source: Tensor, target: Tensor) -> Tensor:
        return model(source, target, tgt_mask=nn.Transformer.generate_square_subsequent_mask(6))

    return Net(run, model), {"source": torch.randn(2, 8, 32), "target": torch.randn(2, 6, 32)}


def _conformer() -> Network:
    """One block of speech recognition: half a feed-forward, attention, a gated convolution, the other half."""

    def feed() -> nn.Module:
        return nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 32))

    conv = nn.Sequential(
        nn.Conv1d(32, 64, 1), nn.GLU(1), nn.Conv1d(32, 32, 5, padding=2, groups=32), nn.BatchNorm1d(32), nn.SiLU(), nn.Conv1d(32, 32, 1)
    )  # fmt: skip

    def run(
        a: nn.Module, attend: nn.Module, conv: nn.Module, b: nn.Module, norm: nn.Module, x: Tensor
    ) -> Tensor:
        x = x + 0.5 * a(x)
        x = x + attend(x, x, x, need_weights=False)[0]
        x = x + conv(x)
        return norm(x + 0.5 * b(x))

    attend = nn.MultiheadAttention(32, 4, batch_first=True)
    return Net(run, feed(), attend, _Swapped(conv), feed(), nn.LayerNorm(32)), sequence(16)


def _poses() -> Network:
    """Heat maps of joints, and the place of each by its mean."""

    def run(body: nn.Module, x: Tensor) -> Tensor:
        heat = body(x).flatten(2).softmax(2).unflatten(2, (8, 8))
        places = torch.linspace(-1, 1, 8)
        return torch.stack([(heat.sum(2) * places).sum(2), (heat.sum(3) * places).sum(2)], 2)

    body = nn.Sequential(
        _conv(3, 16, 2, act=nn.Hardswish), _conv(16, 16, 2, act=nn.ReLU6), nn.Conv2d(16, 5, 1)
    )
    return Net(run, body), image()


def _warper() -> Network:
    """Turns an image by what it sees in it, then looks again."""

    def run(look: nn.Module, end: nn.Module, x: Tensor) -> Tensor:
        turn = look(x).view(-1, 2, 3) * 0.1 + torch.eye(2, 3)
        grid = F.affine_grid(turn, [x.shape[0], 3, 32, 32], align_corners=False)
        return end(F.grid_sample(x, grid, align_corners=False))

    look = nn.Sequential(
        nn.Conv2d(3, 8, 7, 4), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 49, 6), nn.Tanh()
    )
    return Net(run, look, nn.Sequential(_conv(3, 8, 4), nn.Flatten(), nn.Linear(512, 10))), image()


def _vae() -> Network:
    """Encodes and decodes; its noise is an input."""

    def run(encode: nn.Module, decode: nn.Module, x: Tensor, noise: Tensor) -> Any:
        mean, log_variance = encode(x).chunk(2, 1)
        return decode(mean + noise * (0.5 * log_variance).exp()), mean

    encode = nn.Sequential(_conv(3, 16, 2), nn.Conv2d(16, 8, 3, 2, 1))
    decode = nn.Sequential(
        nn.ConvTranspose2d(4, 16, 4, 2, 1),
        nn.GroupNorm(4, 16),
        nn.SiLU(),
        nn.ConvTranspose2d(16, 3, 4, 2, 1),
    )
    return Net(run, encode, decode), {**image(), "noise": torch.randn(2, 4, 8, 8)}


def _segment_by_levels() -> Network:
    """Pyramid pooling (PSPNet): means over ever finer tiles, enlarged, beside what they were made of."""

    def run(body: nn.Module, levels: nn.ModuleList, end: nn.Module, x: Tensor) -> Tensor:
        found = body(x)
        tiles = [
            F.interpolate(
                level(F.adaptive_avg_pool2d(found, size)), size=found.shape[2:], mode="bilinear"
            )
            for size, level in zip((1, 2, 4), levels, strict=True)
        ]
        return F.interpolate(end(torch.cat([found, *tiles], 1)), size=x.shape[2:], mode="bilinear")

    levels = nn.ModuleList(nn.Conv2d(16, 4, 1) for _ in range(3))
    return Net(
        run, nn.Sequential(_conv(3, 16, 2), _conv(16, 16, 2)), levels, nn.Conv2d(28, 5, 1)
    ), image()


# fmt: off
NETWORKS: dict[str, Callable[[], Network]] = {
    # Text.
    "bert": text("Bert"),
    "gpt2": text("GPT2", n_embd=32, n_layer=2, n_head=4, n_positions=32),
    "vit": vision("ViTModel", "ViT"),
    "unet_bilinear": lambda: (_UNet("bilinear"), image()),
    "lstm": recurrent(nn.LSTM),
    "distilbert": text("DistilBert", dim=32, n_layers=2, n_heads=4, hidden_dim=64),
    "roberta": text("Roberta"),
    "albert": text("Albert", embedding_size=16),
    "mpnet": text("MPNet"),
    "minilm_sentence": sentence("Bert"),
    "mpnet_sentence": sentence("MPNet"),
    "electra": text("Electra", embedding_size=16),
    "deberta": text("Deberta", relative_attention=True, pos_att_type=["c2p", "p2c"], max_relative_positions=16),
    "deberta_v2": text("DebertaV2", relative_attention=True, pos_att_type=["c2p", "p2c"], position_buckets=8,
        max_relative_positions=16, norm_rel_ebd="layer_norm", share_att_key=True),
    "mobilebert": text("MobileBert", embedding_size=16, intra_bottleneck_size=16, num_feedforward_networks=2),
    "squeezebert": text("SqueezeBert", embedding_size=32),
    "convbert": text("ConvBert", embedding_size=16, conv_kernel_size=3),
    "fnet": lambda: hugging("FNetModel", "FNetConfig", tokens(masked=False)),
    "bert_classifier": text("Bert", "ForSequenceClassification"),
    "roberta_tokens": text("Roberta", "ForTokenClassification"),
    "bert_answers": text("Bert", "ForQuestionAnswering", pick=lambda o: (o.start_logits, o.end_logits)),
    "gpt_neo": text("GPTNeo", num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], window_size=4),
    "gptj": text("GPTJ", n_embd=32, n_layer=2, n_head=4, rotary_dim=4, n_positions=32),
    "gpt_neox": text("GPTNeoX"),
    "opt": text("OPT", ffn_dim=64, word_embed_proj_dim=32),
    "bloom": text("Bloom", n_layer=2, n_head=4),
    "llama": text("Llama", num_key_value_heads=2),
    "llama_next_token": text("Llama", "ForCausalLM", num_key_value_heads=4),
    "mistral": text("Mistral", num_key_value_heads=2, sliding_window=4),
    "qwen2": text("Qwen2", num_key_value_heads=2),
    "qwen3": text("Qwen3", num_key_value_heads=2, head_dim=8),
    "gemma": text("Gemma", num_key_value_heads=1, head_dim=8),
    "gemma2": text("Gemma2", num_key_value_heads=2, head_dim=8, sliding_window=4),
    "phi": text("Phi"),
    "phi3": text("Phi3", num_key_value_heads=2),
    "stablelm": text("StableLm", num_key_value_heads=2),
    "t5_encoder": lambda: _t5("encoder"),
    "t5_decoder": lambda: _t5("decoder"),
    "bart": seq2seq("Bart"),
    "marian": seq2seq("Marian"),
    "pegasus": seq2seq("Pegasus"),
    "clip_text": text("CLIPText", pick=lambda o: (o[0], o[1]), eos_token_id=63),
    "siglip_text": lambda: hugging("SiglipTextModel", "SiglipTextConfig", tokens(masked=False)),
    # Images.
    "clip_vision": vision("CLIPVisionModel", "CLIPVision", pick=lambda o: (o[0], o[1])),
    "siglip_vision": vision("SiglipVisionModel", "SiglipVision", pick=lambda o: (o[0], o[1])),
    "deit": vision("DeiTModel", "DeiT"),
    "beit": vision("BeitModel", "Beit", use_relative_position_bias=True, use_mask_token=False),
    "dinov2": vision("Dinov2Model", "Dinov2"),
    "swin": vision("SwinModel", "Swin", embed_dim=16, depths=[2, 1], num_attention_heads=[2, 4], window_size=2, patch_size=4),
    "swinv2": vision("Swinv2Model", "Swinv2", embed_dim=16, depths=[2, 1], num_attention_heads=[2, 4], window_size=2, patch_size=4),
    "convnext": vision("ConvNextModel", "ConvNext", hidden_sizes=[16, 32], depths=[1, 1], num_stages=2),
    "convnextv2": vision("ConvNextV2Model", "ConvNextV2", hidden_sizes=[16, 32], depths=[1, 1], num_stages=2),
    "segformer": vision("SegformerForSemanticSegmentation", "Segformer", hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 1, 1],
        num_attention_heads=[1, 2, 2, 4], decoder_hidden_size=32),
    "mobilevit": vision("MobileViTModel", "MobileViT", hidden_sizes=[16, 24, 32], neck_hidden_sizes=[8, 8, 16, 16, 24, 32, 64], patch_size=2),
    "poolformer": vision("PoolFormerModel", "PoolFormer", hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 1, 1], patch_size=7),
    "pvt": vision("PvtModel", "Pvt", hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 2, 4], patch_size=4),
    "cvt": vision("CvtModel", "Cvt", embed_dim=[8, 16, 32], num_heads=[1, 2, 4], depth=[1, 2, 3]),
    "levit": vision("LevitModel", "Levit", hidden_sizes=[16, 24, 32], num_attention_heads=[2, 2, 4], depths=[1, 1, 1], key_dim=[8, 8, 8], patch_size=16),
    "yolos": vision("YolosForObjectDetection", "Yolos", image_size=[32, 32], num_detection_tokens=5, use_mid_position_embeddings=False,
        pick=lambda o: (o.logits, o.pred_boxes)),
    "detr": _detr,
    "mask2former": _mask2former,
    "maskformer": _maskformer,
    "dpt": _dpt,
    "depth_anything": _depth_anything,
    "upernet": _upernet,
    "glpn": vision("GLPNForDepthEstimation", "GLPN", hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 2, 4],
        decoder_hidden_size=16),
    # Sound.
    "wav2vec2": speech("Wav2Vec2"),
    "hubert": speech("Hubert"),
    "wavlm": speech("WavLM"),
    "data2vec_audio": speech("Data2VecAudio"),
    "whisper_encoder": lambda: _whisper("encoder"),
    "whisper_decoder": lambda: _whisper("decoder"),
    "audio_spectrogram": lambda: hugging("ASTModel", "ASTConfig", {"sequence": torch.randn(2, 32, 16)}, {**_IMAGE_SIZES, "patch_size": 8},
        as_argument={"sequence": "input_values"}, max_length=32, num_mel_bins=16, frequency_stride=4, time_stride=4),
    # torchvision.
    "tv_resnet": seen(lambda: _resnet(tv.resnet.BasicBlock)),
    "tv_resnet_bottleneck": seen(lambda: _resnet(tv.resnet.Bottleneck)),
    "tv_resnext": seen(lambda: _resnet(tv.resnet.Bottleneck, groups=8, width_per_group=4)),
    "tv_densenet": seen(lambda: tv.DenseNet(8, (2, 2, 2), 16, num_classes=10)),
    "tv_googlenet": seen(lambda: tv.googlenet(num_classes=10, aux_logits=False, init_weights=False)),
    "tv_inception": seen(lambda: tv.inception_v3(num_classes=10, aux_logits=False, init_weights=False, transform_input=True), 75),
    "tv_squeezenet": seen(lambda: tv.squeezenet1_1(num_classes=10)),
    "tv_vgg": seen(lambda: _vgg(norm=False)),
    "tv_vgg_bn": seen(lambda: _vgg(norm=True)),
    "tv_alexnet": seen(_alexnet, 64),
    "tv_mobilenet_v2": seen(lambda: tv.mobilenet_v2(num_classes=10, width_mult=0.25)),
    "tv_mobilenet_v3_small": seen(lambda: tv.mobilenet_v3_small(num_classes=10)),
    "tv_mobilenet_v3_large": seen(lambda: tv.mobilenet_v3_large(num_classes=10)),
    "tv_efficientnet": seen(_efficientnet),
    "tv_efficientnet_v2": seen(_efficientnet_v2),
    "tv_regnet_x": seen(lambda: tv.regnet_x_400mf(num_classes=10)),
    "tv_regnet_y": seen(lambda: tv.regnet_y_400mf(num_classes=10)),
    "tv_mnasnet": seen(lambda: tv.mnasnet0_5(num_classes=10)),
    "tv_shufflenet": seen(lambda: tv.shufflenet_v2_x0_5(num_classes=10)),
    "tv_vit": seen(lambda: tv.VisionTransformer(32, 8, 2, 4, 32, 64, num_classes=10)),
    "tv_swin": seen(lambda: _swin(1)),
    "tv_swin_v2": seen(lambda: _swin(2)),
    "tv_convnext": seen(_convnext),
    "tv_maxvit": seen(_maxvit),
    "tv_fcn": seen(lambda: tv.segmentation.FCN(_features(True), tv.segmentation.fcn.FCNHead(2048, 5)), pick=lambda o: o["out"]),
    "tv_deeplab": seen(lambda: tv.segmentation.DeepLabV3(_features(True), tv.segmentation.deeplabv3.DeepLabHead(2048, 5)),
        pick=lambda o: o["out"]),
    "tv_lraspp": seen(lambda: tv.segmentation.lraspp_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=5), 32,
        pick=lambda o: o["out"]),
    "tv_retinanet_heads": _retinanet_heads,
    "tv_ssd_heads": _ssd_heads,
    "tv_ssdlite_heads": _ssdlite_heads,
    "tv_raft": _raft,
    "tv_r3d": _r3d,
    # After common ones.
    "yolo": lambda: (_Yolo(), image(64)),
    "unet_transposed": lambda: (_UNet("transposed"), image()),
    "unet_nearest": lambda: (_UNet("nearest"), image()),
    "denoiser": lambda: (_Denoiser(), {**image(16), "time": torch.rand(2) * 100}),
    "bifpn": lambda: (_Pyramid(), image(64)),
    "lstm_both_ways": recurrent(nn.LSTM, num_layers=2, bidirectional=True),
    "gru": recurrent(nn.GRU),
    "gru_both_ways": recurrent(nn.GRU, num_layers=2, bidirectional=True),
    "rnn": recurrent(nn.RNN),
    "reader": _reader,
    "tagger": _tagger,
    "zfnet": _zfnet,
    "tcn": _tcn,
    "wavenet": lambda: (_WaveNet(), signal(32, 1)),
    "autoencoder": _autoencoder,
    "super_resolution": _super_resolution,
    "enlarged_bicubic": _enlarged("bicubic"),
    "enlarged_bilinear": _enlarged("bilinear"),
    "style": _style,
    "generator": _generator,
    "discriminator": _discriminator,
    "recommender": _recommender,
    "experts": _experts,
    "points": _points,
    "graph": _graph,
    "text_cnn": _text_cnn,
    "table": _table,
    "separator": _separator,
    "forecast": _forecast,
    "embedder": _embedder,
    "transformer_encoder": lambda: _transformer("encoder"),
    "transformer": lambda: _transformer("both"),
    "conformer": _conformer,
    "poses": _poses,
    "warper": _warper,
    "vae": _vae,
    "pspnet": _segment_by_levels,
    "mixer": _mixer,
}
# fmt: on
