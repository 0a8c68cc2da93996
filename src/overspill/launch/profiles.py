"""Memory profiles: what engines were measured to take beside weights and KV, kept in the registry between runs."""

import logging
import os
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache

from overspill.hardware.gpu import Gpu
from overspill.kv.sizes import TiB
from overspill.launch.reference import NoRegistry, has_registry, using_registry
from overspill.launch.vllm import Vllm
from overspill.model.facts import ModelFacts
from overspill.planning.memory import Profile, fingerprint
from overspill.planning.planner import Plan
from overspill.planning.setup import Profiles, Wishes, nothing_measured
from overspill.planning.ways import Way

logger = logging.getLogger(__name__)

# More is not an overhead but a damaged record.
_MOST = TiB
# An engine is starting meanwhile and must not wait long for the database.
_WAIT_S = 5.0


def remember(fingerprint: str, profile: Profile, environ: Mapping[str, str] | None = None) -> None:
    """Store a profile; a failure is only logged. The last of two writers wins with its whole profile."""
    try:
        with using_registry():
            from overspill.registry import open_registry, save_profile

            with open_registry(environ=environ, wait_seconds=_WAIT_S) as registry:
                save_profile(registry, fingerprint, profile)
    except NoRegistry as error:
        logger.warning(
            "Overspill: this run's measurements could not be saved, so plans keep using assumed sizes: %s", error
        )


class Remembered:
    """Profiles that earlier runs measured, for one plan. The registry is opened at first use, never created, and not
    used again after a failure."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        self._environ = os.environ if environ is None else environ
        self._is_usable = has_registry(self._environ)

    def recall(self, fingerprint: str) -> Profile | None:
        """The profile measured for the fingerprint; None if there is none or the registry fails."""
        if not self._is_usable:
            return None
        try:
            with using_registry():
                from overspill.registry import load_profile, open_existing

                if (registry := open_existing(self._environ)) is None:
                    return None
                with registry:
                    found = load_profile(registry, fingerprint)
            sizes = [] if found is None else list(asdict(found).values())
            if not all(0 <= size < _MOST for size in sizes):
                raise NoRegistry(f"sizes of {sizes} for {fingerprint}")
            return found
        except NoRegistry as error:
            self._is_usable = False
            logger.warning(
                "Overspill: measurements of earlier runs cannot be read, so plans use assumed sizes: %s", error
            )
            return None


def remember_profile(plan: Plan, way: Way, profile: Profile, vllm: Vllm) -> None:
    """Store the profile of an engine that followed its plan."""
    key = _key(plan.rank, plan.gpu, plan.wishes, vllm, way.max_num_batched_tokens, way.kv_cache_dtype)
    remember(key, profile)


def measured_profiles(facts: ModelFacts, gpu: Gpu, wishes: Wishes, vllm: Vllm | None) -> Profiles:
    if vllm is None or gpu.is_stated:  # no engine can have run
        return nothing_measured
    remembered = Remembered()
    return cache(lambda chunk, kv_dtype: remembered.recall(_key(facts, gpu, wishes, vllm, chunk, kv_dtype)))


def _key(facts: ModelFacts, gpu: Gpu, wishes: Wishes, vllm: Vllm, chunk: int, kv_cache_dtype: str) -> str:
    return fingerprint(
        facts, gpu, vllm_version=vllm.version, max_num_batched_tokens=chunk, max_num_seqs=wishes.num_seqs,
        enforce_eager=wishes.enforce_eager, kv_cache_dtype=kv_cache_dtype,
    )  # fmt: skip
