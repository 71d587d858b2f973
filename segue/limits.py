"""Every maximum of the system, by name, with its reason. Overflow is a rejection with a reason, never growth."""

from __future__ import annotations

KIB = 1024
MIB = 1024 * KIB

BODY_BYTES_MAX = 32 * MIB
"""Largest request body: a 1M-token prompt of ids as JSON is about 8 MB; base64 media is out of scope."""

PROMPT_TOKENS_MAX = 1 << 20
"""Largest prompt that any model may accept, whatever its own maximum says: bounds hash chains and block tables."""

REQUEST_ID_BYTES_MAX = 128
"""Ids appear in every message and log line."""

TENANT_BYTES_MAX = 128
"""A tenant's name is a key of the directory, and part of the salt of every block hash."""

TENANTS_TRACKED_MAX = 16384
"""Tenants with a live request or tokens spent in this minute, per Conductor, and only where tenants have limits: about
4 MB. As many as requests that can be live."""

PROMPTS_PER_CALL_MAX = 128
"""`prompt` lists of the completions API fan out to one request each."""

N_MAX = 16
"""`n` choices (and the `best_of` that they are the best of) share one prompt's pages; each needs a row of the batch."""

SEQUENCES_PER_CALL_MAX = 256
"""Prompts times choices of one call: they arrive at once, and a decode instance runs 64 to 256 rows for everybody."""

STOP_STRINGS_MAX = 16
STOP_STRING_BYTES_MAX = 256
"""Held-back text is bounded by the longest stop string."""

STOP_TOKEN_IDS_MAX = 64

LOGIT_BIAS_MAX = 1024
"""As OpenAI's API documents."""

LOGPROBS_MAX = 20
"""top_logprobs of OpenAI's API."""

PROMPT_SCORES_MAX = 1 << 19
"""Prompt tokens times (1 + `prompt_logprobs`) of one request, which a gateway holds until all are there: about 40 MB,
and as much again as JSON. 25,000 tokens with 20 alternatives, 131,072 tokens with 3."""

QUEUED_REQUESTS_MAX = 4096
"""Requests waiting in one Conductor; each holds its token ids (at most 4 MiB, typically under 32 KiB)."""

LIVE_REQUESTS_MAX = 16384
"""Requests that one gateway owns at once."""

ATTEMPTS_MAX = 5
"""Plans in a row without progress before a request's client is told UNAVAILABLE: one that kills what it touches must
stop."""

PROGRESS_TOKENS = 16
"""An attempt that brought so many tokens did not fail by its request's fault: a long stream outlives many deaths."""

ATTEMPTS_TOTAL_MAX = 64
"""Plans per request in all, progress or not: what one request may cost the cluster is bounded."""

PRIORITY_ABS_MAX = 1000
"""Classes of urgency; each that waits has a queue of its own."""

CONDUCTORS_MAX = 64
"""Conductors that an instance keeps a stream to: each sees every event and books on every instance, so few are many."""

INSTANCES_MAX = 1024
"""Members of one cluster: the design target is 256 with headroom."""

INSTANCE_NAME_CHARS_MAX = 128
"""Names of instances are labels of metrics, and stand in views, messages and log lines."""

GRPC_MESSAGE_BYTES_MAX = 64 * MIB
"""Control messages: the largest is a tokenizer (Gemma's is 33 MB)."""

KV_EVENTS_PER_BATCH_MAX = 4096
"""Events in one published message; a larger batch is split."""

KV_EVENTS_BUFFERED_MAX = 65536
"""Blocks in the events that a worker keeps for range replay, about 8 MB; a larger gap is answered by a snapshot."""

TOKENS_PER_PUSH_MAX = 4096
"""Token deltas in one message to a gateway; steps of more rows are split."""
