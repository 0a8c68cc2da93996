"""Flag over environment over file over default, and each value knows which it was."""

from pathlib import Path
from typing import Any

import pytest

from overspill.settings import SETTINGS, GivenBy, SettingsError, config_path, parse_settings, resolve


def written(folder: Path, text: str) -> Path:
    path = folder / "config.toml"
    path.write_text(text)
    return path


def test_precedence_is_flag_environment_file_default(tmp_path: Path) -> None:
    file = written(tmp_path, 'port = 1\nram = "1GiB"\ngpu_memory = "3GiB"\n')
    environment = {"OVERSPILL_PORT": "2", "OVERSPILL_RAM": "2GiB"}
    values = resolve({"port": "3"}, environment, file)
    assert [(values[n].value, values[n].origin) for n in ("port", "ram", "gpu_memory", "host")] == [
        (3, GivenBy.FLAG),
        (2 << 30, GivenBy.ENVIRONMENT),
        (3 << 30, GivenBy.FILE),
        ("127.0.0.1", GivenBy.DEFAULT),
    ]
    assert values["port"].place == "--port" and values["ram"].place == "OVERSPILL_RAM"
    assert str(file) in values["gpu_memory"].place


def test_every_setting_has_a_value_without_anything_given() -> None:
    values = resolve({}, {}, None)
    assert set(values) == {setting.name for setting in SETTINGS}
    assert all(value.origin is GivenBy.DEFAULT for value in values.values())


def test_a_missing_file_sets_nothing(tmp_path: Path) -> None:
    assert resolve({}, {}, tmp_path / "none.toml")["port"].origin is GivenBy.DEFAULT


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("131072", 131072), ("128k", 131072), ("52K", 53248), ("1m", 1 << 20), (4096, 4096), ("32_768", 32768)],
)
def test_lengths_as_people_write_them(text: object, tokens: int) -> None:
    assert resolve({"max_model_len": text}, {}, None)["max_model_len"].value == tokens


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("max_model_len", "0", "not a number of tokens"),
        ("max_model_len", "-1", "not a number of tokens"),
        ("max_model_len", "many", "not a number of tokens"),
        ("max_model_len", "12.5k", "not a number of tokens"),
        ("max_model_len", True, "not a number of tokens"),
        ("ram", "-1GiB", "is not a size"),
        ("ram", "64", "64 without a unit is 64 bytes; write for example 64GiB"),
        ("ram", "24 gigs", "is not a size"),
        ("gpu_memory", "", "is not a size"),
        ("port", "0", "ports are 1 to 65535"),
        ("port", "65536", "ports are 1 to 65535"),
        ("port", "http", "ports are 1 to 65535"),
        ("force", "maybe", "write true or false"),
        ("enforce_eager", "2", "write true or false"),
        ("device", "gpu", "is none of auto, cuda, cpu"),
        ("dtype", "fp8", "is none of auto, bfloat16"),
        ("max_num_seqs", "0", "write for example 64"),
        ("max_num_seqs", "-4", "write for example 64"),
        ("max_num_batched_tokens", "0", "not a number of tokens"),
        ("offload_ram", "-1GiB", "is not a size"),
        ("ram_reserve", "0.5", "0.5 without a unit is 0 bytes; write for example 0.5GiB"),
        ("host", "", "must not be empty"),
    ],
)
def test_a_wrong_value_is_refused_with_its_place(name: str, given: Any, said: str) -> None:
    flag = "--" + name.replace("_", "-")
    with pytest.raises(SettingsError) as refused:
        resolve({name: given}, {}, None)
    assert str(refused.value).startswith(f"{flag}: ") and said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_wrong_value_in_the_environment_or_the_file_names_it(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="OVERSPILL_PORT: 'x' is not a port"):
        resolve({}, {"OVERSPILL_PORT": "x"}, None)
    with pytest.raises(SettingsError, match=r"config\.toml: port: -1 is not a port"):
        resolve({}, {}, written(tmp_path, "port = -1"))


def test_a_bare_number_in_the_file_is_not_taken_for_bytes(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"config\.toml: ram: 3 without a unit is 3 bytes; write for example 3GiB"):
        resolve({}, {}, written(tmp_path, "ram = 3"))


def test_a_bare_number_in_a_file_of_models_is_not_taken_for_bytes() -> None:
    with pytest.raises(SettingsError, match=r"m\.yaml: ram: 64 without a unit is 64 bytes; write for example 64GiB"):
        parse_settings({"ram": 64}, where="m.yaml")
    assert parse_settings({"ram": 64 * 2**30, "offload_ram": 0}, where="m.yaml") == {
        "ram": 64 * 2**30,
        "offload_ram": 0,
    }


def test_words_that_yaml_takes_for_something_else_are_understood() -> None:
    assert parse_settings({"drafts": False})["drafts"] == "off"
    with pytest.raises(SettingsError, match="False is not a name for a variant; put the name in quotes"):
        parse_settings({"variants": {False: {"chat_template_kwargs": {"enable_thinking": False}}}})


def test_a_models_own_setting_in_the_file_names_its_place(tmp_path: Path) -> None:
    """It was taken for a misspelt `port`."""
    with pytest.raises(
        SettingsError, match="ttl is a setting of a model; set it with: overspill models edit NAME --ttl"
    ):
        resolve({}, {}, written(tmp_path, 'ttl = "10m"'))


def test_misspelt_names_are_refused_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="no variable OVERSPILL_PROT; did you mean OVERSPILL_PORT"):
        resolve({}, {"OVERSPILL_PROT": "1"}, None)
    with pytest.raises(SettingsError, match="no setting 'gpu_mem'; did you mean gpu_memory"):
        resolve({}, {}, written(tmp_path, 'gpu_mem = "1GiB"'))


def test_a_file_that_is_not_toml_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="is not TOML"):
        resolve({}, {}, written(tmp_path, "port: 1"))
    (tmp_path / "config.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(SettingsError, match="cannot be read"):
        resolve({}, {}, tmp_path / "config.toml")


def test_where_the_file_is() -> None:
    assert config_path({"OVERSPILL_CONFIG": __file__}) == Path(__file__)
    with pytest.raises(SettingsError, match=r"OVERSPILL_CONFIG names /a/b.toml, and there is no such file"):
        config_path({"OVERSPILL_CONFIG": "/a/b.toml"})
    assert config_path({"XDG_CONFIG_HOME": "/x"}) == Path("/x/overspill/config.toml")
    assert config_path({}) == Path.home() / ".config/overspill/config.toml"


def test_a_user_without_a_home_has_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended in a traceback."""
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    assert config_path({}) is None and resolve({}, {}, None)["port"].origin is GivenBy.DEFAULT


def test_every_setting_is_described() -> None:
    assert all(len(setting.help) > 15 for setting in SETTINGS)
