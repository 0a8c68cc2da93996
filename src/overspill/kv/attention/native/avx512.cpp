// AVX-512 with fp32 arithmetic; other types are converted.
#include "avx512.h"

namespace overspill {
namespace {
constexpr bool kBf16Dot = false;
}
}  // namespace overspill

#include "attend.h"

namespace overspill {
namespace {
bool suits(const OverspillLayout&) { return true; }
}  // namespace

extern const Kernel kAvx512 = {
    "avx512",
    has_avx512,
    suits,
    0,
    width_of,
    state_floats_of,
    attend<kBf16, kFp16, kFp8E4m3, kFp8E5m2, kFp32>,
    order_of_layout,
    value_factor_of,
};
}  // namespace overspill
