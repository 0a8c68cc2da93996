"""The pages: server-rendered, kept true by events, without a script of others or a byte from elsewhere."""

from fastapi import APIRouter

from overspill.manager.pages import access, dashboard, found, logs, models, results, trying

router = APIRouter(include_in_schema=False)
for part in (dashboard, models, results, logs, trying, found, access):
    router.include_router(part.router)
