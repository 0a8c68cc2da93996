"""From raw repeats to the numbers a table shows: pure functions over one result of the spill benchmark."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from record import Json
from spill_plan import WAYS

# The first tokens after a prefill also pay for what the prefill left behind.
SKIPPED_GAPS = 3
# Logits of 4 to 8 are 1/32 apart in bf16, so two tokens closer than two such steps may change places by rounding.
TIE_LOGPROB = 1 / 16


def summarise(result: Json) -> list[Json]:
    """One entry for each model and precision of KV; made anew whenever a life is added."""
    groups: dict[tuple[str, str], list[Json]] = {}
    for life in result["lives"]:
        groups.setdefault((life["model"], life["kv_cache_dtype"]), []).append(life)
    return [
        {
            "model": model,
            "kv_cache_dtype": dtype,
            "lengths": length_rows(lives),
            "batches": batch_rows(lives),
            "sharing": sharing_rows(lives),
            "contexts": context_rows(lives),
        }
        for (model, dtype), lives in groups.items()
    ]


def repeats(lives: Sequence[Json], name: str, phase: str) -> Iterator[tuple[Json, Json]]:
    """(life, repeat) of all lives of a name."""
    return ((life, one) for life in lives if life["name"] == name for one in life["phases"].get(phase, []))


def extent(values: Sequence[float]) -> Json | None:
    """Median over repeats, with the extremes beside it."""
    if not values:
        return None
    return {"count": len(values), "median": statistics.median(values), "min": min(values), "max": max(values)}


def ratio(over: Json | None, under: Json | None) -> float | None:
    return over["median"] / under["median"] if over and under and under["median"] else None


# Long prompts.


def time_per_token(gaps: Sequence[float]) -> float | None:
    """Median time between tokens once decode has settled."""
    settled = gaps[SKIPPED_GAPS:] if len(gaps) >= 2 * SKIPPED_GAPS else gaps
    return statistics.median(settled) if settled else None


def streamed_per_token(repeat: Json) -> float | None:
    """Bytes from RAM for each token after the first."""
    return repeat["decode"]["spill_in_bytes"] / len(repeat["gaps"]) if repeat["gaps"] else None


def link_fraction(repeat: Json, link: Json | None) -> float | None:
    """The time that the streamed bytes need at the link's own speed, over the time that a token took."""
    per_token, seconds = streamed_per_token(repeat), time_per_token(repeat["gaps"])
    if not link or not per_token or not seconds:
        return None
    return per_token / link["h2d_bytes_per_second"] / seconds


def length_rows(lives: Sequence[Json]) -> list[Json]:
    lengths = {one["length"] for name in ("spill", "gpu") for _, one in repeats(lives, name, "long")}
    return [length_row(lives, length) for length in sorted(lengths)]


def length_row(lives: Sequence[Json], length: int) -> Json:
    found = {
        name: [(life, one) for life, one in repeats(lives, name, "long") if one["length"] == length]
        for name in ("spill", "gpu")
    }
    per_token = next((life["kv_bytes_per_token"] for pairs in found.values() for life, _ in pairs), 0)
    row: Json = {"length": length, "kv_bytes": length * per_token}
    for name, pairs in found.items():
        row[name] = {
            "ttft": extent([one["ttft"] for _, one in pairs]),
            "tpot": extent([seconds for _, one in pairs if (seconds := time_per_token(one["gaps"])) is not None]),
            "gpu_bytes": largest(one["memory"]["gpu_bytes"] for _, one in pairs),
            "rss_bytes": largest(one["memory"]["rss_bytes"] for _, one in pairs),
        }
    spilled = found["spill"]
    fractions = [link_fraction(one, life.get("link")) for life, one in spilled]
    row["spill"] |= {
        "streamed_bytes_per_token": extent([b for _, one in spilled if (b := streamed_per_token(one)) is not None]),
        "prefill_in_bytes": extent([one["prefill"]["spill_in_bytes"] for _, one in spilled]),
        "spilled_steps": extent([one["decode"]["spilled_steps"] for _, one in spilled]),
        "link_fraction": extent([fraction for fraction in fractions if fraction is not None]),
    }
    row["ways"] = {way: way_row([one["ways"][way] for _, one in spilled if way in one.get("ways", {})]) for way in WAYS}
    row["ttft_ratio"] = ratio(row["spill"]["ttft"], row["gpu"]["ttft"])
    row["tpot_ratio"] = ratio(row["spill"]["tpot"], row["gpu"]["tpot"])
    row["tokens"] = compared([one for _, one in spilled], [one for _, one in found["gpu"]])
    return row


def way_row(ones: Sequence[Json]) -> Json:
    """Times per token, and bytes per token over the link and by the CPU."""
    return {
        "tpot": extent([seconds for one in ones if (seconds := time_per_token(one["gaps"])) is not None]),
        **{
            name: extent([one["decode"][name] / len(one["gaps"]) for one in ones if one["gaps"]])
            for name in ("spill_in_bytes", "spill_far_bytes")
        },
    }


def largest(values: Iterator[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def compared(mine: Sequence[Json], theirs: Sequence[Json]) -> Json:
    """Answers to the same prompts, pair by pair; what differs is listed with the reason."""
    references = {one["number"]: one for one in reversed(theirs)}
    pairs = [(one, references[one["number"]]) for one in mine if one["number"] in references]
    differences = [said for one, other in pairs if (said := first_difference(one, other)) is not None]
    worst = [value for one, other in pairs if (value := logprob_distance(one, other)) is not None]
    return {
        "compared": len(pairs),
        "equal": len(pairs) - len(differences),
        "differences": differences,
        # Of the tokens that both chose; 0 means bit for bit the same, as far as the file's six digits say.
        "largest_logprob_distance": max(worst, default=None),
        # One answer to all prompts would mean a model that hears nothing, and equality that proves nothing.
        "distinct": len({tuple(one["tokens"]) for one in mine}),
    }


def first_difference(mine: Json, theirs: Json) -> Json | None:
    """Where two answers part, and whether either system thought the other's token just as likely."""
    for index, (a, b) in enumerate(zip(mine["tokens"], theirs["tokens"])):
        if a != b:
            gaps = [gap for one, other in ((mine, b), (theirs, a)) if (gap := gap_to(one, index, other)) is not None]
            gap = min(gaps, default=None)
            return {
                "number": mine["number"],
                "index": index,
                "tokens": [a, b],
                "logprob_gap": gap,
                "is_tie": gap is not None and gap <= TIE_LOGPROB,
            }
    return None


def gap_to(answer: Json, index: int, token: int) -> float | None:
    """How much likelier the chosen token was than `token`; None if that was not even the runner-up."""
    if answer["runners_up"][index] != token:
        return None
    return float(answer["logprobs"][index] - answer["runner_up_logprobs"][index])


def logprob_distance(mine: Json, theirs: Json) -> float | None:
    """The largest difference between the logprobs of tokens up to the one where answers part."""
    distances = []
    for a, b, x, y in zip(mine["tokens"], theirs["tokens"], mine["logprobs"], theirs["logprobs"]):
        if a != b:
            break
        distances.append(abs(x - y))
    return max(distances, default=None)


# Batches of short requests.


def batch_rows(lives: Sequence[Json]) -> list[Json]:
    sizes = sorted({one["batch"] for name in ("spill", "gpu") for _, one in repeats(lives, name, "batch")})
    return [batch_row(lives, size) for size in sizes]


def batch_row(lives: Sequence[Json], size: int) -> Json:
    found = {
        name: [one for _, one in repeats(lives, name, "batch") if one["batch"] == size] for name in ("spill", "gpu")
    }
    times = {name: extent([one["tpot"]["median"] for one in ones]) for name, ones in found.items()}
    references = {one["number"]: one["tokens_hashes"] for one in reversed(found["gpu"])}
    pairs = [
        (mine, theirs)
        for one in found["spill"]
        for mine, theirs in zip(one["tokens_hashes"], references.get(one["number"], []))
    ]
    return {
        "batch": size,
        "spill_tpot": times["spill"],
        "gpu_tpot": times["gpu"],
        "ratio": ratio(times["spill"], times["gpu"]),
        "spilled_steps": sum(one["spill"]["spilled_steps"] for one in found["spill"]),
        "tokens": {"compared": len(pairs), "equal": sum(mine == theirs for mine, theirs in pairs)},
    }


# Short requests beside a long one.


def sharing_rows(lives: Sequence[Json]) -> list[Json]:
    rows = []
    for name in ("spill", "gpu"):
        ones = [one for _, one in repeats(lives, name, "sharing")]
        alone = extent([one["tpot"]["median"] for one in ones if one["share"] == "alone" and one["tpot"]["count"]])
        # The order in which they were measured.
        for share in dict.fromkeys(one["share"] for one in ones):
            these = [one for one in ones if one["share"] == share]
            tpot = extent([one["tpot"]["median"] for one in these if one["tpot"]["count"]])
            rates = [one["long_tokens"] / one["long_seconds"] for one in these if one.get("long_seconds", 0) > 0]
            rows.append(
                {
                    "life": name,
                    "share": share,
                    "tpot": tpot,
                    "over_alone": ratio(tpot, alone),
                    "itl_p99": extent([one["itl"]["p99"] for one in these if one["itl"]["count"]]),
                    "ttft": extent([one["ttft"]["median"] for one in these if one["ttft"]["count"]]),
                    "long_tokens_per_second": extent(rates),
                    "requests_spilled": max(one["requests_spilled"] for one in these),
                    "all_done": all(one["all_done"] for one in these),
                }
            )
    return rows


# What a GPU of --gpu-bytes can do.


def context_rows(lives: Sequence[Json]) -> list[Json]:
    """The longest context without spill, and the ones with it: speed, GPU memory and RAM of each."""
    rows = [
        context_row("without spill", life, [one for _, one in repeats([life], "baseline", "long")])
        for life in lives
        if life["name"] == "baseline" and "max_model_len" in life
    ]
    spilling = [life for life in lives if life["name"] == "spill" and "resident_bytes" in life]
    if not rows and spilling:
        rows.append(computed_row(spilling[0]))
    for length in sorted({one["length"] for _, one in repeats(spilling, "spill", "long")}):
        life = next(life for life, one in repeats(spilling, "spill", "long") if one["length"] == length)
        ones = [one for _, one in repeats(spilling, "spill", "long") if one["length"] == length]
        rows.append(context_row("spill", life, ones))
    if rows and rows[0]["context"]:
        for row in rows:
            row["over_baseline"] = row["context"] / rows[0]["context"]
    return rows


def context_row(label: str, life: Json, ones: Sequence[Json]) -> Json:
    # The prompt and what was generated after it.
    contexts = [one["length"] + len(one["tokens"]) for one in ones]
    return {
        "label": label,
        "context": max(contexts, default=life["max_model_len"]),
        "tokens_per_second": extent([1 / seconds for one in ones if (seconds := time_per_token(one["gaps"]))]),
        "gpu_bytes": largest(one["memory"]["gpu_bytes"] for one in ones),
        "kv_ram_bytes": life.get("arena_bytes", 0),
        "rss_bytes": largest(one["memory"]["rss_bytes"] for one in ones),
    }


def computed_row(life: Json) -> Json:
    """Without a baseline life: the tokens whose KV would fit where the resident blocks and the window are, which have
    a part of their memory by turns."""
    kv_bytes = life["resident_bytes"] + life["window_bytes"] - life.get("lent_bytes", 0)
    tokens = kv_bytes // life["kv_bytes_per_token"]
    return {
        "label": "without spill (computed)",
        "context": tokens - life["block_tokens"],
        "tokens_per_second": None,
        "gpu_bytes": None,
        "kv_ram_bytes": 0,
        "rss_bytes": None,
    }
