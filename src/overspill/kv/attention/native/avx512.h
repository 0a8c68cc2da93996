// Vectors of AVX-512 (F, BW, DQ, VL), shared by the kernels that build on it.
#pragma once

#include <immintrin.h>

#include "kernel.h"

namespace overspill {
namespace {

constexpr int kLanes = 16, kSums = 16, kSlab = 8;
using Vector = __m512;
using Words = __m512i;

OVERSPILL_INLINE Vector zero() { return _mm512_setzero_ps(); }
OVERSPILL_INLINE Vector splat(float x) { return _mm512_set1_ps(x); }
OVERSPILL_INLINE Vector load(const float* p) { return _mm512_loadu_ps(p); }
OVERSPILL_INLINE void store(float* p, Vector v) { _mm512_storeu_ps(p, v); }
OVERSPILL_INLINE Vector add(Vector a, Vector b) { return _mm512_add_ps(a, b); }
OVERSPILL_INLINE Vector sub(Vector a, Vector b) { return _mm512_sub_ps(a, b); }
OVERSPILL_INLINE Vector fma(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
OVERSPILL_INLINE Vector fms(Vector a, Vector b, Vector c) { return _mm512_fmsub_ps(a, b, c); }
OVERSPILL_INLINE Vector maximum(Vector a, Vector b) { return _mm512_max_ps(a, b); }
OVERSPILL_INLINE bool any_above(Vector a, Vector b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ) != 0; }
OVERSPILL_INLINE Vector nearest(Vector v) {
    return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
OVERSPILL_INLINE Vector power(Vector p, Vector n) { return _mm512_scalef_ps(p, n); }
OVERSPILL_INLINE Vector pick_pairs(Vector a, Vector b) {
    return add(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}
OVERSPILL_INLINE Vector totals(const Vector* v) {
    Vector a[8], b[4];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
        a[i] = add(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const __m512d x = _mm512_castps_pd(a[2 * i]), y = _mm512_castps_pd(a[2 * i + 1]);
        b[i] = add(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
    }
    return pick_pairs(pick_pairs(b[0], b[1]), pick_pairs(b[2], b[3]));
}
// Into the L2 cache: tokens are often a multiple of 4 KiB apart, and so many do not fit into one set of the L1 cache.
OVERSPILL_INLINE void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T1); }

// 32 bf16 numbers, or 16 followed by zeros.
template <bool whole>
OVERSPILL_INLINE Words load_words(const uint8_t* p) {
    return whole ? _mm512_loadu_si512(p) : _mm512_zextsi256_si512(_mm256_loadu_si256((const __m256i*)p));
}

// Even and odd bf16 numbers as floats.
OVERSPILL_INLINE void split(Words pairs, Vector& a, Vector& b) {
    a = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
    b = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(int(0xffff0000))));
}

template <int type, bool whole>
OVERSPILL_INLINE void load_pair(const uint8_t* p, Vector& a, Vector& b) {
    if (type == kFp32) {
        a = _mm512_loadu_ps(p);
        b = whole ? _mm512_loadu_ps(p + 64) : zero();
    } else if (type == kBf16) {
        split(load_words<whole>(p), a, b);
    } else {
        Words half;
        if (type == kFp16) {
            half = load_words<whole>(p);
        } else {
            const __m256i bytes = whole ? _mm256_loadu_si256((const __m256i*)p)
                                        : _mm256_zextsi128_si256(_mm_loadu_si128((const __m128i*)p));
            half =
                _mm512_slli_epi16(_mm512_cvtepu8_epi16(bytes), 8);  // an e5m2 number is the upper half of an fp16 one
            if (type == kFp8E4m3) half = _mm512_and_si512(_mm512_srai_epi16(half, 1), _mm512_set1_epi16(short(0xbfff)));
        }
        a = _mm512_cvtph_ps(_mm512_castsi512_si256(half));
        b = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(half, 1));
    }
}

}  // namespace
}  // namespace overspill
