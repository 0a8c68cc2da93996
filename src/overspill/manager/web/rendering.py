"""Rendering of pages: templates, formats of numbers and times, and the parts that every page has."""

import shlex
import time
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote

from fastapi import Request
from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup
from starlette.responses import HTMLResponse, Response

from overspill.kv.sizes import format_size
from overspill.manager.errors import ManagerError
from overspill.manager.telemetry.overview import plan_maps
from overspill.manager.web.access import read_cookie, set_cookie
from overspill.manager.web.forms import LABELS
from overspill.manager.web.guards import csrf_token
from overspill.registry.access import new_session_id

STATIC = Path(__file__).parent / "static"
PAGES = (
    ("/", "Dashboard"), ("/models", "Models"), ("/try", "Try it"), ("/activity", "Activity"), ("/runs", "Runs"),
    ("/logs", "Logs"),
    ("/found", "Found"), ("/keys", "Keys"), ("/audit", "Audit"), ("/api", "API"),
)  # fmt: skip
# Sections without a list of their own, and the section that lists their entries.
_LISTED_AT = {"results": "runs", "compare": "runs", "add": "models"}
_MOST_FIELDS = 100


def page(request: Request, template: str, status: int = 200, **values: Any) -> HTMLResponse:
    """Render a whole page; a browser without our cookie gets one, since the CSRF token is made from it."""
    is_tls = getattr(request.state, "is_tls", False)
    known = read_cookie(request.headers.get("cookie"), is_tls=is_tls)
    cookie = known or new_session_id()
    identity = getattr(request.state, "identity", None)
    path = request.url.path
    common = {"path": path, "section": section(path), "pages": PAGES, "token": csrf_token(cookie)}
    text = fragment(template, **common, identity=identity, **values)
    response = HTMLResponse(text, status_code=status)
    if known is None:
        set_cookie(response, cookie, is_tls=is_tls)
    return response


def section(path: str) -> str:
    """Address of the list page that a path belongs to, such as /runs for /results/7."""
    first = path.split("/")[1]
    return f"/{_LISTED_AT.get(first, first)}"


def part(template: str, **values: Any) -> HTMLResponse:
    return HTMLResponse(fragment(template, **values))


def fragment(template: str, **values: Any) -> str:
    return _environment.get_template(template).render(**values)


def redirect(place: str) -> Response:
    """Redirect htmx, which cannot see an HTTP redirect because the browser follows it."""
    return HTMLResponse("", headers={"hx-redirect": place})


async def form_of(request: Request) -> dict[str, str]:
    """Fields of a submitted form; where a name repeats, the last field counts."""
    body = await request.body()
    try:
        return dict(parse_qsl(body.decode("utf-8", "replace"), keep_blank_values=True, max_num_fields=_MOST_FIELDS))
    except ValueError:
        raise ManagerError(
            f"the form has more than {_MOST_FIELDS} fields; no page of the manager has that many"
        ) from None


def shown(value: float | None, unit: str) -> str:
    """The number with its unit, or a dash if it is unknown."""
    if value is None:
        return "–"
    match unit:
        case "bytes":
            return format_size(int(value))
        case "bytes/s":
            return f"{format_size(int(value))}/s"
        case "share":
            return f"{100 * value:.0f} %"
        case "s":
            return f"{1000 * value:.0f} ms" if value < 1 else f"{value:.1f} s"
        case "cores":
            return f"{value:.2f} cores"
    number = f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"
    return f"{number} {unit}".strip()


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def moment(at: float | datetime | None) -> str:
    """The time in UTC; the page's script converts it to the browser's time zone, as for the charts."""
    if at is None:
        return "–"
    when = (at if isinstance(at, datetime) else datetime.fromtimestamp(at, UTC)).astimezone(UTC)
    return Markup(f'<time datetime="{when:%Y-%m-%dT%H:%M:%SZ}">{when:%Y-%m-%d %H:%M:%S} UTC</time>')


def element_id(name: str) -> str:
    """HTML id for a model, whose name may contain slashes and dots."""
    return "m" + sha256(name.encode()).hexdigest()[:12]


_environment = Environment(
    loader=PackageLoader("overspill.manager.web"), autoescape=select_autoescape(default=True),
    undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
)  # fmt: skip
_environment.filters.update(
    shown=shown,
    size=lambda value: shown(value, "bytes"),
    duration=duration,
    ago=lambda at: "never" if at is None else f"{duration(time.time() - at)} ago",
    moment=moment,
    element_id=element_id,
    in_path=lambda text: quote(text, safe="/"),
    plan_maps=plan_maps,
    command=shlex.join,
    labels=lambda names: [LABELS.get(name, name) for name in names],
)
