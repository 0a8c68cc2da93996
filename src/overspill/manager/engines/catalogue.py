"""The registry's models as the manager knows them: read beside the event loop, and kept for when it cannot be read."""

import asyncio
import logging
import time

from overspill.registry import Model, Registry, RegistryError, list_models

logger = logging.getLogger(__name__)


class Catalogue:
    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.problem = ""
        """Why the registry could not be read the last time."""
        self._models: dict[str, Model] = {}
        self._read_at = float("-inf")
        self._reading = asyncio.Lock()

    def get(self, name: str) -> Model | None:
        return self._models.get(name)

    def names(self) -> list[str]:
        return list(self._models)

    def models(self) -> list[Model]:
        return list(self._models.values())

    async def find(self, name: str) -> Model | None:
        """One that was added a moment ago is found too."""
        asked_at = time.monotonic()
        if name not in self._models:
            async with self._reading:
                if self._read_at < asked_at:  # else it was read for another who asked meanwhile
                    await self._read()
        return self._models.get(name)

    async def refresh(self, older_than_s: float = 0.0) -> None:
        async with self._reading:
            if time.monotonic() - self._read_at >= older_than_s:
                await self._read()

    async def _read(self) -> None:
        began = time.monotonic()
        try:
            models = await asyncio.to_thread(list_models, self.registry)
        except RegistryError as error:
            if str(error) != self.problem:
                logger.warning("Overspill: %s", error)
            self.problem = str(error)
            # Who asked while it was tried does not wait for a try of their own.
            self._read_at = time.monotonic()
        else:
            self.problem = ""
            self._models = {model.name: model for model in models}
            self._read_at = began
