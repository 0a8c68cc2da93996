// AVX-512 with dot products of bf16 numbers, for bf16 queries and KV.
#include "avx512.h"

#define OVERSPILL_BF16_DOT

namespace overspill {
namespace {
constexpr bool kBf16Dot = true;
OVERSPILL_INLINE Vector dot_bf16(Vector sum, Words a, Words b) {
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
}
}  // namespace
}  // namespace overspill

#include "attend.h"

namespace overspill {
namespace {
bool suits(const OverspillLayout& layout) { return layout.kv_type == kBf16 && layout.query_type == kBf16; }
}  // namespace

extern const Kernel kAvx512Bf16 = {
    "avx512bf16", has_avx512_bf16, suits, 0, width_of, state_floats_of, attend<kBf16>, order_of_layout, value_factor_of,
};
}  // namespace overspill
