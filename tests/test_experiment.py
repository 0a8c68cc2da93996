"""What is compared, and in which order: configurations and experiments as they are written; without any engine."""

import json
import re
from datetime import UTC, datetime
from typing import Any

import pytest

from overspill.errors import CannotServe
from overspill.measure import MeasureError
from overspill.measure.ab import is_last_of_life, remaining, schedule
from overspill.measure.configuration import (
    PEERS,
    Configuration,
    read_configuration,
    read_configurations,
    read_peer,
    require_usable,
)
from overspill.measure.experiment import Experiment, require_same, written_configurations
from overspill.measure.trial import Step
from tests.experiments import definition

# Configurations.


def transfer_config(configuration: Configuration) -> dict[str, Any]:
    assert configuration.peer is not None
    name, value = configuration.peer.words
    assert name == "--kv-transfer-config"
    return dict(json.loads(value))


def test_flags_are_settings_of_overspill_and_flags_of_vllm() -> None:
    read = read_configuration("a", "--ram 8GiB --max-model-len 128k --block-size 32 --enforce-eager")
    assert read.is_planned and read.peer is None and read.label == "a"
    assert read.settings == {"ram": "8GiB", "max_model_len": "128k", "enforce_eager": True}
    assert read.vllm_args == ("--block-size", "32")
    assert read_configuration("a", "overspill").is_planned
    assert read_configuration("a", "overspill --ram 8GiB").settings == {"ram": "8GiB"}


def test_weights_in_ram_can_be_compared_with_and_without_a_plan() -> None:
    """Seed commands of weight offload: none and 4 GiB, and UVA against prefetch."""
    assert read_configuration("a", "--cpu-offload-gb 0").vllm_args == ("--cpu-offload-gb", "0")
    plain = read_configuration("b", "vllm --cpu-offload-gb 4")
    assert not plain.is_planned and plain.peer is None and plain.vllm_args == ("--cpu-offload-gb", "4")
    prefetch = read_configuration("c", "vllm --offload-backend prefetch --offload-group-size 4")
    assert prefetch.vllm_args == ("--offload-backend", "prefetch", "--offload-group-size", "4")


@pytest.mark.parametrize(
    ("text", "connector", "extra"),
    [
        ("native:8GiB", "OffloadingConnector", {"cpu_bytes_to_use": 8 << 30}),
        ("simple:1GiB", "SimpleCPUOffloadConnector", {"cpu_bytes_to_use": 1 << 30, "lazy_offload": False}),
        ("simple-eager:1GiB", "SimpleCPUOffloadConnector", {"cpu_bytes_to_use": 1 << 30, "lazy_offload": False}),
        ("simple-lazy:1GiB", "SimpleCPUOffloadConnector", {"cpu_bytes_to_use": 1 << 30, "lazy_offload": True}),
        ("overspill-eager:64MiB,verify=all", "OverspillConnector",
         {"host_bytes": 64 << 20, "store": "eager", "verify": "all"}),
        ("overspill-lazy:64MiB,reserve_bytes=0", "OverspillConnector",
         {"host_bytes": 64 << 20, "store": "lazy", "reserve_bytes": 0}),
        ("lmcache:2GiB", "LMCacheConnectorV1", {}),
    ],
)  # fmt: skip
def test_a_peer_is_vllm_with_its_connector(text: str, connector: str, extra: dict[str, Any]) -> None:
    read = read_configuration("b", f"{text} --block-size 32")
    assert not read.is_planned and read.vllm_args == ("--block-size", "32")
    config = transfer_config(read)
    assert config["kv_connector"] == connector and config["kv_role"] == "kv_both"
    assert config["kv_connector_extra_config"] == extra


def test_vllm_and_overspill_accept_what_peers_are_made_of() -> None:
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from overspill.kv import plugin
    from overspill.kv.options import Options

    plugin.register()
    for name, peer in PEERS.items():
        if peer.connector is None:
            continue
        config = transfer_config(read_configuration("a", f"{name}:1GiB"))
        KVTransferConfig(**config)
        assert config["kv_connector"] in KVConnectorFactory._registry, name
        if name.startswith("overspill"):
            assert Options.parse(config["kv_connector_extra_config"]).host_bytes == 1 << 30


def test_lmcache_is_sized_by_environment_and_must_be_installed() -> None:
    settings = read_peer("lmcache:2GiB")
    assert settings.environment == {"LMCACHE_LOCAL_CPU": "True", "LMCACHE_MAX_LOCAL_CPU_SIZE": "2"}
    with pytest.raises(MeasureError, match="pip install lmcache"):
        require_usable(settings, on_cpu=False)


@pytest.mark.parametrize("name", [name for name, peer in PEERS.items() if peer.needs_gpu])
def test_peers_that_need_a_gpu_are_refused_on_a_cpu(name: str) -> None:
    """vLLM would say so too, half a minute later and less clearly."""
    with pytest.raises(CannotServe, match=f"{name} needs a GPU.* on a CPU there are none, overspill-eager"):
        require_usable(read_peer(f"{name}:1GiB"), on_cpu=True)


def test_none_is_vllm_alone() -> None:
    read = read_configuration("a", "none")
    assert read.label == "none" and read.peer is not None and read.peer.words == ()


@pytest.mark.parametrize(
    ("text", "label", "rest"),
    [
        ("small = --ram 8GiB", "small", "--ram 8GiB"),
        ("no offload=none", "no offload", "none"),
        ("<script>alert(1)</script> = none", "<script>alert(1)</script>", "none"),
        ("vllm --block-size=32", "k", "vllm --block-size=32"),
        ("--ram=8GiB", "k", "--ram=8GiB"),
        ("overspill-lazy:8GiB,verify=all", "overspill-lazy", "overspill-lazy:8GiB,verify=all"),
        ("x = overspill-lazy:8GiB,verify=all", "x", "overspill-lazy:8GiB,verify=all"),
    ],
)
def test_a_label_ends_with_an_equals_sign(text: str, label: str, rest: str) -> None:
    read = read_configuration("k", text)
    assert (read.label, read.text) == (label, rest)


def test_a_configurations_own_flags_override_common_flags() -> None:
    both = read_configurations(
        [("a", "none --max-num-seqs 4"), ("b", "--ram 8GiB")], "--max-model-len 4k --max-num-seqs 2 --block-size 32"
    )
    assert both[0].vllm_args == ("--max-model-len", "4096", "--block-size", "32", "--max-num-seqs", "4")
    assert both[1].settings == {"max_model_len": "4k", "max_num_seqs": "2", "ram": "8GiB"}
    assert both[1].vllm_args == ("--block-size", "32")


def test_vllm_gets_numbers_without_a_suffix() -> None:
    """vLLM reads 4k as 4000."""
    assert read_configuration("a", "vllm --max-model-len 4k").vllm_args == ("--max-model-len", "4096")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("   ", "is empty"),
        ("natve:8GiB", "did you mean native?"),
        ("native", "native needs the RAM that it may use; write for example native:8GiB"),
        ("native:", "write for example native:8GiB"),
        ("native:8GiX", "is not a size"),
        ("native:0", "needs some RAM"),
        ("native:8GiB,eviction", "is not an option; write option=value"),
        ("none:8GiB", "takes no size"),
        ("native:8GiB --kv-transfer-config {}", "sets --kv-transfer-config itself"),
        ("vllm 4", "write flags of overspill serve"),
        ("8GiB", "there is no peer '8GiB'"),
        ("--ram 8GiX", "--ram: '8GiX' is not a size"),
        ("--max-model-len many", "--max-model-len: 'many' is not a number of tokens"),
        ("vllm --max-model-len 4.5k", "--max-model-len: '4.5k' is not a number of tokens"),
        ("vllm --ram 8GiB", "--ram is a setting of Overspill's plan, and vllm is vLLM without a plan"),
        ("none --gpu-memory 8GiB", "with a plan, or give this one vLLM's own --gpu-memory-utilization"),
        ("none --weights-ram 8GiB", "with a plan, or give this one vLLM's own --cpu-offload-gb"),
        ("--port 8000", "--port cannot be used here: servers listen on 127.0.0.1"),
        ("vllm --host 0.0.0.0", "--host cannot be used here"),
        ("vllm --model other", "--model cannot be used here"),
        ("vllm --config x.yaml", "--config cannot be used here"),
        ("--api-key secret", "set VLLM_API_KEY in the environment"),
        ("vllm --hf_token secret", "set HF_TOKEN in the environment"),
        ("vllm --hf-to=secret", "set HF_TOKEN in the environment"),
        ("vllm --otlp-traces-endpoint http://u:p@h", "would put a secret into the results; leave out the secret"),
        ("vllm --x 'open", "cannot be split into words"),
        (f"{'x' * 80} = none", "at most 60 printable characters"),
        ("a\x07b = none", "at most 60 printable characters"),
    ],
)
def test_a_mistake_in_a_configuration_is_named(text: str, message: str) -> None:
    with pytest.raises(MeasureError, match=re.escape(message)):
        read_configuration("a", text)


@pytest.mark.parametrize("text", ["--api-key hunter2", "--api-key=hunter2 'open", "what --api-key hunter2 'open"])
def test_a_secret_is_not_repeated_in_the_message(text: str) -> None:
    with pytest.raises(MeasureError) as caught:
        read_configuration("a", text)
    assert "hunter2" not in str(caught.value)


def test_two_configurations_at_least_and_no_two_of_one_name() -> None:
    with pytest.raises(MeasureError, match="nothing to compare"):
        read_configurations([("a", "none")])
    with pytest.raises(MeasureError, match="two configurations are called 'native'"):
        read_configurations([("a", "native:1GiB"), ("b", "native:2GiB")])
    with pytest.raises(MeasureError, match="--ram is a setting of Overspill's plan"):
        read_configurations([("a", "none"), ("b", "--ram 1GiB")], "--ram 8GiB")


# Definitions.


def test_a_definition_survives_json() -> None:
    asked = definition()
    assert Experiment.from_json(json.loads(json.dumps(asked.as_json()))) == asked
    assert Experiment.from_json({**asked.as_json(), "of a later version": 1}) == asked
    with pytest.raises(MeasureError, match="cannot be read"):
        Experiment.from_json({"model": "tiny"})


def test_the_command_of_a_definition_says_all_of_it() -> None:
    assert definition(keeps_engines=True).command == (
        "overspill ab tiny --a none --b native:1GiB --common '--max-model-len 4k' --workload multi-turn:turns=2 "
        "--repeats 3 --seed 7 --keep --expect offload"
    )


def test_each_repeat_has_a_seed_of_its_own() -> None:
    assert [definition().seed_of(repeat) for repeat in (1, 2, 3)] == [7, 8, 9]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"repeats": 0}, "--repeats 0 is not possible"),
        ({"repeats": 100_000}, "--repeats 100000 is not possible"),
        ({"seed": -1}, "--seed -1 is negative"),
        ({"expects": "disk"}, "--expect 'disk' is not a tier; use offload or spill"),
    ],
)
def test_a_mistake_in_a_definition_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(MeasureError, match=message):
        definition(**changes)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": "other"}, "another model: 'tiny', not 'other'"),
        ({"repeats": 4}, "another --repeats: 3, not 4"),
        (
            {"configurations": (("a", "none"), ("b", "native:2GiB"))},
            "--b native:1GiB, not --a none --b native:2GiB",
        ),
        ({"keeps_engines": True}, "another --keep"),
    ],
)
def test_a_resume_of_something_else_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(MeasureError, match=message):
        require_same(definition(), given, "ab-1")


def test_a_resume_may_leave_out_or_repeat_what_it_was() -> None:
    require_same(definition(), {"model": None, "repeats": 3, "configurations": definition().configurations}, "ab-1")


def test_letters_are_used_in_order() -> None:
    assert written_configurations(["none", "native:1GiB", None, None]) == (("a", "none"), ("b", "native:1GiB"))
    with pytest.raises(MeasureError, match="--b is missing, and --c is given"):
        written_configurations(["none", None, "native:1GiB"])


def test_experiment_names_are_unique_and_begin_with_the_time() -> None:
    at = datetime(2026, 11, 15, 12, 0, 1, tzinfo=UTC)
    names = {Experiment.new_name(at) for _ in range(20)}
    assert len(names) > 1 and all(name.startswith("ab-20261115-120001-") for name in names)


# Order.


def test_repeats_alternate_and_every_second_one_is_reversed() -> None:
    order = [(step.repeat, step.label) for step in schedule(["a", "b"], 3, keeps_engines=False)]
    assert order == [(1, "a"), (1, "b"), (2, "b"), (2, "a"), (3, "a"), (3, "b")]


def test_kept_engines_have_their_repeats_one_after_the_other() -> None:
    planned = schedule(["a", "b"], 2, keeps_engines=True)
    assert [(step.label, step.repeat) for step in planned] == [("a", 1), ("a", 2), ("b", 1), ("b", 2)]
    ends = [is_last_of_life(planned, index, keeps_engines=True) for index in range(4)]
    assert ends == [False, True, False, True]
    assert all(is_last_of_life(planned, index, keeps_engines=False) for index in range(4))


def test_finished_steps_are_not_repeated() -> None:
    planned = schedule(["a", "b"], 2, keeps_engines=False)
    assert remaining(planned, {Step(1, "a"), Step(2, "b")}) == [Step(1, "b"), Step(2, "a")]
