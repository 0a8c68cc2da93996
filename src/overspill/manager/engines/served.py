"""Under which names an engine serves its model: those that its clients must use."""

import json
from contextlib import suppress

from overspill.manager.engines.upstream import Upstream


async def served_names(upstream: Upstream, url: str, timeout: float) -> tuple[str, ...]:
    """None where it does not say."""
    answer = await upstream.get(url, "/v1/models", timeout)
    with suppress(ValueError, KeyError, TypeError):
        if answer is not None and answer[0] == 200:
            return tuple(str(model["id"]) for model in json.loads(answer[1])["data"])
    return ()
