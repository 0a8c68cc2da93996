"""The API: everything that the page does, as JSON, documented in /api/openapi.json."""

from fastapi import APIRouter

from overspill.manager.api import engines, found, jobs, logs, machine, models, results

router = APIRouter(prefix="/api")
for part in (models, engines, machine, logs, jobs, results, found):
    router.include_router(part.router)
