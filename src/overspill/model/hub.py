"""A model on the Hugging Face hub: its config, and its weight files' headers by HTTP ranges, never the weights."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import quote

import httpx

from overspill.model import ModelError
from overspill.model.checkpoint import INDEX, LENGTH_BYTES, MAX_FILE_BYTES, header_length

ENDPOINT = "https://huggingface.co"
SINGLE = "model.safetensors"
TIMEOUT = httpx.Timeout(15.0, connect=5.0)
# Most headers fit; a longer one takes a second request.
FIRST_BYTES = 256 * 1024
PARALLEL = 8


@dataclass(frozen=True, slots=True)
class Repository:
    client: httpx.Client
    repo_id: str
    revision: str

    @property
    def where(self) -> str:
        return f"{self.repo_id} (revision {self.revision})"

    def content(self, name: str) -> bytes | None:
        found = self._get(name, 0, MAX_FILE_BYTES, ranged=False)
        if found is None:
            return None
        content, size = found
        if size > MAX_FILE_BYTES:
            raise ModelError(f"{name} of {self.where} is {size} bytes long, and a few megabytes were expected")
        return content

    def safetensors(self) -> list[str]:
        """The only weight file, if it exists: without an index, the hub's own tools write no other."""
        return [SINGLE] if self._get(SINGLE, 0, LENGTH_BYTES, ranged=True) is not None else []

    def headers(self, names: Sequence[str]) -> Iterator[tuple[bytes, int]]:
        with ThreadPoolExecutor(PARALLEL) as pool:
            yield from pool.map(self._header, names)

    def _header(self, name: str) -> tuple[bytes, int]:
        start, size = self._range(name, 0, FIRST_BYTES)
        length = header_length(start, size, f"{name} of {self.where}")
        header = start[LENGTH_BYTES : LENGTH_BYTES + length]
        if len(header) < length:
            more, _ = self._range(name, len(start), LENGTH_BYTES + length - len(start))
            header += more
        if len(header) < length:
            raise ModelError(
                f"{name} of {self.where}: {len(header)} bytes of its header arrived, and {length} were expected; "
                "try again"
            )
        return header, size

    def _range(self, name: str, start: int, length: int) -> tuple[bytes, int]:
        found = self._get(name, start, length, ranged=True)
        if found is None:
            raise ModelError(f"{INDEX} of {self.where} names {name}, which the repository does not hold; try again")
        return found

    def _get(self, name: str, start: int, length: int, *, ranged: bool) -> tuple[bytes, int] | None:
        """Up to `length` bytes from `start`, and the size of the whole file; None if there is no such file."""
        headers = {"Range": f"bytes={start}-{start + length - 1}"} if ranged else {}
        url = f"/{self.repo_id}/resolve/{quote(self.revision, safe='')}/{quote(name)}"
        with self.client.stream("GET", url, headers=headers) as response:
            if response.status_code == httpx.codes.NOT_FOUND:
                if response.headers.get("X-Error-Code") in ("RepoNotFound", "RevisionNotFound"):
                    raise ModelError(f"the hub knows no {self.where}; check the name and the revision")
                return None
            self._check_status(response, name)
            # A server that ignores ranges sends the file from its beginning; reading stops after the requested part.
            skip = 0 if response.status_code == httpx.codes.PARTIAL_CONTENT else start
            content = _read(response, skip + length)
            return content[skip:], _file_size(response, len(content))

    def _check_status(self, response: httpx.Response, name: str) -> None:
        if response.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            raise ModelError(
                f"the hub does not show {name} of {self.where} to this user ({response.status_code}); if the model is "
                "gated, accept its conditions on its page and set HF_TOKEN, else check the name"
            )
        if not response.is_success:
            raise ModelError(
                f"the hub answered {response.status_code} when asked for {name} of {self.where}; try again later"
            )


@contextmanager
def open_repository(
    repo_id: str, *, revision: str = "main", token: str | None = None, endpoint: str | None = None
) -> Iterator[Repository]:
    # In a compressed response, a range would cover other bytes.
    headers = {"Accept-Encoding": "identity"}
    if token:
        headers["Authorization"] = f"Bearer {token.strip()}"
    # httpx drops the token when a redirect leads to another host, as the hub's do.
    with (
        _explained(repo_id),
        httpx.Client(base_url=endpoint or ENDPOINT, headers=headers, timeout=TIMEOUT, follow_redirects=True) as client,
    ):
        yield Repository(client, repo_id, revision)


def _read(response: httpx.Response, length: int) -> bytes:
    content = bytearray()
    for piece in response.iter_bytes():
        content += piece
        if len(content) >= length:
            break
    return bytes(content[:length])


def _file_size(response: httpx.Response, received: int) -> int:
    """Size of the whole file, from Content-Range (bytes 0-7/1234) or the length of a full response."""
    total = response.headers.get("Content-Range", "").rpartition("/")[2]
    if not total.isdigit() and response.status_code != httpx.codes.PARTIAL_CONTENT:
        total = response.headers.get("Content-Length", "")
    return int(total) if total.isdigit() else received


@contextmanager
def _explained(where: str) -> Iterator[None]:
    try:
        yield
    except httpx.TimeoutException as error:
        raise ModelError(
            f"the hub did not answer within {TIMEOUT.read:g} s when asked for {where}; try again, or give a folder"
        ) from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ModelError(
            f"the hub could not be reached for {where} ({error}); check the network, or give a folder"
        ) from error
