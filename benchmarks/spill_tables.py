"""A result of the spill benchmark as tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from cells import markdown, number, ranged
from record import Json
from spill_summary import summarise

GB = 1e9


def text(result: Json) -> str:
    """All tables, as the script prints them."""
    parts = [where(result)]
    for entry in summarise(result):
        for title, table in PARTS.values():
            if rendered := table(entry):
                parts.append(f"{title}: {subject(entry)}\n\n{rendered}")
    parts.append("".join(f"{line}\n" for line in remarks(result)))
    return "\n".join(part for part in parts if part)


def part(name: str, result: Json) -> str:
    """One kind of table, for each model and precision of KV that has it, as a document shows it."""
    if name == "where":
        return where(result)
    _, table = PARTS[name]
    found = [(subject(entry), rendered) for entry in summarise(result) if (rendered := table(entry))]
    return "\n".join(f"{about}:\n\n{rendered}" for about, rendered in found)


def subject(entry: Json) -> str:
    return f"{entry['model']}, KV {entry['kv_cache_dtype']}"


def where(result: Json) -> str:
    links = [life["link"]["h2d_bytes_per_second"] / GB for life in result["lives"] if life.get("link")]
    machine, versions = result["hardware"]["gpu"] or result["hardware"]["cpu"], result["versions"]
    shown = dict.fromkeys(f"{speed:.1f}" for speed in (min(links), max(links))) if links else {}
    link = f", link {' to '.join(shown)} GB/s" if shown else ""
    return f"{machine}, vLLM {versions['vllm']}{link}, {commits(result)}\n"


def commits(result: Json) -> str:
    """Of all runs that a file was put together from."""
    runs = [result, *result.get("resumed", [])]
    found = list(dict.fromkeys(run["versions"].get("commit") or "not recorded" for run in runs))
    return f"commit{'s' if len(found) > 1 else ''} {' and '.join(found)}"


def lengths_table(rows: Sequence[Json]) -> str:
    head = ["tokens", "their KV, GB", "TTFT spilled, s", "TTFT all on GPU, s", "ratio", "ms per token spilled",
            "ms all on GPU", "from RAM per token, GB", "of the link", "GPU spilled, GB"]  # fmt: skip
    cells = []
    for row in rows:
        spill, gpu = row["spill"], row["gpu"]
        cells.append([
            f"{row['length']:,}", gigabytes(row["kv_bytes"]),
            ranged(spill["ttft"]), ranged(gpu["ttft"]), number(row["ttft_ratio"]),
            ranged(spill["tpot"], 1000), ranged(gpu["tpot"], 1000),
            number(middle(spill["streamed_bytes_per_token"], 1 / GB)), percent(middle(spill["link_fraction"])),
            gigabytes(spill["gpu_bytes"]),
        ])  # fmt: skip
    return markdown(head, cells) if cells else ""


def tokens_table(rows: Sequence[Json]) -> str:
    cells = []
    for row in rows:
        said = row["tokens"]
        if said["compared"]:
            parted = "; ".join(describe(one) for one in said["differences"]) or "–"
            distance = number(said["largest_logprob_distance"])
            cells.append([f"{row['length']:,}", f"{said['equal']} of {said['compared']}", parted, distance])
    return markdown(["tokens", "answers equal", "first difference", "largest logprob distance"], cells) if cells else ""


def describe(difference: Json) -> str:
    gap = difference["logprob_gap"]
    why = (
        "not the runner-up" if gap is None else f"{number(gap)} apart, {'a tie' if difference['is_tie'] else 'NO TIE'}"
    )
    return f"prompt {difference['number']} at token {difference['index']}: {why}"


def batches_table(rows: Sequence[Json]) -> str:
    cells = [
        [
            str(row["batch"]), ranged(row["spill_tpot"], 1000), ranged(row["gpu_tpot"], 1000), number(row["ratio"], 4),
            number(row["spilled_steps"]), f"{row['tokens']['equal']} of {row['tokens']['compared']}",
        ]
        for row in rows
    ]  # fmt: skip
    head = ["requests", "spill on, ms", "plain vLLM, ms", "ratio", "spilled steps", "answers equal"]
    return markdown(head, cells) if cells else ""


def sharing_table(rows: Sequence[Json]) -> str:
    cells = []
    for row in rows:
        share = {None: "beside it, all on GPU", "alone": "alone"}.get(row["share"], f"beside it, share {row['share']}")
        cells.append([
            row["life"], share, ranged(row["tpot"], 1000), number(row["over_alone"]), ranged(row["itl_p99"], 1000),
            ranged(row["long_tokens_per_second"]), number(row["requests_spilled"]),
        ])  # fmt: skip
    head = ["life", "short requests", "their ms per token", "over alone", "p99 between tokens, ms", "long, tokens/s",
            "short ones with KV in RAM"]  # fmt: skip
    return markdown(head, cells) if cells else ""


def contexts_table(rows: Sequence[Json]) -> str:
    cells = [
        [
            row["label"], f"{row['context']:,}", number(row.get("over_baseline")), ranged(row["tokens_per_second"]),
            gigabytes(row["gpu_bytes"]), gigabytes(row["kv_ram_bytes"]), gigabytes(row["rss_bytes"]),
        ]
        for row in rows
    ]  # fmt: skip
    head = ["", "context", "over the baseline", "tokens/s", "GPU, GB", "RAM for KV, GB", "RSS, GB"]
    return markdown(head, cells) if cells else ""


def remarks(result: Json) -> Iterator[str]:
    """What a reader must know before believing a table."""
    for life in result["lives"]:
        label = f"{life['name']} ({life['model']}, KV {life['kv_cache_dtype']})"
        if life["error"]:
            yield f"{label}: {life['error']}"
        for said in life["failed"]:
            yield f"failed: {label}: {said['phase']} {said['number']}: {said['why']}"
        for said in life["notes"]:
            yield f"skipped: {label}: {said.get('phase')}: {said.get('why')}"
    for skipped in result["skipped"]:
        yield f"skipped: {skipped['life']}: {skipped['why']}"


def middle(numbers: Json | None, scale: float = 1.0) -> float | None:
    return None if numbers is None else numbers["median"] * scale


def percent(fraction: float | None) -> str:
    return "–" if fraction is None else f"{100 * fraction:.1f} %"


def gigabytes(num_bytes: float | None) -> str:
    return "–" if num_bytes is None else number(num_bytes / GB)


PARTS: dict[str, tuple[str, Callable[[Json], str]]] = {
    "lengths": ("Long prompts", lambda entry: lengths_table(entry["lengths"])),
    "tokens": (
        "Tokens, compared with those of the same prompts all on the GPU",
        lambda entry: tokens_table(entry["lengths"]),
    ),
    "batches": ("Short requests, nothing spilled, time per token", lambda entry: batches_table(entry["batches"])),
    "sharing": ("Short requests beside a long one", lambda entry: sharing_table(entry["sharing"])),
    "contexts": ("Context", lambda entry: contexts_table(entry["contexts"])),
    "where": ("Measured on", lambda entry: ""),
}
