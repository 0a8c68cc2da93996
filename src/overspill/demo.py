"""Demo on a tiny model: KV that does not fit the KV cache is kept in RAM, and every answer stays the same.

    make demo
    python -m overspill.demo

First comes the proof of `overspill verify` on vLLM's CPU engine: conversations that take turns are loaded from RAM, a
damaged block is caught, and prompts longer than the KV cache are spilled. Then two servers, one without and one with
Overspill, are measured with the same conversations, as `overspill ab` does. Exits 0 if every answer is the one that
stock vLLM gives. Needs no GPU and no network, and takes two minutes.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

from overspill.kv.errors import OverspillError

# Read when torch and vLLM are imported. One thread: a tiny model gains nothing from more.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TQDM_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
SETTINGS = {"device": "cpu", "dtype": "float32", "ram": "4GiB", "gpu_memory": "1GiB"}
SCENARIOS = ("returning", "damaged", "spilled")


def prove(model: Path) -> int:
    """Run the proof; return the exit code of `overspill verify`."""
    from overspill.launch.launch import Launch
    from overspill.verify import run
    from overspill.verify.scenarios import read_request

    request = read_request(quick=True, soak=False, minutes=None, seed=None, scenarios=SCENARIOS)
    proof = run.prove(Launch.of(str(model), SETTINGS, defaults=run.DEFAULTS), request, say)
    print(f"\n{proof.as_text()}", flush=True)
    return proof.exit_code


def compare(model: Path, folder: Path) -> int:
    """Run `overspill ab` and return its exit code: returning prompts are loaded, not computed, and answered sooner."""
    from overspill.measure.ab import EXAMPLE_MEASURES, run_example

    print("\nTwo servers, the same long conversations", flush=True)
    lines: list[str] = []
    report = run_example(model, folder, lines.append)
    print(f"\n{report.as_table(*EXAMPLE_MEASURES)}", flush=True)
    if report.exit_code:
        print("\n".join(["the servers could not be compared:", *lines]), file=sys.stderr)
    return report.exit_code


def say(line: str) -> None:
    print(f"- {line}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m overspill.demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    os.environ.update(ENVIRONMENT)
    from transformers.utils import logging

    from overspill.tiny import make_llama

    logging.disable_progress_bar()
    print("Overspill demo: a tiny Llama on vLLM's CPU engine\n", flush=True)
    with tempfile.TemporaryDirectory(prefix="overspill-demo-") as folder:
        model = make_llama(Path(folder) / "llama")
        try:
            code = prove(model) or compare(model, Path(folder))
        except OverspillError as error:
            print(f"error: {error}", file=sys.stderr)
            code = 1
    if not code:
        print("\nok: every answer is the one that stock vLLM gives")
    return code


if __name__ == "__main__":
    sys.exit(main())
