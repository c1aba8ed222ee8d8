#include "sample.hpp"

#include <algorithm>
#include <bit>
#include <cassert>
#include <cmath>
#include <limits>

namespace segue {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kMaxFloat = std::numeric_limits<float>::max();
constexpr float kMinFloat = std::numeric_limits<float>::min();

// Loops run over blocks of this many ids; the lanes inside let a compiler vectorise without reordering
// anything.
constexpr size_t kBlock = 512;
constexpr size_t kLanes = 16;

// An id's weight is its probability in units of 1/2^32 of the most likely id's, rounded: an integer. Sums of
// weights are exact in a double up to 2^21 ids, so no order of summation changes which id is drawn.
constexpr double kWeightOne = 4294967296.0;

// Bins of 1/64 nat down to the smallest weight, 32 · ln(2) = 22.2 nats below the most likely id.
constexpr float kBinsPerNat = 64.0f;
constexpr size_t kNumBins = 23 * 64;

// Where exponents are clamped: a little above where e^x stops being a normal number.
constexpr float kLowestExponent = -87.0f;

// max(x, -87), and -87 for NaN.
inline float clamp_exponent(float x) { return x > kLowestExponent ? x : kLowestExponent; }

// e^x for x in [-87, 0]. Cephes' expf: 2^n · e^r with |r| ≤ ln(2)/2. To stay vectorisable it is called in
// loops of its own, on exponents that are clamped already.
inline float exp_of(float x) {
    constexpr float kRoundToInteger = 12582912.0f;  // 1.5 · 2^23: adding it leaves no room for a fraction
    const float n = (x * 1.44269504088896341f + kRoundToInteger) - kRoundToInteger;
    const float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    return p * std::bit_cast<float>((static_cast<int32_t>(n) + 127) << 23);
}

// The integer weight of an id whose probability is `e` times the most likely id's.
inline double weight_of(float e) {
    constexpr double kRoundToInteger = 6755399441055744.0;  // 1.5 · 2^52
    return (static_cast<double>(e) * kWeightOne + kRoundToInteger) - kRoundToInteger;
}

float block_max(const float* x, size_t count) {
    float lanes[kLanes];
    std::fill_n(lanes, kLanes, -kInf);
    size_t i = 0;
    for (; i + kLanes <= count; i += kLanes)
        for (size_t j = 0; j < kLanes; ++j) lanes[j] = x[i + j] > lanes[j] ? x[i + j] : lanes[j];
    float best = -kInf;
    for (; i < count; ++i) best = x[i] > best ? x[i] : best;
    for (const float lane : lanes) best = lane > best ? lane : best;
    return best;
}

struct Best {
    float logit;
    int32_t id;  // the lowest with this logit; 0 when all are -inf or NaN
};

Best argmax(std::span<const float> x) {
    float best = -kInf;
    size_t start = 0;
    for (size_t i = 0; i < x.size(); i += kBlock) {
        const float here = block_max(&x[i], std::min(kBlock, x.size() - i));
        if (here > best) {
            best = here;
            start = i;
        }
    }
    if (best == -kInf) return {best, 0};
    while (x[start] != best) ++start;
    return {best, static_cast<int32_t>(start)};
}

bool has_penalties(const SamplingSpec& spec) {
    return spec.repetition_penalty != 1.0f || spec.presence_penalty != 0.0f || spec.frequency_penalty != 0.0f;
}

// Bias, bans and penalties, in place on x [vocab]. `seen` and `counts` are scratch [vocab].
void adjust(std::span<float> x, const SamplingSpec& spec, int32_t position, std::span<const int32_t> history,
            std::span<float> seen, std::span<float> counts) {
    for (const auto& [id, bias] : spec.logit_bias) {
        assert(0 <= id && static_cast<size_t>(id) < x.size());
        x[id] += bias;
    }
    if (position < spec.banned_until)
        for (const int32_t id : spec.banned)
            if (static_cast<size_t>(id) < x.size()) x[id] = -kInf;
    if (!has_penalties(spec)) return;
    std::fill(seen.begin(), seen.end(), 0.0f);
    std::fill(counts.begin(), counts.end(), 0.0f);
    for (size_t i = spec.output_start; i < history.size(); ++i) counts[history[i]] += 1.0f;
    const float repetition = std::clamp(spec.repetition_penalty, kMinFloat, kMaxFloat);
    for (const int32_t id : history) {
        assert(0 <= id && static_cast<size_t>(id) < x.size());
        if (seen[id] != 0.0f) continue;
        seen[id] = 1.0f;
        float logit = x[id] > 0.0f ? x[id] / repetition : x[id] * repetition;
        logit -= spec.frequency_penalty * counts[id];
        logit -= counts[id] > 0.0f ? spec.presence_penalty : 0.0f;
        x[id] = std::min(logit, kMaxFloat);
    }
}

// Where a ranking ends, inclusive. Rank order: higher exponent first, among equals the lower id.
struct Cut {
    float exponent = -kInf;
    int32_t id = std::numeric_limits<int32_t>::max();
};

bool ranks_before(const Cut& a, const Cut& b) {
    return a.exponent > b.exponent || (a.exponent == b.exponent && a.id < b.id);
}

// A row's ids by likelihood, coarsely: enough to find where a ranking is cut without sorting the vocabulary.
class Ranking {
   public:
    // exponents [vocab]: log of the probability relative to the most likely id; relative [vocab]: e to that,
    // or 0 for an id that is no candidate.
    Ranking(std::span<const float> exponents, std::span<const float> relative)
        : exponents_(exponents), relative_(relative) {
        for (size_t i = 0; i < exponents.size(); ++i) {
            if (relative[i] == 0.0f) continue;
            Bin& bin = bins_[bin_of(exponents[i])];
            bin.mass += weight_of(relative[i]);
            bin.count += 1.0;
        }
        for (const Bin& bin : bins_) total_ += bin.mass;
    }

    // Sum of all weights.
    double total() const { return total_; }

    struct Prefix {
        Cut cut;
        double mass;  // sum of the weights up to and including the cut
    };

    // The shortest prefix of the ranking with `enough(count, mass)`; all of it when there is none.
    template <typename Enough>
    Prefix shortest_prefix(const Enough& enough) const {
        double count = 0.0;
        double mass = 0.0;
        for (size_t b = 0; b < kNumBins; ++b) {
            const Bin& bin = bins_[b];
            if (bin.count > 0.0 && enough(count + bin.count, mass + bin.mass))
                return cut_inside(b, count, mass, enough);
            count += bin.count;
            mass += bin.mass;
        }
        return {Cut{}, mass};
    }

   private:
    struct Bin {
        double mass = 0.0;
        double count = 0.0;
    };

    static size_t bin_of(float exponent) { return static_cast<size_t>(exponent * -kBinsPerNat); }

    template <typename Enough>
    Prefix cut_inside(size_t bin, double count, double mass, const Enough& enough) const {
        std::vector<Cut> members;
        members.reserve(static_cast<size_t>(bins_[bin].count));
        for (size_t i = 0; i < exponents_.size(); ++i)
            if (relative_[i] != 0.0f && bin_of(exponents_[i]) == bin)
                members.push_back({exponents_[i], static_cast<int32_t>(i)});
        std::sort(members.begin(), members.end(), ranks_before);
        for (const Cut& member : members) {
            count += 1.0;
            mass += weight_of(relative_[member.id]);
            if (enough(count, mass)) return {member, mass};
        }
        assert(false && "a bin with enough in it has a member with enough before it");
        return {Cut{}, mass};
    }

    std::span<const float> exponents_;
    std::span<const float> relative_;
    std::array<Bin, kNumBins> bins_{};
    double total_ = 0.0;
};

// Sets to 0 what ranks after the cut.
void drop_after(const Cut& cut, std::span<const float> exponents, std::span<float> relative) {
    const size_t n = relative.size();
    const size_t middle = std::min(n, static_cast<size_t>(cut.id) + 1);
    for (size_t i = 0; i < middle; ++i) relative[i] = exponents[i] >= cut.exponent ? relative[i] : 0.0f;
    for (size_t i = middle; i < n; ++i) relative[i] = exponents[i] > cut.exponent ? relative[i] : 0.0f;
}

double block_mass(const float* relative, size_t count) {
    double lanes[kLanes] = {};
    size_t i = 0;
    for (; i + kLanes <= count; i += kLanes)
        for (size_t j = 0; j < kLanes; ++j) lanes[j] += weight_of(relative[i + j]);
    double mass = 0.0;
    for (; i < count; ++i) mass += weight_of(relative[i]);
    for (const double lane : lanes) mass += lane;
    return mass;
}

// ⌊uniform · total / 2^64⌋
uint64_t scale_uniform(uint64_t uniform, uint64_t total) {
    __extension__ using uint128 = unsigned __int128;
    return static_cast<uint64_t>((static_cast<uint128>(uniform) * total) >> 64);
}

// The first id at which the running sum of weights exceeds a uniform share of their total.
int32_t draw(std::span<const float> relative, uint64_t uniform) {
    const size_t n = relative.size();
    double total = 0.0;
    for (size_t i = 0; i < n; i += kBlock) total += block_mass(&relative[i], std::min(kBlock, n - i));
    const auto target = static_cast<double>(scale_uniform(uniform, static_cast<uint64_t>(total)));
    double mass = 0.0;
    for (size_t i = 0; i < n; i += kBlock) {
        const size_t end = std::min(i + kBlock, n);
        const double here = block_mass(&relative[i], end - i);
        if (mass + here <= target) {
            mass += here;
            continue;
        }
        for (size_t id = i; id < end; ++id) {
            mass += weight_of(relative[id]);
            if (mass > target) return static_cast<int32_t>(id);
        }
    }
    assert(false && "the target is less than the total");
    return 0;
}

// exponents = (x - max) / temperature; relative = e to that, 0 where that is below min_p or the smallest weight.
void exponentiate(std::span<const float> x, float max, const SamplingSpec& spec, std::span<float> exponents,
                  std::span<float> relative) {
    const float temperature = std::min(spec.temperature, kMaxFloat);
    const float lowest = std::max(spec.min_p, static_cast<float>(1.0 / kWeightOne));
    for (size_t start = 0; start < x.size(); start += kBlock) {
        const size_t end = std::min(start + kBlock, x.size());
        for (size_t i = start; i < end; ++i) exponents[i] = clamp_exponent((x[i] - max) / temperature);
        for (size_t i = start; i < end; ++i) relative[i] = exp_of(exponents[i]);
        for (size_t i = start; i < end; ++i) relative[i] = relative[i] >= lowest ? relative[i] : 0.0f;
    }
}

// top_k, then top_p: both set to 0 what they leave out.
void truncate(const SamplingSpec& spec, std::span<const float> exponents, std::span<float> relative) {
    const bool has_top_k = 0 < spec.top_k && static_cast<size_t>(spec.top_k) < relative.size();
    const bool has_top_p = spec.top_p < 1.0f;
    if (!has_top_k && !has_top_p) return;
    const Ranking ranking(exponents, relative);
    Ranking::Prefix kept{Cut{}, ranking.total()};
    if (has_top_k) kept = ranking.shortest_prefix([k = spec.top_k](double count, double) { return count >= k; });
    if (has_top_p) {
        const double enough = std::max(1.0, std::ceil(static_cast<double>(spec.top_p) * kept.mass));
        kept = ranking.shortest_prefix([enough](double, double mass) { return mass >= enough; });
    }
    drop_after(kept.cut, exponents, relative);
}

// An integer that orders as the logit does, NaNs included, so that no comparison is ever inconsistent.
inline uint32_t order_of(float logit) {
    const uint32_t bits = std::bit_cast<uint32_t>(logit + 0.0f);  // -0 becomes +0
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

struct Ranked {
    uint32_t order;
    int32_t id;

    // Ranks before: more likely, among equals the lower id.
    bool operator<(const Ranked& other) const { return order > other.order || (order == other.order && id < other.id); }
};

// The `count` ids that rank first, in rank order.
std::vector<Ranked> most_likely(std::span<const float> logits, size_t count) {
    std::vector<Ranked> heap;  // its front ranks last
    if (count == 0) return heap;
    heap.reserve(count + 1);
    constexpr size_t kSkip = 64;
    for (size_t i = 0; i < logits.size(); i += kSkip) {
        const size_t end = std::min(i + kSkip, logits.size());
        const bool full = heap.size() == count;
        if (full && order_of(block_max(&logits[i], end - i)) <= heap.front().order) continue;
        for (size_t id = i; id < end; ++id) {
            const Ranked ranked{order_of(logits[id]), static_cast<int32_t>(id)};
            if (heap.size() == count) {
                if (!(ranked < heap.front())) continue;
                std::pop_heap(heap.begin(), heap.end());
                heap.pop_back();
            }
            heap.push_back(ranked);
            std::push_heap(heap.begin(), heap.end());
        }
    }
    std::sort_heap(heap.begin(), heap.end());
    return heap;
}

// ln Σ e^(x - max), in a fixed order of summation.
double log_sum(std::span<const float> x, float max) {
    float e[kBlock];
    double lanes[kLanes] = {};
    for (size_t start = 0; start < x.size(); start += kBlock) {
        const size_t count = std::min(kBlock, x.size() - start);
        std::fill(e + count, e + kBlock, 0.0f);
        for (size_t i = 0; i < count; ++i) e[i] = clamp_exponent(x[start + i] - max);
        for (size_t i = 0; i < count; ++i) e[i] = exp_of(e[i]);
        for (size_t i = 0; i < kBlock; i += kLanes)
            for (size_t j = 0; j < kLanes; ++j) lanes[j] += static_cast<double>(e[i + j]);
    }
    double sum = 0.0;
    for (const double lane : lanes) sum += lane;
    return std::log(sum);
}

}  // namespace

std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
    for (int round = 0; round < 10; ++round) {
        const uint64_t product0 = uint64_t{0xD2511F53u} * counter[0];
        const uint64_t product1 = uint64_t{0xCD9E8D57u} * counter[2];
        counter = {static_cast<uint32_t>(product1 >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(product1),
                   static_cast<uint32_t>(product0 >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(product0)};
        key[0] += 0x9E3779B9u;
        key[1] += 0xBB67AE85u;
    }
    return counter;
}

int32_t sample_row(std::span<const float> logits, const SamplingSpec& spec, int32_t position,
                   std::span<const int32_t> history, std::vector<float>& scratch) {
    assert(!logits.empty());
    const size_t n = logits.size();
    const bool bans = position < spec.banned_until && !spec.banned.empty();
    const bool adjusts = !spec.logit_bias.empty() || bans || has_penalties(spec);
    const bool greedy = !(spec.temperature > 0.0f);
    if (greedy && !adjusts) return argmax(logits).id;

    if (scratch.size() < 3 * n) scratch.resize(3 * n);
    const auto exponents = std::span(scratch).subspan(0, n);
    const auto relative = std::span(scratch).subspan(n, n);
    const auto counts = std::span(scratch).subspan(2 * n, n);
    std::span<const float> adjusted = logits;
    if (adjusts) {
        std::copy(logits.begin(), logits.end(), exponents.begin());
        adjust(exponents, spec, position, history, relative, counts);
        adjusted = exponents;
    }
    const Best best = argmax(adjusted);
    if (greedy || !std::isfinite(best.logit)) return best.id;

    exponentiate(adjusted, best.logit, spec, exponents, relative);
    truncate(spec, exponents, relative);
    const auto words = philox4x32({static_cast<uint32_t>(position), 0, 0, 0},
                                  {static_cast<uint32_t>(spec.seed), static_cast<uint32_t>(spec.seed >> 32)});
    return draw(relative, uint64_t{words[1]} << 32 | words[0]);
}

TokenLogprobs row_logprobs(std::span<const float> logits, int32_t token, int32_t num_top) {
    assert(0 <= token && static_cast<size_t>(token) < logits.size() && num_top >= 0);
    const float max = argmax(logits).logit;
    const double log_total = max == -kInf ? 0.0 : static_cast<double>(max) + log_sum(logits, max);
    const auto logprob_of = [&](int32_t id) { return static_cast<float>(static_cast<double>(logits[id]) - log_total); };

    int32_t num_more_likely = 0;
    for (const float logit : logits) num_more_likely += logit > logits[token];
    TokenLogprobs result{logprob_of(token), 1 + num_more_likely, {}, {}};
    for (const Ranked& ranked : most_likely(logits, std::min(static_cast<size_t>(num_top), logits.size()))) {
        result.top_ids.push_back(ranked.id);
        result.top_logprobs.push_back(logprob_of(ranked.id));
    }
    return result;
}

bool all_finite(std::span<const float> logits) {
    int32_t num_bad = 0;
    for (const float logit : logits) num_bad += !(std::abs(logit) <= kMaxFloat);
    return num_bad == 0;
}

}  // namespace segue
