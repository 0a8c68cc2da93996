"""Names of the gateway: aliases and variants of a model, what they change in a request, and who may have which."""

import json
from pathlib import Path
from typing import Any

import pytest

from overspill.registry import DuplicateModel, add_model, edit_model, get_model, import_models, read_models_file
from overspill.settings import SettingsError, parse_settings
from tests.managed_here import managed_here
from tests.manager_process import Place, eventually
from tests.pages import program
from tests.test_gateway import Served, error_of, with_gateway

VARIANTS = {
    "cold": {"temperature": 0, "top_p": None},
    "plain": {"chat_template_kwargs": {"enable_thinking": False}},
}


async def echoed(served: Served, model: str, **more: Any) -> dict[str, Any]:
    """The request as the engine got it."""
    told: dict[str, Any] = json.loads((await served.post(model, path="/v1/echo", **more)).json()["body"])
    return told


def test_an_alias_is_served_by_its_model(place: Place) -> None:
    place.add("qwen3:8b", aliases="gpt-4o, org/chat")

    async def run(served: Served) -> None:
        answer = await served.client.chat.completions.create(
            model="gpt-4o", messages=[{"role": "user", "content": "x"}], max_tokens=2
        )
        assert answer.choices[0].message.content == "qwen3:8b-0 qwen3:8b-1 "
        assert answer.model == "qwen3:8b"  # the model that answered, as OpenAI's aliases do
        assert (await served.post("qwen3:8b", max_tokens=1)).status_code == 200
        assert (await served.post("org/chat", max_tokens=1)).status_code == 200
        listed = (await served.http.get(f"{served.url}/v1/models")).json()["data"]
        assert {one["id"]: one["parent"] for one in listed} == {
            "qwen3:8b": None, "gpt-4o": "qwen3:8b", "org/chat": "qwen3:8b",
        }  # fmt: skip
        one = (await served.http.get(f"{served.url}/v1/models/org/chat")).json()
        assert (one["id"], one["state"]) == ("org/chat", "ready")
        assert served.engines.traffic("qwen3:8b").requests == 3 and "gpt-4o" not in served.engines.counts

    with_gateway(place, run)


def test_a_variant_sets_merges_and_strips_parameters(place: Place) -> None:
    place.add("qwen3:8b", aliases="chat", variants=VARIANTS, behaviour={"served": "other"})

    async def run(served: Served) -> None:
        sent = {"temperature": 0.7, "top_p": 0.9, "chat_template_kwargs": {"x": 1, "enable_thinking": True}}
        kept = {"prompt": "x", "model": "other"}
        assert await echoed(served, "qwen3:8b", **sent) == {**kept, **sent}
        without = {"chat_template_kwargs": sent["chat_template_kwargs"]}
        assert await echoed(served, "qwen3:8b:cold", **sent) == {**kept, **without, "temperature": 0}
        plain = {"x": 1, "enable_thinking": False}
        assert await echoed(served, "chat:plain", **sent) == {**kept, **sent, "chat_template_kwargs": plain}
        assert (await echoed(served, "chat:plain"))["chat_template_kwargs"] == {"enable_thinking": False}
        answer = await served.post("qwen3:8b:warm")
        assert error_of(answer) == (404, "model_not_found", "gateway")
        form = await served.http.post(f"{served.url}/v1/echo", data={"model": "chat:cold"}, files={"file": b"RIFF"})
        assert error_of(form) == (400, "variant_of_form", "gateway")
        broken = b'{"model": "chat:plain", "chat_template_kwargs": {"a": ' + b"[" * 5000 + b"]" * 5000 + b"}}"
        deep = await served.http.post(f"{served.url}/v1/echo", content=broken)
        assert error_of(deep) == (400, "bad_json", "gateway")

    with_gateway(place, run)


def test_a_variant_of_a_stream_is_counted_under_its_model(place: Place) -> None:
    """Usage is asked for on top of the variant's changes."""
    place.add("a", variants={"short": {"max_tokens": 2}})

    async def run(served: Served) -> None:
        text = (await served.post("a:short", stream=True, max_tokens=50)).text
        assert text.count('"text":"a-') == 2 and "usage" not in text
        assert served.engines.traffic("a").completion_tokens == 2

    with_gateway(place, run)


def test_an_exact_name_wins_over_a_variant(place: Place) -> None:
    """Also where an older registry, or two writers at once, left both."""
    place.add("qwen3", ram=1, variants={"4b": {"temperature": 0}})
    with place.registry() as registry, pytest.raises(DuplicateModel, match="qwen3:4b is another name of qwen3"):
        add_model(registry, "qwen3:4b", {"source": get_model(registry, "qwen3").settings.source})
    with place.registry() as registry:
        edit_model(registry, "qwen3", {"variants": None})
    place.add("qwen3:4b", ram=1)

    async def run(served: Served) -> None:
        assert (await echoed(served, "qwen3:4b")) == {"model": "qwen3:4b", "prompt": "x"}

    with_gateway(place, run)
    with place.registry() as registry, pytest.raises(DuplicateModel, match="qwen3:4b is a model of its own"):
        edit_model(registry, "qwen3", {"variants": VARIANTS | {"4b": {"temperature": 0}}})


def test_a_name_that_is_taken_is_refused_with_what_to_do(place: Place) -> None:
    place.add("a", aliases="chat")
    place.add("b")
    with place.registry() as registry:
        for changes, said in (
            ({"aliases": "chat"}, "chat is another name of a already; .* overspill models edit a"),
            ({"aliases": "c,a"}, "a is a model of its own already; choose another name"),
        ):
            with pytest.raises(DuplicateModel, match=said):
                edit_model(registry, "b", changes)
        with pytest.raises(DuplicateModel, match="chat is another name of a"):
            add_model(registry, "chat", {"source": get_model(registry, "a").settings.source})
        edit_model(registry, "a", {"aliases": None})
        assert edit_model(registry, "b", {"aliases": ["chat", "c"]}).after.names == {"b": {}, "chat": {}, "c": {}}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"aliases": "a b"}, "is not a comma-separated list of names"),
        ({"aliases": ""}, "is not a comma-separated list of names"),
        ({"aliases": {"a": 1}}, "a single value is needed here, not a dict"),
        ({"variants": "cold"}, 'is not JSON: .*; write for example {"fast":'),
        ({"variants": '["cold"]'}, "variants must map each name to an object"),
        ({"variants": {"cold": {}}}, "variants must map each name to an object"),
        ({"variants": {"a:b": {"n": 1}}}, "'a:b' is not a name for a variant"),
        ({"variants": {"cold": {"stream": True}}}, "the variant cold changes stream, which only the client can"),
        ({"variants": {"cold": {"n": float("nan")}}}, "is not JSON"),
    ],
)
def test_bad_names_and_variants_are_refused(given: dict[str, object], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        parse_settings(given)


def test_a_file_lists_aliases_and_variants_as_yaml(place: Place, tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text("models:\n  org/a:\n    aliases: [chat, c]\n    variants: {cold: {temperature: 0}}\n")
    with place.registry() as registry:
        assert [str(one.outcome) for one in import_models(registry, read_models_file(file))] == ["added"]
        found = get_model(registry, "org/a")
        assert list(found.names) == ["org/a:cold", "chat:cold", "c:cold", "org/a", "chat", "c"]
        assert [str(one.outcome) for one in import_models(registry, read_models_file(file))] == ["unchanged"]


def test_names_are_given_by_api_and_form(place: Place) -> None:
    place.add("a")
    place.add("b", aliases="taken")
    with managed_here(place) as here, program(here) as client:
        edited = client.patch("/api/models/a", json={"aliases": ["chat"], "variants": {"cold": {"temperature": 0}}})
        assert edited.json()["changed"] == ["aliases", "variants"] and edited.json()["needs_restart"] == []
        assert client.post("/v1/completions", json={"model": "chat:cold"}).json()["model"] == "a"
        form = client.get("/models/settings/a").text
        assert 'value="chat"' in form and "{&#34;cold&#34;: {&#34;temperature&#34;: 0}}" in form
        saved = client.post("/models/settings/a", data={"aliases": "other", "variants": '{"hot": {"temperature": 2}}'})
        assert "Saved: Other names, Variants of requests." in saved.text
        assert client.post("/v1/completions", json={"model": "other:hot"}).is_success
        assert client.post("/v1/completions", json={"model": "chat"}).status_code == 404
        refused = client.patch("/api/models/a", json={"aliases": "taken"})
        assert refused.status_code == 409 and "overspill models edit b" in refused.json()["error"]["message"]


def test_the_context_is_listed_once_it_is_known(place: Place) -> None:
    """`auto` was listed as the number of tokens."""
    place.add("a", max_model_len="auto", behaviour={"plan": {"max_model_len": 9216}})
    place.add("b", max_model_len=4096)

    async def run(served: Served) -> None:
        async def lengths() -> dict[str, int | None]:
            listed = (await served.http.get(f"{served.url}/v1/models")).json()["data"]
            return {one["id"]: one["max_model_len"] for one in listed}

        assert await lengths() == {"a": None, "b": 4096}
        await served.post("a")
        await eventually(lambda: served.engines.plan("a"))
        assert await lengths() == {"a": 9216, "b": 4096}

    with_gateway(place, run)
