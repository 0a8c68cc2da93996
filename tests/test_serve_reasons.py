"""Why an engine ended, found in its log: need, have and what would work, from vLLM's own messages."""

import re
from pathlib import Path

import pytest

from overspill.serve.log import epitaph, reason, without_tracebacks


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


CORE = "overspill: the engine core (process 31) {}; OOM kills meanwhile: {}"
DEAD = [
    "(APIServer pid=7) ERROR 11-15 09:17:55 [async_llm.py:906] vllm.v1.engine.exceptions.EngineDeadError: EngineCore "
    "encountered an issue. See stack trace (above) for the root cause.",
    "(APIServer pid=7) ERROR 11-15 09:17:55 [serving.py:1] ConnectionError: a request of the dead engine",
    "nanobind: leaked 4 instances!",
]
FLAW = FROM_CORE + "ValueError: a flaw in the core"


@pytest.mark.parametrize(
    ("lines", "code", "told"),
    [
        ([CORE.format("was killed by SIGKILL", 1), *DEAD], 137, "vLLM ended at dawn: RAM ran out, and the kernel's OOM "
         "killer killed the engine core; give less with --ram, or a shorter --max-model-len"),
        ([CORE.format("is gone", 2), *DEAD], 0, "vLLM ended at dawn: RAM ran out, and the kernel's OOM killer"),
        ([FLAW, CORE.format("was killed by SIGKILL", 0), *DEAD], 137, "vLLM ended at dawn: the engine core was killed "
         "by SIGKILL; the kernel counts no OOM kill, so another program or a user did it"),
        ([CORE.format("was killed by SIGKILL", "unknown"), *DEAD], 137, "dawn: the engine core was killed by SIG"),
        ([CORE.format("was killed by SIGSEGV", 0), *DEAD], 139, "the engine core crashed: it was killed by SIGSEGV"),
        ([FLAW, *DEAD, CORE.format("ended with exit code 1", 0), *DEAD], 1, "at dawn: ValueError: a flaw in the core"),
        (["(Worker_TP0 pid=8) ERROR 11-15 09:17:54 [a.py:1] KeyError: 'x'", CORE.format("is gone", 0), *DEAD], 0,
         "vLLM ended at dawn: KeyError: 'x'"),
        ([*DEAD[:1], CORE.format("is gone", 0), *DEAD[:1]], 0, "the engine core is gone, and its log does not say"),
        ([FLAW, CORE.format("ended with exit code 1", 1), *DEAD], 1,
         "a flaw in the core; just before, the kernel's OOM killer killed 1 process(es)"),
        (["INFO: all is well"], 0, "vLLM ended at dawn: its server shut down without an error"),
        (["INFO: all is well"], 137, "vLLM ended by SIGKILL at dawn"),
        (["INFO: all is well"], 5, "vLLM ended with exit code 5 at dawn"),
    ],
)  # fmt: skip
def test_an_epitaph_names_the_cause_and_not_its_consequences(lines: list[str], code: int, told: str) -> None:
    first, *rest = epitaph(code, lines, during="at dawn").splitlines()
    assert told in first and "exit code 0" not in first
    assert rest[0] == "the last lines of its log:" and rest[-1].strip() == next(
        line for line in lines if line.startswith(("overspill", "INFO"))
    )
    assert not any("EngineDeadError" in line for line in rest)


CASES: list[tuple[list[str], list[str]]] = [
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
]  # fmt: skip


@pytest.mark.parametrize(("lines", "told"), CASES)
def test_numbers_in_vllms_messages_become_need_have_and_advice(lines: list[str], told: list[str]) -> None:
    why = reason([*lines, SECONDHAND.format({"EngineCore_DP0": 1})])
    assert all(part in why for part in told) and "Error" not in why and "\n" not in why


@pytest.mark.parametrize("lines", [lines for lines, _ in CASES])
def test_an_engine_without_a_plan_is_advised_vllms_flags(lines: list[str]) -> None:
    """`overspill ab` told of --gpu-memory and --ram, and refused them for such a configuration."""
    why = reason(lines, is_planned=False)
    assert why and not re.search(r"--gpu-memory(?!-utilization)|--ram\b|--offload-ram|--weights-ram", why)
    assert "{" not in why and "  " not in why


@pytest.mark.parametrize(
    ("have", "everything", "part"), [("9.87", "23.52", "0.41"), ("23.51", "23.52", "0.99"), ("0.1", "80.0", "0.01")]
)
def test_an_engine_without_a_plan_is_advised_the_free_share(have: str, everything: str, part: str) -> None:
    for where, what in (("device cuda:0", "Free"), ("node 0", "Available")):
        kind = "GPU" if what == "Free" else "CPU"
        line = (
            f"ValueError: {what} memory on {where} ({have}/{everything} GiB) on startup is less than desired {kind} "
            "memory utilization (0.92, 21.64 GiB). "
        )
        assert f"ive less with --gpu-memory-utilization {part}" in reason([line], is_planned=False)


# As vLLM 0.32 on a CPU wrote it.
LONGER = [
    "(APIServer pid=7427) INFO 11-15 20:25:42 [model.py:733] Resolved architecture: LlamaForCausalLM",
    "Traceback (most recent call last):",
    '  File "<frozen runpy>", line 198, in _run_module_as_main',
    "    return runner.run(wrapper())",
    "           ^^^^^^^^^^^^^^^^^^^^^",
    "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig",
    "  Value error, User-specified max_model_len (40960) is greater than the derived max_model_len "
    "(max_position_embeddings=32768.0 or model_max_length=None in model's config.json). To allow overriding this "
    "maximum, set the env var VLLM_ALLOW_LONG_MAX_MODEL_LEN=1. [type=value_error, input_value=ArgsKwargs((), "
    "{'model': ...nderer_num_workers': 1}), input_type=ArgsKwargs]",
    "    For further information visit https://errors.pydantic.dev/2.14/v/value_error",
]
NO_TOKENIZER = [
    "Traceback (most recent call last):",
    '  File "/x/tokenization_utils_tokenizers.py", line 412, in __init__',
    "    raise ValueError(",
    "ValueError: Couldn't instantiate the backend tokenizer from one of: ",
    "(1) a `tokenizers` library serialization file, ",
    "(2) a slow tokenizer instance to convert or ",
    "(3) an equivalent slow tokenizer class to instantiate and convert. ",
]
INVALID = [
    "pydantic_core._pydantic_core.ValidationError: 2 validation errors for SchedulerConfig",
    "max_num_seqs",
    "  Input should be greater than or equal to 1 [type=greater_than_equal, input_value=0, input_type=int]",
    "    For further information visit https://errors.pydantic.dev/2.14/v/greater_than_equal",
    "policy",
    "  Value error, no such policy. [type=value_error, input_value='x', input_type=str]",
]


def test_a_context_beyond_the_models_own_is_reported_with_a_flag() -> None:
    """Only `1 validation error for ModelConfig` was shown: the reason stood on the next line."""
    for lines in (LONGER, [FROM_CORE + line for line in LONGER[1:]]):
        why = reason([*lines, SECONDHAND.format({"EngineCore_DP0": 1})])
        assert why.startswith("40960 tokens are more than the 32768 the model was made for")
        assert "--max-model-len 32768;" in why and "pydantic" not in why


def test_a_model_without_a_tokenizer_is_told_what_to_add() -> None:
    why = reason(NO_TOKENIZER)
    assert "tokenizer" in why and "--tokenizer" in why and "--skip-tokenizer-init" in why


@pytest.mark.parametrize("prefix", ["", "(APIServer pid=7) ", FROM_CORE])
def test_settings_vllm_rejects_are_named_with_the_reason(prefix: str) -> None:
    why = reason([f"{prefix}{line}" for line in INVALID])
    assert why == (
        "vLLM does not accept its settings (SchedulerConfig): max_num_seqs: Input should be greater than or equal to "
        "1; policy: no such policy"
    )
    one = [INVALID[0].replace("2 validation errors", "1 validation error"), INVALID[-1]]
    assert reason(one) == "vLLM does not accept its settings (SchedulerConfig): no such policy"


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (["\tsize mismatch for a: 1", "  and for b"], "RuntimeError: broken: size mismatch for a: 1 and for b"),
        (["unindented, and announced"], "RuntimeError: broken: unindented, and announced"),
        (["(Worker pid=9)   of another process", "  of this"], "RuntimeError: broken: of this"),
        (["", "  after a pause"], "RuntimeError: broken:"),
        (["Traceback (most recent call last):", '  File "x", line 1'], "RuntimeError: broken:"),
        (['  File "x", line 1', "    call()"], "RuntimeError: broken:"),
        (["(EngineCore pid=31) INFO 11-15 09:17:53 [x.py:7] all is well"], "RuntimeError: broken:"),
        (["INFO 11-15 09:17:53 [x.py:7] all is well"], "RuntimeError: broken:"),
        (["nanobind: leaked 3 instances!", ' - leaked function "get"'], "RuntimeError: broken:"),
        (["/x/resource_tracker.py:254: UserWarning: leaked", "  warnings.warn("], "RuntimeError: broken:"),
    ],
)
def test_an_error_is_told_with_the_lines_that_belong_to_it(more: list[str], why: str) -> None:
    assert reason(["RuntimeError: broken:", *more]) == why


def test_lines_that_no_error_announces_are_not_its_own() -> None:
    assert reason(["ValueError: no", "/x/resource_tracker.py:254: UserWarning: leaked"]) == "ValueError: no"


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
        "config/model.py": [
            "User-specified max_model_len ({max_model_len}) is greater ",
            "than the derived max_model_len ({max_len_key}=",
        ],
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


@pytest.mark.parametrize("prefix", ["", "(APIServer pid=7) ", FROM_CORE])
def test_continuation_lines_of_an_error_are_shown_without_frames(prefix: str) -> None:
    """Every line that began with a space was left out, and so was what pydantic found wrong."""
    for lines in (LONGER[1:], NO_TOKENIZER, INVALID):
        shown = without_tracebacks([f"{prefix}{line}" for line in lines])
        told = [f"{prefix}{line}".rstrip() for line in lines if "Error: " in line or "alue error, " in line]
        assert set(told) <= set(shown)
        said = "\n".join(shown)
        assert not re.search(r'File "|Traceback|\^\^|runner\.run|raise ValueError|further information', said)
    assert f"{prefix}(3) an equivalent slow tokenizer class to instantiate and convert." in "\n".join(
        without_tracebacks([f"{prefix}{line}" for line in NO_TOKENIZER])
    )
    assert without_tracebacks(["    call()", "/x.py:24: DeprecationWarning: old", "  warnings.warn("]) == [
        "/x.py:24: DeprecationWarning: old"
    ]
