// AMX instructions. The compilers' intrinsics do not always declare that they read and write memory: GCC 12 drops all
// but the first 8 bytes of the configuration that _tile_loadconfig is given, and every later tile instruction is then
// illegal.
#pragma once

#include <cstdint>

// All tiles have 16 rows of 64 bytes: 32 bf16 numbers, or 16 floats.
struct TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

#define TILE_CONFIGURE(config) __asm__ volatile("ldtilecfg %0" ::"m"(config) : "memory")
#define TILE_RELEASE() __asm__ volatile("tilerelease" ::: "memory")
#define TILE_ZERO(tile) __asm__ volatile("tilezero %%tmm" #tile::)
#define TILE_LOAD(tile, from, stride) \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile::"r"(from), "r"(int64_t(stride)) : "memory")
#define TILE_STORE(tile, to, stride) \
    __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(to), "r"(int64_t(stride)) : "memory")
// c += a * b
#define TILE_MULTIPLY(c, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c::)
