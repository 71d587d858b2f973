"""How answers and clusters look in a terminal."""

from __future__ import annotations

from rich.table import Table

from launcher.rpc_client import Cluster, Finished, Instance
from segue.pool_messages import InstanceChange, InstanceState, ScaleDone

SCALE_WORDS = {
    InstanceState.STARTING: "starts",
    InstanceState.READY: "is ready",
    InstanceState.DRAINING: "drains",
    InstanceState.GONE: "is gone",
    InstanceState.FAILED: "failed and is given up",
}


def summary_line(finished: Finished) -> str:
    """TTFT, TPOT, counts, and who served."""
    served = f"P {finished.prefill_instance or '-'}  D {finished.decode_instance or '-'}"
    tpot_us = finished.tpot_us
    parts = [
        f"TTFT {finished.first_token_us / 1000:.1f} ms",
        f"TPOT {'-' if tpot_us is None else f'{tpot_us / 1000:.1f} ms'}",
        f"{finished.tokens_generated} tokens ({finished.reason})",
        f"prompt {finished.tokens_prompt}, cached {finished.tokens_cached}",
        served,
    ]
    if finished.request_id:
        parts.append(finished.request_id)
    if finished.attempts > 1:
        parts.append(f"{finished.attempts} attempts")
    return " | ".join(parts)


def scale_line(pool: str, event: InstanceChange | ScaleDone) -> str:
    match event:
        case ScaleDone(instances=count):
            return f"{count} {pool} {'instance serves' if count == 1 else 'instances serve'}"
        case InstanceChange(reason=""):
            return f"{event.name} {SCALE_WORDS[event.state]}"
        case InstanceChange():
            return f"{event.name} {SCALE_WORDS[event.state]}: {event.reason}"


def cluster_table(cluster: Cluster) -> Table:
    """At most 80 columns wide for one model: the model has a column only where instances differ in it."""
    several_models = len({instance.model for instance in cluster.instances}) > 1
    table = Table(title=_title(cluster), title_justify="left", box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for column in ("instance", "role", "state", *(("model",) if several_models else ())):
        table.add_column(column, no_wrap=True)
    for column in ("run", "wait", "tokens\nqueued", "pages\nused", "\ncached", "\nheld", "\nfree", "pre-\nempted"):
        table.add_column(column, justify="right")
    for instance in sorted(cluster.instances, key=lambda one: (one.role, one.name)):
        table.add_row(*_row(instance, several_models))
    return table


def _title(cluster: Cluster) -> str:
    models = ", ".join(f"{model.name} (up to {model.max_model_len} tokens)" for model in cluster.models) or "no model"
    return f"Segue {cluster.version}: {models}; {cluster.requests_live} live requests, {cluster.requests_queued} queued"


def _row(instance: Instance, with_model: bool) -> tuple[str, ...]:
    counts = (
        instance.running,
        instance.waiting,
        instance.tokens_queued,
        instance.pages_active,
        instance.pages_cached,
        instance.pages_held + instance.pages_quarantined,
        instance.pages_free,
        instance.preemptions,
    )
    model = (instance.model,) if with_model else ()
    return (instance.name, instance.role, instance.state, *model, *(str(count) for count in counts))
