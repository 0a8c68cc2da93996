// AVX-512 with fp32 arithmetic, to which other types are converted.
#include "avx512.h"

namespace overspill {
namespace {
constexpr bool kBf16Dot = false;
// An e4m3 number, shifted into the bits of an fp16 number, is too small by the difference of the exponents' biases.
constexpr float kE4m3Factor = 256.0f;
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
    nullptr,
    width_of,
    state_floats_of,
    attend<kBf16, kFp16, kFp8E4m3, kFp8E5m2, kFp32>,
    order_of_layout,
    value_factor_of,
};
}  // namespace overspill
