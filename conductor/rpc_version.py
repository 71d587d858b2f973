"""The wire version of this process, and streams of others refused by it."""

from __future__ import annotations

from typing import Any

import grpc

from segue.wire_version import METADATA_KEY, WIRE_VERSION, VersionClaim, wire_refusal

MY_VERSION = VersionClaim(name="the Conductor", wire_version=WIRE_VERSION)
"""Gateways are of one process with it."""


async def refuse_other_versions(context: grpc.aio.ServicerContext[Any, Any]) -> None:
    """End the call with FAILED_PRECONDITION and both versions unless its metadata names this one; none is 0."""
    named = dict(context.invocation_metadata() or ()).get(METADATA_KEY, "")
    version = int(named) if isinstance(named, str) and named.isdecimal() and len(named) < 10 else 0
    refusal = wire_refusal(MY_VERSION, VersionClaim(name="the instance", wire_version=version))
    if refusal is not None:
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, refusal)
