"""What the manager writes to logs, where it may listen, which folders it reads, and the files it ships."""

import hashlib
import json
import logging
import os
import re
from pathlib import Path

import pytest

import overspill.manager
from overspill.manager.allowlist import ModelNotAllowed, confined_source, is_repo_id
from overspill.manager.errors import ManagerError
from overspill.manager.web.server import OneLine, one_line
from overspill.manager.web.setup import Setup, require_protection

VENDOR = Path(overspill.manager.__file__).parent / "web" / "static" / "vendor"


# Logs, addresses, folders


def test_no_client_writes_lines_of_its_own_into_a_log(caplog: pytest.LogCaptureFixture) -> None:
    attack = 'GET /\r\nINFO: key admin logged in\x1b[2J\u202e\u2028\x85"'
    shown = one_line(attack)
    assert shown == r'GET /\r\nINFO: key admin logged in\x1b[2J\u202e\u2028\x85"'
    assert one_line("naïve ✓ 漢字") == "naïve ✓ 漢字"
    assert len(one_line("x" * 10**6)) < 2100
    logger = logging.getLogger("overspill.test")
    logger.addFilter(OneLine())
    logger.warning("%s - %s", "10.0.0.7", attack)
    assert caplog.records[-1].getMessage() == f"10.0.0.7 - {shown}"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.8.8.8"])
def test_loopback_needs_no_protection(host: str) -> None:
    require_protection(Setup(folder=Path(), host=host), is_protected=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "gpu.example.org"])
def test_other_addresses_need_a_key_or_password(host: str) -> None:
    require_protection(Setup(folder=Path(), host=host), is_protected=True)
    with pytest.raises(ManagerError, match=rf"--host {re.escape(host)} .*overspill manager password.* keys add NAME"):
        require_protection(Setup(folder=Path(), host=host), is_protected=False)


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """models/good, a hub cache with a snapshot of links, and secrets beside them."""
    (tmp_path / "models" / "good").mkdir(parents=True)
    (tmp_path / "models" / "good" / "config.json").write_text("{}")
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "config.json").write_text("key")
    (tmp_path / "models-of-others").mkdir()
    snapshot = tmp_path / "hub" / "models--a--b" / "snapshots" / "c0ffee"
    snapshot.mkdir(parents=True)
    (tmp_path / "hub" / "models--a--b" / "blobs").mkdir()
    (tmp_path / "hub" / "models--a--b" / "blobs" / "1").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/1")
    return tmp_path


def confined(folders: Path, source: str) -> str:
    return confined_source(source, [folders / "models"], folders / "hub")


def test_allowed_sources_are_the_hub_the_cache_and_set_folders(folders: Path) -> None:
    good = str(folders / "models" / "good")
    assert confined(folders, "Qwen/Qwen3-8B") == "Qwen/Qwen3-8B"
    assert confined(folders, good) == good
    assert confined(folders, f"{folders}/models/../models/./good/") == good
    (folders / "models" / "link").symlink_to(folders / "models" / "good")
    assert confined(folders, str(folders / "models" / "link")) == good, "kept as what it is"
    snapshot = str(folders / "hub" / "models--a--b" / "snapshots" / "c0ffee")
    assert confined(folders, snapshot) == snapshot


def test_models_come_from_nowhere_else(folders: Path) -> None:
    (folders / "models" / "out").symlink_to(folders / "secret")
    (folders / "models" / "loop").symlink_to(folders / "models" / "loop")
    (folders / "models" / "half").mkdir()
    (folders / "models" / "half" / "config.json").symlink_to(folders / "secret" / "config.json")
    inside = folders / "models"
    for source in (
        str(folders / "secret"), f"{inside}/../secret", f"{inside}/good/../../secret", str(inside / "out"), "/", "/etc",
        str(inside / "loop"), str(inside / "half"), str(inside / "none"), f"{inside}-of-others", f"{inside}/good\0/x",
        str(inside / "good" / "config.json"), "../secret", "~/secret", "~root", "./x", "", "x" * 5000, "a\nb", "..",
        "file:///etc", "a/b/c", "-flag", "--model", "a--b/c", "Qwen/..", "org/name.git", "x" * 97, "s3://bucket/x",
        "\\\\host\\share", "Qwen/Qwen3-8B\x00", "Qwen/Qwen3-8B ", "gпt2",
    ):  # fmt: skip
        with pytest.raises(ModelNotAllowed):
            confined(folders, source)


def test_a_refusal_does_not_tell_what_is_on_the_disk(folders: Path) -> None:
    def said(source: str) -> str:
        with pytest.raises(ModelNotAllowed) as error:
            confined(folders, source)
        return str(error.value).replace(source, "X")

    assert said(str(folders / "secret")) == said(str(folders / "there-is-none"))


def test_a_repo_id_is_not_taken_for_a_folder_in_the_cwd(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folders)
    assert is_repo_id("secret")
    with pytest.raises(ModelNotAllowed, match="the manager's working directory has a folder of that name"):
        confined(folders, "secret")


# Vendored files


def test_vendored_files_match_their_hashes_and_licences() -> None:
    listed: dict[str, str] = {}
    for package in json.loads((VENDOR / "vendor.json").read_text())["packages"]:
        assert package["licence"] in ("0BSD", "MIT") and package["licence_file"] in package["files"]
        assert all(package["version"] in name for name in package["files"])
        listed |= package["files"]
    there = {path.name for path in VENDOR.iterdir()} - {"vendor.json"}
    assert there == set(listed)
    for name, expected in listed.items():
        content = (VENDOR / name).read_bytes()
        assert hashlib.sha256(content).hexdigest() == expected, name
        assert b"sourceMappingURL" not in content
    assert sum(os.path.getsize(VENDOR / name) for name in listed) < 150_000
