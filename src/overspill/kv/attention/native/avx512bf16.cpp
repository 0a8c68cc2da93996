// AVX-512 with bf16 dot products, for bf16 queries with KV in bf16 or in e4m3, which is converted to bf16.
#include "avx512bf16.h"

#include "attend.h"

namespace overspill {
// A block of rows or less is faster with fp32 arithmetic, where products take no longer than reads.
extern const Kernel kAvx512Bf16 = {
    "avx512bf16",
    has_avx512_bf16,
    suits,
    kRowBlock + 1,
    width_of,
    state_floats_of,
    attend<kBf16, kFp8E4m3>,
    order_of_layout,
    value_factor_of,
};
}  // namespace overspill
