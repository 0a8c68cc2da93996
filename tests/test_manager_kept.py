"""Models that are kept loaded, and models that are started with the manager."""

import asyncio
import json
import logging
from functools import partial

import httpx
import pytest

from overspill.kv.sizes import GiB
from overspill.manager.errors import NoRoom
from overspill.manager.needs import Memory, Need
from overspill.manager.states import State
from overspill.manager.swaps import Verdict, choose, kept_in_the_way
from overspill.manager.web.forms import changes_of, form_values
from overspill.registry import Model, add_model, edit_model
from overspill.settings import parse_settings
from tests.managed_here import managed_here
from tests.manager_process import Place, eventually, managing
from tests.test_manager_states import decide_who, engine, ram
from tests.test_models_cli import Overspill, ok, overspill  # noqa: F401 (a fixture)

# What goes, as a pure function


def test_a_kept_engine_is_never_evicted() -> None:
    kept, other = engine("a", 4, is_kept=True), engine("b", 4, last_used=9.0)
    assert decide_who(4, 0, kept, other) == (Verdict.EVICT, ("b",)), "though it was used later"
    assert decide_who(4, 0, kept) == (Verdict.NEVER, ())
    assert decide_who(8, 0, kept, other) == (Verdict.NEVER, ())
    assert decide_who(4, 0, engine("a", 4, is_kept=True, is_leaving=True)) == (Verdict.WAIT, ()), "somebody stopped it"


def test_kept_engines_are_named_only_if_stopping_them_would_help() -> None:
    a, b, c = (engine(name, 2, is_kept=True, last_used=at) for name, at in (("a", 3.0), ("b", 1.0), ("c", 2.0)))
    assert kept_in_the_way(ram(2), ram(0), [a, b, c]) == ("b",), "the fewest, and of them the least recently used"
    assert kept_in_the_way(ram(4), ram(0), [a, b, c]) == ("b", "c")
    assert kept_in_the_way(ram(4), ram(0), [a, engine("d", 2)]) == ("a",), "beside what would go anyway"
    assert kept_in_the_way(ram(2), ram(0), [a, engine("d", 2)]) == (), "there is room without it"
    assert kept_in_the_way(ram(9), ram(0), [a, b, c]) == (), "it would not be enough"
    assert kept_in_the_way(ram(2), ram(0), [engine("e", 2, is_kept=True, may_go=False)]) == ()
    assert choose(ram(2), ram(0), [a], now=100.0, least_service_s=0.0).verdict is Verdict.NEVER


# With engines


def test_a_kept_model_stays_and_the_refusal_names_it(place: Place) -> None:
    place.add("a", ram=2 * GiB, keep=True, ttl=1)
    place.add("b", ram=2 * GiB)

    async def run() -> None:
        async with managing(place) as engines:
            await engines.ensure_ready("a")
            for ask in (engines.ensure_ready, partial(engines.start, make_room=True)):
                with pytest.raises(
                    NoRoom, match=r"a is set to be kept, and so not stopped\. Stop a first.*edit a --no-keep"
                ):
                    await ask("b")
            await asyncio.sleep(1.5)
            assert engines.snapshot("a").state is State.READY, "nor by its TTL"
            # Taken back, it goes as any other; and whoever stops it by hand may.
            with place.registry() as registry:
                edit_model(registry, "a", {"keep": False, "ttl": None})
            await engines.catalogue.refresh()
            await engines.ensure_ready("b")
            assert engines.snapshot("a").state is State.STOPPED
            with place.registry() as registry:
                edit_model(registry, "b", {"keep": "yes"})
            await engines.catalogue.refresh()
            assert (await engines.stop("b")).state is State.STOPPED

    asyncio.run(run())


def test_memory_of_kept_engines_does_not_count_as_evictable(place: Place) -> None:
    """On a machine without a limit of its own, the plan says already that there is no room."""
    place.add("a", ram=GiB, keep=True)
    place.add("b", ram=GiB)
    seen: list[Memory] = []

    def reckon(model: Model, evictable: Memory) -> Need:
        seen.append(evictable)
        return Need(refused="131072 tokens do not fit") if model.name == "b" else Need(takes=ram(1), least=ram(1))

    async def run() -> None:
        async with managing(place, reckon=reckon) as engines:
            await engines.ensure_ready("a")
            with pytest.raises(NoRoom, match=r"131072 tokens do not fit\. a is set to be kept, and so not stopped"):
                await engines.ensure_ready("b")
            assert seen[-1] == Memory()

    asyncio.run(run())


def test_preloaded_models_start_by_name_while_there_is_room(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    place.add("c", ram=GiB, preload=True)
    place.add("b", ram=GiB, preload=True, behaviour={"start_s": 0.3})
    place.add("a", ram=GiB, preload=True, behaviour={"dies_at_start": True})
    place.add("d", ram=GiB, preload=True)
    place.add("e", ram=GiB)
    started = place.behaviours.with_suffix(".starts")

    async def run() -> None:
        with caplog.at_level(logging.WARNING):
            async with managing(place) as engines:
                await eventually(lambda: "d could not be started" in caplog.text)
                states = {one.name: one.state for one in engines.snapshots()}
                assert states == {
                    "a": State.FAILED, "b": State.READY, "c": State.READY, "d": State.STOPPED, "e": State.STOPPED,
                }  # fmt: skip

    asyncio.run(run())
    assert [line.split()[0] for line in started.read_text().splitlines()] == ["a", "b", "c"]
    assert "a could not be started with the manager" in caplog.text and "the weights are broken" in caplog.text
    assert "d needs 1 GiB" in caplog.text, "and nothing went for it"


def test_a_preloaded_engine_still_running_is_not_started_twice(place: Place) -> None:
    place.add("a", preload=True)

    async def run() -> None:
        async with managing(place) as engines:
            await eventually(lambda: engines.snapshot("a").state is State.READY)
            await engines.close(keep=True)
        async with managing(place) as engines:
            await eventually(lambda: engines.snapshot("a").state is State.READY)
            await asyncio.sleep(0.3)
        assert len(place.starts("a")) == 1

    asyncio.run(run())


# Everywhere else


def test_api_form_and_card_show_keep_and_preload(place: Place) -> None:
    place.add("a")
    with managed_here(place) as here, here.client() as client:
        edited = client.patch("/api/models/a", json={"keep": True, "preload": True}).json()
        assert edited["changed"] == ["keep", "preload"] and edited["needs_restart"] == []
        assert client.get("/api/models/a").json()["keep"] is True
        form = httpx.get(f"{here.url}/models/settings/a", timeout=60).text
        for name in ("keep", "preload"):
            (select,) = [part for part in form.split("<select ")[1:] if f'name="{name}"' in part]
            assert '<option value="true" selected>yes' in select.partition("</select>")[0]
        page = httpx.get(f"{here.url}/models", timeout=60).text
        assert '<span class="phase">kept</span>' in page
        assert '<span class="phase">starts with the manager</span>' in page
        assert client.patch("/api/models/a", json={"keep": None, "preload": False}).status_code == 200
        page = httpx.get(f"{here.url}/models", timeout=60).text
        assert '<span class="phase">kept' not in page and '<span class="phase">starts' not in page


def test_keep_and_preload_survive_a_form(place: Place) -> None:
    with place.registry() as registry:
        model = add_model(registry, "a", {"source": "gpt2", "keep": True, "preload": False})
    parsed = parse_settings(changes_of(form_values(model)))
    assert (parsed["keep"], parsed["preload"]) == (True, False)


def test_flags_set_and_unset_keep_and_preload(overspill: Overspill) -> None:  # noqa: F811
    ok(overspill("add", "a", "--source", "gpt2", "--keep", "--preload"))
    told = json.loads(ok(overspill("show", "a", "--json")))
    assert (told["keep"], told["preload"]) == (True, True)
    assert ok(overspill("edit", "a", "--no-keep", "--unset", "preload")) == "keep: True -> False\npreload: True -> -\n"


def test_the_list_tells_of_weights_in_ram_where_there_are_some(overspill: Overspill) -> None:  # noqa: F811
    ok(overspill("add", "a", "--source", "gpt2"))
    assert "weights" not in ok(overspill("list"))
    ok(overspill("add", "b", "--source", "gpt2", "--weights-ram", "4GiB"))
    lines = ok(overspill("list")).splitlines()
    assert lines[0].split("  ")[-1].strip() == "weights in RAM"
    assert lines[1].endswith("-") and lines[2].endswith("4 GiB")
