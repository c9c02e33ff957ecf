"""Makes models as their exporters write them: `python make_zoo.py FOLDER`, in an environment of its own.

`zoo_requirements.txt` next to it names the exporters, and `experiments.bench.zoo` makes the environment. Weights are random,
from fixed seeds, and trees are fitted to random rows: what is tried is the form of the files.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import catboost
import keras
import lightgbm
import numpy as np
import onnx
import onnxmltools
import torch
import transformers
import xgboost
from onnxmltools.convert.common.data_types import FloatTensorType as MlFloats
from onnxruntime import quantization as quant
from onnxruntime.transformers.float16 import convert_float_to_float16
from onnxruntime.transformers.optimizer import optimize_model
from skl2onnx import to_onnx
from skl2onnx.common.data_types import FloatTensorType, StringTensorType
from sklearn import (
    compose,
    datasets,
    decomposition,
    feature_extraction,
    linear_model,
    naive_bayes,
    pipeline,
    preprocessing,
    svm,
    tree,
)
from sklearn.utils import all_estimators
from torch import nn

#: Writes one model to a path.
Maker = Callable[[Path], object]

torch.manual_seed(0)  # networks below are made as this is read
X, LABELS = datasets.make_classification(120, 6, n_informative=4, n_classes=3, random_state=0)
X, NUMBERS = X.astype(np.float32), X @ np.arange(6)
BINARY = (LABELS > 0).astype(int)
COLORS = np.array(["red", "green", "blue"])[LABELS]
TEXTS = np.array([f"the {color} cat number {row % 7}" for row, color in enumerate(COLORS)])


# --- trees and tables -------------------------------------------------------------------------------

#: By name, the estimator, and what it needs to be small or to be exported.
CLASSIFIERS = """
logreg LogisticRegression, sgd SGDClassifier, perceptron Perceptron, ridge_clf RidgeClassifier, linear_svc LinearSVC, svc SVC,
nu_svc NuSVC, calibrated CalibratedClassifierCV, gaussian_nb GaussianNB, bernoulli_nb BernoulliNB, knn KNeighborsClassifier,
tree DecisionTreeClassifier, forest RandomForestClassifier, extra_trees ExtraTreesClassifier,
boosting GradientBoostingClassifier, ada AdaBoostClassifier, bagging BaggingClassifier, mlp MLPClassifier,
lda LinearDiscriminantAnalysis, qda QuadraticDiscriminantAnalysis, one_vs_rest OneVsRestClassifier, voting VotingClassifier,
stacking StackingClassifier
"""
OTHERS = """
linear LinearRegression, bayesian_ridge BayesianRidge, huber HuberRegressor, lasso Lasso, svr SVR, knn_reg KNeighborsRegressor,
forest_reg RandomForestRegressor, boosting_reg GradientBoostingRegressor, mlp_reg MLPRegressor,
gaussian_process GaussianProcessRegressor, pls PLSRegression, multi_output MultiOutputRegressor, scaler StandardScaler,
min_max MinMaxScaler, robust RobustScaler, normalizer Normalizer, polynomial PolynomialFeatures, bins KBinsDiscretizer,
power PowerTransformer, pca PCA, svd TruncatedSVD, kmeans KMeans, mixture GaussianMixture, isolation IsolationForest,
outlier_factor LocalOutlierFactor, one_class OneClassSVM, imputer SimpleImputer, k_best SelectKBest
"""
_PARTS = [("a", linear_model.LogisticRegression()), ("b", naive_bayes.GaussianNB())]
NEEDS: dict[str, Any] = {
    "sgd": {"loss": "log_loss"},
    "nu_svc": {"nu": 0.2},
    "calibrated": {"estimator": svm.LinearSVC(), "cv": 2},
    "qda": {"reg_param": 0.1},
    "one_vs_rest": {"estimator": linear_model.LogisticRegression()},
    "voting": {"estimators": _PARTS, "voting": "soft", "flatten_transform": False},
    "stacking": {"estimators": _PARTS, "cv": 2},
    "multi_output": {"estimator": linear_model.Ridge()},
    "bins": {"n_bins": 4, "encode": "onehot-dense"},
    "mixture": {"reg_covar": 1e-3},
    "outlier_factor": {"novelty": True},
    "k_best": {"k": 2},
}
FEW = {"n_estimators": 9, "n_components": 2, "n_clusters": 3, "hidden_layer_sizes": (8,)}


def estimators(words: str) -> Iterator[tuple[str, Any]]:
    """Make the estimators of a list."""
    kinds = dict(all_estimators())
    for name, kind in map(str.split, words.split(",")):
        model = kinds[kind](**NEEDS.get(name, {}))
        few = {key: value for key, value in FEW.items() if key in model.get_params(deep=False)}
        yield name, model.set_params(**few)


def write_sklearn(model: Any, path: Path, *, labels: Any = LABELS, **options: Any) -> None:
    """Fit a model of scikit-learn and write it as skl2onnx does where nothing else is said."""
    model.fit(X, labels)
    opsets = {"": 21, "ai.onnx.ml": 3}
    path.write_bytes(to_onnx(model, X[:1], target_opset=opsets, **options).SerializeToString())


def write_columns(path: Path, *, texts: bool) -> None:
    """Write a pipeline of columns, some of them texts."""
    import pandas

    frame = pandas.DataFrame({"a": X[:, 0], "b": X[:, 1], "color": COLORS if texts else X[:, 2]})
    chosen = preprocessing.OneHotEncoder(handle_unknown="ignore") if texts else "passthrough"
    columns = compose.ColumnTransformer(
        [("n", preprocessing.StandardScaler(), ["a", "b"]), ("c", chosen, ["color"])]
    )
    model = pipeline.make_pipeline(columns, linear_model.LogisticRegression()).fit(frame, LABELS)
    last = StringTensorType([None, 1]) if texts else FloatTensorType([None, 1])
    types = [("a", FloatTensorType([None, 1])), ("b", FloatTensorType([None, 1])), ("color", last)]
    path.write_bytes(to_onnx(model, initial_types=types).SerializeToString())


def write_texts(model: Any, path: Path, rows: Any) -> None:
    """Write a model of one column of texts."""
    model.fit(rows, LABELS)
    types = [("text", StringTensorType([None, 1]))]
    # onnxruntime fails where a machine lacks the locale that it would take.
    words = {id(each): {"locale": "C"} for _, each in getattr(model, "steps", [])[:1]}
    path.write_bytes(to_onnx(model, initial_types=types, options=words).SerializeToString())


def write_boosted(model: Any, path: Path, convert: Any, labels: Any, **options: Any) -> None:
    """Fit and convert a model of LightGBM or XGBoost."""
    model.fit(X, labels)
    onnx.save(convert(model, initial_types=[("input", MlFloats([None, 6]))], **options), path)


def write_catboost(model: Any, path: Path, labels: Any) -> None:
    """Fit and write a model of CatBoost."""
    model.fit(X, labels, silent=True)
    model.save_model(str(path), format="onnx")


def tables() -> Iterator[tuple[str, Maker]]:
    """Models of rows of numbers or texts."""
    for name, model in estimators(CLASSIFIERS):
        yield f"sk_{name}", partial(write_sklearn, model)
    steps = preprocessing.StandardScaler(), decomposition.PCA(3), svm.SVC(probability=True)
    yield "sk_pipe", partial(write_sklearn, pipeline.make_pipeline(*steps))
    for name, model in estimators(OTHERS):
        targets = np.stack([NUMBERS] * 2, 1) if name in ("multi_output", "pls") else NUMBERS
        is_class = name == "k_best"
        yield f"sk_{name}", partial(write_sklearn, model, labels=LABELS if is_class else targets)
    plain: dict[str, Any] = {"options": {"zipmap": False}}
    yield "sk_logreg_plain", partial(write_sklearn, linear_model.LogisticRegression(), **plain)
    yield (
        "sk_logreg_columns",
        partial(write_sklearn, linear_model.LogisticRegression(), options={"zipmap": "columns"}),
    )
    yield "sk_text_labels", partial(write_sklearn, tree.DecisionTreeClassifier(), labels=COLORS)
    yield "sk_columns_numbers", partial(write_columns, texts=False)
    yield "sk_columns_texts", partial(write_columns, texts=True)
    column = TEXTS[:, np.newaxis]
    yield "sk_one_hot", partial(write_texts, preprocessing.OneHotEncoder(), rows=column)
    yield "sk_ordinal", partial(write_texts, preprocessing.OrdinalEncoder(), rows=column)
    for name, words in (
        ("tfidf", feature_extraction.text.TfidfVectorizer()),
        ("counts", feature_extraction.text.CountVectorizer()),
    ):
        model = pipeline.make_pipeline(words, linear_model.LogisticRegression())
        yield f"sk_{name}", partial(write_texts, model, rows=TEXTS)
    light, boosted = onnxmltools.convert_lightgbm, onnxmltools.convert_xgboost
    few: dict[str, Any] = {"n_estimators": 9}
    quiet: dict[str, Any] = {**few, "verbose": -1}
    kinds: tuple[tuple[str, Any, Any, Any, dict[str, Any]], ...] = (
        ("lgbm", lightgbm.LGBMClassifier(**quiet), light, LABELS, {}),
        ("lgbm_plain", lightgbm.LGBMClassifier(**quiet), light, LABELS, {"zipmap": False}),
        ("lgbm_binary", lightgbm.LGBMClassifier(**quiet), light, BINARY, {}),
        ("lgbm_reg", lightgbm.LGBMRegressor(**quiet), light, NUMBERS, {}),
        ("xgb", xgboost.XGBClassifier(**few), boosted, LABELS, {}),
        ("xgb_binary", xgboost.XGBClassifier(**few), boosted, BINARY, {}),
        ("xgb_reg", xgboost.XGBRegressor(**few), boosted, NUMBERS, {}),
        ("xgb_forest", xgboost.XGBRFRegressor(**few), boosted, NUMBERS, {}),
    )
    for name, model, convert, labels, options in kinds:
        yield name, partial(write_boosted, model, convert=convert, labels=labels, **options)
    # It would leave a folder where it runs.
    trees: dict[str, Any] = {"iterations": 9, "allow_writing_files": False}
    for name, model, labels in (
        ("cat", catboost.CatBoostClassifier(**trees), LABELS),
        ("cat_binary", catboost.CatBoostClassifier(**trees), BINARY),
        ("cat_reg", catboost.CatBoostRegressor(**trees), NUMBERS),
    ):
        yield name, partial(write_catboost, model, labels=labels)


# --- torch, both exporters --------------------------------------------------------------------------


class PartsModule(nn.Module):  # type: ignore[misc]  # torch is not type-checked
    """A module of a function and the parts that it uses."""

    def __init__(self, function: Callable[..., Any], *parts: nn.Module) -> None:
        super().__init__()
        self.parts, self.function = nn.ModuleList(parts), function

    def forward(self, *inputs: Any) -> Any:
        """PartsModule the function."""
        return self.function(*self.parts, *inputs)


def floats(*shape: int) -> torch.Tensor:
    """Random numbers."""
    return torch.randn(shape)


def mlp(*, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A small network of rows."""
    return nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3), nn.Softmax(-1)).to(dtype)


def images() -> nn.Module:
    """A small network of images of any size."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5),
    )  # fmt: skip


def unet() -> nn.Module:
    """Down, up, and past that."""
    down, up = nn.Conv2d(3, 8, 3, 2, 1), nn.ConvTranspose2d(8, 8, 2, 2)
    last = nn.Conv2d(11, 2, 1)
    return PartsModule(lambda d, u, e, x: e(torch.cat([u(d(x).relu()), x], 1)), down, up, last)


def encoder() -> nn.Module:
    """Attention over rows of any length."""
    return nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)


BATCH, BATCH_TIME, BATCH_HW = {0: "batch"}, {0: "batch", 1: "time"}, {0: "batch", 2: "h", 3: "w"}
#: By name: module, inputs, and the open dimensions of each input.
TORCH: dict[str, tuple[Any, tuple[Any, ...], tuple[Any, ...]]] = {
    "mlp": (mlp(), (floats(2, 6),), (BATCH,)),
    "mlp_fixed": (mlp(), (floats(2, 6),), ({},)),
    "mlp_f64": (mlp(dtype=torch.float64), (floats(2, 6).double(),), (BATCH,)),
    "mlp_f16": (mlp(dtype=torch.float16), (floats(2, 6).half(),), (BATCH,)),
    "mlp_bf16": (mlp(dtype=torch.bfloat16), (floats(2, 6).bfloat16(),), (BATCH,)),
    "images": (images(), (floats(2, 3, 32, 32),), (BATCH,)),
    "images_one": (images(), (floats(1, 3, 32, 32),), ({},)),
    "images_open": (images(), (floats(2, 3, 32, 32),), (BATCH_HW,)),
    "unet": (unet(), (floats(2, 3, 32, 32),), (BATCH,)),
    "conv1d": (nn.Sequential(nn.Conv1d(2, 4, 3), nn.GroupNorm(2, 4), nn.GELU()), (floats(2, 2, 32),), (BATCH,)),
    "encoder": (encoder(), (floats(2, 10, 16),), (BATCH_TIME,)),
    "lstm": (nn.LSTM(4, 8, batch_first=True, bidirectional=True), (floats(2, 10, 4),), (BATCH,)),
    "lstm_states": (
        nn.LSTM(4, 8, 2), (floats(10, 2, 4), (floats(2, 2, 8), floats(2, 2, 8))), ({1: "batch"}, ({1: "batch"}, {1: "batch"})),
    ),
    "gru": (nn.GRU(4, 8, batch_first=True), (floats(2, 10, 4),), (BATCH,)),
    "embedding": (PartsModule(lambda e, f, x: f(e(x).mean(1)), nn.Embedding(50, 8), nn.Linear(8, 2)), (torch.randint(0, 50, (2, 7)),), (BATCH_TIME,)),
    "two_inputs": (PartsModule(lambda f, x, y: f(x) * y, nn.Linear(6, 4)), (floats(2, 6), floats(2, 4)), (BATCH, BATCH)),
    "scalar_input": (PartsModule(lambda f, x, t: f(x) / t, nn.Linear(6, 4)), (floats(2, 6), torch.tensor(0.7)), (BATCH, {})),
    "scalar_output": (PartsModule(lambda f, x: f(x).square().mean(), nn.Linear(6, 4)), (floats(2, 6),), (BATCH,)),
    "kept": (PartsModule(lambda f, x: x[f(x).squeeze(-1) > 0], nn.Linear(6, 1)), (floats(8, 6),), ({0: "n"},)),
    "top": (PartsModule(lambda f, x: (*f(x).topk(2), x > 0), nn.Linear(6, 4)), (floats(2, 6),), (BATCH,)),
    "similarity": (PartsModule(lambda f, x: f(x) @ f(x).T, nn.Linear(6, 4)), (floats(2, 6),), (BATCH,)),
    "batch_statistics": (PartsModule(lambda f, x: (y := f(x)) - y.mean(0), nn.Linear(6, 4)), (floats(2, 6),), (BATCH,)),
    "noise": (PartsModule(lambda f, x: f(x) + torch.randn_like(x), nn.Linear(6, 6)), (floats(2, 6),), (BATCH,)),
    "constant": (PartsModule(lambda f, x: (f(x), torch.arange(7.0)), nn.Linear(6, 4)), (floats(2, 6),), (BATCH,)),
}  # fmt: skip


def write_torch(
    module: Any,
    inputs: Any,
    opened: Any,
    path: Path,
    *,
    names: Any = None,
    dynamo: bool = True,
) -> None:
    """Export a module; `opened` names the open dimensions of each input."""
    module = module.eval()
    names = names or [f"x{index}" for index in range(len(_flat(inputs)))]
    options: dict[str, Any] = {"input_names": names}
    axes = {name: each for name, each in zip(names, _flat(opened), strict=True) if each}
    with torch.no_grad():
        if dynamo:
            torch.onnx.export(module, inputs, path, dynamic_shapes=_dims(opened, isinstance(module, PartsModule)), dynamo=True, verbose=False, **options)  # fmt: skip
        else:
            torch.onnx.export(module, inputs, str(path), dynamic_axes=axes, dynamo=False, **options)


def _flat(inputs: Any) -> list[Any]:
    return [x for each in inputs for x in (_flat(each) if isinstance(each, tuple) else [each])]


def _dims(opened: Any, is_call: bool) -> Any:
    auto = torch.export.Dim.DYNAMIC

    def of(each: Any) -> Any:
        return tuple(map(of, each)) if isinstance(each, tuple) else dict.fromkeys(each, auto)

    found = tuple(map(of, opened))
    return (found,) if is_call else found


def torches() -> Iterator[tuple[str, Maker]]:
    """Networks as both of torch's exporters write them."""
    for name, (module, inputs, opened) in TORCH.items():
        for way in ("dynamo", "script") if name != "encoder" else ("dynamo",):
            is_new = way == "dynamo"
            yield f"pt_{name}_{way}", partial(write_torch, module, inputs, opened, dynamo=is_new)


# --- transformers -----------------------------------------------------------------------------------

SMALL = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 99,
    "max_position_embeddings": 64, "image_size": 32, "patch_size": 8, "attn_implementation": "eager",
    "num_key_value_heads": 2, "type_vocab_size": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "head_dim": 8,
}  # fmt: skip
#: By name: configuration, class, what else is small.
ENCODERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("BertConfig", "BertModel", {}),
    "bert_classes": ("BertConfig", "BertForSequenceClassification", {"num_labels": 3}),
    "bert_words": ("BertConfig", "BertForMaskedLM", {}),
    "roberta": ("RobertaConfig", "RobertaModel", {}),
    "distilbert": ("DistilBertConfig", "DistilBertModel", {"dim": 32, "hidden_dim": 64, "n_heads": 4, "n_layers": 2}),
    "electra": ("ElectraConfig", "ElectraModel", {"embedding_size": 16}),
    "albert": ("AlbertConfig", "AlbertModel", {"embedding_size": 16}),
    "mpnet": ("MPNetConfig", "MPNetModel", {}),
    "deberta": ("DebertaV2Config", "DebertaV2Model", {}),
    "mobilebert": ("MobileBertConfig", "MobileBertModel", {"embedding_size": 32, "intra_bottleneck_size": 32, "true_hidden_size": 32}),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64, "use_cache": False}),
    "opt": ("OPTConfig", "OPTForCausalLM", {"ffn_dim": 64, "word_embed_proj_dim": 32, "use_cache": False}),
    "llama": ("LlamaConfig", "LlamaForCausalLM", {"use_cache": False}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {"use_cache": False}),
    "t5": ("T5Config", "T5EncoderModel", {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}),
}  # fmt: skip
SEEING: dict[str, tuple[str, str, dict[str, Any]]] = {
    "vit": ("ViTConfig", "ViTForImageClassification", {}),
    "deit": ("DeiTConfig", "DeiTModel", {}),
    "convnext": ("ConvNextConfig", "ConvNextForImageClassification", {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}),
    "resnet": ("ResNetConfig", "ResNetForImageClassification", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}),
    "mobilenet": ("MobileNetV2Config", "MobileNetV2ForImageClassification", {"depth_multiplier": 0.35}),
    "segformer": ("SegformerConfig", "SegformerForSemanticSegmentation", {"hidden_sizes": [8, 16], "depths": [1, 1], "num_encoder_blocks": 2, "num_attention_heads": [1, 2], "sr_ratios": [2, 1], "patch_sizes": [7, 3], "strides": [4, 2], "mlp_ratios": [2, 2], "decoder_hidden_size": 16}),
}  # fmt: skip
SOUNDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "wav2vec2": ("Wav2Vec2Config", "Wav2Vec2ForCTC", {"conv_dim": [16, 16], "conv_stride": [5, 4], "conv_kernel": [10, 8], "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2}),
}  # fmt: skip


def _chosen(config: str, kind: str, more: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    chosen = getattr(transformers, config)(**{**SMALL, **more})
    model: nn.Module = getattr(transformers, kind)(chosen)
    return model


def write_encoder(spec: Any, path: Path, *, dynamo: bool) -> None:
    """Write a model of tokens and their mask."""
    model = _chosen(*spec)
    module = PartsModule(
        lambda m, i, a: m(input_ids=i, attention_mask=a, return_dict=True)[0], model
    )
    tokens = torch.randint(3, 99, (2, 12))
    inputs, opened = (tokens, torch.ones_like(tokens)), ({0: "batch", 1: "sequence"},) * 2
    names = ["input_ids", "attention_mask"]
    write_torch(module, inputs, opened, path, names=names, dynamo=dynamo)


class CachedModule(nn.Module):  # type: ignore[misc]  # torch is not type-checked
    """A decoder that takes the keys and values of what it has seen, and gives them with its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Any, mask: Any, *seen: Any) -> Any:
        """Give the scores, and a key and a value per layer."""
        cache = transformers.DynamicCache()
        for layer in range(len(seen) // 2):
            cache.update(*seen[2 * layer : 2 * layer + 2], layer)
        places = (mask.cumsum(-1) - 1)[:, -tokens.shape[1] :]
        found = self.model(
            input_ids=tokens, attention_mask=mask, position_ids=places, past_key_values=cache
        )
        pairs = [
            each for layer in found.past_key_values.layers for each in (layer.keys, layer.values)
        ]
        return found.logits, *pairs


def write_cached(spec: Any, path: Path, *, heads: int) -> None:
    """Write a decoder with its cache, its sizes named as Hugging Face's exporter names them."""
    config, kind, more = spec
    tokens = torch.randint(3, 99, (2, 3))
    seen = [floats(2, heads, 5, 8) for _ in range(4)]
    names = ["input_ids", "attention_mask"]
    names += [f"past_key_values.{layer}.{each}" for layer in range(2) for each in ("key", "value")]
    own, past = "sequence_length", "past_sequence_length"
    opened = [{0: "batch_size", 1: own}, {0: "batch_size", 1: f"{past} + {own}"}]
    opened += [{0: "batch_size", 2: past}] * 4
    inputs = (tokens, torch.ones(2, 8, dtype=torch.long), *seen)
    module = CachedModule(_chosen(config, kind, {**more, "use_cache": True}))
    write_torch(module, inputs, tuple(opened), path, names=names, dynamo=False)


def write_seeing(spec: Any, path: Path, *, sound: bool) -> None:
    """Write a model of images or sounds."""
    module = PartsModule(lambda m, x: m(x, return_dict=True)[0], _chosen(*spec))
    sample, axes = (
        (floats(2, 800), {0: "batch", 1: "samples"}) if sound else (floats(2, 3, 32, 32), BATCH)
    )
    write_torch(module, (sample,), (axes,), path, names=["input_values"], dynamo=not sound)


def hugging() -> Iterator[tuple[str, Maker]]:
    """Networks of transformers, with random weights."""
    for name, spec in ENCODERS.items():
        yield f"hf_{name}", partial(write_encoder, spec, dynamo=True)
        if name in ("bert", "roberta", "distilbert", "electra", "gpt2", "t5", "bert_classes"):
            yield f"hf_{name}_script", partial(write_encoder, spec, dynamo=False)
    for name, heads in (("gpt2", 4), ("llama", 2), ("qwen2", 2)):
        yield f"hf_{name}_cached", partial(write_cached, ENCODERS[name], heads=heads)
    for sound, group in ((False, SEEING), (True, SOUNDS)):
        for name, spec in group.items():
            yield f"hf_{name}", partial(write_seeing, spec, sound=sound)


# --- Keras, and onnxruntime's tools -----------------------------------------------------------------


def keras_models() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Networks of Keras."""
    layers = keras.layers
    yield (
        "mlp",
        lambda: keras.Sequential(
            [keras.Input((6,)), layers.Dense(16, "relu"), layers.Dense(3, "softmax")]
        ),
    )
    yield "cnn", lambda: keras.Sequential([
        keras.Input((16, 16, 3)), layers.Conv2D(8, 3), layers.BatchNormalization(), layers.ReLU(), layers.GlobalAveragePooling2D(), layers.Dense(4),
    ])  # fmt: skip
    yield "embedding", lambda: keras.Sequential([
        keras.Input((12,), dtype="int32"), layers.Embedding(50, 8), layers.Conv1D(8, 3), layers.GlobalMaxPooling1D(), layers.Dense(2),
    ])  # fmt: skip
    yield "upsampling", lambda: keras.Sequential([
        keras.Input((8, 8, 3)), layers.Conv2DTranspose(4, 3, 2), layers.UpSampling2D(), layers.Conv2D(1, 1),
    ])  # fmt: skip
    yield "lstm", lambda: keras.Sequential([keras.Input((10, 4)), layers.LSTM(8), layers.Dense(2)])
    yield (
        "mobilenet",
        lambda: keras.applications.MobileNetV2((32, 32, 3), 0.35, weights=None, classes=5),
    )

    def wide_and_deep() -> Any:
        one, other = keras.Input((6,), name="wide"), keras.Input((4,), name="deep")
        joined = layers.concatenate([one, layers.Dense(8, "relu")(other)])
        return keras.Model([one, other], [layers.Dense(2)(joined), layers.Dense(1)(joined)])

    yield "wide_and_deep", wide_and_deep


def write_keras(make: Callable[[], Any], path: Path) -> None:
    """Export as Keras does."""
    keras.utils.set_random_seed(0)
    model = make()
    rows = [np.ones((2, *each.shape[1:]), each.dtype) for each in model.inputs]
    model(rows)  # or it does not export
    model.export(str(path), format="onnx", verbose=False)


class Rows(quant.CalibrationDataReader):  # type: ignore[misc]  # nor is onnxruntime
    """Random rows to calibrate with."""

    def __init__(self, **arrays: Any) -> None:
        self._rows = iter([arrays] * 3)

    def get_next(self) -> Any:
        """Give the next rows; None: there are no more."""
        return next(self._rows, None)


def write_static(path: Path, source: Path, rows: Any, **options: Any) -> None:
    """Quantise with calibration."""
    quant.quantize_static(source, path, Rows(x0=rows.numpy()), **options)


def write_blocks(path: Path, source: Path, bits: int) -> None:
    """Quantise the weights of products in blocks."""
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    quantizer = MatMulNBitsQuantizer(onnx.load(source), block_size=16, bits=bits)
    quantizer.process()
    quantizer.model.save_model_to_file(str(path), False)


def tools(made: Callable[[str], Path]) -> Iterator[tuple[str, Maker]]:
    """What onnxruntime's tools make of other models; `made` tells where they are."""
    rows, image = floats(4, 6), floats(2, 3, 32, 32)
    dynamic, kind, form = quant.quantize_dynamic, quant.QuantType, quant.QuantFormat
    for name, source in (
        ("mlp", "pt_mlp_script"), ("bert", "hf_bert_script"), ("gpt2", "hf_gpt2_script"), ("lstm", "pt_lstm_script"),
    ):  # fmt: skip
        yield f"q_{name}_dynamic", partial(_quantise, dynamic, made(source))
    bert, unsigned = made("hf_bert_script"), partial(dynamic, weight_type=kind.QUInt8)
    yield "q_bert_uint8", partial(_quantise, unsigned, bert)
    ways: dict[str, Any] = {
        "qdq": {},
        "operators": {"quant_format": form.QOperator},
        "channels": {"per_channel": True},
        "16": {"activation_type": kind.QUInt16},
    }
    for name, sample in (("mlp", rows), ("images", image)):
        static = partial(write_static, source=made(f"pt_{name}_script"), rows=sample)
        for way, options in ways.items():
            yield f"q_{name}_{way}", partial(static, **options)
    for bits in (4, 8):
        yield f"q_bert_blocks_{bits}", partial(write_blocks, source=bert, bits=bits)
    for name in ("hf_bert_script", "pt_images_script", "sk_forest_reg"):
        yield f"f16_{name}", partial(_change, convert_float_to_float16, made(name))
    for kind_name in ("bert", "gpt2"):
        yield f"fused_{kind_name}", partial(_fuse, kind_name, made(f"hf_{kind_name}_script"))


def _quantise(how: Any, source: Path, path: Path) -> None:
    how(source, path)


def _change(how: Any, source: Path, path: Path) -> None:
    onnx.save(how(onnx.load(source)), path)


def _fuse(kind: str, source: Path, path: Path) -> None:
    fused = optimize_model(str(source), kind, num_heads=4, hidden_size=32)
    fused.save_model_to_file(str(path))


def main() -> int:
    """Write all models. Returns how many exporters failed."""
    folder, failed = Path(sys.argv[1]), 0

    def made(name: str) -> Path:
        return folder / name / "1" / "model.onnx"

    kerases = ((f"keras_{name}", partial(write_keras, make)) for name, make in keras_models())
    for makers in (tables(), torches(), hugging(), kerases, tools(made)):
        for name, maker in makers:
            if made(name).exists():
                continue
            made(name).parent.mkdir(parents=True, exist_ok=True)
            torch.manual_seed(0)
            np.random.seed(0)
            try:
                maker(made(name))
            except Exception:  # whatever exporters raise
                failed += 1
                print(f"{name} failed: {traceback.format_exc(limit=-1)}", file=sys.stderr)
                for each in made(name).parent.iterdir():
                    each.unlink()
                made(name).parent.rmdir()
                made(name).parent.parent.rmdir()
    return failed


if __name__ == "__main__":
    main()
