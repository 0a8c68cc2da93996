// Instruction sets that this CPU and its system can run.
#include <cerrno>
#include <cstring>

#include <sys/syscall.h>
#include <unistd.h>

#include "kernel.h"

#if defined(__x86_64__)
#include <cpuid.h>

#if defined(OVERSPILL_HAS_AMX)
namespace overspill {
void try_amx_instructions(int stage);  // amx.cpp
}
#endif
#endif

namespace overspill {

#if defined(__x86_64__)

namespace {

constexpr long kGetXcompPermission = 0x1022, kRequestXcompPermission = 0x1023, kTileData = 18;

struct Features {
    bool avx2 = false, avx512 = false, avx512_bf16 = false, amx = false;

    static bool has(unsigned leaf, unsigned subleaf, int reg, unsigned bits) {
        unsigned found[4];
        return __get_cpuid_count(leaf, subleaf, found, found + 1, found + 2, found + 3) && (found[reg] & bits) == bits;
    }

    Features() {
        enum { eax, ebx, ecx, edx };
        if (!has(1, 0, ecx, 1u << 27)) return;  // OSXSAVE
        uint32_t low, high;
        __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
        const auto saved = [&](uint32_t mask) { return (low & mask) == mask; };  // on thread switches, by the system
        avx2 = saved(0x6) && has(7, 0, ebx, 1u << 5) && has(1, 0, ecx, 1u << 12 | 1u << 29);        // FMA, F16C
        avx512 = avx2 && saved(0xe6) && has(7, 0, ebx, 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31);  // F, DQ, BW, VL
        avx512_bf16 = avx512 && has(7, 1, eax, 1u << 5) && has(7, 0, ecx, 1u << 1);  // VBMI, for e4m3
        amx = avx512_bf16 && saved(0x60000) && has(7, 0, edx, 1u << 22 | 1u << 24);  // BF16, TILE
    }
};

const Features& features() {
    static const Features found;
    return found;
}

bool amx_enabled = false;

// Linux grants tile registers per process, on request. A process in a virtual machine or a sandbox may be refused, or
// be granted registers that then do not work.
int request_amx() {
    if (!features().amx) return ENODEV;
    uint64_t granted = 0;
    if (syscall(SYS_arch_prctl, kRequestXcompPermission, kTileData) != 0) return errno;
    if (syscall(SYS_arch_prctl, kGetXcompPermission, &granted) != 0) return errno;
    return granted >> kTileData & 1 ? 0 : EPERM;
}

}  // namespace

bool has_avx2() { return features().avx2; }
bool has_avx512() { return features().avx512; }
bool has_avx512_bf16() { return features().avx512_bf16; }
bool may_use_amx() { return amx_enabled; }

#endif

const Kernel* const kKernels[] = {
#if defined(OVERSPILL_HAS_AMX)
    &kAmx,
#endif
#if defined(OVERSPILL_HAS_AVX512BF16)
    &kAvx512Bf16,
#endif
#if defined(OVERSPILL_HAS_AVX512)
    &kAvx512,
#endif
#if defined(OVERSPILL_HAS_AVX2)
    &kAvx2,
#endif
#if defined(OVERSPILL_HAS_NEON)
    &kNeon,
#endif
    nullptr,
};

bool runs_here(int kernel) { return kKernels[kernel]->runs_here(); }

}  // namespace overspill

extern "C" {

const char* overspill_digest() { return OVERSPILL_DIGEST; }

int overspill_num_kernels() {
    int count = 0;
    while (overspill::kKernels[count]) count++;
    return count;
}
const char* overspill_kernel_name(int kernel) { return overspill::kKernels[kernel]->name; }
int overspill_kernel_runs(int kernel) { return overspill::runs_here(kernel); }

int overspill_try_amx([[maybe_unused]] int stage) {
#if defined(OVERSPILL_HAS_AMX)
    if (stage == 0) return overspill::features().amx ? 0 : ENODEV;
    const int refused = overspill::request_amx();
    if (!refused) overspill::try_amx_instructions(stage);
    return refused;
#else
    return ENOSYS;
#endif
}

int overspill_enable_amx() {
#if defined(OVERSPILL_HAS_AMX)
    const int refused = overspill::request_amx();
    overspill::amx_enabled = refused == 0;
    return refused;
#else
    return ENOSYS;
#endif
}

}  // extern "C"
