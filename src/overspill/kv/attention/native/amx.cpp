// AMX tiles of bf16 numbers, for bf16 queries with KV in bf16 or e4m3: 16 rows cost about as much as one.
#include "avx512bf16.h"
#include "tiles.h"

#include "attend.h"

namespace overspill {

namespace {

constexpr int kTileRows = 16;
// Depth of a tile of weights and values.
constexpr int kDepth = 32;

// Order of the dimensions in the sums of a pair of value tiles, which pack_values permutes.
template <int type>
struct TileOrder {
    int16_t position[kMaxHeadSize] = {};
    constexpr TileOrder() {
        for (int d = 0; d < kMaxHeadSize; d++) {
            const int word = word_of<type>(d);
            position[d] = int16_t(word / 32 * 32 + word / 4 % 2 * 16 + word % 32 / 8 * 4 + word % 4);
        }
    }
};
template <int type>
constexpr TileOrder<type> kTileOrder{};

// Packs a row of a kv head's queries: 16 rows and 32 dimensions form a tile of [pair of dimensions][row][2].
template <int type>
void pack_tile_row(const uint8_t* from, int head_size, int width, int row, uint16_t* to) {
    to += row / kTileRows * kTileRows * width + row % kTileRows * 2;
    for (int d = 0; d < head_size; d++) {
        const int word = word_of<type>(d);
        std::memcpy(to + word / 2 * 32 + word % 2, from + 2 * d, 2);
    }
}

// Loads a whole unit or, for bf16 only, half of one.
template <int type>
OVERSPILL_INLINE void load_rest(const uint8_t* p, bool whole, Words* words) {
    if (whole) load_unit<type, true>(p, words);
    else load_unit<type, false>(p, words);
}

// Packs the values of 32 tokens: 16 dimensions form a tile of [pair of tokens][dimension][2]. Unpacking within 128 bits
// puts four of each eight dimensions into one tile and four into the next.
template <int type>
void pack_values(const uint8_t* const* tokens, int64_t offset, int head_size, const uint8_t* const* ahead,
                 uint16_t* packed) {
    for (int j = 0; j < kTileRows; j++) {
        const uint8_t *left = tokens[2 * j] + offset, *right = tokens[2 * j + 1] + offset;
        for (int d = 0, at = 0; d < head_size; d += kUnit<type>, at += kLineBytes) {  // a unit is a cache line
            Words x[kUnit<type> / 32], y[kUnit<type> / 32];
            load_rest<type>(left + at, d + kUnit<type> <= head_size, x);
            load_rest<type>(right + at, d + kUnit<type> <= head_size, y);
            uint16_t* to = packed + d / 16 * 512 + j * 32;
#pragma GCC unroll 2
            for (int i = 0; i < kUnit<type> / 32; i++, to += 1024) {
                _mm512_storeu_si512(to, _mm512_unpacklo_epi16(x[i], y[i]));
                _mm512_storeu_si512(to + 512, _mm512_unpackhi_epi16(x[i], y[i]));
            }
            prefetch(ahead[2 * j] + offset + at);
            prefetch(ahead[2 * j + 1] + offset + at);
        }
    }
}

// to[r][t] = from[t][r]; rows of `to` are kDepth apart.
void transpose(const float* from, float* to) {
    Vector a[16], b[16];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        const Vector x = load(from + 32 * i), y = load(from + 32 * i + 16);
        a[2 * i] = _mm512_unpacklo_ps(x, y), a[2 * i + 1] = _mm512_unpackhi_ps(x, y);
    }
    // b[4 * i + j] holds tokens 4 * i to 4 * i + 3 of rows j, j + 4, j + 8 and j + 12.
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const __m512d low = _mm512_castps_pd(a[4 * i]), high = _mm512_castps_pd(a[4 * i + 1]);
        const __m512d next_low = _mm512_castps_pd(a[4 * i + 2]), next_high = _mm512_castps_pd(a[4 * i + 3]);
        b[4 * i] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, next_low));
        b[4 * i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, next_low));
        b[4 * i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(high, next_high));
        b[4 * i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(high, next_high));
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        const Vector x = _mm512_shuffle_f32x4(b[j], b[4 + j], 0x88), y = _mm512_shuffle_f32x4(b[j], b[4 + j], 0xdd);
        const Vector z = _mm512_shuffle_f32x4(b[8 + j], b[12 + j], 0x88),
                     w = _mm512_shuffle_f32x4(b[8 + j], b[12 + j], 0xdd);
        store(to + j * kDepth, _mm512_shuffle_f32x4(x, z, 0x88));
        store(to + (j + 4) * kDepth, _mm512_shuffle_f32x4(y, w, 0x88));
        store(to + (j + 8) * kDepth, _mm512_shuffle_f32x4(x, z, 0xdd));
        store(to + (j + 12) * kDepth, _mm512_shuffle_f32x4(y, w, 0xdd));
    }
}

OVERSPILL_INLINE __m256i round_to_bf16(Vector v) {
    const Words bits = _mm512_castps_si512(v),
                odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const Words rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
}

// Tiles in memory, and the state of one kv head's rows.
struct Tiles {
    alignas(64) float products[16 * 16];           // [token][row]
    alignas(64) float scores[kTileRows * kDepth];  // [row][token]
    alignas(64) uint16_t weights[2][16 * kDepth];  // [row][token], the sum of two bf16 numbers: 16 bits of precision
    alignas(64) uint16_t values[kMaxHeadSize / 16 * 512];
    alignas(64) uint16_t keys[kDepth * kMaxHeadSize];  // copies, where a tile cannot be loaded in place
    alignas(64) uint8_t nothing[kMaxHeadSize * 2] = {};
};

// Copies the keys of 16 tokens, as bf16 numbers, into rows of tiles.
template <int type>
void copy_keys(const uint8_t* const* tokens, int64_t offset, int head_size, int width, uint16_t* to) {
    for (int i = 0; i < kTileRows; i++, to += width)
        for (int d = 0; d < head_size; d += kUnit<type>) {
            Words words[kUnit<type> / 32];
            load_rest<type>(tokens[i] + offset + d * kTypeBytes[type], d + kUnit<type> <= head_size, words);
#pragma GCC unroll 2
            for (int j = 0; j < kUnit<type> / 32; j++) _mm512_storeu_si512(to + d + 32 * j, words[j]);
        }
}

// Products of 16 tokens' keys with 16 rows of queries. The bf16 keys are rows of a tile just as they lie in memory.
void multiply_keys(const uint16_t* queries, const uint8_t* keys, int64_t stride, int width, float* products) {
    TILE_ZERO(0);
    int d = 0;
    for (; d + 64 <= width; d += 64) {
        TILE_LOAD(1, keys + 2 * d, stride);
        TILE_LOAD(2, queries + d * 16, 64);
        TILE_LOAD(3, keys + 2 * d + 64, stride);
        TILE_LOAD(4, queries + d * 16 + 512, 64);
        TILE_MULTIPLY(0, 1, 2);
        TILE_MULTIPLY(0, 3, 4);
    }
    if (d < width) {
        TILE_LOAD(1, keys + 2 * d, stride);
        TILE_LOAD(2, queries + d * 16, 64);
        TILE_MULTIPLY(0, 1, 2);
    }
    TILE_STORE(0, products, 64);
}

// Turns one row's kDepth scores, of which `valid` count, into weights; raises the row's reference if necessary.
void weigh(Tiles& tiles, int row, int valid, float scale, float& reference, float& total, float* sums, int width) {
    float* scores = tiles.scores + row * kDepth;
    for (int t = valid; t < kDepth; t++) scores[t] = -INFINITY;
    const Vector left = _mm512_mul_ps(load(scores), splat(scale)),
                 right = _mm512_mul_ps(load(scores + 16), splat(scale));
    const float most = _mm512_reduce_max_ps(maximum(left, right));
    if (__builtin_expect(reference == kNothingSeen || most > reference + kSlack, 0)) {
        const float factor = reference == kNothingSeen ? 0 : exp2f(reference - most);
        for (int d = 0; d < width; d += kLanes) store(sums + d, _mm512_mul_ps(load(sums + d), splat(factor)));
        total *= factor;
        reference = most;
    }
    Vector sum = zero();
    for (int half = 0; half < 2; half++) {
        const Vector weight = exp2_of(sub(half ? right : left, splat(reference)));
        sum = add(sum, weight);
        const __m256i high = round_to_bf16(weight);
        const Vector rest = sub(weight, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16)));
        _mm256_storeu_si256((__m256i*)(tiles.weights[0] + row * kDepth + 16 * half), high);
        _mm256_storeu_si256((__m256i*)(tiles.weights[1] + row * kDepth + 16 * half), round_to_bf16(rest));
    }
    total += _mm512_reduce_add_ps(sum);
}

// Adds the weighted values of kDepth tokens to sums[row][d]. Two tiles of sums at a time keep the multiplier busy.
void add_values(const Tiles& tiles, int width, float* sums) {
    TILE_LOAD(4, tiles.weights[0], 64);
    TILE_LOAD(5, tiles.weights[1], 64);
    for (int d = 0; d < width; d += 32) {
        TILE_LOAD(0, sums + d, width * 4);
        TILE_LOAD(1, sums + d + 16, width * 4);
        TILE_LOAD(6, tiles.values + d * 32, 64);
        TILE_LOAD(7, tiles.values + d * 32 + 512, 64);
        TILE_MULTIPLY(0, 4, 6);
        TILE_MULTIPLY(1, 4, 7);
        TILE_MULTIPLY(0, 5, 6);
        TILE_MULTIPLY(1, 5, 7);
        TILE_STORE(0, sums + d, width * 4);
        TILE_STORE(1, sums + d + 16, width * 4);
    }
}

int padded_rows(int rows) { return (rows + kTileRows - 1) / kTileRows * kTileRows; }

template <int type>
void attend_tiles(const OverspillJob& job, const Chunk& chunk, Scratch& scratch, Result result) {
    const OverspillLayout& layout = *job.layout;
    const OverspillSegment& segment = job.segments[chunk.segment];
    const int rows = segment.num_queries * layout.group, all_rows = padded_rows(rows), heads = layout.kv_heads;
    const int head_size = layout.head_size, width = padded(head_size);
    uint16_t* queries = (uint16_t*)scratch.queries;
    if (packs_now(job, chunk, scratch)) {
        std::memset(queries, 0, sizeof(uint16_t) * heads * all_rows * width);
        pack_queries(job, segment, [&](const uint8_t* from, int head, int row) {
            pack_tile_row<type>(from, head_size, width, row, queries + size_t(head) * all_rows * width);
        });
    }
    // State of all rows of tiles, padding included; a result leaves the padding out.
    float *sums = scratch.state, *reference = sums + size_t(heads) * all_rows * width,
          *total = reference + heads * all_rows;
    std::memset(sums, 0, sizeof(float) * heads * all_rows * (width + 2));
    for (int i = 0; i < heads * all_rows; i++) reference[i] = kNothingSeen;

    Tiles tiles;
    std::memset(tiles.weights, 0, sizeof tiles.weights);
    const TileConfig config;
    TILE_CONFIGURE(config);
    const float scale = job.scale * job.key_scale * kLog2e;
    const int last = segment.num_blocks * layout.block_size - 1;
    const bool in_place = type == kBf16 && layout.block_size % kTileRows == 0 && head_size % 32 == 0;
    const uint8_t *tokens[kDepth], *values[kDepth], *ahead[kDepth];
    for (int first = chunk.first; first < chunk.end; first += kDepth) {
        const int valid = chunk.end - first < kDepth ? chunk.end - first : kDepth;
        for (int t = 0; t < kDepth; t++) {
            tokens[t] = token_at(job, segment, first + (t < valid ? t : valid - 1));
            ahead[t] = token_at(job, segment, first + kDepth + t < last ? first + kDepth + t : last);
        }
        for (int h = 0; h < heads; h++) {
            const int64_t offset = h * layout.head_stride, value_offset = offset + layout.value_offset;
            // Tokens beyond `valid` have no weight, but their values could be anything, even NaN.
            for (int t = 0; t < kDepth; t++) values[t] = t < valid ? tokens[t] : tiles.nothing - value_offset;
            pack_values<type>(values, value_offset, head_size, ahead, tiles.values);
            for (int row = 0; row < rows; row += kTileRows) {
                const uint16_t* q = queries + (size_t(h) * all_rows + row) * width;
                for (int t = 0; t < valid; t += kTileRows) {
                    const uint8_t* keys = tokens[t] + offset;
                    int64_t stride = layout.token_stride;
                    if (!in_place || t + kTileRows > valid) {
                        uint16_t* copy = tiles.keys + t * width;
                        keys = (const uint8_t*)copy, stride = 2 * width;
                        if (row == 0) copy_keys<type>(tokens + t, offset, head_size, width, copy);
                    }
                    for (int i = 0; i < kTileRows && row == 0; i++)
                        for (int line = 0; line < head_size * kTypeBytes[type]; line += kLineBytes)
                            prefetch(ahead[t + i] + offset + line);
                    multiply_keys(q, keys, stride, width, tiles.products);
                    transpose(tiles.products, tiles.scores + t);
                }
                const int at = h * all_rows + row;
                for (int r = 0; r < kTileRows && row + r < rows; r++)
                    weigh(tiles, r, valid, scale, reference[at + r], total[at + r], sums + size_t(at + r) * width,
                          width);
                add_values(tiles, width, sums + size_t(at) * width);
            }
        }
    }
    TILE_RELEASE();
    for (int h = 0; h < heads; h++) {
        std::memcpy(result.reference + h * rows, reference + h * all_rows, sizeof(float) * rows);
        std::memcpy(result.total + h * rows, total + h * all_rows, sizeof(float) * rows);
        std::memcpy(result.sums + size_t(h) * rows * width, sums + size_t(h) * all_rows * width,
                    sizeof(float) * rows * width);
    }
}

void attend_type(const OverspillJob& job, const Chunk& chunk, Scratch& scratch, Result result) {
    (job.layout->kv_type == kBf16 ? attend_tiles<kBf16> : attend_tiles<kFp8E4m3>)(job, chunk, scratch, result);
}
size_t tile_state_floats(const OverspillLayout& layout, int rows) {
    return size_t(layout.kv_heads) * padded_rows(rows) * (padded(layout.head_size) + 2);
}
// Vectors attend to a block of their rows as fast as it is read; tiles do not.
int least_rows(const OverspillLayout&) { return 5; }
const int16_t* tile_order(const OverspillLayout& layout) {
    return layout.kv_type == kBf16 ? kTileOrder<kBf16>.position : kTileOrder<kFp8E4m3>.position;
}

}  // namespace

void try_amx_instructions(int stage) {
    if (stage < 2) return;
    const TileConfig config;
    TILE_CONFIGURE(config);
    alignas(64) uint8_t tile[1024] = {};
    if (stage >= 3) {
        TILE_LOAD(0, tile, 64);
        TILE_LOAD(1, tile, 64);
        TILE_ZERO(2);
        TILE_STORE(0, tile, 64);
    }
    if (stage >= 4) {
        TILE_MULTIPLY(2, 0, 1);
        TILE_STORE(2, tile, 64);
    }
    TILE_RELEASE();
}

extern const Kernel kAmx = {
    "amx", may_use_amx, suits, least_rows, width_of, tile_state_floats, attend_type, tile_order, value_factor_of,
};
}  // namespace overspill
