"""Attention on the CPU: the kernel against float64, its threads, its steps, and what it does when they fail."""

import ctypes
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from attention_cases import Case, bounds, cases
from attention_rates import measure_rates
from overspill.kv.attention import build, library
from overspill.kv.attention.library import AttentionUnavailable, Library, default_threads, load
from overspill.kv.attention.pool import (
    Attended,
    Fault,
    Job,
    Layout,
    Pool,
    Segments,
    State,
    Step,
    StepAborted,
    StepStalled,
)

LONG = Case(kv_heads=4, segments=((96, (0,)),))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Library:
    """The installed library; one built for this run where the sources were not installed, or changed since."""
    try:
        return load()
    except AttentionUnavailable:
        path = tmp_path_factory.mktemp("library") / "libattention.so"
        build.build(path)
        return load(path)


@pytest.fixture
def pool(built: Library) -> Iterator[Pool]:
    with Pool(2, library=built) as pool:
        yield pool


def merged(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Parts of a softmax put together by their log-sum-exps, as the GPU does it."""
    lses = torch.stack([lse for _, lse in parts])
    whole = lses.logsumexp(0)
    weights = (lses - whole).exp().transpose(1, 2).unsqueeze(-1)  # [part][query][head]
    return (torch.stack([output for output, _ in parts]) * weights).sum(0), whole


def test_every_kernel_agrees_with_float64(built: Library, pool: Pool) -> None:
    for kernel in built.kernels:
        pool.force_kernel(kernel)
        for case in cases():
            if not case.suits(kernel):
                continue
            error, lse_error = case.errors(pool)
            assert error < bounds(kernel)[0] and lse_error < bounds(kernel)[1], (kernel, case, error, lse_error)
            assert pool.kernel == kernel


@pytest.mark.parametrize(("name", "count"), [("float8_e4m3fn", 254), ("float8_e5m2", 248)])
def test_every_fp8_number_is_read_exactly(built: Library, pool: Pool, name: str, count: int) -> None:
    numbers = torch.arange(256, dtype=torch.uint8).view(getattr(torch, name))
    numbers = numbers[numbers.float().isfinite()]
    assert len(numbers) == count
    # One token: its value comes out as it is.
    values = Case(kv_type=name, kv_heads=1, group=1, head_size=256, block_size=1, segments=((1, (0,)),))
    values.kv[..., 1, :count] = numbers
    # One token for each query, which picks one number of its key: that is the log-sum-exp.
    keys = Case(
        kv_type=name, kv_heads=1, group=1, head_size=64, block_size=1, sharp=8.0,
        segments=tuple((1, (i,)) for i in range(count)), num_queries=count,
    )  # fmt: skip
    keys.kv.zero_()
    keys.query.zero_()
    for i, ids in enumerate(keys.blocks):
        keys.kv[int(ids[0]), 0, 0, 0, i % 64] = numbers[i]
        keys.query[i, 0, i % 64] = 1
    for kernel in filter(values.suits, built.kernels):
        pool.force_kernel(kernel)
        output, _ = values.attend(pool)
        assert torch.equal(output[0, 0, :count], numbers.float()), kernel
        _, lse = keys.attend(pool)
        torch.testing.assert_close(lse[0], numbers.float(), rtol=1e-6, atol=0, msg=kernel)


def test_results_do_not_depend_on_the_number_of_threads(built: Library) -> None:
    case = Case(kv_heads=8, segments=((150, (0, 1, 2)), (40, (1,))), num_queries=3)
    results = []
    for threads in (1, 2, 3, 7):
        with Pool(threads, library=built) as pool:
            results += [case.attend(pool), case.attend(pool)]
    for output, lse in results[1:]:
        assert torch.equal(output, results[0][0]) and torch.equal(lse, results[0][1])


def test_a_shared_prefix_gives_what_each_request_gets_alone(pool: Pool) -> None:
    case = Case(segments=((7, (0, 1, 2)), (3, (0,)), (2, (2,))), num_queries=3)
    error, lse_error = case.errors(pool)
    assert error < bounds("")[0] and lse_error < bounds("")[1]


def test_a_query_without_blocks_weighs_nothing(pool: Pool) -> None:
    output, lse = Case(segments=((4, (1,)), (0, (2,))), num_queries=3).attend(pool)
    assert (output[[0, 2]] == 0).all() and (lse[:, [0, 2]] == -torch.inf).all()
    assert (output[1] != 0).any() and lse[:, 1].isfinite().all()


def test_nan_in_a_block_is_not_hidden(pool: Pool) -> None:
    case = Case(head_size=64)
    case.kv[int(case.blocks[0][0]), 3, :, 0, 5] = torch.nan
    output, lse = case.attend(pool)
    assert output.isnan().all() and lse.isnan().all()


def test_parts_merged_by_lse_equal_the_whole(pool: Pool) -> None:
    case = Case(segments=((12, (0, 1)),), num_queries=2, sharp=3.0)
    (ids,) = case.blocks
    parts = [case.attend(pool, [ids[:5]]), case.attend(pool, [ids[5:]])]
    expected, expected_lse = case.expected()
    output, lse = merged(parts)
    assert (output - expected).abs().max() < 1e-5 and (lse - expected_lse).abs().max() < 1e-5

    def distance(*wrong: tuple[torch.Tensor, torch.Tensor]) -> float:
        return float((merged(list(wrong))[0] - expected).abs().max())

    left_out = case.attend(pool, [ids[6:]])
    twice = case.attend(pool, [ids[4:]])
    wrong_lse = (parts[1][0], parts[1][1] * 0.69)  # base 2 taken for e
    for planted in (left_out, twice, wrong_lse):
        assert distance(parts[0], planted) > 1e-2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_size": 72}, "head size 72"),
        ({"kv_type": "int8"}, "KV of int8"),
        ({"query_type": "float8_e5m2"}, "queries of float8_e5m2"),
        ({"num_blocks": 3}, "of 3"),
    ],
)
def test_impossible_jobs_are_refused(pool: Pool, change: dict[str, object], message: str) -> None:
    case = Case()
    job = case.job(*case.results())
    layout = replace(job.layout, **change)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        pool.attend(replace(job, layout=layout))
    with pytest.raises(ValueError, match="query 1 of 1"):
        pool.attend(replace(job, segments=Segments([([0], [1])])))


class Flags:
    """32-bit flags in memory, as a GPU raises and lowers them."""

    def __init__(self, count: int) -> None:
        self.ready, self.done = (ctypes.c_uint32 * count)(), (ctypes.c_uint32 * count)()

    def job(self, job: Job, layer: int) -> Job:
        size = ctypes.sizeof(ctypes.c_uint32)
        ready, done = ctypes.addressof(self.ready) + layer * size, ctypes.addressof(self.done) + layer * size
        return replace(job, ready=ready, done=done)


def eventually(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.001)
    return False


def test_steps_follow_their_flags(pool: Pool) -> None:
    layers = [Case(seed=seed) for seed in range(3)]
    results = [case.results() for case in layers]
    flags = Flags(3)
    jobs = [flags.job(case.job(*result), i) for i, (case, result) in enumerate(zip(layers, results))]
    for _ in range(3):
        step = pool.submit(Step(jobs))
        for layer, (case, (output, _)) in enumerate(zip(layers, results)):
            assert eventually(lambda: (pool.progress().state, pool.progress().layer) == (State.WAITING, layer))  # noqa: B023
            assert not flags.done[layer]
            output.fill_(torch.nan)
            flags.ready[layer] = 1
            assert eventually(lambda: flags.done[layer])  # noqa: B023
            assert not flags.ready[layer], "a step of one layer would begin the next one"
            flags.done[layer] = 0
            assert (output - case.expected()[0]).abs().max() < 1e-5
        pool.wait(step, 20)
    assert pool.progress().finished == 3 and pool.progress().state == State.IDLE


def test_steps_run_in_the_order_of_their_submission(pool: Pool) -> None:
    flags, case = Flags(1), Case()
    output, lse = case.results()
    late = pool.submit(Step([flags.job(case.job(output, lse), 0)]))
    other, other_lse = case.results()
    next_one = pool.submit(Step([case.job(other, other_lse)]))
    assert other.isnan().all()
    flags.ready[0] = 1
    pool.wait(next_one, 20)
    pool.wait(late, 20)
    assert torch.equal(output, other)


def test_a_step_takes_other_blocks_without_being_made_anew(pool: Pool) -> None:
    layers = [Case(segments=((6, (0, 1)),), num_queries=2, seed=seed) for seed in range(3)]
    results, wanted = [case.results() for case in layers], [case.results() for case in layers]
    step = Step([case.job(*result) for case, result in zip(layers, results)])
    other = [(range(4), [0]), (range(2, 6), [1])]
    step.attend_to(Segments(other), 2, layers=[0, 2])
    pool.wait(pool.submit(step), 20)
    for layer, (case, result) in enumerate(zip(layers, wanted)):
        job = case.job(*result)
        pool.attend(job if layer == 1 else replace(job, segments=Segments(other)))
    for got, expected in zip(results, wanted):
        assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


def test_an_aborted_step_sets_no_flag_and_the_pool_goes_on(pool: Pool) -> None:
    flags, case = Flags(2), Case()
    result = case.results()
    steps = [pool.submit(Step([flags.job(case.job(*result), i)])) for i in range(2)]
    assert eventually(lambda: pool.progress().state == State.WAITING)
    with pytest.raises(StepStalled, match="waiting at layer 0 of step 1, 2 threads alive"):
        pool.wait(steps[0], 0.01)
    pool.abort()
    flags.ready[:] = [1, 1]
    for step in steps:
        with pytest.raises(StepAborted):
            pool.wait(step, 20)
    assert list(flags.done) == [0, 0] and result[0].isnan().all()
    assert case.errors(pool)[0] < bounds("")[0]
    with pytest.raises(StepAborted):
        pool.wait(steps[0], 20)


def test_a_stalled_thread_is_seen_and_may_come_back(pool: Pool) -> None:
    pool.inject_fault(1, Fault.STALL)
    results = LONG.results()
    assert eventually(lambda: stalls(pool, LONG, results))
    before = pool.progress()
    time.sleep(0.05)
    after = pool.progress()
    assert before.units == after.units and before.heartbeat < after.heartbeat and after.alive == 2
    with pytest.raises(StepStalled, match="still uses an aborted step's memory"):
        pool.abort(0.01)
    pool.inject_fault(1, Fault.NONE)
    pool.abort(20)
    assert LONG.errors(pool)[0] < bounds("")[0]


def stalls(pool: Pool, case: Case, results: tuple[torch.Tensor, torch.Tensor]) -> bool:
    """Whether a step did not end: the thread with the fault may have come too late to take part."""
    step = pool.submit(Step([case.job(*results)]))
    try:
        pool.wait(step, 0.5)
    except StepStalled:
        return True
    return False


def test_a_dead_thread_is_reported_and_does_not_hang_the_end(built: Library) -> None:
    for thread in (0, 1):
        pool = Pool(2, library=built)
        pool.inject_fault(thread, Fault.EXIT)
        results = LONG.results()
        assert eventually(lambda: stalls(pool, LONG, results))  # noqa: B023
        assert eventually(lambda: pool.progress().alive == 1)  # noqa: B023
        with pytest.raises(StepStalled, match="1 of 2 threads died"):
            pool.wait(pool.progress().submitted, 0.01)
        pool.close()


def test_no_memory_for_results_is_a_dead_thread(built: Library) -> None:
    code = """
import resource, sys
import numpy as np
from pathlib import Path
from overspill.kv.attention.library import load
from overspill.kv.attention.pool import Job, Layout, Pool, Segments, StepStalled, Step

queries = 4000
layout = Layout.packed(
    num_blocks=1, block_size=16, kv_heads=2, group=4, head_size=128, kv_type="float32", query_type="float32"
)
memory = [np.zeros(n, np.float32) for n in (16 * 2 * 256, queries * 8 * 128, queries * 8 * 128, queries * 8)]
kv, query, output, lse = (one.ctypes.data for one in memory)
job = Job(
    layout=layout, segments=Segments([([0], list(range(queries)))]), kv=kv, query=query, output=output, lse=lse,
    num_queries=queries, scale=1.0,
)
with Pool(2, library=load(Path(sys.argv[1]))) as pool:
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + (4 << 20), resource.RLIM_INFINITY))
    step = pool.submit(Step([job]))
    try:
        pool.wait(step, 2)
    except StepStalled as error:
        print(error)
"""
    command = [sys.executable, "-c", code, str(built.path)]
    child = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "1 of 2 threads died" in child.stdout and child.returncode == 0, child.stderr
    assert "no memory for its results" in child.stderr


def test_threads_sleep_when_there_is_nothing_to_do(pool: Pool) -> None:
    Case().attend(pool)
    tasks = [Path(f"/proc/self/task/{task}") for task in os.listdir("/proc/self/task")]
    ours = [task for task in tasks if (task / "comm").read_text().startswith("overspill-")]
    assert len(ours) == pool.threads
    assert eventually(lambda: all((task / "stat").read_text().rpartition(")")[2].split()[0] == "S" for task in ours))

    def ticks() -> int:
        return sum(sum(map(int, (task / "stat").read_text().rpartition(")")[2].split()[11:13])) for task in ours)

    before = ticks()
    time.sleep(0.2)
    assert ticks() - before <= 1


def test_callers_may_share_a_pool(pool: Pool) -> None:
    wrong = []

    def call(seed: int) -> None:
        case = Case(seed=seed)
        for _ in range(10):
            if case.errors(pool)[0] > bounds("")[0]:
                wrong.append(seed)

    callers = [threading.Thread(target=call, args=(seed,)) for seed in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


def test_default_threads_leave_two_cores(tmp_path: Path) -> None:
    for cpu in range(8):  # four cores, two threads each
        folder = tmp_path / f"devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    assert default_threads(range(8), tmp_path) == 2
    assert default_threads([0, 4], tmp_path) == 1
    assert default_threads([], tmp_path) == 1


def test_threads_stay_on_the_cpus_given(built: Library) -> None:
    cpu = min(os.sched_getaffinity(0))
    with Pool(1, cpus=[cpu, 4096], library=built):
        allowed = {
            (task / "comm").read_text().strip(): os.sched_getaffinity(int(task.name))
            for task in Path("/proc/self/task").iterdir()
        }
        assert allowed["overspill-0"] == {cpu}


def test_rates_are_measured_beside_plain_reads(pool: Pool) -> None:
    rates = measure_rates(pool, num_bytes=8 << 20, repeats=1)
    assert rates.attend_bytes_per_s > 0 and rates.read_bytes_per_s > 0 and rates.kernel


def test_a_library_from_other_sources_is_not_loaded(
    built: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "libattention.so"
    with pytest.raises(AttentionUnavailable, match=r"libattention\.so is missing.*install a C\+\+ compiler"):
        load(path)
    shutil.copy(built.path, path)
    monkeypatch.setattr(library, "digest", lambda: "another")
    with pytest.raises(AttentionUnavailable, match="not built from the sources next to it"):
        load(path)
    (tmp_path / "damaged.so").write_bytes(b"no library")
    with pytest.raises(AttentionUnavailable, match="does not load"):
        load(tmp_path / "damaged.so")


def test_the_digest_follows_the_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = build.digest()
    shutil.copytree(build.SOURCES, tmp_path / "native")
    monkeypatch.setattr(build, "SOURCES", tmp_path / "native")
    assert build.digest() == before
    with (tmp_path / "native/plan.cpp").open("a") as file:
        file.write("\n")
    assert build.digest() != before


def test_without_a_compiler_the_build_says_what_it_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(build.BuildError, match="no-such-compiler"):
        build.build(tmp_path / "libattention.so")
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "ziglang", None)
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(build.BuildError, match=r"c\+\+, g\+\+, clang\+\+ nor the package ziglang"):
        build.build(tmp_path / "libattention.so")
    with pytest.raises(build.BuildError, match="no attention kernel for riscv64"):
        build.build(tmp_path / "libattention.so", "riscv64")


def test_amx_that_kills_its_process_is_not_used(built: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    class Call:
        def try_amx(self, stage: int) -> int:
            return 0

    monkeypatch.setattr(library, "_AMX_TRY", "import os, sys; os.kill(os.getpid(), 4 if int(sys.argv[2]) >= 2 else 0)")
    assert library._try_amx(built.path, Call()) == "configuration: SIGILL"
    monkeypatch.setattr(library, "_AMX_TRY", "import sys; sys.exit(1)")
    assert library._try_amx(built.path, Call()) == "permission: Operation not permitted"
    monkeypatch.setattr(library, "_AMX_TRY", "")
    assert library._try_amx(built.path, Call()) == "works"


def test_structures_match_the_header(tmp_path: Path) -> None:
    if not (compilers := list(build.compilers())):
        pytest.skip("needs a C++ compiler")
    names = {
        "Layout": library.NativeLayout, "Segment": library.NativeSegment, "Job": library.NativeJob,
        "Progress": library.NativeProgress,
    }  # fmt: skip
    lines = [
        f'static_assert(sizeof(Overspill{name}) == {ctypes.sizeof(native)}, "");'
        + "".join(
            f'static_assert(__builtin_offsetof(Overspill{name}, {field}) == {getattr(native, field).offset}, "");'
            for field, *_ in native._fields_
        )
        for name, native in names.items()
    ]
    source = tmp_path / "check.cpp"
    source.write_text(f'#include "{build.SOURCES}/attention.h"\n' + "\n".join(lines))
    subprocess.run([*compilers[0], "-std=c++17", "-fsyntax-only", str(source)], check=True)


def test_layouts_of_both_orders_differ_in_strides_only() -> None:
    shape = dict(num_blocks=3, block_size=16, kv_heads=8, group=4, head_size=128)
    tokens_first = Layout.packed(**shape, kv_type="bfloat16", query_type="bfloat16")
    heads_first = Layout.packed(**shape, kv_type="bfloat16", query_type="bfloat16", heads_first=True)
    assert (tokens_first.token_stride, tokens_first.head_stride) == (4096, 512)
    assert (heads_first.token_stride, heads_first.head_stride) == (512, 8192)
    assert tokens_first.block_stride == heads_first.block_stride == 65536
    assert tokens_first.token_bytes == heads_first.token_bytes == 4096


def test_pools_of_several_ranks_share_the_cores() -> None:
    cores = default_threads()
    with Pool(pools=2) as pool:
        assert pool.threads == max(1, cores // 2)


def test_bytes_and_times_of_jobs_add_up() -> None:
    case = next(cases())
    with Pool(2) as pool:
        assert pool.attended == Attended()
        case.errors(pool)
        once = pool.attended
        assert once.num_bytes > 0 and once.seconds > 0 and (once.jobs, once.late) == (1, 0)
        case.errors(pool)
        again = pool.attended.since(once)
        assert again.seconds > 0 and again._replace(seconds=0) == once._replace(seconds=0)


@pytest.mark.parametrize("due", [0, 1])
def test_a_job_is_late_if_its_result_is_waited_for(due: int) -> None:
    flag, case = ctypes.c_uint32(due), next(cases())
    results = case.results()
    with Pool(2) as pool:
        job = replace(case.job(*results), due=ctypes.addressof(flag))
        pool.wait(pool.submit(Step([job, job])), 60)
        assert pool.attended[2:] == (2, 2 * due)
