// AVX-512 with bf16 dot products, for bf16 queries with KV in bf16 or in e4m3, which is converted to bf16.
#include "avx512bf16.h"

#include "attend.h"

namespace overspill {
namespace {
// A block of rows of bf16 is read faster with fp32 arithmetic: its products take no longer than its reads.
int least_rows(const OverspillLayout& layout) { return layout.kv_type == kBf16 ? kRowBlock + 1 : 0; }
}  // namespace

extern const Kernel kAvx512Bf16 = {
    "avx512bf16",
    has_avx512_bf16,
    suits,
    least_rows,
    width_of,
    state_floats_of,
    attend<kBf16, kFp8E4m3>,
    order_of_layout,
    value_factor_of,
};
}  // namespace overspill
