// NEON, on every 64-bit ARM CPU: fp32 arithmetic, to which other types are converted.
#include <arm_neon.h>

#include "kernel.h"

namespace overspill {
namespace {

constexpr int kLanes = 4, kSums = 16, kSlab = 8;
constexpr bool kBf16Dot = false;
// An e4m3 number, shifted into the bits of an fp16 number, is too small by the difference of the exponents' biases.
constexpr float kE4m3Factor = 256.0f;
using Vector = float32x4_t;

OVERSPILL_INLINE Vector zero() { return vdupq_n_f32(0); }
OVERSPILL_INLINE Vector splat(float x) { return vdupq_n_f32(x); }
OVERSPILL_INLINE Vector load(const float* p) { return vld1q_f32(p); }
OVERSPILL_INLINE void store(float* p, Vector v) { vst1q_f32(p, v); }
OVERSPILL_INLINE Vector add(Vector a, Vector b) { return vaddq_f32(a, b); }
OVERSPILL_INLINE Vector sub(Vector a, Vector b) { return vsubq_f32(a, b); }
OVERSPILL_INLINE Vector fma(Vector a, Vector b, Vector c) { return vfmaq_f32(c, a, b); }
OVERSPILL_INLINE Vector fms(Vector a, Vector b, Vector c) { return vnegq_f32(vfmsq_f32(c, a, b)); }
OVERSPILL_INLINE Vector maximum(Vector a, Vector b) { return vmaxq_f32(a, b); }
OVERSPILL_INLINE bool any_above(Vector a, Vector b) { return vmaxvq_u32(vcgtq_f32(a, b)) != 0; }
OVERSPILL_INLINE Vector nearest(Vector v) { return vrndnq_f32(v); }
OVERSPILL_INLINE Vector power(Vector p, Vector n) {
    const int32x4_t exponent = vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(n), vdupq_n_s32(127)), 23);
    return vmulq_f32(p, vreinterpretq_f32_s32(exponent));
}
OVERSPILL_INLINE Vector totals(const Vector* v) { return vpaddq_f32(vpaddq_f32(v[0], v[1]), vpaddq_f32(v[2], v[3])); }
OVERSPILL_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

template <int type, bool whole>
OVERSPILL_INLINE void load_pair(const uint8_t* p, Vector& a, Vector& b) {
    static_assert(whole || kLanes == 4, "head sizes are multiples of 16");
    if (type == kFp32) {
        a = vld1q_f32((const float*)p);
        b = vld1q_f32((const float*)p + 4);
    } else if (type == kBf16) {
        const uint32x4_t pairs = vreinterpretq_u32_u16(vld1q_u16((const uint16_t*)p));
        a = vreinterpretq_f32_u32(vshlq_n_u32(pairs, 16));
        b = vreinterpretq_f32_u32(vandq_u32(pairs, vdupq_n_u32(0xffff0000u)));
    } else {
        uint16x8_t half;
        if (type == kFp16) {
            half = vld1q_u16((const uint16_t*)p);
        } else {
            half = vshll_n_u8(vld1_u8(p), 8);  // an e5m2 number is the upper half of an fp16 one
            if (type == kFp8E4m3)
                half =
                    vandq_u16(vreinterpretq_u16_s16(vshrq_n_s16(vreinterpretq_s16_u16(half), 1)), vdupq_n_u16(0xbfff));
        }
        a = vcvt_f32_f16(vget_low_f16(vreinterpretq_f16_u16(half)));
        b = vcvt_high_f32_f16(vreinterpretq_f16_u16(half));
    }
}

}  // namespace
}  // namespace overspill

#include "attend.h"

namespace overspill {
namespace {
bool always() { return true; }
bool suits(const OverspillLayout&) { return true; }
}  // namespace

extern const Kernel kNeon = {
    "neon",
    always,
    suits,
    nullptr,
    width_of,
    state_floats_of,
    attend<kBf16, kFp16, kFp8E4m3, kFp8E5m2, kFp32>,
    order_of_layout,
    value_factor_of,
};
}  // namespace overspill
