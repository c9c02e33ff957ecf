"""The commands of clients and operators."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from clockwright.cli.applications import print_application, print_applications, settings
from clockwright.cli.flags import Json, ServerFlags, ns, takes_flags
from clockwright.cli.show import (
    plain,
    print_explanation,
    print_json,
    print_models,
    print_released,
    print_status,
    print_wanted,
    show,
)
from clockwright.errors import ConfigError, ModelError, UnknownModelError

models = typer.Typer(no_args_is_help=True, help="Add, list and remove models of a server.")
app = typer.Typer(
    no_args_is_help=True,
    help="Applications: one name for several models, chosen and combined by a policy that learns "
    "from feedback.",
)

workers = typer.Typer(
    no_args_is_help=True, help="How many workers the load needs, and which one may leave."
)

_Model = Annotated[str, typer.Argument(help="Name of the model.")]
_Application = Annotated[str, typer.Argument(help="Name of the application.")]


@models.command("add")
@takes_flags
def add_model(
    folder: Annotated[Path, typer.Argument(help="Folder that contains VERSION/model.onnx.")],
    name: Annotated[
        str | None, typer.Option(help="The model's name; by default the folder's.")
    ] = None,
    replace: Annotated[bool, typer.Option(help="Replace the model of this name.")] = False,
    *,
    to: ServerFlags,
    json: Json = False,
) -> None:
    """Send a model to a server. Returns when it is ready, or fails with the reason."""
    with to.operator() as operator:
        added = operator.add_model(folder, name=name or folder.resolve().name, replace=replace)
    show(added, print_models, as_json=json)


@models.command("list")
@takes_flags
def list_models(*, to: ServerFlags, json: Json = False) -> None:
    """List models: state, predicted times, where they are resident, outcomes of their requests."""
    with to.operator() as operator:
        show(operator.models(), print_models, as_json=json)


@models.command("remove")
@takes_flags
def remove_model(name: _Model, *, to: ServerFlags) -> None:
    """Remove a model; requests that wait for it are refused."""
    with to.operator() as operator:
        operator.remove_model(name)
    print(f"removed {name}")


@models.command("pin")
@takes_flags
def pin_model(
    name: Annotated[str, typer.Argument(help="A model, or the folder name of several copies.")],
    *,
    to: ServerFlags,
    json: Json = False,
) -> None:
    """Keep a model loaded: its weights are never evicted, and are loaded if they are not resident.

    The pin holds until `models unpin`, also when the model is replaced and, with --state, after a restart.
    """
    with to.operator() as operator:
        show(operator.pin_model(name, pinned=True), print_models, as_json=json)


@models.command("unpin")
@takes_flags
def unpin_model(
    name: Annotated[str, typer.Argument(help="A model, or the folder name of several copies.")],
    *,
    to: ServerFlags,
    json: Json = False,
) -> None:
    """Allow the eviction of a pinned model's weights again."""
    with to.operator() as operator:
        show(operator.pin_model(name, pinned=False), print_models, as_json=json)


@models.command("traffic")
@takes_flags
def route_traffic(
    name: _Model,
    shares: Annotated[
        list[str],
        typer.Argument(
            help="VERSION=SHARE, such as 2=10%, of versions or aliases; the others keep the rest. latest=100% gives all to "
            "the highest version that is ready.",
        ),
    ],
    *,
    to: ServerFlags,
    json: Json = False,
) -> None:
    """Share out the requests that name no version among a model's versions."""
    with to.operator() as operator:
        routed = operator.route_model(name, traffic=_read_shares(shares))
        show(routed, print_models, as_json=json)


@models.command("alias")
@takes_flags
def route_alias(
    name: _Model,
    aliases: Annotated[
        list[str],
        typer.Argument(help="ALIAS=VERSION, such as stable=2; ALIAS= removes the alias."),
    ],
    *,
    to: ServerFlags,
    json: Json = False,
) -> None:
    """Give versions of a model names, which clients may use wherever they name a version."""
    with to.operator() as operator:
        routed = operator.route_model(name, aliases=dict(map(_read_pair, aliases)))
        show(routed, print_models, as_json=json)


@models.command("shadow")
@takes_flags
def route_shadow(
    name: _Model,
    share: Annotated[str, typer.Argument(help="VERSION=SHARE, such as 3=5%; 3=0% ends it.")],
    *,
    to: ServerFlags,
    json: Json = False,
) -> None:
    """Send a version copies of a share of the other versions' requests, and drop its answers."""
    with to.operator() as operator:
        routed = operator.route_model(name, shadow=_read_shares([share]))
        show(routed, print_models, as_json=json)


@models.command("rollback")
@takes_flags
def roll_back(name: _Model, *, to: ServerFlags, json: Json = False) -> None:
    """Take back the last change of a model's traffic, aliases or shadow, or of its latest version."""
    with to.operator() as operator:
        show(operator.roll_back_model(name), print_models, as_json=json)


def _read_pair(text: str) -> tuple[str, str]:
    named, sign, value = text.partition("=")
    if not named or not sign:
        raise ConfigError(f"found {text!r}, expected NAME=VALUE")
    return named, value


def _read_shares(texts: Sequence[str]) -> dict[str, float]:
    shares = {}
    for named, value in map(_read_pair, texts):
        try:
            shares[named] = float(value.removesuffix("%")) / (100 if value.endswith("%") else 1)
        except ValueError:
            raise ConfigError(
                f"share of {named}: found {value!r}, expected 10% or 0.1, for example"
            ) from None
    return shares


@models.command("reload")
@takes_flags
def reload_model(name: _Model, *, to: ServerFlags) -> None:
    """Reload a model from the server's models directory; the old one serves until the new one is ready."""
    with to.client() as client:
        client.load_model(name)
        serves = [model for model in client.models() if model.name in (name, f"{name}-0")]
    print(f"reloaded {name}" + "".join(f": version {model.version} serves" for model in serves))


@app.command("add")
@takes_flags
def add_application(
    name: _Application,
    model: Annotated[list[str], typer.Option(help="A model of the application; repeat per model.")],
    policy: Annotated[
        str,
        typer.Option(
            help="exp4-full, exp4 (all models, weighted); exp3, exp3-ix, exp3-s, thompson, epsilon-greedy "
            "(one model per query); static, ab, canary, shadow. `clockwright policies` describes each "
            "with its options."
        ),
    ] = "exp4-full",
    option: Annotated[
        list[str] | None,
        typer.Option(help="NAME=VALUE of the policy, VALUE in JSON; repeat per option."),
    ] = None,
    slo_ms: Annotated[
        float | None, typer.Option(help="SLO of its queries; by default the server's.")
    ] = None,
    default: Annotated[
        int | None,
        typer.Option(
            help="Label to answer if the models give none; without it the query is refused."
        ),
    ] = None,
    threshold: Annotated[float, typer.Option(help="Lowest confidence of an answer.")] = 0.0,
    combination: Annotated[
        str, typer.Option(help="How answers are combined: vote, average, mean (of numbers) or one.")
    ] = "vote",
    label_output: Annotated[str, typer.Option(help="The models' output with the label.")] = "label",
    probability_output: Annotated[
        str, typer.Option(help="The models' output with probabilities, for average.")
    ] = "probabilities",
    cache: Annotated[bool, typer.Option(help="Take answers from the prediction cache.")] = True,
    replace: Annotated[bool, typer.Option(help="Replace the application of this name.")] = False,
    *,
    to: ServerFlags,
    json: Json = False,
) -> None:
    """Add or change an application."""
    wanted = settings(
        name,
        model,
        policy=policy,
        options=option or [],
        slo_ns=0 if slo_ms is None else ns(slo_ms, "--slo-ms"),
        default_label=default,
        confidence_threshold=threshold,
        combination=combination,
        label_output=label_output,
        probability_output=probability_output,
        no_cache=not cache,
    )
    with to.operator() as operator:
        show(operator.put_application(wanted, replace=replace), print_application, as_json=json)


@app.command("list")
@takes_flags
def list_applications(*, to: ServerFlags, json: Json = False) -> None:
    """List applications: outcomes of their queries, and the weights of their models."""
    with to.operator() as operator:
        show(operator.applications(), print_applications, as_json=json)


@app.command("show")
@takes_flags
def show_application(
    name: _Application,
    context: Annotated[
        str,
        typer.Option(help="Context whose weights to show; by default those of all users together."),
    ] = "",
    *,
    to: ServerFlags,
    json: Json = False,
) -> None:
    """Show one application."""
    with to.operator() as operator:
        (info,) = operator.applications(name, context=context)
    show(info, print_application, as_json=json)


@app.command("remove")
@takes_flags
def remove_application(name: _Application, *, to: ServerFlags) -> None:
    """Remove an application with all it has learned; its models stay."""
    with to.operator() as operator:
        operator.remove_application(name)
    print(f"removed {name}")


@app.command("erase")
@takes_flags
def erase_context(
    name: _Application,
    context: Annotated[str, typer.Argument(help="The user, session or tenant.")],
    *,
    to: ServerFlags,
) -> None:
    """Erase what an application learned about a user, session or tenant."""
    with to.operator() as operator:
        erased = operator.erase_context(name, context)
    print(f"erased {context}" if erased else f"{name} knows nothing of {context}")


@app.command("feedback")
@takes_flags
def give_feedback(
    query_id: Annotated[str, typer.Argument(help="The query_id that came with the answer.")],
    label: Annotated[str | None, typer.Option(help="The true label.")] = None,
    reward: Annotated[
        float | None,
        typer.Option(help="How good the answer was, 0 to 1. Policy exp4-full needs labels."),
    ] = None,
    *,
    to: ServerFlags,
    json: Json = False,
) -> None:
    """Send feedback on an answer."""
    from dataclasses import asdict

    from clockwright.client.client import Feedback

    with to.client() as client:
        (outcome,) = client.feedback(Feedback(query_id, label=label, reward=reward))
    if json:
        print_json(asdict(outcome))
    else:
        losses = ", ".join(f"{m} {loss:g}" for m, loss in sorted(outcome.losses.items()))
        more = f"loss of {losses}" if losses else outcome.message
        print(outcome.status + (f": {more}" if more else ""))


@takes_flags
def infer(
    model: Annotated[str, typer.Argument(help="Name of a model or an application.")],
    inputs: Annotated[
        list[str] | None,
        typer.Option("--input", help="NAME=FILE.npy, shape (rows, ...); once per input."),
    ] = None,
    random: Annotated[
        bool, typer.Option("--random", help="Random inputs from a fixed seed.")
    ] = False,
    rows: Annotated[int, typer.Option(help="Rows of random inputs.", min=1)] = 1,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=1,3,224,224: shape of a random input; by default open dimensions after the first are 16."
        ),
    ] = None,
    slo_ms: Annotated[
        float | None, typer.Option(help="SLO of the request; by default the model's.")
    ] = None,
    decide_within_ms: Annotated[
        float | None,
        typer.Option(help="Refuse or promise the request by then; by default when it is certain."),
    ] = None,
    weight: Annotated[
        float | None,
        typer.Option(help="What an answer is worth; that to a usual request is worth 1."),
    ] = None,
    work_ahead_ms: Annotated[
        float | None,
        typer.Option(help="Part of the SLO that its pipeline needs after the answer."),
    ] = None,
    explain: Annotated[bool, typer.Option(help="Explain where the time went.")] = False,
    context: Annotated[
        str,
        typer.Option(help="User, session or tenant for which an application weighs its models."),
    ] = "",
    tenant: Annotated[str, typer.Option(help="Tenant whose share of the GPUs it uses.")] = "",
    version: Annotated[str, typer.Option(help="A version of the model, or an alias.")] = "",
    *,
    to: ServerFlags,
    json: Json = False,
) -> None:
    """Send one request to a model."""
    from clockwright.cli.inference import print_result, random_inputs, read_inputs, read_shapes

    if bool(inputs) == random:
        raise typer.BadParameter(
            "expected either --input NAME=FILE.npy or --random", param_hint="--input"
        )
    with to.client() as client:
        arrays = (
            random_inputs(client.metadata(model), rows=rows, shapes=read_shapes(shape or []))
            if random
            else read_inputs(inputs or [])
        )
        result = client.infer(
            model,
            arrays,
            slo_ms=slo_ms,
            decide_within_ms=decide_within_ms,
            weight=weight,
            work_ahead_ms=work_ahead_ms,
            explain=explain,
            context=context,
            tenant=tenant,
            version=version,
        )
    print_result(result, explain=explain, json=json)


@takes_flags
def status(*, to: ServerFlags, json: Json = False) -> None:
    """Show the state of a server: totals, workers, resident models."""
    with to.operator() as operator:
        totals, workers = operator.status(), operator.workers()
    if json:
        print_json({**plain(totals), "workers": [plain(row) for row in workers]})
    else:
        print_status(totals, workers)


@takes_flags
def explain(
    request_id: Annotated[
        str,
        typer.Argument(
            help="The client's id, or the server's number (request_id in a refusal or an explanation)."
        ),
    ],
    *,
    to: ServerFlags,
    json: Json = False,
) -> None:
    """Explain a recent request: why it was answered, refused or late."""
    with to.operator() as operator:
        show(operator.explain(request_id), print_explanation, as_json=json)


@workers.command("wanted")
@takes_flags
def workers_wanted(
    watch: Annotated[
        bool, typer.Option("--watch", help="Go on, and print each change; JSON on one line each.")
    ] = False,
    *,
    to: ServerFlags,
    json: Json = False,
) -> None:
    """Say how many workers of each kind the load needs by the time that another would be ready."""
    with to.operator() as operator:
        if not watch:
            show(operator.workers_wanted(), print_wanted, as_json=json)
            return
        before = None
        for kinds in operator.watch_workers_wanted():
            if kinds != before:
                show(kinds, print_wanted, as_json=json, indent=None)
            before = kinds


@workers.command("release")
@takes_flags
def release_worker(
    kind: Annotated[str, typer.Option(help="Kind of GPU, as `workers wanted` lists it.")],
    worker: Annotated[
        str, typer.Option(help="Name of a worker; by default the one that is cheapest to lose.")
    ] = "",
    *,
    to: ServerFlags,
    json: Json = False,
) -> None:
    """Drain the worker of a kind that is cheapest to lose. Returns at once; `workers wanted` says when it may go."""
    with to.operator() as operator:
        show(operator.release_worker(kind, worker), print_released, as_json=json)


@takes_flags
def drain(
    worker_id: Annotated[str, typer.Argument(help="Name of a worker, as listed by `status`.")],
    yes: Annotated[
        bool, typer.Option("--yes", help="Do not ask, also if models are left without a worker.")
    ] = False,
    *,
    to: ServerFlags,
) -> None:
    """Take a worker out: it finishes its actions and leaves. Asks first if models are left without a worker."""
    with to.operator() as operator:
        try:
            operator.drain(worker_id, unless_last=not yes)
        except UnknownModelError:
            raise
        except ModelError as error:
            if not sys.stdin.isatty():
                raise ConfigError(f"{error}; --yes drains it all the same") from None
            typer.confirm(f"{error}. Drain it all the same?", abort=True)
            operator.drain(worker_id)
    print(f"worker {worker_id} has left")
