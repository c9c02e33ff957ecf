"""Common networks, small: few layers, few channels and small images, with the operators of the full size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
import torchvision.models as tv
import transformers as hf
from torch import nn
from torchvision.ops import FeaturePyramidNetwork

Tensor: TypeAlias = torch.Tensor
#: A batch of two of each input.
Inputs: TypeAlias = Mapping[str, Tensor]
Network: TypeAlias = tuple[nn.Module, Inputs]
Build: TypeAlias = Callable[[], Network]


class Net(nn.Module):
    """Modules, and a function that runs them on inputs."""

    def __init__(self, run: Callable[..., Any], *parts: nn.Module) -> None:
        super().__init__()
        self._run = run
        self.parts = nn.ModuleList(parts)

    def forward(self, *inputs: Tensor) -> Any:
        """Give the modules and then the inputs to the function."""
        return self._run(*self.parts, *inputs)


def image(size: int = 32, channels: int = 3) -> Inputs:
    return {"image": torch.randn(2, channels, size, size)}


def signal(*shape: int) -> Inputs:
    return {"signal": torch.randn(2, *shape)}


def sequence(length: int = 8, width: int = 32) -> Inputs:
    return {"sequence": torch.randn(2, length, width)}


def tokens(*, masked: bool = True) -> Inputs:
    ids = {"input_ids": torch.randint(0, 64, (2, 8))}
    return {**ids, "attention_mask": torch.ones(2, 8, dtype=torch.int64)} if masked else ids


# --- transformers ---------------------------------------------------------------------------------------

# fmt: off
_LAYERS: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
_TEXT: dict[str, Any] = {
    "vocab_size": 64, "max_position_embeddings": 32, "use_cache": False,
    "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
}
_IMAGE: dict[str, Any] = {**_LAYERS, "image_size": 32, "patch_size": 8}
_SPEECH: dict[str, Any] = {
    **_LAYERS, "vocab_size": 64, "conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3),
    "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
}
_BOTH: dict[str, Any] = {
    **_TEXT, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "decoder_start_token_id": 2,
}
_T5: dict[str, Any] = {
    "vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "use_cache": False,
    "decoder_start_token_id": 0,
}
_WHISPER: dict[str, Any] = {**_BOTH, "num_mel_bins": 16, "max_source_positions": 20, "max_target_positions": 16}
_C2P: dict[str, Any] = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 16}
_SWIN: dict[str, Any] = {"embed_dim": 16, "depths": [2, 1], "num_attention_heads": [2, 4], "window_size": 2, "patch_size": 4}
_STAGES: dict[str, Any] = {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1]}
_STAGE_HEADS: dict[str, Any] = {**_STAGES, "num_attention_heads": [1, 2, 2, 4]}
_OUT: dict[str, Any] = {"out_features": ["stage1", "stage2", "stage3", "stage4"]}
_RESNET = hf.ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic", out_features=["stage2"])
_SMALL_SWIN = hf.SwinConfig(image_size=64, patch_size=4, embed_dim=16, depths=[1] * 4, num_heads=[2, 2, 4, 4], window_size=4, **_OUT)
_DINO = hf.Dinov2Config(**{**_IMAGE, "num_hidden_layers": 4, "image_size": 28, "patch_size": 14}, out_indices=[1, 2, 3, 4],
    reshape_hidden_states=False)
_NECK: dict[str, Any] = {"neck_hidden_sizes": [8, 16, 16, 16], "fusion_hidden_size": 16}
# fmt: on


def hugging(
    name: str, inputs: Callable[[], Inputs], sizes: Mapping[str, Any], /, pick: str = "", part: str = "", **more: Any
) -> Build:  # fmt: skip
    """One of Hugging Face's, by its class, its inputs (first what its class calls the main one) and configuration.

    `part` is which of its modules is wanted, all by default, and `pick` what of the answer, the first by default.
    """

    def build() -> Network:
        kind = getattr(hf, name)
        model = kind(kind.config_class(**{**sizes, **more}))
        model = getattr(model, part) if part else model
        batch = inputs()
        others = [each.replace("sequence", "encoder_hidden_states") for each in batch][1:]

        def run(model: nn.Module, *tensors: Tensor) -> Any:
            named = dict(zip([model.main_input_name, *others], tensors, strict=True))
            answer = model(**named, return_dict=True)
            return tuple(answer[each] for each in pick.split()) if pick else answer[0]

        return Net(run, model), batch

    return build


def text(family: str, suffix: str = "Model", /, *, masked: bool = True, **more: Any) -> Build:
    return hugging(family + suffix, lambda: tokens(masked=masked), {**_LAYERS, **_TEXT}, **more)


def decoder(name: str, length: int, sizes: Mapping[str, Any], **more: Any) -> Build:
    """A decoder, of which so many states of the encoder are an input."""
    return hugging(name, lambda: {**tokens(), **sequence(length)}, sizes, part="decoder", **more)


def seq2seq(family: str) -> Build:
    """An encoder and a decoder, run once."""
    return hugging(
        f"{family}Model", lambda: {**tokens(), "decoder_input_ids": tokens()["input_ids"]}, _BOTH
    )


def vision(name: str, size: int = 32, sizes: Mapping[str, Any] = _IMAGE, /, **more: Any) -> Build:
    return hugging(name, lambda: image(size), sizes, **more)


def speech(family: str) -> Build:
    return hugging(f"{family}Model", lambda: signal(400), _SPEECH)


def sentence(family: str) -> Build:
    """An encoder of sentences: the mean of the tokens that are there, of length one."""

    def build() -> Network:
        model, inputs = text(family)()

        def run(model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
            weights = mask.unsqueeze(-1).float()
            mean = (model(ids, mask) * weights).sum(1) / weights.sum(1).clamp(min=1e-9)
            return F.normalize(mean, dim=1)

        return Net(run, model), inputs

    return build


# --- torchvision ----------------------------------------------------------------------------------------


def seen(build: Callable[[], nn.Module], size: int = 32, pick: str = "") -> Build:
    """A network of torchvision's that looks at an image."""

    def network() -> Network:
        model = build()
        return (Net(lambda m, x: m(x)[pick], model) if pick else model), image(size)

    return network


def _resnet(block: Any = tv.resnet.Bottleneck, **more: Any) -> tv.ResNet:
    return tv.ResNet(block, [1, 1, 1, 1], num_classes=10, **more)


def _narrow(model: nn.Module, width: int) -> nn.Module:
    """Put a small end in the place of one that has most of the weights."""
    model.avgpool = nn.Identity()
    model.classifier = nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, 10))
    return model


def _features() -> nn.Module:
    model = _resnet(replace_stride_with_dilation=[False, True, True])
    return tv._utils.IntermediateLayerGetter(model, {"layer4": "out"})


def _efficientnet(first: Any, width: int, **more: Any) -> nn.Module:
    last = tv.efficientnet.MBConvConfig(4, width, 2, 24, 40, 1)
    settings = [first(1, 3, 1, 16, 16, 1), first(4, 3, 2, 16, 24, 2), last]
    return tv.EfficientNet(settings, 0.2, num_classes=10, **more)


def _convnext() -> nn.Module:
    block = tv.convnext.CNBlockConfig
    return tv.ConvNeXt([block(16, 32, 1), block(32, 64, 1), block(64, None, 1)], num_classes=10)


def _swin(**more: Any) -> nn.Module:
    return tv.SwinTransformer([4, 4], 16, [2, 2], [2, 4], [4, 4], num_classes=10, **more)


def _swin_v2() -> nn.Module:
    kinds = tv.swin_transformer
    return _swin(block=kinds.SwinTransformerBlockV2, downsample_layer=kinds.PatchMergingV2)


def _retinanet_heads() -> Network:
    layers = {"layer2": "0", "layer3": "1", "layer4": "2"}
    body = tv._utils.IntermediateLayerGetter(_resnet(tv.resnet.BasicBlock), layers)
    pyramid = FeaturePyramidNetwork([128, 256, 512], 32)
    head = tv.detection.retinanet.RetinaNetHead(32, 3, 5)

    def run(body: Any, pyramid: Any, head: Any, x: Tensor) -> Any:
        found = head(list(pyramid(body(x)).values()))
        return found["cls_logits"], found["bbox_regression"]

    return Net(run, body, pyramid, head), image(64)


def _raft() -> Network:
    inputs = {"first": torch.randn(2, 3, 128, 128), "second": torch.randn(2, 3, 128, 128)}
    model = tv.optical_flow.raft_small(weights=None)
    return Net(lambda m, a, b: m(a, b, num_flow_updates=2)[-1], model), inputs


def _r3d() -> Network:
    video = tv.video.resnet
    makers = [video.Conv3DSimple, video.Conv2Plus1D, video.Conv3DSimple, video.Conv3DNoTemporal]
    model = video.VideoResNet(video.BasicBlock, makers, [1, 1, 1, 1], video.BasicStem, 10)
    return model, {"video": torch.randn(2, 3, 8, 32, 32)}


# --- our own, for what those above do not have ----------------------------------------------------------


def _conv(inputs: int, outputs: int, stride: int = 1, width: int = 3) -> nn.Module:
    conv = nn.Conv2d(inputs, outputs, width, stride, width // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.SiLU())


class _Halves(nn.Module):
    """YOLOv8's block: halves of the channels, each new one from the last, and all of them joined."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        half = channels // 2
        self.begin, self.inner = _conv(channels, channels, 1, 1), _conv(half, half)
        self.end = _conv(3 * half, channels, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.begin(x).chunk(2, 1)
        return self.end(torch.cat([first, second, second + self.inner(second)], 1))


def _pooled(x: Tensor) -> Tensor:
    """Spatial pyramid pooling: one pooling after the other, all joined."""
    pooled = [x]
    for _ in range(3):
        pooled.append(F.max_pool2d(pooled[-1], 5, 1, 2))
    return torch.cat(pooled, 1)


def _yolo(
    one: Any, two: Any, mix: Any, up: Any, down: Any, low: Any, heads: Any, x: Tensor
) -> Tensor:
    """A detector of YOLOv8's kind: two scales up and down, boxes from distributions of distances, anchors."""
    high = one(x)
    deep = mix(_pooled(two(high)))
    high = up(torch.cat([F.interpolate(deep, scale_factor=2.0, mode="nearest"), high], 1))
    deep = low(torch.cat([down(high), deep], 1))
    maps = [heads[0](high), heads[1](deep)]
    centres, strides = [], []
    for each, stride in zip(maps, (8.0, 16.0), strict=True):
        sides = (torch.arange(each.shape[axis]) + 0.5 for axis in (2, 3))
        rows, columns = torch.meshgrid(*sides, indexing="ij")
        centres.append(torch.stack((columns, rows), -1).reshape(-1, 2))
        strides.append(torch.full((centres[-1].shape[0], 1), stride))
    boxes, classes = torch.cat([each.flatten(2) for each in maps], 2).split((32, 4), 1)
    shares = boxes.reshape(boxes.shape[0], 4, 8, boxes.shape[2]).transpose(1, 2).softmax(1)
    numbers = torch.arange(8, dtype=torch.float32).view(1, -1, 1, 1)
    begin, end = (shares * numbers).sum(1).chunk(2, 1)
    anchors = torch.cat(centres).t().unsqueeze(0)
    begin, end = anchors - begin, anchors + end
    places = torch.cat([(begin + end) / 2, end - begin], 1) * torch.cat(strides).t()
    return torch.cat([places, classes.sigmoid()], 1)


def _unet(down: Any, narrow: Any, up: Any, end: Any, x: Tensor) -> Tensor:
    across = []
    for index, block in enumerate(down):
        x = block(F.max_pool2d(x, 2) if index else x)
        across.append(x)
    for less, block, other in zip(narrow, up, across[-2::-1], strict=True):
        large = F.interpolate(x, size=other.shape[2:], mode="bilinear", align_corners=True)
        x = block(torch.cat([other, less(large)], 1))
    return end(x)


def _denoiser(
    begin: Any, told: Any, norm: Any, conv: Any, down: Any, norm_rows: Any, attend: Any, end: Any, x: Tensor, time: Tensor
) -> Tensor:  # fmt: skip
    """What diffusion runs: an image and a time, group normalisation, attention over places."""
    angles = time[:, None] * torch.exp(torch.arange(8) * (-9.2 / 8))[None]
    step = told(torch.cat([angles.sin(), angles.cos()], 1))[:, :, None, None]
    first = begin(x)
    x = down(first + conv(F.silu(norm(first) + step)))
    rows = norm_rows(x).flatten(2).transpose(1, 2)
    x = x + attend(rows, rows, rows, need_weights=False)[0].transpose(1, 2).reshape(x.shape)
    return end(first + F.interpolate(x, scale_factor=2.0, mode="nearest"))


def _wavenet(begin: Any, layers: Any, across: Any, end: Any, x: Tensor) -> Tensor:
    """Causal convolutions that see ever further, gates, and sums across."""
    x, total = begin(x), 0.0
    for index, (layer, sum_up) in enumerate(zip(layers, across, strict=True)):
        tanh, gate = layer(F.pad(x, (2**index, 0))).chunk(2, 1)
        step = sum_up(tanh.tanh() * gate.sigmoid())
        x, total = x + step, total + step
    return end(F.relu(total))


def recurrent(kind: type[nn.Module], width: int = 16, **more: Any) -> Build:
    """A recurrent layer, of which the whole sequence and the last state are used."""

    def run(cell: nn.Module, end: nn.Module, x: Tensor) -> Any:
        found, state = cell(x)
        last = (state[0] if isinstance(state, tuple) else state).transpose(0, 1)
        return end(found), last

    def build() -> Network:
        return Net(run, kind(32, 16, batch_first=True, **more), nn.Linear(width, 10)), sequence()

    return build


def _enlarged(conv: Any, x: Tensor) -> Tensor:
    large = F.interpolate(x, scale_factor=2.0, mode="bicubic", align_corners=False)
    return large + conv(large)


class _Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def _reflected(inputs: int, outputs: int, stride: int = 1) -> nn.Module:
    conv = nn.Conv2d(inputs, outputs, 3, stride)
    norm = nn.InstanceNorm2d(outputs, affine=True)
    return nn.Sequential(nn.ReflectionPad2d(1), conv, norm, nn.ReLU())


def _experts(gate: Any, experts: Any, x: Tensor) -> Tensor:
    """Two of four experts per token, weighed."""
    share, chosen = gate(x).softmax(-1).topk(2, -1)
    weights = torch.zeros_like(gate(x)).scatter(-1, chosen, share / share.sum(-1, keepdim=True))
    weighed = [each(x) * weights[..., i : i + 1] for i, each in enumerate(experts)]
    return x + torch.stack(weighed).sum(0)


def _points(turn: Any, body: Any, end: Any, x: Tensor) -> Tensor:
    """A cloud of points: turned by a matrix that it has learnt to choose, then the largest of each feature."""
    matrix = turn(x).amax(2).view(-1, 3, 3) + torch.eye(3)
    return end(body(torch.bmm(matrix, x)).max(2)[0]).log_softmax(1)


def _graph(first: Any, second: Any, x: Tensor, joined: Tensor) -> Tensor:
    """Nodes and which of them are joined: attention over neighbours."""
    for layer in (first, second):
        hidden = layer(x)
        scores = F.leaky_relu(torch.einsum("bik,bjk->bij", hidden, hidden), 0.2)
        x = F.elu(scores.masked_fill(joined <= 0, -1e9).softmax(-1) @ hidden)
    return x.mean(1)


def _separator(encode: Any, norm: Any, masks: Any, decode: Any, x: Tensor) -> Tensor:
    """Separates voices: masks over a learnt spectrum, normalised over all of it."""
    found = F.relu(encode(x))
    shares = masks(norm(found)).sigmoid().view(x.shape[0], 2, 16, -1)
    return decode((shares * found.unsqueeze(1)).flatten(0, 1)).view(x.shape[0], 2, -1)


def _forecast(blocks: Any, x: Tensor) -> Tensor:
    """Forecasts a series by what is left of it after each block."""
    mean, deviation = x.mean(1, keepdim=True), x.std(1, keepdim=True) + 1e-5
    left, total = (x - mean) / deviation, 0.0
    for block in blocks:
        back, ahead = block(left).split((24, 6), 1)
        left, total = left - back, total + ahead
    return total * deviation + mean


def _translate(model: Any, source: Tensor, target: Tensor) -> Tensor:
    return model(source, target, tgt_mask=nn.Transformer.generate_square_subsequent_mask(6))


# fmt: off
NETWORKS: dict[str, Build] = {
    # Text.
    "bert": text("Bert"), "gpt2": text("GPT2", n_embd=32, n_layer=2, n_head=4, n_positions=32),
    "distilbert": text("DistilBert", dim=32, n_layers=2, n_heads=4, hidden_dim=64), "roberta": text("Roberta"),
    "albert": text("Albert", embedding_size=16), "mpnet": text("MPNet"), "minilm_sentence": sentence("Bert"),
    "mpnet_sentence": sentence("MPNet"), "electra": text("Electra", embedding_size=16),
    "deberta": text("Deberta", **_C2P),
    "deberta_v2": text("DebertaV2", **_C2P, position_buckets=8, norm_rel_ebd="layer_norm", share_att_key=True),
    "mobilebert": text("MobileBert", embedding_size=16, intra_bottleneck_size=16, num_feedforward_networks=2),
    "squeezebert": text("SqueezeBert", embedding_size=32),
    "convbert": text("ConvBert", embedding_size=16, conv_kernel_size=3), "fnet": text("FNet", masked=False),
    "bert_classifier": text("Bert", "ForSequenceClassification"),
    "roberta_tokens": text("Roberta", "ForTokenClassification"),
    "bert_answers": text("Bert", "ForQuestionAnswering", pick="start_logits end_logits"),
    "gpt_neo": text("GPTNeo", num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], window_size=4),
    "gptj": text("GPTJ", n_embd=32, n_layer=2, n_head=4, rotary_dim=4, n_positions=32), "gpt_neox": text("GPTNeoX"),
    "opt": text("OPT", ffn_dim=64, word_embed_proj_dim=32), "bloom": text("Bloom", n_layer=2, n_head=4),
    "llama": text("Llama", num_key_value_heads=2),
    "llama_next_token": text("Llama", "ForCausalLM", num_key_value_heads=4),
    "mistral": text("Mistral", num_key_value_heads=2, sliding_window=4),
    "qwen2": text("Qwen2", num_key_value_heads=2), "qwen3": text("Qwen3", num_key_value_heads=2, head_dim=8),
    "gemma": text("Gemma", num_key_value_heads=1, head_dim=8),
    "gemma2": text("Gemma2", num_key_value_heads=2, head_dim=8, sliding_window=4), "phi": text("Phi"),
    "phi3": text("Phi3", num_key_value_heads=2), "stablelm": text("StableLm", num_key_value_heads=2),
    "t5_encoder": hugging("T5EncoderModel", tokens, _T5),
    "t5_decoder": decoder("T5Model", 6, _T5, feed_forward_proj="gated-gelu"), "bart": seq2seq("Bart"),
    "marian": seq2seq("Marian"), "pegasus": seq2seq("Pegasus"),
    "clip_text": text("CLIPText", pick="last_hidden_state pooler_output", eos_token_id=63),
    "siglip_text": text("SiglipText", masked=False),
    # Images.
    "clip_vision": vision("CLIPVisionModel", pick="last_hidden_state pooler_output"),
    "siglip_vision": vision("SiglipVisionModel", pick="last_hidden_state pooler_output"), "vit": vision("ViTModel"),
    "deit": vision("DeiTModel"), "beit": vision("BeitModel", use_relative_position_bias=True, use_mask_token=False),
    "dinov2": vision("Dinov2Model"), "swin": vision("SwinModel", **_SWIN), "swinv2": vision("Swinv2Model", **_SWIN),
    "convnext": vision("ConvNextModel", hidden_sizes=[16, 32], depths=[1, 1], num_stages=2),
    "convnextv2": vision("ConvNextV2Model", hidden_sizes=[16, 32], depths=[1, 1], num_stages=2),
    "segformer": vision("SegformerForSemanticSegmentation", **_STAGE_HEADS, decoder_hidden_size=32),
    "mobilevit": vision("MobileViTModel", hidden_sizes=[16, 24, 32], neck_hidden_sizes=[8, 8, 16, 16, 24, 32, 64], patch_size=2),
    "poolformer": vision("PoolFormerModel", **_STAGES, patch_size=7),
    "pvt": vision("PvtModel", **_STAGE_HEADS, patch_size=4),
    "cvt": vision("CvtModel", embed_dim=[8, 16, 32], num_heads=[1, 2, 4], depth=[1, 2, 3]),
    "levit": vision("LevitModel", hidden_sizes=[16, 24, 32], num_attention_heads=[2, 2, 4], depths=[1, 1, 1], key_dim=[8, 8, 8], patch_size=16),
    "yolos": vision("YolosForObjectDetection", image_size=[32, 32], num_detection_tokens=5, use_mid_position_embeddings=False,
        pick="logits pred_boxes"),
    "detr": vision("DetrForObjectDetection", 64, _BOTH, pick="logits pred_boxes", num_queries=10, use_timm_backbone=False,
        use_pretrained_backbone=False, backbone=None, backbone_config=_RESNET),
    "mask2former": vision("Mask2FormerForUniversalSegmentation", 64, {}, pick="class_queries_logits masks_queries_logits",
        backbone_config=_SMALL_SWIN, feature_size=32, mask_feature_size=32, hidden_dim=32, encoder_feedforward_dim=64, encoder_layers=1,
        decoder_layers=2, num_attention_heads=4, dim_feedforward=64, num_queries=8, num_labels=5),
    "maskformer": vision("MaskFormerForInstanceSegmentation", 64, {}, pick="class_queries_logits masks_queries_logits",
        backbone_config=_SMALL_SWIN, fpn_feature_size=32, mask_feature_size=32, num_labels=5,
        decoder_config=hf.DetrConfig(**_BOTH, num_queries=10, use_timm_backbone=False, backbone_config=_RESNET)),
    "dpt": vision("DPTForDepthEstimation", **_NECK, num_hidden_layers=4, backbone_out_indices=[0, 1, 2, 3], is_hybrid=False, backbone_config=None),
    "depth_anything": vision("DepthAnythingForDepthEstimation", 56, _NECK, backbone_config=_DINO, reassemble_hidden_size=32,
        patch_size=14, head_hidden_size=8),
    "upernet": vision("UperNetForSemanticSegmentation", 64, {}, backbone_config=hf.ConvNextConfig(**_STAGES, **_OUT), hidden_size=16,
        auxiliary_in_channels=16, auxiliary_channels=16, num_labels=5, pool_scales=[1, 2]),
    "glpn": vision("GLPNForDepthEstimation", **_STAGE_HEADS, decoder_hidden_size=16),
    # Sound.
    "wav2vec2": speech("Wav2Vec2"), "hubert": speech("Hubert"), "wavlm": speech("WavLM"),
    "data2vec_audio": speech("Data2VecAudio"),
    "whisper_encoder": hugging("WhisperModel", lambda: signal(16, 40), _WHISPER, part="encoder"),
    "whisper_decoder": decoder("WhisperModel", 20, _WHISPER),
    "audio_spectrogram": hugging("ASTModel", lambda: sequence(32, 16), _IMAGE, max_length=32, num_mel_bins=16, frequency_stride=4, time_stride=4),
    # torchvision.
    "tv_resnet": seen(lambda: _resnet(tv.resnet.BasicBlock)), "tv_resnet_bottleneck": seen(_resnet),
    "tv_resnext": seen(lambda: _resnet(groups=8, width_per_group=4)),
    "tv_densenet": seen(lambda: tv.DenseNet(8, (2, 2, 2), 16, num_classes=10)),
    "tv_googlenet": seen(lambda: tv.googlenet(num_classes=10, aux_logits=False, init_weights=False)),
    "tv_inception": seen(lambda: tv.inception_v3(num_classes=10, aux_logits=False, init_weights=False, transform_input=True), 75),
    "tv_squeezenet": seen(lambda: tv.squeezenet1_1(num_classes=10)), "tv_vgg": seen(lambda: _narrow(tv.vgg11(), 512)),
    "tv_vgg_bn": seen(lambda: _narrow(tv.vgg11_bn(), 512)),
    "tv_alexnet": seen(lambda: _narrow(tv.alexnet(), 256), 64),
    "tv_mobilenet_v2": seen(lambda: tv.mobilenet_v2(num_classes=10, width_mult=0.25)),
    "tv_mobilenet_v3_small": seen(lambda: tv.mobilenet_v3_small(num_classes=10)),
    "tv_mobilenet_v3_large": seen(lambda: tv.mobilenet_v3_large(num_classes=10)),
    "tv_efficientnet": seen(lambda: _efficientnet(tv.efficientnet.MBConvConfig, 5)),
    "tv_efficientnet_v2": seen(lambda: _efficientnet(tv.efficientnet.FusedMBConvConfig, 3, last_channel=64)),
    "tv_regnet_x": seen(lambda: tv.regnet_x_400mf(num_classes=10)),
    "tv_regnet_y": seen(lambda: tv.regnet_y_400mf(num_classes=10)),
    "tv_mnasnet": seen(lambda: tv.mnasnet0_5(num_classes=10)),
    "tv_shufflenet": seen(lambda: tv.shufflenet_v2_x0_5(num_classes=10)),
    "tv_vit": seen(lambda: tv.VisionTransformer(32, 8, 2, 4, 32, 64, num_classes=10)), "tv_swin": seen(_swin),
    "tv_swin_v2": seen(_swin_v2), "tv_convnext": seen(_convnext),
    "tv_maxvit": seen(lambda: tv.MaxVit((32, 32), 16, 4, [16, 32], [1, 1], 8, 0.0, num_classes=10)),
    "tv_fcn": seen(lambda: tv.segmentation.FCN(_features(), tv.segmentation.fcn.FCNHead(2048, 5)), pick="out"),
    "tv_deeplab": seen(lambda: tv.segmentation.DeepLabV3(_features(), tv.segmentation.deeplabv3.DeepLabHead(2048, 5)), pick="out"),
    "tv_lraspp": seen(lambda: tv.segmentation.lraspp_mobilenet_v3_large(weights_backbone=None, num_classes=5), pick="out"),
    "tv_retinanet_heads": _retinanet_heads, "tv_raft": _raft, "tv_r3d": _r3d,
    # Our own.
    "lstm": recurrent(nn.LSTM), "lstm_both_ways": recurrent(nn.LSTM, 32, num_layers=2, bidirectional=True),
    "gru": recurrent(nn.GRU), "gru_both_ways": recurrent(nn.GRU, 32, num_layers=2, bidirectional=True),
    "rnn": recurrent(nn.RNN),
    "unet_bilinear": lambda: (Net(
        _unet, nn.ModuleList([_conv(3, 8), _conv(8, 16), _conv(16, 32)]), nn.ModuleList([nn.Conv2d(32, 16, 1), nn.Conv2d(16, 8, 1)]),
        nn.ModuleList([_conv(32, 16), _conv(16, 8)]), nn.Conv2d(8, 3, 1),
    ), image()),
    "yolo": lambda: (Net(
        _yolo, nn.Sequential(_conv(3, 16, 2), _conv(16, 32, 2), _Halves(32), _conv(32, 32, 2)), nn.Sequential(_Halves(32), _conv(32, 32, 2)),
        _conv(128, 32, 1, 1), _Halves(64), _conv(64, 32, 2), _Halves(64), nn.ModuleList(nn.Conv2d(64, 36, 1) for _ in range(2)),
    ), image(64)),
    "denoiser": lambda: (Net(
        _denoiser, nn.Conv2d(3, 16, 3, 1, 1), nn.Sequential(nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 16)), nn.GroupNorm(4, 16),
        nn.Conv2d(16, 16, 3, 1, 1), nn.Conv2d(16, 16, 3, 2, 1), nn.GroupNorm(4, 16), nn.MultiheadAttention(16, 2, batch_first=True),
        nn.Conv2d(16, 3, 3, 1, 1),
    ), {**image(16), "time": torch.rand(2) * 100}),
    "wavenet": lambda: (Net(
        _wavenet, nn.Conv1d(1, 16, 1), nn.ModuleList(nn.Conv1d(16, 32, 2, dilation=2**i) for i in range(3)),
        nn.ModuleList(nn.Conv1d(16, 16, 1) for _ in range(3)), nn.Conv1d(16, 8, 1),
    ), signal(1, 32)),
    "enlarged_bicubic": lambda: (Net(
        _enlarged, nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1), nn.PReLU(16), nn.Conv2d(16, 3, 3, 1, 1)),
    ), image(16)),
    "experts": lambda: (Net(
        _experts, nn.Linear(32, 4), nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Mish(), nn.Linear(32, 32)) for _ in range(4)),
    ), sequence()),
    "points": lambda: (Net(
        _points, nn.Sequential(nn.Conv1d(3, 16, 1), nn.ReLU(), nn.Conv1d(16, 9, 1)),
        nn.Sequential(nn.Conv1d(3, 16, 1), nn.BatchNorm1d(16), nn.ReLU(), nn.Conv1d(16, 32, 1)), nn.Linear(32, 5),
    ), {"points": torch.randn(2, 3, 20)}),
    "graph": lambda: (Net(_graph, nn.Linear(8, 16), nn.Linear(16, 16)), {"nodes": torch.randn(2, 6, 8), "joined": torch.randn(2, 6, 6)}),
    "separator": lambda: (Net(
        _separator, nn.Conv1d(1, 16, 8, 4), nn.GroupNorm(1, 16),
        nn.Sequential(nn.Conv1d(16, 16, 3, padding=1, groups=16), nn.PReLU(), nn.Conv1d(16, 32, 1)), nn.ConvTranspose1d(16, 1, 8, 4),
    ), signal(1, 64)),
    "forecast": lambda: (Net(
        _forecast, nn.ModuleList(nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 30)) for _ in range(3)),
    ), signal(24)),
    "transformer": lambda: (Net(_translate, nn.Transformer(32, 4, 1, 1, 64, batch_first=True)),
        {"source": torch.randn(2, 8, 32), "target": torch.randn(2, 6, 32)}),
    "transformer_encoder": lambda: (nn.TransformerEncoder(
        nn.TransformerEncoderLayer(32, 4, 64, activation="gelu", norm_first=True, batch_first=True), 2, enable_nested_tensor=False,
    ), sequence()),
    "super_resolution": lambda: (nn.Sequential(
        nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 9, 3, padding=1),
        nn.PixelShuffle(3),
    ), image(16, 1)),
    "autoencoder": lambda: (nn.Sequential(
        nn.Conv2d(1, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 49, 16),
        nn.Linear(16, 16 * 49), nn.Unflatten(1, (16, 7, 7)), nn.ConvTranspose2d(16, 8, 3, 2, 1, 1), nn.ReLU(),
        nn.ConvTranspose2d(8, 1, 3, 2, 1, 1), nn.Sigmoid(),
    ), image(28, 1)),
    "generator": lambda: (nn.Sequential(
        nn.Linear(16, 32 * 16), nn.Unflatten(1, (32, 4, 4)), nn.ConvTranspose2d(32, 16, 4, 2, 1, bias=False), nn.BatchNorm2d(16),
        nn.ReLU(), nn.ConvTranspose2d(16, 3, 4, 2, 1), nn.Tanh(),
    ), {"noise": torch.randn(2, 16)}),
    "style": lambda: (nn.Sequential(
        _reflected(3, 8), _reflected(8, 16, 2), _Residual(_reflected(16, 16)), nn.Upsample(scale_factor=2.0), _reflected(16, 8),
        nn.Conv2d(8, 3, 3, padding=1), nn.Tanh(),
    ), image(24)),
    "zfnet": lambda: (nn.Sequential(
        nn.Conv2d(3, 16, 7, 2, 1), nn.ReLU(), nn.MaxPool2d(3, 2, 1), nn.LocalResponseNorm(5, 1e-2),
        nn.Conv2d(16, 32, 5, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1), nn.LocalResponseNorm(5, 1e-2), nn.Conv2d(32, 32, 3, 1, 1), nn.ReLU(),
        nn.Flatten(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10), nn.Softmax(1),
    ), image(48)),
    "table": lambda: (nn.Sequential(
        nn.Linear(12, 32), nn.SELU(), nn.Linear(32, 32), nn.Softsign(), nn.Linear(32, 32), nn.CELU(), nn.Linear(32, 16),
        nn.Softplus(), nn.Linear(16, 16), nn.Hardtanh(), nn.Linear(16, 3), nn.Softmax(1),
    ), {"row": torch.randn(2, 12)}),
}
# fmt: on
