// Interface of a kernel for one instruction set, and the work that it is given.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention.h"

// Files are compiled for different instruction sets: a function in two of them must be inlined into both, or the linker
// would keep just one, perhaps with instructions that this CPU lacks.
#define OVERSPILL_INLINE inline __attribute__((always_inline))

namespace overspill {

constexpr int kMaxHeadSize = 256;
// Tokens that a kernel attends to at a time.
constexpr int kStep = 16;

// Bytes of an element of each OverspillType.
constexpr int kTypeBytes[] = {2, 2, 1, 1, 4};

// A run of tokens of one segment. Segments are cut by their size alone, and results are added in a fixed order: outputs
// depend neither on the number of threads nor on which thread ran which chunk.
struct Chunk {
    int32_t segment;
    int32_t first, end;  // tokens, counted through the segment's blocks
    size_t result;       // offset of its Result, in floats
};

// Partial result of a chunk. Row i * group + g of a kv head is query token i of the segment and query head g of the kv
// head.
struct Result {
    float* reference;  // [kv_heads][rows]: weights are 2^(score - reference)
    float* total;      // [kv_heads][rows]: sums of weights
    float* sums;       // [kv_heads][rows][width]: sums of weighted values, dimensions in the kernel's order

    OVERSPILL_INLINE Result(float* memory, int kv_heads, int rows)
        : reference(memory), total(memory + kv_heads * rows), sums(memory + 2 * kv_heads * rows) {}
    static OVERSPILL_INLINE size_t floats(int kv_heads, int rows, int width) {
        return (size_t(kv_heads) * rows * (width + 2) + 15) / 16 * 16;
    }
};

// Working memory of one thread.
struct Scratch {
    float* queries;  // [kv_heads][rows][width] in the kernel's form
    float* state;
    const void* packed_job;  // the job whose queries are packed
    int packed_segment;
};

struct Kernel {
    const char* name;
    bool (*runs_here)();
    bool (*suits)(const OverspillLayout& layout);
    // Rows per kv head from which this kernel is better than those after it; without the function, any.
    int (*least_rows)(const OverspillLayout& layout);
    // Floats per row of sums and of packed queries.
    int (*width)(const OverspillLayout& layout);
    // Floats of Scratch::state for `rows` rows per kv head.
    size_t (*state_floats)(const OverspillLayout& layout, int rows);
    void (*attend)(const OverspillJob& job, const Chunk& chunk, Scratch& scratch, Result result);
    // Position of each dimension in a row of sums.
    const int16_t* (*order)(const OverspillLayout& layout);
    // Factor missing from sums because the conversion of the element type left it out.
    float (*value_factor)(const OverspillLayout& layout);
};

#if defined(__x86_64__)
extern const Kernel kAvx2, kAvx512, kAvx512Bf16, kAmx;
bool has_avx2();
bool has_avx512();
bool has_avx512_bf16();
bool may_use_amx();
#elif defined(__aarch64__)
extern const Kernel kNeon;
#endif

// Kernels compiled in, best first; null-terminated.
extern const Kernel* const kKernels[];
// The answer is cached: in a virtual machine each CPUID instruction traps and takes tens of microseconds.
bool runs_here(int kernel);

static OVERSPILL_INLINE const uint8_t* token_at(const OverspillJob& job, const OverspillSegment& segment, int token) {
    const OverspillLayout& layout = *job.layout;
    const int block = token / layout.block_size;
    return job.kv + segment.blocks[block] * layout.block_stride +
           (token - block * layout.block_size) * layout.token_stride;
}

}  // namespace overspill
