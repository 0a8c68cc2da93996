"""Templates, and what every page has: who is there, the token against other sites, and the way to the others."""

from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote

from fastapi import Request
from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from starlette.responses import HTMLResponse

from overspill.manager.errors import ManagerError
from overspill.manager.pages import words
from overspill.manager.security.cookies import new_browser_id, read_cookie, set_cookie
from overspill.manager.security.csrf import csrf_token

STATIC = Path(__file__).parents[1] / "static"
PAGES = (
    ("/", "Dashboard"), ("/models", "Models"), ("/try", "Try it"), ("/runs", "Runs"), ("/logs", "Logs"),
    ("/found", "Found"), ("/audit", "Audit"), ("/api", "API"),
)  # fmt: skip
_MOST_FIELDS = 100

_environment = Environment(
    loader=PackageLoader("overspill.manager"), autoescape=select_autoescape(default=True), undefined=StrictUndefined,
    trim_blocks=True, lstrip_blocks=True,
)  # fmt: skip
_environment.filters.update(
    size=words.size, shown=words.shown, duration=words.duration, ago=words.ago, moment=words.moment,
    element_id=words.element_id, in_path=lambda text: quote(text, safe="/"),
)  # fmt: skip


def fragment(template: str, **values: Any) -> str:
    return _environment.get_template(template).render(**values)


def part(template: str, **values: Any) -> HTMLResponse:
    return HTMLResponse(fragment(template, **values))


def page(request: Request, template: str, status: int = 200, **values: Any) -> HTMLResponse:
    """With a cookie for a browser that has none, since the token is made from it."""
    is_tls = getattr(request.state, "is_tls", False)
    cookie = read_cookie(request.headers.get("cookie"), is_tls=is_tls)
    new = None if cookie is not None else new_browser_id()
    identity = getattr(request.state, "identity", None)
    text = fragment(
        template, path=request.url.path, pages=PAGES, token=csrf_token(cookie or new or ""), identity=identity, **values
    )
    response = HTMLResponse(text, status_code=status)
    if new is not None:
        response.headers.append("set-cookie", set_cookie(new, is_tls=is_tls))
    return response


async def form_of(request: Request) -> dict[str, str]:
    """What a form sent, the last of each name."""
    body = await request.body()
    try:
        return dict(parse_qsl(body.decode("utf-8", "replace"), keep_blank_values=True, max_num_fields=_MOST_FIELDS))
    except ValueError:
        raise ManagerError(f"the form has more than {_MOST_FIELDS} fields; none of this manager's pages has") from None
