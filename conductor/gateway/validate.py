"""From the fields of a request to parameters that everything below may trust. Pure; every error is an InvalidField that
names the field as the client spelled it, and the limit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from conductor.gateway.request_fields import CheckedRequest, ModelLimits, SamplingFields, pack_token_ids
from segue import limits
from segue.errors import InvalidField
from segue.sampling_params import SamplingParams

SEED_MASK = (1 << 64) - 1
PENALTY_MAX = 2.0
TEMPERATURE_MAX = 2.0
LOGIT_BIAS_ABS_MAX = 100.0
REPETITION_PENALTY_MAX = 100.0


def validate(
    fields: SamplingFields,
    prompt_ids: Sequence[int],
    model: ModelLimits,
    *,
    seed_drawn: int,
    max_tokens_default: int | None = None,
) -> CheckedRequest:
    """Check everything that is known of one prompt and its parameters.

    `seed_drawn` is used when the client gave none. `max_tokens_default` None means: what the model's length leaves.
    """
    tokens_prompt = check_prompt(prompt_ids, model, fields.name_of("prompt"))
    max_tokens = _max_tokens(fields, tokens_prompt, model, max_tokens_default)
    sampling = SamplingParams(
        temperature=_number(fields, "temperature", 1.0, 0.0, TEMPERATURE_MAX),
        top_k=_top_k(fields, model),
        top_p=_number(fields, "top_p", 1.0, 0.0, 1.0, least_excluded=True),
        min_p=_number(fields, "min_p", 0.0, 0.0, 1.0),
        presence_penalty=_number(fields, "presence_penalty", 0.0, -PENALTY_MAX, PENALTY_MAX),
        frequency_penalty=_number(fields, "frequency_penalty", 0.0, -PENALTY_MAX, PENALTY_MAX),
        repetition_penalty=_number(fields, "repetition_penalty", 1.0, 0.0, REPETITION_PENALTY_MAX, least_excluded=True),
        logit_bias=_logit_bias(fields, model),
        seed=_seed(fields, seed_drawn),
        max_tokens=max_tokens,
        min_tokens=_min_tokens(fields, max_tokens),
        stop_token_ids=_stop_token_ids(fields, model),
        ignore_eos=bool(fields.ignore_eos),
        logprobs=_logprobs(fields, "logprobs"),
        prompt_logprobs=_prompt_logprobs(fields, tokens_prompt),
    )
    return CheckedRequest(
        prompt_ids=pack_token_ids(prompt_ids),
        tokens_prompt=tokens_prompt,
        sampling=sampling,
        stops=_stops(fields),
        skip_special_tokens=True if fields.skip_special_tokens is None else fields.skip_special_tokens,
    )


def check_prompt(prompt_ids: Sequence[int], model: ModelLimits, name: str = "prompt") -> int:
    """Length of the prompt in tokens; one token must be left to generate."""
    tokens_prompt = len(prompt_ids)
    if tokens_prompt == 0:
        raise InvalidField(name, "is empty; at least 1 token is needed", code="prompt_empty")
    check_prompt_length(tokens_prompt, model, name)
    least, largest = min(prompt_ids), max(prompt_ids)
    if least < 0 or largest >= model.vocab_size:
        wrong = least if least < 0 else largest
        index = list(prompt_ids).index(wrong)
        raise InvalidField(name, f"token id {wrong} at index {index} is outside of 0 .. {model.vocab_size - 1}")
    return tokens_prompt


def check_prompt_length(
    tokens_prompt: int, model: ModelLimits, name: str = "prompt", *, at_least: bool = False
) -> None:
    """`at_least`: the count is a lower bound, made without tokenising."""
    tokens_max = min(model.max_model_len - 1, limits.PROMPT_TOKENS_MAX)
    if tokens_prompt > tokens_max:
        count = f"at least {tokens_prompt}" if at_least else f"{tokens_prompt}"
        excess = tokens_prompt - tokens_max
        raise InvalidField(
            name,
            f"has {count} tokens, {excess} more than the {tokens_max} that the model's maximum length of "
            f"{model.max_model_len} leaves beside 1 generated token",
            code="context_length_exceeded",
        )


def check_request_id(
    request_id: str, field: str = "request_id", *, bytes_max: int = limits.REQUEST_ID_BYTES_MAX
) -> None:
    _check_name(request_id, field, bytes_max)


def check_priority(priority: int, field: str = "priority") -> None:
    if abs(priority) > limits.PRIORITY_ABS_MAX:
        raise InvalidField(field, f"is {priority}, must be in -{limits.PRIORITY_ABS_MAX} .. {limits.PRIORITY_ABS_MAX}")


def check_tenant(tenant: str, field: str = "tenant") -> None:
    """Empty is the tenant without a name."""
    _check_name(tenant, field, limits.TENANT_BYTES_MAX)


def _check_name(name: str, field: str, bytes_max: int) -> None:
    try:
        size = len(name.encode())
    except UnicodeEncodeError as error:
        raise InvalidField(field, "is not valid Unicode") from error
    if size > bytes_max:
        raise InvalidField(field, f"has {size} bytes, at most {bytes_max} are allowed")
    if not name.isprintable():
        raise InvalidField(field, "holds characters that cannot be printed")


def check_choices(n: int | None, best_of: int | None, prompts: int) -> tuple[int, int]:
    """(choices to answer with, choices to sample) of each prompt."""
    answered = 1 if n is None else n
    sampled = answered if best_of is None else best_of
    if not 1 <= answered <= limits.N_MAX:
        raise InvalidField("n", f"is {answered}, must be in 1 .. {limits.N_MAX}")
    if not answered <= sampled <= limits.N_MAX:
        raise InvalidField("best_of", f"is {sampled}, must be in {answered} (n) .. {limits.N_MAX}")
    if prompts * sampled > limits.SEQUENCES_PER_CALL_MAX:
        name, most = "n" if best_of is None else "best_of", limits.SEQUENCES_PER_CALL_MAX
        raise InvalidField(
            name, f"is {sampled}; {prompts} prompts make {prompts * sampled} sequences, at most {most} are allowed"
        )
    return answered, sampled


def _number(
    fields: SamplingFields, field: str, default: float, least: float, most: float, *, least_excluded: bool = False
) -> float:
    value: float | None = getattr(fields, field)
    if value is None:
        return default
    if not math.isfinite(value):
        raise InvalidField(fields.name_of(field), f"is {value}, must be a finite number")
    if value > most or value < least or (least_excluded and value == least):
        above = f"greater than {least:g}" if least_excluded else f"at least {least:g}"
        raise InvalidField(fields.name_of(field), f"is {value:g}, must be {above} and at most {most:g}")
    return float(value)


def _max_tokens(fields: SamplingFields, tokens_prompt: int, model: ModelLimits, default: int | None) -> int:
    left = model.max_model_len - tokens_prompt
    if fields.max_tokens is None:
        return left if default is None else min(default, left)
    name = fields.name_of("max_tokens")
    if fields.max_tokens < 1:
        raise InvalidField(name, f"is {fields.max_tokens}, must be at least 1")
    if fields.max_tokens > left:
        raise InvalidField(
            name,
            f"is {fields.max_tokens}; with {tokens_prompt} prompt tokens at most {left} fit into the model's maximum "
            f"length of {model.max_model_len}",
            code="context_length_exceeded",
        )
    return fields.max_tokens


def _min_tokens(fields: SamplingFields, max_tokens: int) -> int:
    value = fields.min_tokens or 0
    if not 0 <= value <= max_tokens:
        raise InvalidField(fields.name_of("min_tokens"), f"is {value}, must be in 0 .. {max_tokens} (max_tokens)")
    return value


def _top_k(fields: SamplingFields, model: ModelLimits) -> int:
    """-1 is another spelling of "off"; more than the vocabulary changes nothing."""
    value = fields.top_k
    if value is None or value == -1:
        return 0
    if value < 0:
        raise InvalidField(fields.name_of("top_k"), f"is {value}, must be at least 0 (0 or -1: off)")
    return 0 if value >= model.vocab_size else value


def _seed(fields: SamplingFields, drawn: int) -> int:
    if fields.seed is None:
        return drawn & SEED_MASK
    if not -(1 << 63) <= fields.seed <= SEED_MASK:
        raise InvalidField(fields.name_of("seed"), f"is {fields.seed}, must fit into 64 bits")
    return fields.seed & SEED_MASK


def _logprobs(fields: SamplingFields, field: str) -> int | None:
    value: int | None = getattr(fields, field)
    if value is not None and not 0 <= value <= limits.LOGPROBS_MAX:
        raise InvalidField(fields.name_of(field), f"is {value}, must be in 0 .. {limits.LOGPROBS_MAX}")
    return value


def _prompt_logprobs(fields: SamplingFields, tokens_prompt: int) -> int | None:
    value = _logprobs(fields, "prompt_logprobs")
    if value is not None and tokens_prompt * (value + 1) > limits.PROMPT_SCORES_MAX:
        raise InvalidField(
            fields.name_of("prompt_logprobs"),
            f"is {value}; {tokens_prompt} prompt tokens with 1 + {value} log-probabilities each are more than the "
            f"{limits.PROMPT_SCORES_MAX} that one request may ask for",
        )
    return value


def _logit_bias(fields: SamplingFields, model: ModelLimits) -> dict[int, float]:
    bias: Mapping[int, float] = fields.logit_bias or {}
    name = fields.name_of("logit_bias")
    if len(bias) > limits.LOGIT_BIAS_MAX:
        raise InvalidField(name, f"has {len(bias)} entries, at most {limits.LOGIT_BIAS_MAX} are allowed")
    for token_id, value in bias.items():
        _check_token_id(name, token_id, model)
        if not math.isfinite(value) or abs(value) > LOGIT_BIAS_ABS_MAX:
            limit = f"{-LOGIT_BIAS_ABS_MAX:g} .. {LOGIT_BIAS_ABS_MAX:g}"
            raise InvalidField(name, f"of token {token_id} is {value:g}, must be in {limit}")
    return dict(bias)


def _stop_token_ids(fields: SamplingFields, model: ModelLimits) -> tuple[int, ...]:
    ids = tuple(fields.stop_token_ids or ())
    name = fields.name_of("stop_token_ids")
    if len(ids) > limits.STOP_TOKEN_IDS_MAX:
        raise InvalidField(name, f"has {len(ids)} entries, at most {limits.STOP_TOKEN_IDS_MAX} are allowed")
    for token_id in ids:
        _check_token_id(name, token_id, model)
    return ids


def _stops(fields: SamplingFields) -> tuple[str, ...]:
    stops = tuple(fields.stop or ())
    name = fields.name_of("stop")
    if len(stops) > limits.STOP_STRINGS_MAX:
        raise InvalidField(name, f"has {len(stops)} entries, at most {limits.STOP_STRINGS_MAX} are allowed")
    for index, stop in enumerate(stops):
        if not stop:
            raise InvalidField(f"{name}[{index}]", "is empty")
        size = len(stop.encode(errors="surrogatepass"))
        if size > limits.STOP_STRING_BYTES_MAX:
            limit = limits.STOP_STRING_BYTES_MAX
            raise InvalidField(f"{name}[{index}]", f"has {size} bytes, at most {limit} are allowed")
    return stops


def _check_token_id(name: str, token_id: int, model: ModelLimits) -> None:
    if not 0 <= token_id < model.vocab_size:
        raise InvalidField(name, f"token id {token_id} is outside of 0 .. {model.vocab_size - 1}")
