// Attention to keys and values with vectors of any width: the file of each instruction set defines its vectors and
// includes this header.
//
// Such a file defines, in an anonymous namespace:
//   Vector of kLanes floats; zero, splat, load, store, add, sub, fma (a * b + c), fms (a * b - c), maximum, any_above,
//   nearest (integers), power (p * 2^n), totals (lane i: sum of the i-th of kLanes vectors), prefetch;
//   load_pair<type, whole>: 2 * kLanes elements as floats, or half as many followed by zeros;
//   kSums: dot products kept in registers at a time; kSlab: pairs of vectors of sums in registers, over all rows;
//   kE4m3Factor: the factor that e4m3 numbers lack after loading;
//   kBf16Dot: whether queries and KV are multiplied as bf16 numbers. The file then defines OVERSPILL_BF16_DOT too,
//   with dot_bf16, load_unit<type, whole> of kUnit<type> elements as bf16 numbers, their order word_of, and split,
//   which converts them to floats.
//
// Every byte of KV comes from memory once: all rows of a kv head attend to kStep tokens while these are in the cache.

#include <cmath>
#include <cstring>

#include "kernel.h"

namespace overspill {
namespace {

constexpr int kPair = 2 * kLanes;
constexpr int kLineBytes = 64;
constexpr int kRowBlock = 4;
constexpr int kCells = 16;
constexpr float kLog2e = 1.44269504088896340736f;
// Distance in tokens from attention to prefetches.
constexpr int kFetchDistance = 16;
// Excess of a score over its row's reference at which all sums of the row are scaled down: 2^8 is far from overflow.
constexpr float kSlack = 8.0f;
constexpr float kNothingSeen = -1e30f;

#if !defined(OVERSPILL_BF16_DOT)
template <int type>
constexpr int kUnit = kPair;
template <int type>
constexpr int word_of(int d) {
    return d;
}
#endif

// bf16 is converted to floats as even and odd elements, by a shift and a mask; other types keep their order. Queries
// are packed in the same order, and sums come out in it.
template <int type>
struct Order {
    int16_t position[kMaxHeadSize] = {};
    constexpr Order() {
        for (int d = 0; d < kMaxHeadSize; d++) {
            const int word = word_of<type>(d), lane = word % kPair;
            const bool halves = type == kBf16 || (kBf16Dot && type == kFp8E4m3);
            position[d] = int16_t(halves ? word - lane + lane % 2 * kLanes + lane / 2 : d);
        }
    }
};
template <int type>
constexpr Order<type> kOrder{};

const int16_t* order_of(int type) {
    if (kBf16Dot && type == kFp8E4m3) return kOrder<kFp8E4m3>.position;
    return type == kBf16 ? kOrder<kBf16>.position : kOrder<kFp32>.position;
}

OVERSPILL_INLINE int padded(int head_size) { return (head_size + kPair - 1) / kPair * kPair; }

// 2^x for x up to 100, with a relative error of about 2e-7; never below 2^-126; NaN for NaN.
OVERSPILL_INLINE Vector exp2_of(Vector x) {
    x = maximum(splat(-126.0f), x);  // in this order: x86 returns the second operand if one is NaN
    const Vector n = nearest(x), f = sub(x, n);
    Vector p = splat(1.5403530e-4f);
    p = fma(p, f, splat(1.3333558e-3f));
    p = fma(p, f, splat(9.6181291e-3f));
    p = fma(p, f, splat(5.5504109e-2f));
    p = fma(p, f, splat(2.4022651e-1f));
    p = fma(p, f, splat(6.9314718e-1f));
    p = fma(p, f, splat(1.0f));
    return power(p, n);
}

// kStep tokens of one kv head. Unless `ahead` is 0, tokens to prefetch lie `ahead` bytes after them.
struct Tokens {
    const uint8_t* keys;
    int64_t stride, value_offset, ahead;
    int valid;  // number of tokens, from the first, that count
};

// A block of up to 4 rows attends to kStep tokens, kPart at a time. Lane r * kPart + t of a vector of scores belongs to
// row r and token t of the part; the block's state has the same lanes: kCells references, and kCells sums of weights.
template <int type, int kRows>
struct Block {
    static constexpr int kPart = kSums / (kRows == 3 ? 4 : kRows), kParts = kStep / kPart, kVectors = kSums / kLanes;
    static constexpr int kGroup = kPart < 4 ? kPart : 4, kBytes = kTypeBytes[type];
    // Pairs of vectors of each row's sums kept in registers: a cache line's, or more if a vector is as long as a line.
    static constexpr int kMostWide = kPair < 32 ? 32 / kPair : 2;
    static constexpr int kWide = kSlab / kRows < kMostWide ? kSlab / kRows : kMostWide;
    static constexpr int kPairsAtOnce = kUnit<type> / kPair;
    static constexpr int kLine = kPair * kBytes < kLineBytes ? kLineBytes / kBytes : kPair;  // elements

    // Products of one unit of kGroup keys: all first vectors, then all second ones, so that each sum is ready again
    // when its turn comes.
    template <bool whole>
    static OVERSPILL_INLINE void multiply(const float* q, int width, const uint8_t* keys, int64_t stride,
                                          Vector* sums) {
#if defined(OVERSPILL_BF16_DOT)
#pragma GCC unroll 4
        for (int t = 0; t < kGroup; t++) {
            Words key[kPairsAtOnce];
            load_unit<type, whole>(keys + t * stride, key);
#pragma GCC unroll 2
            for (int i = 0; i < kPairsAtOnce; i++)
#pragma GCC unroll 4
                for (int r = 0; r < kRows; r++)
                    sums[r * kPart + t] = dot_bf16(
                        sums[r * kPart + t], key[i], load_words<true>((const uint8_t*)q + (r * width + i * kPair) * 2));
        }
#else
        Vector a[kGroup], b[kGroup];
#pragma GCC unroll 4
        for (int t = 0; t < kGroup; t++) load_pair<type, whole>(keys + t * stride, a[t], b[t]);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; r++)
#pragma GCC unroll 4
            for (int t = 0; t < kGroup; t++) sums[r * kPart + t] = fma(a[t], load(q + r * width), sums[r * kPart + t]);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; r++)
#pragma GCC unroll 4
            for (int t = 0; t < kGroup; t++)
                sums[r * kPart + t] = fma(b[t], load(q + r * width + kLanes), sums[r * kPart + t]);
#endif
    }

    static OVERSPILL_INLINE const float* at(const float* q, int d) {
        return kBf16Dot ? (const float*)((const uint16_t*)q + d) : q + d;
    }

    static OVERSPILL_INLINE void dots(const float* q, int head_size, int width, const uint8_t* keys,
                                      const Tokens& tokens, Vector* scores) {
        Vector sums[kSums];
#pragma GCC unroll 16
        for (int i = 0; i < kSums; i++) sums[i] = zero();
        int d = 0;
        for (; d + kLine <= head_size; d += kLine) {
            if (tokens.ahead)
#pragma GCC unroll 16
                for (int t = 0; t < kPart; t++)
                    for (int line = 0; line < kLine * kBytes; line += kLineBytes)
                        prefetch(keys + tokens.ahead + t * tokens.stride + d * kBytes + line);
            // Whole lines of a few keys at a time: keys are often so far apart that they share a set of the L1 cache.
#pragma GCC unroll 4
            for (int t = 0; t < kPart; t += kGroup)
#pragma GCC unroll 2
                for (int e = d; e < d + kLine; e += kUnit<type>)
                    multiply<true>(at(q, e), width, keys + t * tokens.stride + e * kBytes, tokens.stride, sums + t);
        }
        if constexpr (kPairsAtOnce == 1)
            for (; d < head_size; d += kPair)
#pragma GCC unroll 4
                for (int t = 0; t < kPart; t += kGroup) {
                    const uint8_t* key = keys + t * tokens.stride + d * kBytes;
                    if (d + kPair <= head_size) multiply<true>(at(q, d), width, key, tokens.stride, sums + t);
                    else multiply<false>(at(q, d), width, key, tokens.stride, sums + t);
                }
#pragma GCC unroll 16
        for (int i = 0; i < kVectors; i++) scores[i] = totals(sums + i * kLanes);
    }

    // Raises the references of rows, at the first tokens of a chunk or after a score far above all earlier ones.
    static __attribute__((noinline)) void raise(float* over, float* state, float* sums, int width, bool first) {
        for (int r = 0; r < kRows; r++) {
            float most = first ? -INFINITY : 0;
            for (int i = 0; i < kParts; i++)
                for (int t = 0; t < kPart; t++) most = fmaxf(most, over[i * kSums + r * kPart + t]);
            const float factor = first ? 0 : exp2f(-most);
            float* cells = state + r * kPart;
            for (int t = 0; t < kPart; t++) {
                cells[t] += most;
                cells[kCells + t] *= factor;
                for (int i = 0; i < kParts; i++) over[i * kSums + r * kPart + t] -= most;
            }
            for (int d = 0; d < width; d++) sums[r * width + d] *= factor;
        }
    }

    // Adds weighted values of kStep tokens, kPairs pairs of vectors of each.
    template <int kPairs, bool whole>
    static OVERSPILL_INLINE void add_slab(const float* weights, const uint8_t* values, const Tokens& tokens, int width,
                                          bool fetch, float* sums) {
        Vector sum[kRows][kPairs * 2];
#pragma GCC unroll 4
        for (int r = 0; r < kRows; r++)
#pragma GCC unroll 16
            for (int w = 0; w < kPairs * 2; w++) sum[r][w] = load(sums + r * width + w * kLanes);
        for (int i = 0; i < kParts; i++, values += kPart * tokens.stride) {
#pragma GCC unroll 16
            for (int t = 0; t < kPart; t++) {
                const uint8_t* value = values + t * tokens.stride;
                if (fetch)
                    for (int line = 0; line < kPairs * kPair * kBytes; line += kLineBytes)
                        prefetch(value + tokens.ahead + line);
                Vector weight[kRows];
#pragma GCC unroll 4
                for (int r = 0; r < kRows; r++) weight[r] = splat(weights[i * kSums + r * kPart + t]);
#pragma GCC unroll 8
                for (int w = 0; w < kPairs; w += kPairsAtOnce) {
                    Vector a, b;
#if defined(OVERSPILL_BF16_DOT)
                    Words words[kPairsAtOnce];
                    load_unit<type, whole>(value + w * kPair * kBytes, words);
#endif
#pragma GCC unroll 2
                    for (int v = w; v < w + kPairsAtOnce; v++) {
#if defined(OVERSPILL_BF16_DOT)
                        split(words[v - w], a, b);
#else
                        load_pair<type, whole>(value + w * kPair * kBytes, a, b);
#endif
#pragma GCC unroll 4
                        for (int r = 0; r < kRows; r++) {
                            sum[r][2 * v] = fma(a, weight[r], sum[r][2 * v]);
                            sum[r][2 * v + 1] = fma(b, weight[r], sum[r][2 * v + 1]);
                        }
                    }
                }
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < kRows; r++)
#pragma GCC unroll 16
            for (int w = 0; w < kPairs * 2; w++) store(sums + r * width + w * kLanes, sum[r][w]);
    }

    // Not inlined: compilers allocate registers better in a separate function.
    static __attribute__((noinline)) void attend(const float* q, int head_size, const Tokens& tokens, float scale,
                                                 float* state, float* sums) {
        const int width = padded(head_size);
        alignas(64) float weights[kParts * kSums];
        const bool first = state[0] == kNothingSeen;
        if (__builtin_expect(first, 0))
            for (int i = 0; i < kCells; i++) state[i] = 0;
        Vector over[kParts * kVectors], most[kVectors];  // scores minus the reference
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; v++) most[v] = splat(-INFINITY);
        // Not unrolled: the whole loop must fit into the CPU's cache of decoded instructions.
#pragma GCC unroll 1
        for (int i = 0; i < kParts; i++) {
            dots(q, head_size, width, tokens.keys + i * kPart * tokens.stride, tokens, over + i * kVectors);
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; v++) {
                Vector& x = over[i * kVectors + v];
                x = fms(x, splat(scale), load(state + v * kLanes));
                most[v] = maximum(most[v], x);
            }
        }
        bool rare = first || tokens.valid < kStep;
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; v++) rare |= any_above(most[v], splat(kSlack));
        if (__builtin_expect(rare, 0)) {
            for (int i = 0; i < kParts * kVectors; i++) store(weights + i * kLanes, over[i]);
            for (int t = tokens.valid; t < kStep; t++)
                for (int r = 0; r < kRows; r++) weights[t / kPart * kSums + r * kPart + t % kPart] = -INFINITY;
            raise(weights, state, sums, width, first);
            for (int i = 0; i < kParts * kVectors; i++) over[i] = load(weights + i * kLanes);
        }
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; v++) {
            Vector total = load(state + kCells + v * kLanes);
#pragma GCC unroll 8
            for (int i = 0; i < kParts; i++) {
                const Vector weight = exp2_of(over[i * kVectors + v]);
                store(weights + i * kSums + v * kLanes, weight);
                total = add(total, weight);
            }
            store(state + kCells + v * kLanes, total);
        }
        const uint8_t* values = tokens.keys + tokens.value_offset;
        int d = 0;
        const auto fetch = [&] { return tokens.ahead && d * kBytes % kLineBytes == 0; };
        for (; d + kWide * kPair <= head_size; d += kWide * kPair)
            add_slab<kWide, true>(weights, values + d * kBytes, tokens, width, fetch(), sums + d);
        static_assert(kWide % kPairsAtOnce == 0, "a slab is of whole units");
        // A head has a whole number of larger units.
        if constexpr (kPairsAtOnce == 1) {
            for (; d + kPair <= head_size; d += kPair)
                add_slab<1, true>(weights, values + d * kBytes, tokens, width, fetch(), sums + d);
            if (d < head_size) add_slab<1, false>(weights, values + d * kBytes, tokens, width, fetch(), sums + d);
        }
    }
};

constexpr int row_blocks(int rows) { return (rows + kRowBlock - 1) / kRowBlock; }

// Attention of all rows of a kv head, one block of rows at a time; only the first block prefetches.
template <int type>
void attend_rows(const float* q, int rows, int head_size, Tokens tokens, float scale, float* state, float* sums) {
    const int width = padded(head_size), q_width = kBf16Dot ? width / 2 : width;
    for (int row = 0; row < rows; row += kRowBlock, state += 2 * kCells, tokens.ahead = 0) {
        const float* mine = q + row * q_width;
        float* out = sums + row * width;
        switch (rows - row) {
            case 1: Block<type, 1>::attend(mine, head_size, tokens, scale, state, out); break;
            case 2: Block<type, 2>::attend(mine, head_size, tokens, scale, state, out); break;
            case 3: Block<type, 3>::attend(mine, head_size, tokens, scale, state, out); break;
            default: Block<type, 4>::attend(mine, head_size, tokens, scale, state, out);
        }
    }
}

// Converts a row of queries to floats, in its type's order.
template <int type>
void convert(const uint8_t* from, int head_size, float* to) {
    Vector a, b;
    int d = 0;
    for (; d + kPair <= head_size; d += kPair) {
        load_pair<type, true>(from + d * kTypeBytes[type], a, b);
        store(to + d, a), store(to + d + kLanes, b);
    }
    if (d < head_size) {
        load_pair<type, false>(from + d * kTypeBytes[type], a, b);
        store(to + d, a), store(to + d + kLanes, b);
    }
}

void pack_row(const OverspillLayout& layout, const uint8_t* from, float* to) {
    const auto convert_row = layout.query_type == kBf16   ? convert<kBf16>
                             : layout.query_type == kFp16 ? convert<kFp16>
                                                          : convert<kFp32>;
    if (order_of(layout.query_type) == order_of(layout.kv_type)) return convert_row(from, layout.head_size, to);
    alignas(64) float row[kMaxHeadSize];
    convert_row(from, layout.head_size, row);
    const int16_t *query_order = order_of(layout.query_type), *kv_order = order_of(layout.kv_type);
    std::memset(to, 0, padded(layout.head_size) * sizeof(float));
    for (int d = 0; d < layout.head_size; d++) to[kv_order[d]] = row[query_order[d]];
}

// Calls pack(query row, kv head, row within the kv head) for each row of a segment, once per thread and segment.
template <typename Pack>
OVERSPILL_INLINE void pack_queries(const OverspillJob& job, const OverspillSegment& segment, Pack pack) {
    const OverspillLayout& layout = *job.layout;
    const int heads = layout.kv_heads * layout.group, row_bytes = layout.head_size * kTypeBytes[layout.query_type];
    for (int i = 0; i < segment.num_queries; i++) {
        const uint8_t* query = (const uint8_t*)job.query + size_t(segment.queries[i]) * heads * row_bytes;
        for (int h = 0; h < heads; h++, query += row_bytes)
            pack(query, h / layout.group, i * layout.group + h % layout.group);
    }
}

OVERSPILL_INLINE bool packs_now(const OverspillJob& job, const Chunk& chunk, Scratch& scratch) {
    if (scratch.packed_job == &job && scratch.packed_segment == chunk.segment) return false;
    scratch.packed_job = &job, scratch.packed_segment = chunk.segment;
    return true;
}

template <int type>
void attend_chunk(const OverspillJob& job, const Chunk& chunk, Scratch& scratch, Result result) {
    const OverspillLayout& layout = *job.layout;
    const OverspillSegment& segment = job.segments[chunk.segment];
    const int rows = segment.num_queries * layout.group, heads = layout.kv_heads, head_size = layout.head_size;
    constexpr int bytes = kTypeBytes[type];
    const int width = padded(head_size), q_width = kBf16Dot ? width / 2 : width;
    if (packs_now(job, chunk, scratch))
        pack_queries(job, segment, [&](const uint8_t* from, int head, int row) {
            float* to = scratch.queries + (size_t(head) * rows + row) * q_width;
            if (!kBf16Dot) return pack_row(layout, from, to);
            std::memset(to + q_width - kLanes, 0, kLanes * sizeof(float));
            for (int d = 0; d < head_size; d += 8)  // word_of keeps eight together
                std::memcpy((uint16_t*)to + word_of<type>(d), from + 2 * d, 16);
        });
    const int state_floats = row_blocks(rows) * 2 * kCells;
    std::memset(scratch.state, 0, sizeof(float) * heads * state_floats);
    for (int i = 0; i < heads * row_blocks(rows); i++) scratch.state[i * 2 * kCells] = kNothingSeen;
    std::memset(result.sums, 0, sizeof(float) * heads * rows * width);

    const float scale = job.scale * job.key_scale * (type == kFp8E4m3 ? kE4m3Factor : 1.0f) * kLog2e;
    const int last = segment.num_blocks * layout.block_size - 1;
    const bool together = layout.block_size % kStep == 0;
    // KV is read in the order of addresses: kStep tokens of all heads, or a block's tokens of each head.
    const int run = layout.head_stride < layout.token_stride || !together ? kStep : layout.block_size;
    alignas(64) uint8_t copy[kStep * 2 * kMaxHeadSize * 4];
    for (int first = chunk.first; first < chunk.end; first += run)
        for (int h = 0; h < heads; h++)
            for (int t = first; t < first + run && t < chunk.end; t += kStep) {
                const int valid = chunk.end - t < kStep ? chunk.end - t : kStep;
                Tokens tokens{copy, 2 * head_size * bytes, head_size * bytes, 0, valid};
                if (together) {
                    const uint8_t* at = token_at(job, segment, t);
                    // Prefetches go beyond the chunk's end: the thread that continues there finds it in a shared cache.
                    const int next = t + kFetchDistance < last ? t + kFetchDistance : last;
                    tokens = {at + h * layout.head_stride, layout.token_stride, layout.value_offset,
                              token_at(job, segment, next) - at, valid};
                } else {
                    std::memset(copy, 0, kStep * tokens.stride);
                    for (int i = 0; i < valid; i++) {
                        const uint8_t* at = token_at(job, segment, t + i) + h * layout.head_stride;
                        std::memcpy(copy + i * tokens.stride, at, head_size * bytes);
                        std::memcpy(copy + i * tokens.stride + tokens.value_offset, at + layout.value_offset,
                                    head_size * bytes);
                    }
                }
                attend_rows<type>(scratch.queries + size_t(h) * rows * q_width, rows, head_size, tokens, scale,
                                  scratch.state + h * state_floats, result.sums + size_t(h) * rows * width);
            }

    for (int h = 0; h < heads; h++)
        for (int r = 0; r < rows; r++) {
            const int in_block = rows - r / kRowBlock * kRowBlock;
            const int share = kSums / (in_block >= 3 ? kRowBlock : in_block);
            const float* cells = scratch.state + h * state_floats + r / kRowBlock * 2 * kCells + r % kRowBlock * share;
            float total = 0;
            for (int i = 0; i < share; i++) total += cells[kCells + i];
            result.reference[h * rows + r] = cells[0];
            result.total[h * rows + r] = total;
        }
}

int width_of(const OverspillLayout& layout) { return padded(layout.head_size); }
size_t state_floats_of(const OverspillLayout& layout, int rows) {
    return size_t(layout.kv_heads) * row_blocks(rows) * 2 * kCells;
}
const int16_t* order_of_layout(const OverspillLayout& layout) { return order_of(layout.kv_type); }
float value_factor_of(const OverspillLayout& layout) { return layout.kv_type == kFp8E4m3 ? kE4m3Factor : 1.0f; }

// Attention for kernels of several KV types.
template <int... types>
void attend(const OverspillJob& job, const Chunk& chunk, Scratch& scratch, Result result) {
    (void)((job.layout->kv_type == types && (attend_chunk<types>(job, chunk, scratch, result), true)) || ...);
}

}  // namespace
}  // namespace overspill
