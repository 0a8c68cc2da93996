// C interface of the CPU attention library, loaded with ctypes: library.py mirrors every structure of this file.
//
// In a job, query tokens attend to KV blocks in RAM; it writes partial outputs with their log-sum-exps, to be merged
// with the GPU's part. A step is a list of jobs, one per layer, which the threads run one after another.
#pragma once

#include <cstdint>

#pragma GCC visibility push(default)
extern "C" {

enum OverspillType { kBf16 = 0, kFp16 = 1, kFp8E4m3 = 2, kFp8E5m2 = 3, kFp32 = 4 };

// Places of keys and values, in bytes. The key of token t and kv head h in block b begins at
// kv + b * block_stride + t * token_stride + h * head_stride, and its value value_offset bytes later.
struct OverspillLayout {
    int64_t block_stride, token_stride, head_stride, value_offset;
    int32_t num_blocks;  // block ids are smaller
    int32_t block_size;  // tokens
    int32_t kv_heads;
    int32_t group;  // query heads per kv head
    int32_t head_size;
    int32_t kv_type, query_type;  // OverspillType; queries are not fp8
};

// Full blocks, and the query tokens that attend to all of them. Requests with a common prefix share a segment, so that
// its blocks are read once.
struct OverspillSegment {
    const int32_t* blocks;
    const int32_t* queries;  // rows of OverspillJob::query
    int32_t num_blocks, num_queries;
};

struct OverspillJob {
    const OverspillLayout* layout;
    const OverspillSegment* segments;
    const uint8_t* kv;
    const void* query;      // [num_queries][kv_heads * group][head_size]
    float* output;          // as query; zeros for a query without a segment
    float* lse;             // [kv_heads * group][num_queries], natural logarithm; -inf for a query without a segment
    // Flags, 0 or 1, or null. Who waits for a flag lowers it, and the GPU lowers `due`.
    uint32_t* ready;      // the job begins when the GPU raises it
    uint32_t* done;       // raised at the end of the job; the GPU waits for it
    const uint32_t* due;  // raised while the GPU waits for `done`
    int32_t num_segments, num_queries;
    float scale, key_scale, value_scale;  // of the softmax; of fp8 keys and values (1 otherwise)
};

enum OverspillState { kIdle = 0, kWaiting = 1, kAttending = 2 };

struct OverspillProgress {
    uint64_t heartbeat;           // rises while the leader is alive
    uint64_t units;               // pieces of work completed by all threads
    int64_t submitted, finished;  // steps
    int32_t layer;  // index of the current job in its step
    int32_t state;  // OverspillState
    int32_t alive;  // threads
};

struct OverspillAttended {
    int64_t bytes;
    int64_t ns;          // from `ready` to `done`
    int64_t jobs, late;  // all jobs, and those that were due before they were done
};

enum OverspillResult { kFinished = 0, kAborted = 1, kTimeout = 2, kBroken = 3 };
enum OverspillFault { kNoFault = 0, kStall = 1, kExit = 2 };

struct OverspillPool;

// SHA-256 of the sources this library was built from.
const char* overspill_digest();
// Kernels by number, best first: the instruction sets compiled in, and whether this CPU and system run them.
int overspill_num_kernels();
const char* overspill_kernel_name(int kernel);
int overspill_kernel_runs(int kernel);
// Tries AMX up to `stage`: 0 CPU, 1 permission, 2 configuration, 3 loads and stores, 4 products. Returns 0 or an errno;
// an instruction that does not work kills the process, so a child must try it first.
int overspill_try_amx(int stage);
// Requests permission for this process, after a successful try in another. Returns 0 if AMX kernels may be used from
// now on.
int overspill_enable_amx();
// Text of the last error that the calling thread received.
const char* overspill_error();

// All threads stay on `cpus`, if there are any; idle threads spin for `spin_us` before they sleep. Null on failure.
OverspillPool* overspill_pool_create(int threads, const int32_t* cpus, int num_cpus, int spin_us);
// Ends the threads. Returns the number that did not end in time; if there are any, the pool is never freed.
int overspill_pool_close(OverspillPool* pool, int timeout_ms);
// Queues a step and returns its id, or a negative number (see overspill_error). Everything that the jobs point to must
// stay until the step has ended.
int64_t overspill_pool_submit(OverspillPool* pool, const OverspillJob* jobs, int num_jobs);
int overspill_pool_wait(OverspillPool* pool, int64_t step, int64_t timeout_us);
// Ends all steps submitted so far without setting `done`. Returns kAborted if no thread touches their memory any more.
int overspill_pool_abort(OverspillPool* pool, int64_t timeout_us);
void overspill_pool_progress(const OverspillPool* pool, OverspillProgress* progress);
// Sets the kernel of steps submitted from now on; with -1, each job gets the best one.
void overspill_pool_force_kernel(OverspillPool* pool, int kernel);
// Kernel of the job that ran last.
const char* overspill_pool_kernel(const OverspillPool* pool);
// Reads memory with all threads, as a yardstick for attention; call it while no step runs.
int64_t overspill_pool_read(OverspillPool* pool, const uint8_t* memory, int64_t bytes);
// CPU time that all threads spent in pieces of work.
int64_t overspill_pool_cpu_ns(const OverspillPool* pool);
// Totals over the jobs with KV so far.
void overspill_pool_attended(const OverspillPool* pool, OverspillAttended* attended);
// Tests only: the thread takes its next piece of work, and then stalls or exits. Thread 0 is the leader.
void overspill_pool_inject_fault(OverspillPool* pool, int thread, int fault);
}
#pragma GCC visibility pop
