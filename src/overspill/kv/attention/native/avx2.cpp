// AVX2 with FMA and F16C: x86-64 CPUs since 2013 (Intel) and 2015 (AMD).
#include <immintrin.h>

#include "kernel.h"

namespace overspill {
namespace {

constexpr int kLanes = 8, kSums = 8, kSlab = 4;
constexpr bool kBf16Dot = false;
// An e4m3 number, shifted into the bits of an fp16 number, is too small by the difference of the exponents' biases.
constexpr float kE4m3Factor = 256.0f;
using Vector = __m256;

OVERSPILL_INLINE Vector zero() { return _mm256_setzero_ps(); }
OVERSPILL_INLINE Vector splat(float x) { return _mm256_set1_ps(x); }
OVERSPILL_INLINE Vector load(const float* p) { return _mm256_loadu_ps(p); }
OVERSPILL_INLINE void store(float* p, Vector v) { _mm256_storeu_ps(p, v); }
OVERSPILL_INLINE Vector add(Vector a, Vector b) { return _mm256_add_ps(a, b); }
OVERSPILL_INLINE Vector sub(Vector a, Vector b) { return _mm256_sub_ps(a, b); }
OVERSPILL_INLINE Vector fma(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
OVERSPILL_INLINE Vector fms(Vector a, Vector b, Vector c) { return _mm256_fmsub_ps(a, b, c); }
OVERSPILL_INLINE Vector maximum(Vector a, Vector b) { return _mm256_max_ps(a, b); }
OVERSPILL_INLINE bool any_above(Vector a, Vector b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ)) != 0; }
OVERSPILL_INLINE Vector nearest(Vector v) { return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
OVERSPILL_INLINE Vector power(Vector p, Vector n) {
    const __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(p, _mm256_castsi256_ps(exponent));
}
OVERSPILL_INLINE Vector totals(const Vector* v) {
    const Vector a = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
    const Vector b = _mm256_hadd_ps(_mm256_hadd_ps(v[4], v[5]), _mm256_hadd_ps(v[6], v[7]));
    return add(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}
// Into the L2 cache: tokens are often a multiple of 4 KiB apart, and so many do not fit into one set of the L1 cache.
OVERSPILL_INLINE void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T1); }

template <int type, bool whole>
OVERSPILL_INLINE void load_pair(const uint8_t* p, Vector& a, Vector& b) {
    if (type == kFp32) {
        a = _mm256_loadu_ps((const float*)p);
        b = _mm256_loadu_ps((const float*)p + 8);
    } else if (type == kBf16) {
        const __m256i pairs = _mm256_loadu_si256((const __m256i*)p);
        a = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
        b = _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(int(0xffff0000))));
    } else {
        __m256i half;
        if (type == kFp16) {
            half = _mm256_loadu_si256((const __m256i*)p);
        } else {
            half = _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p)),
                                     8);  // an e5m2 number is the upper half of an fp16 one
            if (type == kFp8E4m3) half = _mm256_and_si256(_mm256_srai_epi16(half, 1), _mm256_set1_epi16(short(0xbfff)));
        }
        a = _mm256_cvtph_ps(_mm256_castsi256_si128(half));
        b = _mm256_cvtph_ps(_mm256_extracti128_si256(half, 1));
    }
}

}  // namespace
}  // namespace overspill

#include "attend.h"

namespace overspill {
namespace {
bool suits(const OverspillLayout&) { return true; }
}  // namespace

extern const Kernel kAvx2 = {
    "avx2",
    has_avx2,
    suits,
    nullptr,
    width_of,
    state_floats_of,
    attend<kBf16, kFp16, kFp8E4m3, kFp8E5m2, kFp32>,
    order_of_layout,
    value_factor_of,
};
}  // namespace overspill
