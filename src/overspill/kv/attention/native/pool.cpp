// Pool of attention threads: one of them leads, takes steps in turn, and divides each layer's job among all.
#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <climits>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <deque>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <vector>

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "plan.h"

using namespace overspill;

namespace {

// While a step runs, its next layer is microseconds to milliseconds away: threads spin this long before they sleep.
constexpr int64_t kStepSpinNs = 20'000'000;
// After this, a waiting thread yields its core.
constexpr int64_t kYieldNs = 100'000;
constexpr int64_t kReadPiece = 1 << 20;

thread_local std::string last_error;

void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

int64_t now_ns(clockid_t clock = CLOCK_MONOTONIC) {
    timespec t;
    clock_gettime(clock, &t);
    return t.tv_sec * 1'000'000'000ll + t.tv_nsec;
}

using Word = std::atomic<uint32_t>;

void sleep_on(const Word& word, uint32_t value, int64_t timeout_ns) {
    const timespec timeout{timeout_ns / 1'000'000'000, timeout_ns % 1'000'000'000};
    syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, &timeout, nullptr, 0);
}

void wake_all(const Word& word) { syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0); }

// Wait that spins, then yields. `tired` is true once the wait has lasted longer than `ns`; calling it is cheap.
class Patience {
  public:
    bool tired(int64_t ns) {
        relax();
        if (++rounds_ % 64) return false;
        const int64_t waited = now_ns() - began_;
        if (waited > kYieldNs) sched_yield();
        return waited > ns;
    }

  private:
    int64_t began_ = now_ns();
    unsigned rounds_ = 0;
};

// The GPU reads and writes flags and results behind the CPU's caches, so ordinary fences between cores do not suffice
// on ARM.
void fence_device() {
#if defined(__aarch64__)
    __asm__ volatile("dmb osh" ::: "memory");
#else
    std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
}

struct Memory {
    float* data = nullptr;
    size_t floats = 0;

    void reserve(size_t needed) {
        if (needed <= floats) return;
        free(data);
        data = nullptr, floats = 0;
        if (posix_memalign((void**)&data, 4096, needed * sizeof(float))) throw std::bad_alloc();
        std::memset(data, 0, needed * sizeof(float));
        floats = needed;
    }
    ~Memory() { free(data); }
};

struct Step {
    int64_t id;
    std::vector<OverspillJob> jobs;
    std::vector<std::shared_ptr<const Plan>> plans;  // one per job
    const uint8_t* memory = nullptr;                 // read instead of running jobs
    int64_t bytes = 0;
};

struct alignas(64) Thread {
    OverspillPool* pool;
    int index;
    pthread_t handle;
    Memory queries, state;
    Scratch scratch{};
    std::atomic<int> fault{kNoFault};
    std::atomic<int64_t> cpu_ns{0};
};

// Pieces of work for all threads. A thread reads the task only while it holds a piece, and the leader changes the task
// only when no piece is held: a thread that comes late finds no piece and touches nothing.
struct Task {
    enum Kind { kChunks, kMerge, kRead } kind = kChunks;
    const OverspillJob* job = nullptr;
    const Plan* plan = nullptr;
    const uint8_t* memory = nullptr;
    uint32_t count = 0;
};

uint64_t read_memory(const uint8_t* memory, int64_t bytes) {
    using Words = uint64_t __attribute__((vector_size(64)));
    Words a{}, b{};
    for (int64_t at = 0; at + 128 <= bytes; at += 128) {
        Words x, y;
        std::memcpy(&x, memory + at, 64), std::memcpy(&y, memory + at + 64, 64);
        a ^= x, b ^= y;
    }
    a ^= b;
    return a[0] ^ a[1] ^ a[2] ^ a[3] ^ a[4] ^ a[5] ^ a[6] ^ a[7];
}

}  // namespace

struct OverspillPool {
    std::vector<Thread> threads;
    std::vector<int> cpus;
    int64_t spin_ns = 0;
    std::atomic<const Kernel*> forced{nullptr}, last_kernel{nullptr};
    Memory results;
    Task task;
    std::atomic<uint64_t> checksum{0};  // of memory read, so that the compiler keeps the reads

    // Steps: submitted by any thread, taken by the leader.
    std::mutex mutex;
    std::deque<Step> queue;
    Step step{};  // running step; not local to the leader, since other threads may use it when the leader has ended
    std::atomic<int64_t> submitted{0}, finished{0}, aborted{0};  // ids; all steps up to `aborted` must end early
    std::array<std::atomic<bool>, 256> cut_short{};              // whether the step was aborted, by id
    Word submit_word{0}, finish_word{0};
    std::atomic<bool> stop{false};

    // Ticket: the task's number in the upper half, and in the lower half how many of its pieces are not taken yet.
    alignas(64) std::atomic<uint64_t> ticket{0};
    alignas(64) std::atomic<uint32_t> completed{0};
    alignas(64) Word wake_word{0};
    std::atomic<uint32_t> sleepers{0};

    alignas(64) std::atomic<uint64_t> heartbeat{0}, units{0};
    std::atomic<int32_t> layer{0}, state{kIdle}, alive{0};
    std::atomic<int64_t> attended_bytes{0}, attended_ns{0}, attended_jobs{0}, late_jobs{0};  // of ended jobs

    explicit OverspillPool(int count) : threads(count) {}

    // Work of every thread.

    void run_unit(Thread& thread, uint32_t unit) {
        if (task.kind == Task::kRead) {
            checksum += read_memory(task.memory + unit * kReadPiece, kReadPiece);
            return;
        }
        const OverspillJob& job = *task.job;
        if (task.kind == Task::kChunks) {
            const Chunk& chunk = task.plan->chunks[unit];
            const int rows = job.segments[chunk.segment].num_queries * job.layout->group;
            task.plan->kernel->attend(job, chunk, thread.scratch,
                                      Result(results.data + chunk.result, job.layout->kv_heads, rows));
        } else {
            const int heads = job.layout->kv_heads * job.layout->group;
            merge(job, *task.plan, results.data, unit / heads, unit % heads);
        }
    }

    // Works on pieces while there are any. False if the thread has to end.
    bool work(Thread& thread) {
        uint64_t seen = ticket.load(std::memory_order_acquire);
        if (!uint32_t(seen)) return true;
        int64_t began = now_ns(CLOCK_THREAD_CPUTIME_ID);
        while (uint32_t(seen)) {
            if (!ticket.compare_exchange_weak(seen, seen - 1, std::memory_order_acq_rel)) continue;
            if (int fault = thread.fault.load(std::memory_order_relaxed)) {
                while (fault == kStall && !stop) usleep(1000), fault = thread.fault;
                if (fault) return false;
            }
            run_unit(thread, task.count - uint32_t(seen));
            // CPU time is counted before the piece is reported; not for merges, which are many and small.
            if (task.kind != Task::kMerge) {
                const int64_t now = now_ns(CLOCK_THREAD_CPUTIME_ID);
                thread.cpu_ns += now - began;
                began = now;
            }
            units.fetch_add(1, std::memory_order_relaxed);
            completed.fetch_add(1, std::memory_order_release);
            seen = ticket.load(std::memory_order_acquire);
        }
        return true;
    }

    void follow(Thread& thread) {
        while (!stop) {
            if (!work(thread)) return;
            Patience patience;
            while (!stop && !uint32_t(ticket.load(std::memory_order_acquire))) {
                if (!patience.tired(state.load(std::memory_order_relaxed) == kIdle ? spin_ns : kStepSpinNs)) continue;
                sleepers.fetch_add(1);
                const uint32_t seen = wake_word.load();
                if (!uint32_t(ticket.load()) && !stop) sleep_on(wake_word, seen, 1'000'000'000);
                sleepers.fetch_sub(1);
            }
        }
    }

    void lead(Thread& thread) {
        while (next_step()) {
            const bool whole = run_step(thread);
            state = kIdle;
            if (!whole && !is_aborted()) return;  // the pool stopped, or this thread has to end
            cut_short[step.id % cut_short.size()] = !whole;
            finished = step.id;
            finish_word.fetch_add(1);
            wake_all(finish_word);
        }
    }

    // Work of the leader.

    bool next_step() {
        Patience patience;
        while (!stop) {
            heartbeat.fetch_add(1, std::memory_order_relaxed);
            const uint32_t seen = submit_word.load();
            if (finished.load() < submitted.load()) {
                const std::lock_guard lock(mutex);
                step = std::move(queue.front());
                queue.pop_front();
                return true;
            }
            if (patience.tired(spin_ns)) sleep_on(submit_word, seen, 100'000'000);
        }
        return false;
    }

    bool is_aborted() const { return aborted.load(std::memory_order_relaxed) >= step.id; }

    // Runs all pieces of `task`; false if the step was aborted, the pool stopped, or this thread has to end.
    bool run_task(Thread& thread) {
        uint32_t awaited = task.count;
        completed.store(0, std::memory_order_relaxed);
        ticket.store(((ticket.load() >> 32) + 1) << 32 | awaited);
        if (sleepers.load()) {
            wake_word.fetch_add(1);
            wake_all(wake_word);
        }
        const bool working = work(thread);
        bool cancelled = false;
        Patience patience;
        while (working && completed.load(std::memory_order_acquire) < awaited) {
            heartbeat.fetch_add(1, std::memory_order_relaxed);
            if (stop) return false;
            if (!cancelled && is_aborted()) {
                // Wait for the pieces that threads hold, since these use the step's memory.
                awaited -= uint32_t(ticket.fetch_and(~uint64_t(UINT32_MAX)));
                cancelled = true;
            }
            patience.tired(0);
        }
        return working && !cancelled;
    }

    static bool is_up(const uint32_t* flag) { return flag && __atomic_load_n(flag, __ATOMIC_RELAXED); }

    bool take_ready(const OverspillJob& job) {
        if (!job.ready) return true;
        Patience patience;
        while (!is_up(job.ready)) {
            heartbeat.fetch_add(1, std::memory_order_relaxed);
            if (stop || is_aborted()) return false;
            if (patience.tired(kStepSpinNs)) usleep(20);
        }
        // Lowered before `done` is raised: if it were up for longer, a step of one layer could begin the next one.
        __atomic_store_n(job.ready, 0, __ATOMIC_RELAXED);
        fence_device();
        return !stop && !is_aborted();
    }

    bool run_step(Thread& thread) {
        if (step.memory) {
            state = kAttending;
            task = {Task::kRead, nullptr, nullptr, step.memory, uint32_t(step.bytes / kReadPiece)};
            return run_task(thread);
        }
        for (size_t i = 0; i < step.jobs.size(); i++) {
            const OverspillJob& job = step.jobs[i];
            const Plan& plan = *step.plans[i];
            layer = int(i);
            results.reserve(plan.result_floats);
            for (Thread& each : threads) {
                each.queries.reserve(plan.query_floats);
                each.state.reserve(plan.state_floats);
                each.scratch = {each.queries.data, each.state.data, nullptr, -1};
            }
            last_kernel = plan.kernel;
            state = kWaiting;
            if (!take_ready(job)) return false;
            state = kAttending;
            const int64_t began = now_ns();
            task = {Task::kChunks, &job, &plan, nullptr, uint32_t(plan.chunks.size())};
            if (!run_task(thread)) return false;
            task.kind = Task::kMerge;
            task.count = uint32_t(job.num_queries) * job.layout->kv_heads * job.layout->group;
            if (!run_task(thread)) return false;
            fence_device();
            if (plan.bytes) {
                // Read `due` before setting `done`: the waiting GPU then lowers `due`.
                late_jobs += is_up(job.due);
                attended_jobs++;
                attended_bytes += plan.bytes;
                attended_ns += now_ns() - began;
            }
            if (job.done) __atomic_store_n(job.done, 1, __ATOMIC_RELEASE);
        }
        return true;
    }

    // Calls from other threads.

    int64_t submit(Step next) {
        const std::lock_guard lock(mutex);
        next.id = submitted + 1;
        queue.push_back(std::move(next));
        submitted = submitted + 1;
        submit_word.fetch_add(1);
        wake_all(submit_word);
        return submitted;
    }

    int wait(int64_t id, int64_t timeout_us) {
        const int64_t deadline = now_ns() + timeout_us * 1000;
        Patience patience;
        while (finished.load(std::memory_order_acquire) < id) {
            if (!patience.tired(spin_ns)) continue;
            const uint32_t seen = finish_word.load();
            const int64_t left = deadline - now_ns();
            if (finished.load() >= id) break;
            if (left <= 0) return alive < int(threads.size()) ? kBroken : kTimeout;
            sleep_on(finish_word, seen, std::min<int64_t>(left, 100'000'000));
        }
        return cut_short[id % cut_short.size()] ? kAborted : kFinished;
    }
};

namespace {

void* run_thread(void* argument) {
    Thread& thread = *static_cast<Thread*>(argument);
    OverspillPool& pool = *thread.pool;
    try {
        if (thread.index == 0) pool.lead(thread);
        else pool.follow(thread);
    } catch (const std::bad_alloc&) {  // the thread ends, and those that wait for the step say so
        fprintf(stderr, "Overspill: a thread for attention ends: no memory for its results\n");
    }
    pool.alive.fetch_sub(1);
    return nullptr;
}

bool start_thread(OverspillPool& pool, Thread& thread) {
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    if (!pool.cpus.empty()) {
        cpu_set_t set;
        CPU_ZERO(&set);
        for (int cpu : pool.cpus) CPU_SET(cpu, &set);
        pthread_attr_setaffinity_np(&attributes, sizeof set, &set);
    }
    pool.alive.fetch_add(1);
    const int error = pthread_create(&thread.handle, &attributes, run_thread, &thread);
    pthread_attr_destroy(&attributes);
    if (!error) {
        char name[16];
        snprintf(name, sizeof name, "overspill-%u", thread.index % 10000u);
        pthread_setname_np(thread.handle, name);
        return true;
    }
    pool.alive.fetch_sub(1);
    last_error = std::string("cannot start a thread: ") + strerror(error);
    return false;
}

}  // namespace

extern "C" {

const char* overspill_error() { return last_error.c_str(); }

OverspillPool* overspill_pool_create(int threads, const int32_t* cpus, int num_cpus, int spin_us) {
    auto* pool = new OverspillPool(threads);
    pool->spin_ns = spin_us * 1000ll;
    pool->cpus.assign(cpus, cpus + num_cpus);
    // Block signals here: they are for the program's own threads.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int started = 0;
    for (Thread& thread : pool->threads) {
        thread.pool = pool, thread.index = started;
        if (!start_thread(*pool, thread)) break;
        started++;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    if (started == threads) return pool;
    pool->stop = true;
    wake_all(pool->submit_word), wake_all(pool->wake_word);
    for (int i = 0; i < started; i++) pthread_join(pool->threads[i].handle, nullptr);
    delete pool;
    return nullptr;
}

int overspill_pool_close(OverspillPool* pool, int timeout_ms) {
    pool->stop = true;
    pool->wake_word.fetch_add(1), pool->submit_word.fetch_add(1);
    wake_all(pool->wake_word), wake_all(pool->submit_word);
    timespec deadline;
    clock_gettime(CLOCK_REALTIME, &deadline);
    deadline.tv_sec += timeout_ms / 1000;
    deadline.tv_nsec += timeout_ms % 1000 * 1'000'000;
    if (deadline.tv_nsec >= 1'000'000'000) deadline.tv_sec++, deadline.tv_nsec -= 1'000'000'000;
    int left = 0;
    for (Thread& thread : pool->threads)
        if (pthread_timedjoin_np(thread.handle, nullptr, &deadline)) left++;
    if (!left) delete pool;
    return left;
}

int64_t overspill_pool_submit(OverspillPool* pool, const OverspillJob* jobs, int num_jobs) try {
    Step step{0, {jobs, jobs + num_jobs}, {}};
    for (const OverspillJob& job : step.jobs) {
        if (step.plans.empty() || !step.plans.back()->fits(job)) {
            last_error = objection(job);
            if (!last_error.empty()) return -1;
            auto plan = std::make_shared<Plan>(make_plan(job, pool->forced));
            if (!plan->kernel) {
                last_error = "this CPU has no instruction set that a kernel for this job needs";
                return -1;
            }
            step.plans.push_back(std::move(plan));
        } else {
            step.plans.push_back(step.plans.back());
        }
    }
    return pool->submit(std::move(step));
} catch (const std::bad_alloc&) {
    last_error = "no memory";  // short enough to need none
    return -1;
}

int overspill_pool_wait(OverspillPool* pool, int64_t step, int64_t timeout_us) { return pool->wait(step, timeout_us); }

int overspill_pool_abort(OverspillPool* pool, int64_t timeout_us) {
    const int64_t last = pool->submitted;
    pool->aborted = last;
    pool->submit_word.fetch_add(1);
    wake_all(pool->submit_word);
    const int result = pool->wait(last, timeout_us);
    return result == kFinished ? kAborted : result;  // the last step may have ended just before
}

void overspill_pool_progress(const OverspillPool* pool, OverspillProgress* progress) {
    *progress = {pool->heartbeat, pool->units, pool->submitted, pool->finished, pool->layer, pool->state, pool->alive};
}

void overspill_pool_force_kernel(OverspillPool* pool, int kernel) {
    pool->forced = kernel < 0 ? nullptr : kKernels[kernel];
}

const char* overspill_pool_kernel(const OverspillPool* pool) {
    const Kernel* kernel = pool->last_kernel;
    return kernel ? kernel->name : "";
}

int64_t overspill_pool_read(OverspillPool* pool, const uint8_t* memory, int64_t bytes) {
    Step step{};
    step.memory = memory, step.bytes = bytes;
    return pool->submit(std::move(step));
}

int64_t overspill_pool_cpu_ns(const OverspillPool* pool) {
    int64_t total = 0;
    for (const Thread& thread : pool->threads) total += thread.cpu_ns;
    return total;
}

void overspill_pool_attended(const OverspillPool* pool, OverspillAttended* attended) {
    *attended = {pool->attended_bytes, pool->attended_ns, pool->attended_jobs, pool->late_jobs};
}

void overspill_pool_inject_fault(OverspillPool* pool, int thread, int fault) { pool->threads[thread].fault = fault; }

}  // extern "C"
