// Loads of bf16 numbers for kernels that multiply these: bf16 KV as it is, and e4m3 KV, which bf16 represents exactly.
#pragma once

#include "avx512.h"

#define OVERSPILL_BF16_DOT

namespace overspill {
namespace {

constexpr bool kBf16Dot = true;
// e4m3 numbers are converted exactly, so sums lack no factor.
constexpr float kE4m3Factor = 1.0f;

OVERSPILL_INLINE Vector dot_bf16(Vector sum, Words a, Words b) {
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
}

// Both bytes of the bf16 number for each e4m3 number without its sign. Denormal e4m3 numbers become normal in bf16:
// dot products treat denormal numbers as zero.
struct E4m3Table {
    alignas(64) uint8_t low[128] = {}, high[128] = {};
    constexpr E4m3Table() {
        for (int i = 1; i < 128; i++) {
            int exponent = i < 8 ? 121 : 120 + i / 8, mantissa = i < 8 ? i : 8 + i % 8;
            for (; mantissa < 8; mantissa *= 2) exponent--;
            const int number = i == 127 ? 0x7fc0 : exponent << 7 | mantissa % 8 << 4;  // the only NaN
            low[i] = uint8_t(number), high[i] = uint8_t(number >> 8);
        }
    }
};
constexpr E4m3Table kE4m3;

OVERSPILL_INLINE Words look_up(const uint8_t* table, Words bytes) {
    return _mm512_permutex2var_epi8(_mm512_load_si512(table), bytes, _mm512_load_si512(table + 64));
}

// Numbers loaded at once.
template <int type>
constexpr int kUnit = type == kFp8E4m3 ? 64 : 32;

// A unit as bf16 numbers, or half a unit followed by zeros. e4m3 numbers come in the order of word_of.
template <int type, bool whole>
OVERSPILL_INLINE void load_unit(const uint8_t* p, Words* words) {
    if (type == kBf16) {
        words[0] = load_words<whole>(p);
    } else {
        const Words bytes = _mm512_loadu_si512(p), low = look_up(kE4m3.low, bytes);
        const Words sign = _mm512_set1_epi8(-128);
        // high | (bytes & sign)
        const Words high = _mm512_ternarylogic_epi64(look_up(kE4m3.high, bytes), bytes, sign, 0xf8);
        words[0] = _mm512_unpacklo_epi8(low, high);
        words[1] = _mm512_unpackhi_epi8(low, high);
    }
}

// Unpacking within 128 bits puts eight of each 16 numbers into the first 32 words of a unit and eight into the rest.
template <int type>
constexpr int word_of(int d) {
    return type == kFp8E4m3 ? d / 64 * 64 + d / 8 % 2 * 32 + d % 64 / 16 * 8 + d % 8 : d;
}

// Other head sizes would need parts of a unit.
bool suits(const OverspillLayout& layout) {
    return layout.query_type == kBf16 &&
           (layout.kv_type == kBf16 || (layout.kv_type == kFp8E4m3 && layout.head_size % kUnit<kFp8E4m3> == 0));
}

}  // namespace
}  // namespace overspill
