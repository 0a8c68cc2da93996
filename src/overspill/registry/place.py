"""The registry's location: OVERSPILL_DATABASE_URL, or a file in the XDG state folder."""

import os
import stat
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from overspill.files import state_folder
from overspill.registry.errors import RegistryError, RegistryUnavailable

VARIABLE = "OVERSPILL_DATABASE_URL"
_ACCEPTED = "accepted are sqlite:////absolute/path.db and postgresql://user@host/database"
_POSTGRESQL = ("postgresql", "postgres", "postgresql+psycopg")
# The only SQLite option that does not affect safety.
_SQLITE_OPTIONS = {"timeout"}
# Closing a file drops all of this process's locks on it, SQLite's too, so it is opened only to create it.
_creating = threading.Lock()


@dataclass(frozen=True, slots=True)
class Place:
    url: URL
    is_default: bool

    @property
    def file(self) -> Path | None:
        """The SQLite file; None for a server."""
        return Path(self.url.database or "") if self.url.get_backend_name() == "sqlite" else None

    def with_wait(self, seconds: float) -> "Place":
        """A copy that waits at most `seconds`; for a server, whole seconds and at least 2, as its library does."""
        name, most = ("timeout", seconds) if self.file is not None else ("connect_timeout", max(2, int(seconds)))
        return replace(self, url=self.url.update_query_dict({name: f"{most:g}"}))

    def __str__(self) -> str:
        """The place for messages, without passwords, which may be in the URL or among its options."""
        if self.file is not None:
            return str(self.file)
        return self.url.set(drivername="postgresql", query={}).render_as_string(hide_password=True)

    def without_password(self, text: str) -> str:
        """Mask passwords in a driver's message, which may repeat parts of the URL."""
        given = [self.url.password, *(value for name, value in self.url.query.items() if "password" in name.lower())]
        for secret in given:
            if secret:
                text = text.replace(str(secret), "***")
        return text


def find_place(url: str | None = None, environ: Mapping[str, str] | None = None) -> Place:
    """The place given by `url`, else by the environment."""
    environ = os.environ if environ is None else environ
    given = (environ.get(VARIABLE) or None) if url is None else url
    if given is None:
        if (folder := state_folder(environ)) is None:
            raise RegistryUnavailable(
                f"there is no home folder to keep the registry in; set XDG_STATE_HOME, or {VARIABLE}"
            )
        return Place(URL.create("sqlite", database=str(folder / "registry.db")), is_default=True)
    return Place(_parse(given), is_default=False)


def prepare_file(place: Place) -> None:
    """Create the file readable by its owner only, unlike SQLite itself, whose other files copy the mode of this one."""
    file = place.file
    if file is None:
        return
    try:
        if place.is_default:
            _private_folder(file.parent)
        with _creating:
            if not os.path.lexists(file):
                os.close(os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        if not os.path.isfile(file):
            raise OSError(0, "it is not a file")
        if not os.access(file, os.R_OK | os.W_OK):
            raise OSError(0, "it may not be read and written")
    except OSError as error:
        raise RegistryUnavailable(
            f"the registry cannot be opened for writing at {file}: {error.strerror}; "
            f"set {VARIABLE} to a database that can be written ({_ACCEPTED})"
        ) from error


def _private_folder(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if stat.S_IMODE(folder.stat().st_mode) & 0o077:
        # An earlier program left the folder readable; another user's folder is not ours to change.
        with suppress(PermissionError):
            folder.chmod(0o700)


def _parse(given: str) -> URL:
    try:
        url = make_url(given)
    except (ArgumentError, ValueError):
        # The text is not repeated: a URL that cannot be parsed may hold a password.
        raise RegistryError(f"{VARIABLE} is not a database's URL; {_ACCEPTED}") from None
    if url.drivername in _POSTGRESQL:
        if not url.database:
            raise RegistryError(f"{VARIABLE} names no database; {_ACCEPTED}")
        return url.set(drivername="postgresql+psycopg")
    if url.drivername != "sqlite":
        raise RegistryError(f"{VARIABLE} is for {url.drivername!r}, which the registry does not support; {_ACCEPTED}")
    if not url.database or url.database == ":memory:" or url.host:
        raise RegistryError(f"{VARIABLE} names no file; {_ACCEPTED}, with four slashes in all")
    if not Path(url.database).is_absolute():
        # A relative path would be another registry in every folder.
        raise RegistryError(f"{VARIABLE}: {url.database} is a relative path; {_ACCEPTED}, with four slashes in all")
    if unknown := sorted(set(url.query) - _SQLITE_OPTIONS):
        raise RegistryError(f"{VARIABLE} has the option {unknown[0]!r}; for SQLite only timeout (seconds) is known")
    try:
        float(str(url.query.get("timeout", "1")))
    except ValueError:
        raise RegistryError(
            f"{VARIABLE}: the timeout {url.query['timeout']!r} is not a number of seconds; write for example timeout=15"
        ) from None
    return url
