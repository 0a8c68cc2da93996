// AVX-512 with dot products of bf16 numbers, for bf16 queries with KV that is bf16 or becomes it.
#include "avx512bf16.h"

#include "attend.h"

namespace overspill {
extern const Kernel kAvx512Bf16 = {
    "avx512bf16",
    has_avx512_bf16,
    suits,
    0,
    width_of,
    state_floats_of,
    attend<kBf16, kFp8E4m3>,
    order_of_layout,
    value_factor_of,
};
}  // namespace overspill
