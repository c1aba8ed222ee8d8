// AVX-512 with the integer matrix products of AMX-INT8. A tile's dot products inside a group of 32 are exact integers and
// the float chain over groups is the one of linear.hpp, so results have the same bits as avx512's.
#include <asm/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "kernels/vec_avx512.hpp"

#include "kernels/linear.hpp"

namespace segue {
namespace {

constexpr int kTileRows = 8;      // rows of x in a tile: two panels' accumulators then stay in registers
constexpr int kMinRows = 5;       // fewer rows are faster without tiles
constexpr int kMaxGroups = 24;    // groups of a panel pair that are unpacked at once; they stay in L1
constexpr int kMaxRows = 128;     // rows whose accumulators wait while the next groups are unpacked
constexpr int kPanels = 2;        // panels at a time

// One group of one panel, as a tile wants it: [k / 4][16 outputs][4 k] of s8; then its scales and minima.
struct alignas(64) UnpackedGroup {
    int8_t w[kGroup / 4][4 * kPanel];
    float scale[kPanel];
    float minimum[kPanel];
};

struct AmxScratch {
    UnpackedGroup groups[kMaxGroups][kPanels];
    alignas(64) int32_t dots[2][kPanels][kTileRows][kPanel];
    alignas(64) float acc[kMaxRows][kPanels][kPanel];
};

struct alignas(64) TileConfig {
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t bytes_per_row[16] = {};
    uint8_t rows[16] = {};
};

// Tiles 0, 1: dots of the two panels [8 rows][16 outputs]; 2: x [8 rows][32]; 3, 4: weights [8][16 outputs][4].
TileConfig tile_config() {
    TileConfig config;
    for (const int tile : {0, 1, 2, 3, 4}) {
        config.rows[tile] = kTileRows;
        config.bytes_per_row[tile] = tile == 2 ? kGroup : 64;
    }
    return config;
}

template <WeightFormat format>
inline void unpack_group(const uint8_t* block, UnpackedGroup& to) {
    if constexpr (format == WeightFormat::kU4) {
        const __m512i low_mask = _mm512_set1_epi8(15);
        for (int t = 0; t < 4; ++t) {
            const __m512i w = _mm512_loadu_si512(block + 64 * t);
            _mm512_store_si512(to.w[2 * t], _mm512_and_si512(w, low_mask));
            _mm512_store_si512(to.w[2 * t + 1], _mm512_and_si512(_mm512_srli_epi16(w, 4), low_mask));
        }
        const Half* scales = reinterpret_cast<const Half*>(block + 256);
        Vec::store(to.scale, Vec::load(scales));
        Vec::store(to.minimum, Vec::load(scales + kPanel));
    } else {
        const __m512i sign = _mm512_set1_epi8(-128);
        for (int s = 0; s < 8; ++s) {
            _mm512_store_si512(to.w[s], _mm512_xor_si512(_mm512_loadu_si512(block + 64 * s), sign));
        }
        Vec::store(to.scale, Vec::load(reinterpret_cast<const Half*>(block + 512)));
    }
}

// x's rows [row, row + 8) of one group.
struct GroupRows {
    const int8_t* q;
    const float* scale;
    const float* sum;
};

inline GroupRows group_rows(const QuantView& x, int row, int group) {
    const size_t at = (static_cast<size_t>(row / kRowBlock) * static_cast<size_t>(x.groups) +
                       static_cast<size_t>(group)) * kRowBlock + static_cast<size_t>(row % kRowBlock);
    return {x.q + at * kGroup, x.scale + at, x.sum + at};
}

template <int NP>
inline void multiply_group(const GroupRows& x, const UnpackedGroup* w, int32_t (*dots)[kTileRows][kPanel]) {
    _tile_loadd(2, x.q, kGroup);
    _tile_zero(0);
    _tile_loadd(3, w[0].w, 64);
    _tile_dpbssd(0, 2, 3);
    _tile_stored(0, dots[0], 64);
    if constexpr (NP == 2) {
        _tile_zero(1);
        _tile_loadd(4, w[1].w, 64);
        _tile_dpbssd(1, 2, 4);
        _tile_stored(1, dots[1], 64);
    }
}

template <WeightFormat format, int NP, int MR>
inline void accumulate_group(const GroupRows& x, const UnpackedGroup* w, const int32_t (*dots)[kTileRows][kPanel],
                             Vec::F (&acc)[NP][MR]) {
    for (int p = 0; p < NP; ++p) {
        const Vec::F scale = Vec::load(w[p].scale);
        const Vec::F minimum = Vec::load(w[p].minimum);
        for (int m = 0; m < MR; ++m) {
            const Vec::F dot = _mm512_cvtepi32_ps(_mm512_load_si512(dots[p][m]));
            acc[p][m] = Vec::fma(dot, Vec::mul(scale, Vec::set1(x.scale[m])), acc[p][m]);
            if constexpr (format == WeightFormat::kU4) acc[p][m] = Vec::fma(minimum, Vec::set1(x.sum[m]), acc[p][m]);
        }
    }
}

// Rows [row, row + MR) by NP panels, groups [begin, end).
template <WeightFormat format, int NP, int MR>
void amx_tile(const LinearArgs& a, int panel, int row, int begin, int end, AmxScratch& s) {
    Vec::F acc[NP][MR];
    float(*waiting)[kPanels][kPanel] = s.acc + (row - a.row_begin);
    for (int p = 0; p < NP; ++p) {
        for (int m = 0; m < MR; ++m) acc[p][m] = begin == 0 ? Vec::zero() : Vec::load(waiting[m][p]);
    }
    GroupRows x = group_rows(a.quant, row, begin);
    multiply_group<NP>(x, s.groups[0], s.dots[0]);
    for (int g = begin; g + 1 < end; ++g) {  // the next group's products are under way while this one's are added
        const GroupRows next = group_rows(a.quant, row, g + 1);
        multiply_group<NP>(next, s.groups[g + 1 - begin], s.dots[(g + 1 - begin) % 2]);
        accumulate_group<format, NP, MR>(x, s.groups[g - begin], s.dots[(g - begin) % 2], acc);
        x = next;
    }
    accumulate_group<format, NP, MR>(x, s.groups[end - 1 - begin], s.dots[(end - 1 - begin) % 2], acc);
    for (int p = 0; p < NP; ++p) {
        const int output = (panel + p) * kPanel;
        for (int m = 0; m < MR; ++m) {
            if (end < a.quant.groups) {
                Vec::store(waiting[m][p], acc[p][m]);
            } else {
                store_outputs<Vec>(a.out + static_cast<size_t>(row + m) * a.out_stride + output, a.w.outputs - output,
                                   acc[p][m], a.accumulate);
            }
        }
    }
}

template <WeightFormat format, int NP>
void amx_panels(const LinearArgs& a, int panel, AmxScratch& s) {
    constexpr size_t block_bytes = format == WeightFormat::kU4 ? kU4BlockBytes : kI8BlockBytes;
    for (int begin = 0; begin < a.quant.groups; begin += kMaxGroups) {
        const int end = begin + kMaxGroups < a.quant.groups ? begin + kMaxGroups : a.quant.groups;
        for (int p = 0; p < NP; ++p) {
            const uint8_t* block = a.w.data + static_cast<size_t>(panel + p) * a.w.panel_bytes +
                                   static_cast<size_t>(begin) * block_bytes;
            for (int g = 0; g < end - begin; ++g, block += block_bytes) unpack_group<format>(block, s.groups[g][p]);
        }
        asm volatile("" ::: "memory");  // the tile intrinsics do not say that they read memory
        for (int row = a.row_begin; row < a.row_end; row += kTileRows) {
            const int rows = a.row_end - row < kTileRows ? a.row_end - row : kTileRows;
            with_rows<kTileRows>(rows, [&]<int MR>() { amx_tile<format, NP, MR>(a, panel, row, begin, end, s); });
        }
    }
}

template <WeightFormat format>
void linear_amx(const LinearArgs& a) {
    if (a.row_end - a.row_begin < kMinRows) return avx512_kernels().linear[static_cast<size_t>(format)](a);
    static const TileConfig config = tile_config();
    thread_local AmxScratch scratch;
    _tile_loadconfig(&config);
    for (int row = a.row_begin; row < a.row_end; row += kMaxRows) {
        LinearArgs part = a;
        part.row_begin = row;
        part.row_end = a.row_end < row + kMaxRows ? a.row_end : row + kMaxRows;
        int panel = a.panel_begin;
        for (; panel + kPanels <= a.panel_end; panel += kPanels) amx_panels<format, kPanels>(part, panel, scratch);
        if (panel < a.panel_end) amx_panels<format, 1>(part, panel, scratch);
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
        t.linear[static_cast<size_t>(WeightFormat::kU4)] = linear_amx<WeightFormat::kU4>;
        t.linear[static_cast<size_t>(WeightFormat::kI8)] = linear_amx<WeightFormat::kI8>;
        return t;
    }();
    return table;
}

}  // namespace segue
