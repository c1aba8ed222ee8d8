// Causal attention over a paged KV cache, by online softmax (Milakov & Gimelshein 2018; Dao et al. 2022).
//
// Keys are visited in tiles of 64 at fixed absolute positions and in ascending order; four tiles make a range, each
// range starts from an empty state, and the states of ranges are merged in ascending order. So a query's result
// depends on its position and its keys only: not on which queries share its tile, where the chunk began, the
// size of a block or who computed which range.
//
//   score[j] = Σ_d q[d] · k[j][d]      one chain over d
//   acc[d]   = Σ_j p[j] · v[j][d]      one chain over j
#pragma once

#include "kernels/rows.hpp"
#include "kernels/table.hpp"
#include "kernels/unroll.hpp"

namespace segue {
namespace {

constexpr int kUnit = 16;  // keys that are contiguous in a block wherever block_size is a multiple of it
constexpr int kUnits = kTileKeys / kUnit;
constexpr float kInfinity = __builtin_inff();

// Where the keys and values of a tile lie: by units of 16 keys.
template <class T>
struct Tile {
    const T* k[kUnits];  // [head_dim][16], rows k_stride apart
    const T* v[kUnits];  // [16][v_stride]
    size_t k_stride;
};

// Scratch of one call, see attention_scratch_floats().
struct Scratch {
    float* q;
    float* scores;
    float* k_tile;
    float* v_tile;
    float* gathered;
    SoftmaxState range;
    SoftmaxState total;
};

inline SoftmaxState softmax_state(float* memory, int rows) { return {memory, memory + rows, memory + 2 * rows}; }

inline Scratch carve(float* memory, int rows, const KvView& kv) {
    Scratch s;
    const auto take = [&](size_t floats) {
        float* p = memory;
        memory += round_up<size_t>(floats, 16);
        return p;
    };
    const size_t head_dim = static_cast<size_t>(kv.head_dim);
    const size_t v_stride = static_cast<size_t>(kv.v_stride);
    s.k_tile = take(kTileKeys * head_dim);
    s.v_tile = take(kTileKeys * v_stride);
    s.gathered = take(2 * kTileKeys * v_stride);
    s.scores = take(static_cast<size_t>(rows) * kTileKeys);
    s.q = take(static_cast<size_t>(rows) * head_dim);
    s.range = softmax_state(take(softmax_state_floats(rows, kv.v_stride)), rows);
    s.total = softmax_state(take(softmax_state_floats(rows, kv.v_stride)), rows);
    return s;
}

// Keys [begin, end) of a tile.
struct Span {
    int begin;
    int end;

    bool empty() const { return begin >= end; }
};

// The tile at `position`, of which only `keys` exist: in place where blocks allow it, else gathered.
template <class T>
Tile<T> locate_tile(const KvView& kv, int position, Span keys, float* gathered) {
    Tile<T> tile;
    const T* base = static_cast<const T*>(kv.base);
    if (kv.block_size % kUnit == 0) {
        tile.k_stride = static_cast<size_t>(kv.block_size);
        for (int u = 0; u < kUnits; ++u) {
            const bool exists = (u + 1) * kUnit > keys.begin && u * kUnit < keys.end;
            const int at = position + (exists ? u * kUnit : keys.begin / kUnit * kUnit);
            const T* block = base + static_cast<size_t>(kv.blocks[at / kv.block_size]) * kv.block_stride;
            const size_t slot = static_cast<size_t>(at % kv.block_size);
            tile.k[u] = block + slot;
            tile.v[u] = block + kv.v_offset + slot * static_cast<size_t>(kv.v_stride);
        }
        return tile;
    }
    T* k = reinterpret_cast<T*>(gathered);
    T* v = k + static_cast<size_t>(kTileKeys) * static_cast<size_t>(kv.head_dim);
    for (int i = keys.begin; i < keys.end; ++i) {
        const int at = position + i;
        const T* block = base + static_cast<size_t>(kv.blocks[at / kv.block_size]) * kv.block_stride;
        const size_t slot = static_cast<size_t>(at % kv.block_size);
        for (int d = 0; d < kv.head_dim; ++d) {
            k[d * kTileKeys + i] = block[static_cast<size_t>(d) * static_cast<size_t>(kv.block_size) + slot];
        }
        __builtin_memcpy(v + static_cast<size_t>(i) * static_cast<size_t>(kv.v_stride),
                         block + kv.v_offset + slot * static_cast<size_t>(kv.v_stride),
                         static_cast<size_t>(kv.v_stride) * sizeof(T));
    }
    tile.k_stride = kTileKeys;
    for (int u = 0; u < kUnits; ++u) {
        tile.k[u] = k + u * kUnit;
        tile.v[u] = v + static_cast<size_t>(u * kUnit) * static_cast<size_t>(kv.v_stride);
    }
    return tile;
}

// Converts a tile to f32, for calls whose many rows share it. The conversion is exact.
template <class V, class T>
Tile<float> widen_tile(const Tile<T>& from, const KvView& kv, Span keys, const Scratch& s) {
    const int first_unit = keys.begin / kUnit;
    const int units = (keys.end + kUnit - 1) / kUnit;
    for (int d = 0; d < kv.head_dim; ++d) {
        for (int u = first_unit; u < units; ++u) {
            for (int i = 0; i < kUnit; i += V::lanes) {
                V::store(s.k_tile + d * kTileKeys + u * kUnit + i,
                         V::load(from.k[u] + static_cast<size_t>(d) * from.k_stride + i));
            }
        }
    }
    for (int j = keys.begin; j < keys.end; ++j) {
        const T* row = from.v[j / kUnit] + static_cast<size_t>(j % kUnit) * static_cast<size_t>(kv.v_stride);
        for (int i = 0; i < kv.v_stride; i += V::lanes) {
            V::store(s.v_tile + static_cast<size_t>(j) * static_cast<size_t>(kv.v_stride) + i, V::load(row + i));
        }
    }
    Tile<float> tile;
    tile.k_stride = kTileKeys;
    for (int u = 0; u < kUnits; ++u) {
        tile.k[u] = s.k_tile + (u >= first_unit && u < units ? u : first_unit) * kUnit;
        tile.v[u] = s.v_tile + static_cast<size_t>(u * kUnit) * static_cast<size_t>(kv.v_stride);
    }
    return tile;
}

// Scores of MR rows by NK vectors of keys, from vector `first` of the tile on.
template <class V, class T, int MR, int NK>
inline void score_vectors(const Tile<T>& tile, int first, const float* q, int head_dim, float* scores) {
    using F = typename V::F;
    constexpr int kPerUnit = kUnit / V::lanes;
    const T* k[NK];
    for (int j = 0; j < NK; ++j) {
        k[j] = tile.k[(first + j) / kPerUnit] + ((first + j) % kPerUnit) * V::lanes;
    }
    F acc[MR][NK];
    unroll<MR>([&](auto m) { unroll<NK>([&](auto j) { acc[m][j] = V::zero(); }); });
    size_t at = 0;
    for (int d = 0; d < head_dim; ++d, at += tile.k_stride) {
        F kv[NK];
        unroll<NK>([&](auto j) { kv[j] = V::load(k[j] + at); });
        unroll<MR>([&](auto m) __attribute__((always_inline)) {
            const F qv = V::set1(q[m * head_dim + d]);
            unroll<NK>([&](auto j) { acc[m][j] = V::fma(qv, kv[j], acc[m][j]); });
        });
    }
    unroll<MR>([&](auto m) {
        unroll<NK>([&](auto j) { V::store(scores + m * kTileKeys + (first + j) * V::lanes, acc[m][j]); });
    });
}

template <class V, class T, int MR>
void score_rows(const Tile<T>& tile, Span keys, const float* q, int head_dim, float* scores) {
    constexpr int kVectors = V::lanes == 16 ? 4 : 2;
    for (int first = keys.begin / (kVectors * V::lanes) * kVectors; first * V::lanes < keys.end; first += kVectors) {
        score_vectors<V, T, MR, kVectors>(tile, first, q, head_dim, scores);
    }
}

// Calls visit(j, skipped, n) for the vectors of a row's scores that have some of `keys`: lanes [skipped, n) of vector
// j.
template <class V, class Visit>
[[gnu::always_inline]] inline void for_score_vectors(Span keys, const Visit& visit) {
    constexpr int kVectors = kTileKeys / V::lanes;
    if (keys.begin == 0 && keys.end == kTileKeys) {
        unroll<kVectors>([&](auto j) { visit(j, 0, V::lanes); });
        return;
    }
    for (int j = keys.begin / V::lanes; j * V::lanes < keys.end; ++j) {
        const int first = j * V::lanes;
        visit(j, keys.begin > first ? keys.begin - first : 0,
              keys.end - first < V::lanes ? keys.end - first : V::lanes);
    }
}

// The lanes [skipped, n) of x, `otherwise` in the others.
template <class V>
[[gnu::always_inline]] inline typename V::F keep_lanes(typename V::F x, int skipped, int n, typename V::F otherwise) {
    if (n < V::lanes) x = V::keep_n(x, n, otherwise);
    return skipped > 0 ? V::keep_n(otherwise, skipped, x) : x;
}

template <class V>
inline float largest_score(const float* scores, Span keys) {
    typename V::F largest = V::set1(-kInfinity);
    for_score_vectors<V>(keys, [&](int j, int skipped, int n) __attribute__((always_inline)) {
        largest = V::max(largest, keep_lanes<V>(V::load(scores + j * V::lanes), skipped, n, V::set1(-kInfinity)));
    });
    return V::reduce_max(largest);
}

// Turns a row's scores into weights e^(s - max); returns their sum.
template <class V>
inline float weigh_scores(float* scores, Span keys, float max) {
    const auto shift = V::set1(max);
    auto sum = V::zero();
    for_score_vectors<V>(keys, [&](int j, int skipped, int n) __attribute__((always_inline)) {
        const auto p = keep_lanes<V>(exp<V>(V::sub(V::load(scores + j * V::lanes), shift)), skipped, n, V::zero());
        V::store(scores + j * V::lanes, p);
        sum = V::add(sum, p);
    });
    return V::reduce_add(sum);
}

// score = cap · tanh(score / cap)
template <class V>
inline void cap_scores(float* scores, Span keys, float cap) {
    for_score_vectors<V>(keys, [&](int j, int, int) __attribute__((always_inline)) {
        V::store(scores + j * V::lanes, soft_cap_lanes<V>(V::load(scores + j * V::lanes), cap));
    });
}

// Scores become weights, in all rows; maxima and sums are brought up to date. factor[r] is by how much what was
// accumulated before must shrink.
template <class V>
void softmax_rows(float* scores, const Span* keys, int rows, const SoftmaxState& state, float* factor) {
    float shift[kMaxQueryRows] = {};
    for (int r = 0; r < rows; ++r) {
        if (keys[r].empty()) continue;
        const float largest = largest_score<V>(scores + r * kTileKeys, keys[r]);
        const float max = largest > state.max[r] ? largest : state.max[r];
        shift[r] = state.max[r] - max;
        state.max[r] = max;
    }
    for (int r = 0; r < rows; r += V::lanes) V::store(factor + r, exp<V>(V::load(shift + r)));
    for (int r = 0; r < rows; ++r) {
        if (keys[r].empty()) continue;
        state.sum[r] = state.sum[r] * factor[r] + weigh_scores<V>(scores + r * kTileKeys, keys[r], state.max[r]);
    }
}

// acc[m] = acc[m] · factor[m] + Σ_j p[m][j] · v[j], for ND vectors of dimensions and the keys j of row m, ascending.
// Both ends of keys ascend with m; the keys that all rows have share their loads.
template <class V, class T, int MR, int ND>
inline void weigh_dims(const Tile<T>& tile, int v_stride, int dim, const float* p, const Span* keys,
                       const float* factor, float* acc) {
    using F = typename V::F;
    F sums[MR][ND];
    unroll<MR>([&](auto m) {
        unroll<ND>(
            [&](auto i) { sums[m][i] = V::mul(V::load(acc + m * v_stride + dim + i * V::lanes), V::set1(factor[m])); });
    });
    const auto weigh_own = [&](auto m, int begin, int end) __attribute__((always_inline)) {
        for (int j = begin; j < end; ++j) {
            const T* v = tile.v[j / kUnit] + (j % kUnit) * v_stride + dim;
            const F weight = V::set1(p[m * kTileKeys + j]);
            unroll<ND>([&](auto i) { sums[m][i] = V::fma(weight, V::load(v + i * V::lanes), sums[m][i]); });
        }
    };
    const int shared_begin = keys[MR - 1].begin;
    const int shared_end = keys[0].end > shared_begin ? keys[0].end : shared_begin;
    if (keys[0].begin < shared_begin) {
        unroll<MR>([&](auto m) __attribute__((always_inline)) {
            weigh_own(m, keys[m].begin, keys[m].end < shared_begin ? keys[m].end : shared_begin);
        });
    }
    for (int begin = shared_begin; begin < shared_end;) {
        const T* v = tile.v[begin / kUnit] + (begin % kUnit) * v_stride + dim;
        const int unit_end = (begin / kUnit + 1) * kUnit;
        const int end = shared_end < unit_end ? shared_end : unit_end;
        for (; begin < end; ++begin, v += v_stride) {
            F vv[ND];
            unroll<ND>([&](auto i) { vv[i] = V::load(v + i * V::lanes); });
            unroll<MR>([&](auto m) __attribute__((always_inline)) {
                const F weight = V::set1(p[m * kTileKeys + begin]);
                unroll<ND>([&](auto i) { sums[m][i] = V::fma(weight, vv[i], sums[m][i]); });
            });
        }
    }
    unroll<MR>([&](auto m) __attribute__((always_inline)) {
        weigh_own(m, keys[m].begin > shared_end ? keys[m].begin : shared_end, keys[m].end);
        unroll<ND>([&](auto i) { V::store(acc + m * v_stride + dim + i * V::lanes, sums[m][i]); });
    });
}

template <class V, class T, int MR>
void weigh_rows(const Tile<T>& tile, int v_stride, const float* p, const Span* keys, const float* factor, float* acc) {
    constexpr int kWide = 4;
    int dim = 0;
    for (; dim + kWide * V::lanes <= v_stride; dim += kWide * V::lanes) {
        weigh_dims<V, T, MR, kWide>(tile, v_stride, dim, p, keys, factor, acc);
    }
    for (; dim < v_stride; dim += V::lanes) {
        weigh_dims<V, T, MR, 1>(tile, v_stride, dim, p, keys, factor, acc);
    }
}

// One tile: scores, softmax, weighted sum, for all rows. Row r sees keys[r], all rows together `seen`.
template <class V, class T>
void attend_tile(const Tile<T>& tile, const KvView& kv, int rows, Span seen, const Span* keys, float softcap,
                 const Scratch& s) {
    constexpr int kScoreRows = 6;
    constexpr int kWeighRows = V::lanes == 16 ? 4 : 2;
    float factor[kMaxQueryRows];
    for (int r = 0; r < rows; r += kScoreRows) {
        const int count = rows - r < kScoreRows ? rows - r : kScoreRows;
        with_rows<kScoreRows>(count, [&]<int MR>() {
            score_rows<V, T, MR>(tile, seen, s.q + r * kv.head_dim, kv.head_dim, s.scores + r * kTileKeys);
        });
    }
    if (softcap > 0.0f) {
        for (int r = 0; r < rows; ++r) cap_scores<V>(s.scores + r * kTileKeys, keys[r], softcap);
    }
    softmax_rows<V>(s.scores, keys, rows, s.range, factor);
    for (int r = 0; r < rows; r += kWeighRows) {
        const int count = rows - r < kWeighRows ? rows - r : kWeighRows;
        with_rows<kWeighRows>(count, [&]<int MR>() {
            weigh_rows<V, T, MR>(tile, kv.v_stride, s.scores + r * kTileKeys, keys + r, factor + r,
                                 s.range.acc + static_cast<size_t>(r) * static_cast<size_t>(kv.v_stride));
        });
    }
}

inline void clear_state(const SoftmaxState& state, int rows, int v_stride) {
    for (int r = 0; r < rows; ++r) {
        state.max[r] = -kInfinity;
        state.sum[r] = 0.0f;
    }
    __builtin_memset(state.acc, 0, static_cast<size_t>(rows) * static_cast<size_t>(v_stride) * sizeof(float));
}

inline int within_tile(int key) { return key < 0 ? 0 : (key < kTileKeys ? key : kTileKeys); }

// The state of one range, for all rows.
template <class V, class T>
void attend_range(const AttentionArgs& a, int range, int rows, const Scratch& s) {
    constexpr int kShareRows = 12;  // from here on converting a tile once is cheaper than each time it is read
    clear_state(s.range, rows, a.kv.v_stride);
    for (int t = 0; t < kRangeTiles; ++t) {
        const int begin = range * kRangeKeys + t * kTileKeys;
        Span keys[kMaxQueryRows];
        for (int r = 0; r < rows; ++r) {
            const int position = a.position + r / a.heads;
            keys[r] = {within_tile(first_key(position, a.window) - begin), within_tile(position + 1 - begin)};
        }
        const Span seen{keys[0].begin, keys[rows - 1].end};
        if (seen.empty()) continue;
        const Tile<T> tile = locate_tile<T>(a.kv, begin, seen, s.gathered);
        if (rows >= kShareRows) {
            attend_tile<V, float>(widen_tile<V, T>(tile, a.kv, seen, s), a.kv, rows, seen, keys, a.softcap, s);
        } else {
            attend_tile<V, T>(tile, a.kv, rows, seen, keys, a.softcap, s);
        }
    }
}

// total ⊕= part, for row r.
template <class V>
void merge_row(const SoftmaxState& total, const SoftmaxState& part, int r, int v_stride) {
    const float max = total.max[r] > part.max[r] ? total.max[r] : part.max[r];
    float factors[V::lanes];
    V::store(factors, exp<V>(V::set1(total.max[r] - max)));
    const float old_factor = factors[0];
    V::store(factors, exp<V>(V::set1(part.max[r] - max)));
    const float new_factor = factors[0];
    total.max[r] = max;
    total.sum[r] = total.sum[r] * old_factor + part.sum[r] * new_factor;
    float* acc = total.acc + static_cast<size_t>(r) * static_cast<size_t>(v_stride);
    const float* add = part.acc + static_cast<size_t>(r) * static_cast<size_t>(v_stride);
    for (int i = 0; i < v_stride; i += V::lanes) {
        const auto added = V::mul(V::load(add + i), V::set1(new_factor));
        V::store(acc + i, V::fma(V::load(acc + i), V::set1(old_factor), added));
    }
}

inline void copy_row(const SoftmaxState& to, const SoftmaxState& from, int r, int v_stride) {
    to.max[r] = from.max[r];
    to.sum[r] = from.sum[r];
    const size_t at = static_cast<size_t>(r) * static_cast<size_t>(v_stride);
    __builtin_memcpy(to.acc + at, from.acc + at, static_cast<size_t>(v_stride) * sizeof(float));
}

// total becomes, or takes in, the state of a range, for the rows that have keys in it.
template <class V>
void take_range(const SoftmaxState& total, const SoftmaxState& part, int range, int rows, int heads, int position,
                int window, int v_stride) {
    for (int r = 0; r < rows; ++r) {
        const int last = position + r / heads;
        const int first_range = first_key(last, window) / kRangeKeys;
        if (range == first_range) {
            if (total.max != part.max) copy_row(total, part, r, v_stride);
        } else if (range > first_range && range <= last / kRangeKeys) {
            merge_row<V>(total, part, r, v_stride);
        }
    }
}

// 1 / Σ weights, where a head's sink is one of them and has no value (Xiao et al. 2023).
template <class V>
float inverse_sum(float max, float sum, float sink) {
    const float largest = max > sink ? max : sink;
    float factors[V::lanes];
    V::store(factors, exp<V>(V::set1(max - largest)));
    const float factor = factors[0];
    V::store(factors, exp<V>(V::set1(sink - largest)));
    return factor / (sum * factor + factors[0]);
}

// out = acc / sum, for the rows of `queries` queries.
template <class V>
void finish_rows(const SoftmaxState& total, int queries, int heads, int head_dim, int v_stride, const float* sinks,
                 float* out, size_t out_stride) {
    for (int r = 0; r < queries * heads; ++r) {
        const auto inverse = V::set1(sinks == nullptr ? 1.0f / total.sum[r]
                                                      : inverse_sum<V>(total.max[r], total.sum[r], sinks[r % heads]));
        const float* acc = total.acc + static_cast<size_t>(r) * static_cast<size_t>(v_stride);
        float* to = out + static_cast<size_t>(r / heads) * out_stride + static_cast<size_t>((r % heads) * head_dim);
        for_lanes<V>(head_dim,
                     [&](int i, int part) { store_part<V>(to + i, part, V::mul(V::load(acc + i), inverse)); });
    }
}

template <class V, class T>
void attention(const AttentionArgs& a) {
    const int rows = a.queries * a.heads;
    const size_t head_dim = static_cast<size_t>(a.kv.head_dim);
    const Scratch s = carve(a.scratch, rows, a.kv);
    for (int i = 0; i < a.queries; ++i) {
        __builtin_memcpy(s.q + static_cast<size_t>(i * a.heads) * head_dim, a.q + static_cast<size_t>(i) * a.q_stride,
                         static_cast<size_t>(a.heads) * head_dim * sizeof(float));
    }
    if (a.partial != nullptr) {
        attend_range<V, T>(a, a.range_begin, rows, s);
        const SoftmaxState stored = softmax_state(a.partial, rows);
        for (int r = 0; r < rows; ++r) copy_row(stored, s.range, r, a.kv.v_stride);
        return;
    }
    for (int range = a.range_begin; range < a.range_end; ++range) {
        attend_range<V, T>(a, range, rows, s);
        take_range<V>(s.total, s.range, range, rows, a.heads, a.position, a.window, a.kv.v_stride);
    }
    finish_rows<V>(s.total, a.queries, a.heads, a.kv.head_dim, a.kv.v_stride, a.sinks, a.out, a.out_stride);
}

template <class V>
void merge_attention(const MergeArgs& a) {
    const int rows = a.queries * a.heads;
    const size_t state_floats = softmax_state_floats(rows, a.v_stride);
    const SoftmaxState total = softmax_state(a.partials, rows);
    for (int i = 0; i < a.ranges; ++i) {
        const SoftmaxState part = softmax_state(a.partials + static_cast<size_t>(i) * state_floats, rows);
        take_range<V>(total, part, a.first_range + i, rows, a.heads, a.position, a.window, a.v_stride);
    }
    finish_rows<V>(total, a.queries, a.heads, a.head_dim, a.v_stride, a.sinks, a.out, a.out_stride);
}

// Magnitudes from here on are infinite once stored.
template <class T>
constexpr float kOverflow = kInfinity;
template <>
inline constexpr float kOverflow<Half> = 65520.0f;

// Stores a position's k (transposed) and v (padded with zeros) in slot `slot` of a block. A score of -inf, from an
// infinity in k, would only hide the key; a NaN is found in the logits.
template <class V, class T>
void store_kv(const float* k, const float* v, const KvView& kv, void* block, int slot) {
    constexpr int kMost = 16;
    T* k_to = static_cast<T*>(block) + slot;
    T* v_to = static_cast<T*>(block) + kv.v_offset + static_cast<size_t>(slot) * static_cast<size_t>(kv.v_stride);
    const size_t k_stride = static_cast<size_t>(kv.block_size);
    for_lanes<V>(kv.head_dim, [&](int i, int part) {
        T converted[kMost] = {};
        const auto key = load_part<V>(k + i, part);
        V::store(converted, V::select_less(V::abs(key), V::set1(kOverflow<T>), key, V::set1(kNaN)));
        for (int j = 0; j < part; ++j) k_to[static_cast<size_t>(i + j) * k_stride] = converted[j];
        V::store(v_to + i, load_part<V>(v + i, part));
    });
    for (int i = round_up(kv.head_dim, V::lanes); i < kv.v_stride; i += V::lanes) V::store(v_to + i, V::zero());
}

}  // namespace
}  // namespace segue
