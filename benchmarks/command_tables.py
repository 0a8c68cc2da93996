"""Tables of what Overspill's own commands wrote with --json: `overspill ab` and `overspill verify`."""

from __future__ import annotations

from cells import markdown, number
from record import GIB, Json

# Of an experiment's measures, those a reader decides by; the file has all.
MEASURES = (
    "load_s", "request_throughput", "output_throughput", "mean_ttft_ms", "p99_ttft_ms", "returning_mean_ttft_ms",
    "mean_tpot_ms", "p99_itl_ms", "mean_e2el_ms", "peak_gpu_bytes", "peak_ram_bytes", "tokens_from_ram",
)  # fmt: skip


def experiment(result: Json) -> str:
    """One column for each configuration: its figure, and the ratio to the first with its confidence interval."""
    labels = [one["label"] for one in result["configurations"]]
    rows = []
    for measure in result["measures"]:
        if measure["key"] not in MEASURES or all(value is None for value in measure["values"]):
            continue
        scale, unit = (1 / GIB, "GiB") if measure["unit"] == "bytes" else (1.0, measure["unit"])
        cells = [_cell(value, scale, ratio) for value, ratio in zip(measure["values"], measure["ratios"], strict=True)]
        name = measure["name"].strip()
        rows.append([f"{name}, {unit}" if unit else name, *cells])
    return markdown(["", *labels], rows)


def experiment_where(result: Json) -> str:
    """What it ran on, the command that repeats it, and what the figures do not say."""
    first = result["results"][0]
    versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
    notes = "".join(f"- {note}\n" for note in result.get("notes", ()))
    missing = "".join(
        f"- {one['label']} {'is not complete' if one['repeats'] else 'did not run'}: {one['problem'].splitlines()[0]}\n"
        for one in result["configurations"]
        if one["problem"]
    )
    same = "".join(
        f"- {one['same']} of {one['compared']} answers of {one['label']} are those of {result['compared_with']}\n"
        for one in result["answers"]
        if one["compared"]
    )
    return (
        f"{first['gpu']}, driver {first['driver']}, {versions}, commit {result['commit']}\n\n"
        f"```text\n{result['command']}\n```\n\n{same}{missing}{notes}"
    )


def verification(result: Json) -> str:
    rows = [
        [
            one["name"], str(one["requests"]), f"{one['tokens']:,}", f"{one['ram_tokens']:,}",
            number(one["ram_bytes"] / 2**20), _share(one["faults_caught"], one["faults_injected"]),
            _share(one["identical_logprobs"], one["logprobs"]), str(len(one["ties"])), str(len(one["mismatches"])),
        ]
        for one in result["scenarios"]
    ]  # fmt: skip
    head = ["scenario", "requests", "tokens", "from RAM", "MiB", "faults caught", "log-probabilities the same", "ties",
            "mismatches"]  # fmt: skip
    reference, hardware = result["reference"], result["hardware"]
    mode = ", batch-invariant" if reference["batch_invariant"] else ""
    return (
        f"{markdown(head, rows)}\n{result['verdict']} {hardware['name']}, vLLM {result['versions']['vllm']}, "
        f"{reference['dtype']}{mode}, {result['seconds']:.0f} s, commit {result['commit']}.\n"
    )


def _share(part: int, whole: int) -> str:
    return f"{part:,} of {whole:,}" if whole else "–"


def _cell(value: float | None, scale: float, ratio: Json | None) -> str:
    if value is None:
        return "–"
    told = number(value * scale)
    if ratio is None:
        return told
    low, high = ratio.get("low"), ratio.get("high")
    interval = f" ({number(low)}–{number(high)})" if low is not None and high is not None else ""
    return f"{told}, ×{number(ratio['value'])}{interval}"
