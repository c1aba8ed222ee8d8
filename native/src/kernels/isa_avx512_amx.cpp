// AVX-512 with the integer matrix products of AMX-INT8. A tile's dot products inside a group of 32 are exact integers
// and the float chain over groups is the one of linear.hpp, so results have the same bits as avx512's.
//
// What bounds it: 16 rows × 16 outputs × 32 take 16 cycles of the matrix unit, but converting and adding the dots takes
// 64 vector operations. While tiles are in use (and for about 1,500 cycles after) a Sapphire Rapids core does one
// 512-bit floating-point operation a cycle instead of two, so a tile costs at least 64 cycles; the same work costs
// avx512 96.
#include <asm/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "kernels/vec_avx512.hpp"

#include "kernels/linear.hpp"
#include "kernels/unroll.hpp"

namespace segue {
namespace {

constexpr int kTileRows = 16;   // storing a tile takes as long with fewer
constexpr int kMinRows = 20;    // fewer rows are as fast without tiles, which slow other vector instructions down
constexpr int kMaxGroups = 48;  // groups of a panel that are unpacked at once; they stay in L1
constexpr int kMaxRows = 256;   // rows whose accumulators wait while the next groups are unpacked
constexpr int kBatch = 2;       // groups whose dots are stored before they are added: loads then find them in L1

// One group of one panel, as a tile wants it: [k / 4][16 outputs][4 k] of s8; then its scales and minima.
struct alignas(64) UnpackedGroup {
    int8_t w[kGroup / 4][4 * kPanel];
    float scale[kPanel];
    float minimum[kPanel];
};

struct AmxScratch {  // as it comes: nothing in it is read before it is written
    UnpackedGroup groups[kMaxGroups];
    alignas(64) int32_t dots[2 * kBatch][kTileRows][kPanel];
    alignas(64) float acc[kMaxRows][kPanel];
};

struct alignas(64) TileConfig {
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t bytes_per_row[16] = {};
    uint8_t rows[16] = {};
};

// Tiles 0: dots [16 rows][16 outputs]; 1: x [16 rows][32]; 2: weights [8][16 outputs][4].
TileConfig tile_config() {
    TileConfig config;
    config.rows[0] = kTileRows;
    config.bytes_per_row[0] = 4 * kPanel;
    config.rows[1] = kTileRows;
    config.bytes_per_row[1] = kGroup;
    config.rows[2] = kGroup / 4;
    config.bytes_per_row[2] = 4 * kPanel;
    return config;
}

inline void unpack_nibbles(const packed::Nibbles& low, int offset, UnpackedGroup& to) {
    const __m512i low_mask = _mm512_set1_epi8(15);
    const __m512i less = _mm512_set1_epi8(static_cast<char>(offset));
    for (int t = 0; t < 4; ++t) {
        const __m512i w = _mm512_loadu_si512(low[t]);
        _mm512_store_si512(to.w[2 * t], _mm512_sub_epi8(_mm512_and_si512(w, low_mask), less));
        _mm512_store_si512(to.w[2 * t + 1], _mm512_sub_epi8(_mm512_and_si512(_mm512_srli_epi16(w, 4), low_mask), less));
    }
}
inline void unpack_group(const packed::Q4_0& block, UnpackedGroup& to) {
    unpack_nibbles(block.low, 8, to);
    Vec::store(to.scale, Vec::load(block.d));
}
inline void unpack_group(const packed::Q4_1& block, UnpackedGroup& to) {
    unpack_nibbles(block.low, 0, to);
    Vec::store(to.scale, Vec::load(block.d));
    Vec::store(to.minimum, Vec::load(block.m));
}
inline void unpack_group(const packed::Q8_0& block, UnpackedGroup& to) {
    const __m512i sign = _mm512_set1_epi8(-128);
    for (int s = 0; s < 8; ++s) {
        _mm512_store_si512(to.w[s], _mm512_xor_si512(_mm512_loadu_si512(block.q[s]), sign));
    }
    Vec::store(to.scale, Vec::load(block.d));
}

// What tile rows [row, row + 16) of x hold for group 0; the next group's is 16 times as far as one row's.
struct TileInput {
    const int8_t* q;
    const float* scale;
    const float* sum;
};

inline TileInput tile_input(const QuantView& x, int row) {
    const size_t at = static_cast<size_t>(row / kRowBlock) * static_cast<size_t>(x.groups) * kRowBlock;
    return {x.q + at * kGroup, x.scale + at, x.sum + at};
}

inline void multiply_group(const TileInput& x, int group, const UnpackedGroup& w, int32_t (*dots)[kPanel]) {
    _tile_loadd(1, x.q + static_cast<size_t>(group) * kRowBlock * kGroup, kGroup);
    _tile_loadd(2, w.w, 4 * kPanel);
    _tile_zero(0);
    _tile_dpbssd(0, 1, 2);
    _tile_stored(0, dots, 4 * kPanel);
}

template <class Block, int MR>
[[gnu::always_inline]] inline void accumulate_group(const TileInput& x, int group, const UnpackedGroup& w,
                                                    const int32_t (*dots)[kPanel], Vec::F (&acc)[MR]) {
    const Vec::F d = Vec::load(w.scale);
    const Vec::F minimum = Vec::load(w.minimum);
    const float* scale = x.scale + static_cast<size_t>(group) * kRowBlock;
    const float* sum = x.sum + static_cast<size_t>(group) * kRowBlock;
    unroll<MR>([&](auto m) __attribute__((always_inline)) {
        const Vec::F dot = _mm512_cvtepi32_ps(_mm512_load_si512(dots[m]));
        acc[m] = Vec::fma(dot, Vec::mul(d, Vec::set1(scale[m])), acc[m]);
        if constexpr (requires(Block block) { block.m; }) acc[m] = Vec::fma(minimum, Vec::set1(sum[m]), acc[m]);
    });
}

// Rows [row, row + MR) by one panel, groups [begin, end). row is the first of a row block.
template <class Block, int MR>
void amx_tile(const LinearArgs& a, int panel, int row, int begin, int end, AmxScratch& s) {
    Vec::F acc[MR];
    float (*waiting)[kPanel] = s.acc + (row - a.row_begin);
    unroll<MR>([&](auto m) { acc[m] = begin == 0 ? Vec::zero() : Vec::load(waiting[m]); });
    const TileInput x = tile_input(a.quant, row);
    const auto multiply = [&](int g) { multiply_group(x, g, s.groups[g - begin], s.dots[(g - begin) % (2 * kBatch)]); };
    // The tiles of the next groups are under way while the dots of these are added.
    for (int g = begin; g < begin + kBatch && g < end; ++g) multiply(g);
    for (int g = begin; g < end; ++g) {
        if (g + kBatch < end) multiply(g + kBatch);
        accumulate_group<Block, MR>(x, g, s.groups[g - begin], s.dots[(g - begin) % (2 * kBatch)], acc);
    }
    const int output = panel * kPanel;
    unroll<MR>([&](auto m) {
        if (end < a.quant.groups) {
            Vec::store(waiting[m], acc[m]);
        } else {
            store_outputs<Vec>(a, row + m, output, acc[m]);
        }
    });
}

template <class Block>
void amx_panel(const LinearArgs& a, int panel, AmxScratch& s) {
    const Block* block = reinterpret_cast<const Block*>(a.w.data + static_cast<size_t>(panel) * a.w.panel_bytes);
    for (int begin = 0; begin < a.quant.groups; begin += kMaxGroups) {
        const int end = begin + kMaxGroups < a.quant.groups ? begin + kMaxGroups : a.quant.groups;
        for (int g = 0; g < end - begin; ++g, ++block) {
            unpack_group(*block, s.groups[g]);
            prefetch_next_panel(block, a.w.panel_bytes);
        }
        asm volatile("" ::: "memory");  // the tile intrinsics do not say that they read memory
        for (int row = a.row_begin; row < a.row_end; row += kTileRows) {
            const int rows = a.row_end - row < kTileRows ? a.row_end - row : kTileRows;
            with_rows<kTileRows>(rows, [&]<int MR>() { amx_tile<Block, MR>(a, panel, row, begin, end, s); });
        }
    }
}

template <class Format>
void linear_amx(const LinearArgs& a) {
    if (a.row_end - a.row_begin < kMinRows) return avx512_kernels().linear[index_of(Format::type)](a);
    static const TileConfig config = tile_config();
    AmxScratch& scratch = *static_cast<AmxScratch*>(a.scratch);
    _tile_loadconfig(&config);
    for (int row = a.row_begin; row < a.row_end; row += kMaxRows) {
        LinearArgs part = a;
        part.row_begin = row;
        part.row_end = a.row_end < row + kMaxRows ? a.row_end : row + kMaxRows;
        for (int panel = a.panel_begin; panel < a.panel_end; ++panel)
            amx_panel<typename Format::Packed>(part, panel, scratch);
    }
    _tile_release();
}

}  // namespace

bool request_amx() {
    // Linux gives a process the tiles' large state only when it asks (Documentation/arch/x86/xstate.rst).
    constexpr long kTileData = 18;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, kTileData) == 0;
}

const KernelTable& avx512_amx_kernels() {
    static const KernelTable table = [] {
        KernelTable t = avx512_kernels();
        t.name = "avx512_amx";
        t.linear_scratch_bytes = sizeof(AmxScratch);
        t.linear[index_of(TensorType::kQ4_0)] = linear_amx<Q4_0<Vec>>;
        t.linear[index_of(TensorType::kQ4_1)] = linear_amx<Q4_1<Vec>>;
        t.linear[index_of(TensorType::kQ8_0)] = linear_amx<Q8_0<Vec>>;
        return t;
    }();
    return table;
}

}  // namespace segue
