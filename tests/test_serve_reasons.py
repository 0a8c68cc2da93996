"""Why an engine ended, found in its log: need, have and what would work, from vLLM's own messages."""

from pathlib import Path

import pytest

from overspill.serve.reasons import reason, without_tracebacks


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (["(EngineCore pid=1) ERROR 11-15 09:17:54 [core.py:1] torch.OutOfMemoryError: CUDA out of memory. Tried"],
         "the GPU's memory ran out"),
        (["usage: x", "api_server.py: error: unrecognized arguments: --no-such"], "unrecognized arguments: --no-such"),
        (["OSError: [Errno 98] Address already in use"], "another program took the port"),
        (["(Worker pid=2) overspill.kv.errors.OverspillError: spill_bytes is too small",
          "RuntimeError: Engine core initialization failed. See root cause above."], "spill_bytes is too small"),
        (["ValueError: this model is strange", "  File x", "RuntimeError: Engine core initialization failed. See root "
          "cause above. Failed core proc(s): {}"], "ValueError: this model is strange"),
        (["(Worker pid=2) INFO 11-15 09:17:54 [a.py:1] MemoryError is what others get"], ""),
    ],
)  # fmt: skip
def test_the_reason_is_found_in_the_log(lines: list[str], why: str) -> None:
    assert why in reason(lines) and bool(why) == bool(reason(lines))


FROM_CORE = "(EngineCore pid=31) ERROR 11-15 09:17:54 [core.py:1120] "
# As vLLM 0.32 (v1/core/kv_cache_utils.py, v1/worker/utils.py) and PyTorch's allocator write them.
SEE = "See https://docs.vllm.ai/en/latest/configuration/conserving_memory/ for more details."
TOO_LONG = (
    "ValueError: To serve at least one request with the model's max seq len (131072), (16.0 GiB KV cache is needed, "
    "which is larger than the available KV cache memory (4.88 GiB). {}Try increasing `gpu_memory_utilization` (which "
    f"also controls CPU memory on the CPU backend) or decreasing `max_model_len` when initializing the engine. {SEE}"
)
NO_BLOCKS = (
    "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing "
    f"the engine (this flag also controls CPU memory reservation on the CPU backend, despite its name). {SEE}"
)
NEGATIVE = "(EngineCore pid=31) INFO 11-15 09:17:53 [gpu_worker.py:760] Available KV cache memory: -3.44 GiB"
SECONDHAND = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ([TOO_LONG.format("Based on the available memory, the estimated maximum model length is 39968. ")],
         ["131072 tokens need 16.0 GiB", "4.88 GiB is free", "--max-model-len 39968", "--ram"]),
        ([TOO_LONG.format("")], ["131072 tokens need 16.0 GiB", "4.88 GiB is free", "--gpu-memory"]),
        ([NEGATIVE, FROM_CORE + NO_BLOCKS], ["need 3.44 GiB more", "--gpu-memory", "--cpu-offload-gb"]),
        ([FROM_CORE + NO_BLOCKS], ["nothing is left for the KV cache", "--max-num-batched-tokens"]),
        (["ValueError: Cannot auto-fit max_model_len: not enough GPU memory available to serve even a single token. "
          "Try increasing `gpu_memory_utilization`."], ["nothing is left for the KV cache"]),
        (["ValueError: Free memory on device cuda:0 (9.87/23.52 GiB) on startup is less than desired GPU memory "
          "utilization (0.92, 21.64 GiB). Decrease GPU memory utilization or reduce GPU memory used by other "
          "processes."], ["take 21.64 GiB of the GPU's 23.52", "9.87 GiB is free", "--gpu-memory 9.87GiB"]),
        (["ValueError: Available memory on node 0 (3.1/15.42 GiB) on startup is less than desired CPU memory "
          "utilization (0.9, 13.88 GiB). On the CPU backend, the `--gpu-memory-utilization` flag"],
         ["take 13.88 GiB of 15.42 GiB of RAM", "3.1 GiB is available", "--gpu-memory"]),
        (["torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.95 GiB. GPU 0 has a total capacity of "
          "14.57 GiB of which 1.58 GiB is free. Process 2493055 has 12.02 GiB memory in use. Including non-PyTorch "
          "memory, this process has 966.00 MiB memory in use."],
         ["the GPU's memory ran out", "1.95 GiB more", "1.58 GiB of 14.57 GiB was free", "--gpu-memory"]),
        (["RuntimeError: CUDA out of memory occurred when warming up sampler with 256 dummy requests. Please try "
          "lowering `max_num_seqs` or `gpu_memory_utilization` when initializing the engine."],
         ["256 requests at once", "--max-num-seqs"]),
        (["AssertionError: Error in memory profiling. Initial free memory 12.5 GiB, current free memory 20.25 GiB. "
          "This happens when other processes sharing the same container release GPU memory while vLLM is profiling"],
         ["12.5 GiB", "20.25 GiB", "start again"]),
        ([SECONDHAND.format({"EngineCore_DP0": -9})], ["was killed", "dmesg", "--ram"]),
        ([FROM_CORE.replace("core.py", "multiproc_executor.py") + "Worker proc VllmWorker-1 died unexpectedly (exit "
          "code: -9), shutting down executor."], ["was killed", "--ram"]),
    ],
)  # fmt: skip
def test_numbers_in_vllms_messages_become_need_have_and_what_would_work(lines: list[str], told: list[str]) -> None:
    why = reason([*lines, SECONDHAND.format({"EngineCore_DP0": 1})])
    assert all(part in why for part in told) and "Error" not in why and "\n" not in why


def test_the_messages_are_vllms_own() -> None:
    """Every fixed piece that the patterns look for stands in the vLLM that is installed."""
    from importlib.util import find_spec

    spec = find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations
    root = Path(spec.submodule_search_locations[0])
    said = {
        "v1/core/kv_cache_utils.py": [
            "No available memory for the cache blocks. ", "To serve at least one request with the model's max seq len ",
            "the estimated maximum model length is {estimated_max_len}. ", "Cannot auto-fit max_model_len: ",
            "({max_model_len}), ({format_gib(needed_memory)} GiB KV ", "memory ({format_gib(available_memory)} GiB). ",
        ],
        "v1/worker/utils.py": [
            "Free memory on device ", "({format_gib(init_snapshot.free_memory)}/",
            "is less than desired GPU memory utilization ",
        ],
        "v1/worker/cpu_worker.py": ["Available memory on node ", "is less than desired CPU memory utilization "],
        "v1/worker/gpu_worker.py": [
            "Available KV cache memory: %s GiB", "Error in memory profiling. ",
            "Initial free memory {format_gib(init_free_memory)} GiB, ",
        ],
        "v1/worker/gpu_model_runner.py": ["CUDA out of memory occurred when warming up sampler with "],
        "v1/engine/utils.py": ["Engine core initialization failed. ", "Failed core proc(s): {finished}"],
        "v1/executor/multiproc_executor.py": ["Worker proc %s died unexpectedly (exit code: %s), "],
    }  # fmt: skip
    for file, pieces in said.items():
        source = (root / file).read_text()
        assert [piece for piece in pieces if piece not in source] == [], file


def test_a_kv_cache_of_some_size_is_no_reason() -> None:
    assert reason([NEGATIVE.replace("-3.44", "3.44"), "ValueError: this model is strange"]) == (
        "ValueError: this model is strange"
    )


def test_tracebacks_are_left_out_of_what_is_shown() -> None:
    lines = ["INFO ok", "(APIServer pid=7) Traceback (most recent call last):", '(APIServer pid=7)   File "x", line 1',
             "(APIServer pid=7)     call()", "(APIServer pid=7) ValueError: no", ""]  # fmt: skip
    assert without_tracebacks(lines) == ["INFO ok", "(APIServer pid=7) ValueError: no"]
