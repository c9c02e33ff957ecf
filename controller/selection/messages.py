"""Applications and feedback to and from the messages of control.proto."""

from __future__ import annotations

import json
from collections.abc import Mapping

from clockwright.errors import BadRequestError, ConfigError, StoreError
from clockwright.foreign import check_name_length
from clockwright.units import SLO_NS_MAX
from clockwright.v1 import control_pb2 as pb
from controller.selection.applications import Applications
from controller.selection.core.application import MODELS_MAX, Application
from controller.selection.core.combination import Rule
from controller.selection.core.journal import FeedbackItem
from controller.selection.live_application import LiveApplication

#: Longest settings of a policy, in JSON: kept for each application, and read in the event loop.
OPTIONS_CHARS_MAX = 64 << 10


def read_application(message: pb.Application) -> Application:
    """Turn a message into settings.

    Raises BadRequestError if a setting is wrong; names the field, what was found and what is expected.
    """
    if len(message.options_json) > OPTIONS_CHARS_MAX:
        raise BadRequestError(
            f"options_json: found {len(message.options_json)} characters, expected {OPTIONS_CHARS_MAX} at most"
        )
    try:
        options = json.loads(message.options_json) if message.options_json else {}
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"options_json: {error}, expected a JSON object") from None
    if not isinstance(options, dict):
        raise BadRequestError(
            f"options_json: found a {type(options).__name__}, expected a JSON object"
        )
    if len(message.models) > MODELS_MAX:
        raise BadRequestError(f"models: found {len(message.models)}, expected {MODELS_MAX} at most")
    for name in ("name", "policy", "combination", "label_output", "probability_output"):
        check_name_length(name, getattr(message, name))
    if message.slo_ns > SLO_NS_MAX:
        raise BadRequestError(
            f"slo_ns: found {message.slo_ns}, expected at most {SLO_NS_MAX}, a day"
        )
    rules = [rule.value for rule in Rule]
    if message.combination and message.combination not in rules:
        raise BadRequestError(
            f"combination: found {message.combination!r}, expected one of {', '.join(rules)}"
        )
    try:
        return Application(
            name=message.name,
            models=tuple(message.models),
            policy=message.policy or "exp4-full",
            options=options,
            slo_ns=message.slo_ns or None,
            default_label=message.default_label if message.HasField("default_label") else None,
            confidence_threshold=message.confidence_threshold,
            combination=Rule(message.combination or "vote"),
            label_output=message.label_output or "label",
            probability_output=message.probability_output or "probabilities",
            cache=not message.no_cache,
        )
    except ConfigError as error:
        raise BadRequestError(str(error)) from None


def write_application(application: Application) -> pb.Application:
    """Turn settings into a message."""
    return pb.Application(
        name=application.name,
        models=application.models,
        policy=application.policy,
        options_json=json.dumps(dict(application.options)) if application.options else "",
        slo_ns=application.slo_ns or 0,
        default_label=application.default_label,
        confidence_threshold=application.confidence_threshold,
        combination=application.combination.value,
        label_output=application.label_output,
        probability_output=application.probability_output,
        no_cache=not application.cache,
    )


def read_feedback(item: pb.FeedbackItem) -> FeedbackItem:
    """Turn a message into feedback; `Applications.feedback` checks the rest.

    Raises BadRequestError if no query has an id of that length.
    """
    check_name_length("query_id", item.query_id)
    kind = item.WhichOneof("verdict")
    return FeedbackItem(
        item.query_id,
        label=item.label if kind == "label" else item.text if kind == "text" else None,
        reward=item.reward if kind == "reward" else None,
    )


async def application_info(
    applications: Applications, running: LiveApplication, context: str
) -> pb.ApplicationInfo:
    """Describe an application, with the weights of a context, or the global ones where it has none.

    Raises StoreError if the weights are not in memory, and the store cannot be read.
    """
    weights, remark = await applications.weights(running, context)
    return _application_info(applications, running, weights, remark)


def application_info_at_hand(
    applications: Applications, running: LiveApplication, context: str
) -> pb.ApplicationInfo:
    """As `application_info`, without waiting: without weights that are not in memory, and with a remark that says so."""
    try:
        weights, remark = applications.weights_at_hand(running, context)
    except StoreError as error:
        info = _application_info(applications, running, {}, str(error))
        del info.weights[:]
        return info
    return _application_info(applications, running, weights, remark)


def _application_info(
    applications: Applications, running: LiveApplication, weights: Mapping[str, float], remark: str
) -> pb.ApplicationInfo:
    counts = running.counts
    return pb.ApplicationInfo(
        application=write_application(running.application),
        revision=running.revision,
        state=applications.state(running).value,
        weights=[
            pb.ModelWeight(
                model=model,
                weight=weights.get(model, 0.0),
                missing=counts.missing[model],
                misfit=running.misfits.get(model, ""),
            )
            for model in running.application.models
        ],
        remark="; ".join(filter(None, [applications.lacks(running), remark])),
        queries=counts.queries,
        defaults=_counts(counts.defaults),
        refusals=_counts(counts.refusals),
        feedbacks=_counts(counts.feedbacks),
        num_contexts=applications.num_contexts(running.application.name),
    )


def _counts(counts: Mapping[str, int]) -> list[pb.ReasonCount]:
    return [pb.ReasonCount(reason=reason, count=counts[reason]) for reason in sorted(counts)]
