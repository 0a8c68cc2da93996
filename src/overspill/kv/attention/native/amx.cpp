// AMX tiles of bf16 numbers, for bf16 queries with KV in bf16 or e4m3: 16 rows cost about as much as one.
#include "avx512bf16.h"
#include "tiles.h"

#include "attend.h"

namespace overspill {

namespace {

constexpr int kTileRows = 16;
// Tokens that a step attends to: the depth of a tile of weights and values.
constexpr int kDepth = 32;

// On CPUs with AMX, a lookup among 128 numbers takes as long as two among 64.
OVERSPILL_INLINE Words look_up_halves(const uint8_t* table, Words bytes, __mmask64 upper) {
    const Words found = _mm512_permutexvar_epi8(bytes, _mm512_load_si512(table));
    return _mm512_mask_permutexvar_epi8(found, upper, bytes, _mm512_load_si512(table + 64));
}

// Converts a cache line of KV to bf16 numbers: e4m3 to even and odd ones, by shifts that run beside the lookups.
template <int type>
OVERSPILL_INLINE void to_bf16(Words line, Words* words) {
    if (type == kBf16) {
        words[0] = line;
        return;
    }
    const __mmask64 upper = _mm512_movepi8_mask(_mm512_slli_epi16(line, 1));
    const Words low = look_up_halves(kE4m3.low, line, upper), found = look_up_halves(kE4m3.high, line, upper);
    const Words high = _mm512_ternarylogic_epi64(found, line, _mm512_set1_epi8(-128), 0xf8);  // found | (line & sign)
    words[0] = _mm512_ternarylogic_epi64(_mm512_slli_epi16(high, 8), low, _mm512_set1_epi16(0x00ff), 0xf8);
    words[1] = _mm512_ternarylogic_epi64(_mm512_srli_epi16(low, 8), high, _mm512_set1_epi16(short(0xff00)), 0xf8);
}

// Position of a dimension among the bf16 numbers that to_bf16 makes of keys.
template <int type>
constexpr int key_word_of(int d) {
    return type == kBf16 ? d : d / 64 * 64 + d % 2 * 32 + d % 64 / 2;
}

// Order of the dimensions in sums, which pack_values permutes: it unpacks two tokens within 128 bits.
template <int type>
struct TileOrder {
    int16_t position[kMaxHeadSize] = {};
    constexpr TileOrder() {
        for (int d = 0; d < kMaxHeadSize; d++)
            position[d] = int16_t(
                type == kBf16 ? d / 32 * 32 + d / 4 % 2 * 16 + d % 32 / 8 * 4 + d % 4
                              : d / 64 * 64 + (d / 8 % 2 * 2 + d % 2) * 16 + d % 64 / 16 * 4 + d % 8 / 2);
    }
};
template <int type>
constexpr TileOrder<type> kTileOrder{};

// Packs a row of a kv head's queries: 16 rows and 32 dimensions form a tile of [pair of dimensions][row][2].
template <int type>
void pack_tile_row(const uint8_t* from, int head_size, int width, int row, uint16_t* to) {
    to += row / kTileRows * kTileRows * width + row % kTileRows * 2;
    for (int d = 0; d < head_size; d++) {
        const int word = key_word_of<type>(d);
        std::memcpy(to + word / 2 * 32 + word % 2, from + 2 * d, 2);
    }
}

// A cache line of KV or, at the end of a head of bf16, half of one.
template <int type>
OVERSPILL_INLINE Words load_line(const uint8_t* p, bool whole) {
    return type != kBf16 || whole ? load_words<true>(p) : load_words<false>(p);
}

// Packs the values of kDepth tokens: 16 dimensions form a tile of [pair of tokens][dimension][2]. `next` are keys to
// prefetch with their values; those of e4m3 are left to copy_keys.
template <int type>
void pack_values(const uint8_t* const* values, const uint8_t* const* next, int64_t value_offset, int head_size,
                 uint16_t* packed) {
    constexpr int kWords = kUnit<type> / 32;
    for (int j = 0; j < kTileRows; j++)
        for (int d = 0, at = 0; d < head_size; d += kUnit<type>, at += kLineBytes) {
            const bool whole = d + kUnit<type> <= head_size;
            const Words x = load_line<type>(values[2 * j] + at, whole),
                        y = load_line<type>(values[2 * j + 1] + at, whole);
            Words words[2 * kWords];
            to_bf16<type>(_mm512_unpacklo_epi16(x, y), words);
            to_bf16<type>(_mm512_unpackhi_epi16(x, y), words + kWords);
            uint16_t* to = packed + d / 16 * 512 + j * 32;
#pragma GCC unroll 4
            for (int i = 0; i < 2 * kWords; i++) _mm512_storeu_si512(to + i * 512, words[i]);
            for (int t = 2 * j; t < 2 * j + 2; t++) {
                prefetch(next[t] + value_offset + at);
                if (type == kBf16) prefetch(next[t] + at);
            }
        }
}

// Copies the keys of 16 tokens, as bf16 numbers, into rows of tiles, and prefetches those of e4m3 at `next`.
template <int type>
void copy_keys(const uint8_t* const* tokens, const uint8_t* const* next, int64_t offset, int head_size, int width,
               uint16_t* to) {
    constexpr int kWords = kUnit<type> / 32;
    for (int i = 0; i < kTileRows; i++, to += width)
        for (int d = 0, at = 0; d < head_size; d += kUnit<type>, at += kLineBytes) {
            Words words[kWords];
            to_bf16<type>(load_line<type>(tokens[i] + offset + at, d + kUnit<type> <= head_size), words);
#pragma GCC unroll 2
            for (int j = 0; j < kWords; j++) _mm512_storeu_si512(to + d + 32 * j, words[j]);
            if (type != kBf16) prefetch(next[i] + at);
        }
}

// Tiles in memory.
struct Tiles {
    alignas(64) float products[kDepth * kTileRows];       // [token][row]
    alignas(64) uint16_t weights[2][kTileRows * kDepth];  // [row][token], the sum of two bf16 numbers
    alignas(64) uint16_t values[kMaxHeadSize / 16 * 512];
    alignas(64) uint16_t keys[kDepth * kMaxHeadSize];  // copies, where a tile cannot be loaded in place
    alignas(64) uint8_t nothing[kMaxHeadSize * 2] = {};
};

// State of a tile of rows of a kv head. Lanes are those of weigh.
struct Cells {
    float reference[kLanes];  // of scores
    float total[kLanes];      // of weights
};

// Tiles 0 and 1 hold products, 2 and 3 what is multiplied, 4 and 5 weights, and 6 and 7 sums, with as many rows as
// there are queries: fewer rows are multiplied faster.
TileConfig config_of(int rows) {
    TileConfig config;
    for (int tile = 4; tile < 8; tile++) config.rows[tile] = uint8_t(rows);
    return config;
}

struct Keys {
    const uint8_t* first;  // of 16 tokens, rows of a tile
    int64_t stride;
};

// Products of kDepth tokens' keys with 16 rows of queries.
void multiply_keys(const uint16_t* queries, const Keys (&keys)[2], int width, float* products) {
    TILE_ZERO(0);
    TILE_ZERO(1);
    for (int d = 0; d < width; d += 32) {
        TILE_LOAD(2, queries + d * 16, 64);
        TILE_LOAD(3, keys[0].first + 2 * d, keys[0].stride);
        TILE_MULTIPLY(0, 3, 2);
        TILE_LOAD(3, keys[1].first + 2 * d, keys[1].stride);
        TILE_MULTIPLY(1, 3, 2);
    }
    TILE_STORE(0, products, 64);
    TILE_STORE(1, products + 16 * kTileRows, 64);
}

// Products of `kTogether` tokens, 16 / kTogether lanes each: all rows of token v / 8 * 8 * kTogether + 8 * i + v % 8.
template <int kTogether>
OVERSPILL_INLINE Vector products_of(const float* products, int v) {
    const float* from = products + (v / 8 * 8 * kTogether + v % 8) * kTileRows;
    constexpr int kNext = 8 * kTileRows;
    if (kTogether == 1) return load(from);
    if (kTogether == 2)
        return _mm512_insertf32x8(_mm512_castps256_ps512(_mm256_loadu_ps(from)), _mm256_loadu_ps(from + kNext), 1);
    Vector found = _mm512_castps128_ps512(_mm_loadu_ps(from));
    found = _mm512_insertf32x4(found, _mm_loadu_ps(from + kNext), 1);
    found = _mm512_insertf32x4(found, _mm_loadu_ps(from + 2 * kNext), 2);
    return _mm512_insertf32x4(found, _mm_loadu_ps(from + 3 * kNext), 3);
}

// Raises the references of rows, at the first tokens of a chunk or after a score far above all earlier ones.
template <int kTogether>
__attribute__((noinline)) void raise(Vector most, Cells& cells, int rows, float* sums, int width) {
    constexpr int kWidth = kLanes / kTogether;
    const bool first = cells.reference[0] == kNothingSeen;
    float over[kLanes];
    store(over, most);
    for (int r = 0; r < kWidth; r++) {
        float reference = first ? -INFINITY : cells.reference[r];
        for (int lane = r; lane < kLanes; lane += kWidth) reference = fmaxf(reference, over[lane]);
        const float factor = first ? 0 : exp2f(cells.reference[r] - reference);
        for (int lane = r; lane < kLanes; lane += kWidth)
            cells.reference[lane] = reference, cells.total[lane] *= factor;
        for (int d = 0; r < rows && d < width; d++) sums[r * width + d] *= factor;
    }
}

// Turns products into weights of [row][token]. Vectors hold kTogether tokens each, so that few rows fill them, in an
// order in which a few permutations within 128 bits make rows of them.
template <int kTogether>
void weigh(Tiles& tiles, float scale, Cells& cells, int rows, float* sums, int width) {
    constexpr int kGroups = kDepth / kTogether / 8;
    Vector scores[8 * kGroups], most = splat(-INFINITY);
#pragma GCC unroll 32
    for (int v = 0; v < 8 * kGroups; v++) {
        scores[v] = _mm512_mul_ps(products_of<kTogether>(tiles.products, v), splat(scale));
        most = maximum(most, scores[v]);
    }
    if (__builtin_expect(cells.reference[0] == kNothingSeen ||
                         any_above(most, add(load(cells.reference), splat(kSlack))), 0))
        raise<kTogether>(most, cells, rows, sums, width);
    const Vector reference = load(cells.reference);
    Vector total = load(cells.total);
    const Words upper = _mm512_set1_epi32(int(0xffff0000)), half = _mm512_set1_epi32(0x8000);  // of the last bit kept
    // 128 bits of a vector are four pairs of tokens of one row.
    Vector parts[2][kGroups][4];
    for (int g = 0; g < kGroups; g++) {
        Words pairs[2][4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            Words high[2], low[2];
#pragma GCC unroll 2
            for (int j = 0; j < 2; j++) {
                const Vector weight = exp2_of(sub(scores[8 * g + 2 * i + j], reference));
                total = add(total, weight);
                // The sum of two bf16 numbers has 16 bits of precision.
                high[j] = _mm512_add_epi32(_mm512_castps_si512(weight), half);
                const Vector rest = sub(weight, _mm512_castsi512_ps(_mm512_and_si512(high[j], upper)));
                low[j] = _mm512_add_epi32(_mm512_castps_si512(rest), half);
            }
            pairs[0][i] = _mm512_ternarylogic_epi64(_mm512_srli_epi32(high[0], 16), high[1], upper, 0xf8);
            pairs[1][i] = _mm512_ternarylogic_epi64(_mm512_srli_epi32(low[0], 16), low[1], upper, 0xf8);
        }
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) {
            const auto unpack = [](Words a, Words b, bool high) {
                return _mm512_castsi512_pd(high ? _mm512_unpackhi_epi32(a, b) : _mm512_unpacklo_epi32(a, b));
            };
            const Words* p = pairs[i];
            const __m512d a = unpack(p[0], p[1], false), b = unpack(p[2], p[3], false);
            const __m512d c = unpack(p[0], p[1], true), d = unpack(p[2], p[3], true);
            parts[i][g][0] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
            parts[i][g][1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
            parts[i][g][2] = _mm512_castpd_ps(_mm512_unpacklo_pd(c, d));
            parts[i][g][3] = _mm512_castpd_ps(_mm512_unpackhi_pd(c, d));
        }
    }
    store(cells.total, total);
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        float* to = (float*)tiles.weights[i];
        constexpr int kRow = kDepth / 2;
#pragma GCC unroll 4
        for (int r = 0; r < 4; r++, to += kRow) {
            const auto& part = parts[i];
            if constexpr (kGroups == 1) {
                store(to, part[0][r]);
            } else if constexpr (kGroups == 2) {
                store(to, _mm512_shuffle_f32x4(part[0][r], part[1][r], 0x88));
                store(to + 4 * kRow, _mm512_shuffle_f32x4(part[0][r], part[1][r], 0xdd));
            } else {
                const Vector x = _mm512_shuffle_f32x4(part[0][r], part[1][r], 0x88),
                             y = _mm512_shuffle_f32x4(part[0][r], part[1][r], 0xdd),
                             z = _mm512_shuffle_f32x4(part[2][r], part[3][r], 0x88),
                             w = _mm512_shuffle_f32x4(part[2][r], part[3][r], 0xdd);
                store(to, _mm512_shuffle_f32x4(x, z, 0x88));
                store(to + 4 * kRow, _mm512_shuffle_f32x4(y, w, 0x88));
                store(to + 8 * kRow, _mm512_shuffle_f32x4(x, z, 0xdd));
                store(to + 12 * kRow, _mm512_shuffle_f32x4(y, w, 0xdd));
            }
        }
    }
}

// Adds the weighted values of kDepth tokens to sums[row][d]. Two tiles of sums at a time keep the multiplier busy.
void add_values(const Tiles& tiles, int width, float* sums) {
    TILE_LOAD(4, tiles.weights[0], 64);
    TILE_LOAD(5, tiles.weights[1], 64);
    for (int d = 0; d < width; d += 32) {
        TILE_LOAD(6, sums + d, width * 4);
        TILE_LOAD(7, sums + d + 16, width * 4);
        TILE_LOAD(2, tiles.values + d * 32, 64);
        TILE_LOAD(3, tiles.values + d * 32 + 512, 64);
        TILE_MULTIPLY(6, 4, 2);
        TILE_MULTIPLY(7, 4, 3);
        TILE_MULTIPLY(6, 5, 2);
        TILE_MULTIPLY(7, 5, 3);
        TILE_STORE(6, sums + d, width * 4);
        TILE_STORE(7, sums + d + 16, width * 4);
    }
}

// Addresses of kDepth tokens of a segment, `apart` from each other, or of its last token after its end.
void locate(const OverspillJob& job, const OverspillSegment& segment, int first, int apart, const uint8_t** tokens) {
    const OverspillLayout& layout = *job.layout;
    const int last = segment.num_blocks * layout.block_size - 1;
    if (first > last) first = last;
    int left = last - first;
    int block = first / layout.block_size, offset = first % layout.block_size;
    for (int t = 0; t < kDepth; t++, left -= apart) {
        tokens[t] = job.kv + segment.blocks[block] * layout.block_stride + offset * layout.token_stride;
        if (left < apart) continue;
        for (offset += apart; offset >= layout.block_size; offset -= layout.block_size) block++;
    }
}

// Distance in tokens between those of a step. These CPUs prefetch by themselves what follows in some 32 pages, if each
// is read in the order of addresses: so a step reads one token of each page, head after head.
int distance(const OverspillLayout& layout) {
    constexpr int kPage = 4096;
    if (layout.head_stride > layout.token_stride || layout.token_stride >= kPage) return 1;
    return int(kPage / layout.token_stride);
}

// Whether 16 tokens can be the rows of a tile as they lie in memory.
bool evenly_spaced(const uint8_t* const* tokens) {
    for (int t = 2; t < kTileRows; t++)
        if (tokens[t] - tokens[t - 1] != tokens[1] - tokens[0]) return false;
    return true;
}

int tiles_of(int rows) { return (rows + kTileRows - 1) / kTileRows; }
// Rows of sums: those of a last tile among several are padded.
int padded_rows(int rows) { return rows <= kTileRows ? rows : tiles_of(rows) * kTileRows; }

template <int type>
void attend_tiles(const OverspillJob& job, const Chunk& chunk, Scratch& scratch, Result result) {
    const OverspillLayout& layout = *job.layout;
    const OverspillSegment& segment = job.segments[chunk.segment];
    const int rows = segment.num_queries * layout.group, row_tiles = tiles_of(rows), all_rows = padded_rows(rows);
    const int heads = layout.kv_heads, head_size = layout.head_size, width = padded(head_size);
    const size_t queries_of_head = size_t(row_tiles) * kTileRows * width;
    uint16_t* queries = (uint16_t*)scratch.queries;
    if (packs_now(job, chunk, scratch)) {
        std::memset(queries, 0, sizeof(uint16_t) * heads * queries_of_head);
        pack_queries(job, segment, [&](const uint8_t* from, int head, int row) {
            pack_tile_row<type>(from, head_size, width, row, queries + head * queries_of_head);
        });
    }
    float* sums = scratch.state;
    Cells* cells = (Cells*)(sums + size_t(heads) * all_rows * width);
    std::memset(sums, 0, sizeof(float) * heads * all_rows * width);
    for (int i = 0; i < heads * row_tiles; i++)
        for (int lane = 0; lane < kLanes; lane++) cells[i].reference[lane] = kNothingSeen, cells[i].total[lane] = 0;
    const int tile_rows = rows < kTileRows ? rows : kTileRows, together = rows <= 4 ? 4 : rows <= 8 ? 2 : 1;

    Tiles tiles;
    const TileConfig config = config_of(tile_rows);
    TILE_CONFIGURE(config);
    const float scale = job.scale * job.key_scale * kLog2e;
    const bool in_place = type == kBf16 && head_size % 32 == 0;
    const int apart = distance(layout);
    const uint8_t *tokens[kDepth], *later[kDepth], *next[kDepth], *values[kDepth];
    for (int step = 1, first = chunk.first, then; first < chunk.end; step++, first = then) {
        then = first + (step % apart ? 1 : (kDepth - 1) * apart + 1);
        const int left = (chunk.end - first + apart - 1) / apart, valid = left < kDepth ? left : kDepth;
        locate(job, segment, first, apart, tokens);
        // Prefetches go beyond the chunk's end: the thread that continues there finds it in a shared cache.
        locate(job, segment, then, apart, later);
        for (int h = 0; h < heads; h++) {
            const int64_t offset = h * layout.head_stride, value_offset = offset + layout.value_offset;
            for (int t = 0; t < kDepth; t++)
                next[t] = h + 1 < heads ? tokens[t] + offset + layout.head_stride : later[t];
            Keys keys[2];
            for (int half = 0; half < 2; half++) {
                const int t = half * kTileRows;
                keys[half] = {tokens[t] + offset, tokens[t + 1] - tokens[t]};
                if (t >= valid) keys[half] = keys[0];
                else if (!in_place || !evenly_spaced(tokens + t)) {
                    uint16_t* copy = tiles.keys + t * width;
                    copy_keys<type>(tokens + t, next + t, offset, head_size, width, copy);
                    keys[half] = {(const uint8_t*)copy, 2 * width};
                }
            }
            // Tokens beyond `valid` have no weight, but their values could be anything, even NaN.
            for (int t = 0; t < kDepth; t++) values[t] = t < valid ? tokens[t] + value_offset : tiles.nothing;
            pack_values<type>(values, next, layout.value_offset, head_size, tiles.values);
            for (int tile = 0; tile < row_tiles; tile++) {
                multiply_keys(queries + h * queries_of_head + tile * kTileRows * width, keys, width, tiles.products);
                for (int i = valid * kTileRows; i < kDepth * kTileRows; i++) tiles.products[i] = -INFINITY;
                float* tile_sums = sums + size_t(h * all_rows + tile * kTileRows) * width;
                const auto weigh_tile = together == 4 ? weigh<4> : together == 2 ? weigh<2> : weigh<1>;
                weigh_tile(tiles, scale, cells[h * row_tiles + tile], tile_rows, tile_sums, width);
                add_values(tiles, width, tile_sums);
            }
        }
    }
    TILE_RELEASE();
    for (int h = 0; h < heads; h++) {
        for (int r = 0; r < rows; r++) {
            const Cells& of_row = cells[h * row_tiles + r / kTileRows];
            float total = 0;
            for (int lane = r % kTileRows; lane < kLanes; lane += kLanes / together) total += of_row.total[lane];
            result.reference[h * rows + r] = of_row.reference[r % kTileRows], result.total[h * rows + r] = total;
        }
        std::memcpy(result.sums + size_t(h) * rows * width, sums + size_t(h) * all_rows * width,
                    sizeof(float) * rows * width);
    }
}

void attend_type(const OverspillJob& job, const Chunk& chunk, Scratch& scratch, Result result) {
    (job.layout->kv_type == kBf16 ? attend_tiles<kBf16> : attend_tiles<kFp8E4m3>)(job, chunk, scratch, result);
}
size_t tile_state_floats(const OverspillLayout& layout, int rows) {
    return layout.kv_heads * (size_t(padded_rows(rows)) * padded(layout.head_size) + tiles_of(rows) * 2 * kLanes);
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
