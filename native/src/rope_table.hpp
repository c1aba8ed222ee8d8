// Cosines and sines of rotary position embeddings (Su et al. 2021).
#pragma once

#include <cmath>
#include <memory>
#include <vector>

#include "program.hpp"

namespace segue {

// Rows of [rope_dim] cosines and [rope_dim] sines by position, computed in f64, for the positions asked for so far.
// Interleaved: entries 2i and 2i+1 belong to pair i, the sine of 2i negated. Halves: entry i to pair i, the rest
// unused.
class RopeTable {
   public:
    explicit RopeTable(const Rope& rope) : rope_dim_(rope.dim), interleaved_(rope.interleaved), scale_(rope.scale) {
        for (int i = 0; i < rope.dim / 2; ++i) {
            const double frequency = std::pow(rope.theta, -2.0 * i / rope.dim);
            frequencies_.push_back(rope.factors.empty() ? frequency : frequency / rope.factors[static_cast<size_t>(i)]);
        }
    }

    // Makes positions [0, end) available.
    void extend(int end) {
        while (static_cast<int>(chunks_.size()) * kChunk < end) {
            chunks_.push_back(make_chunk(static_cast<int>(chunks_.size()) * kChunk));
        }
    }
    const float* cos(int position) const {
        const size_t row = static_cast<size_t>(position % kChunk) * 2 * static_cast<size_t>(rope_dim_);
        return chunks_[static_cast<size_t>(position / kChunk)].get() + row;
    }
    const float* sin(int position) const { return cos(position) + rope_dim_; }

   private:
    static constexpr int kChunk = 256;

    std::unique_ptr<float[]> make_chunk(int first) const {
        const size_t row_floats = 2 * static_cast<size_t>(rope_dim_);
        auto chunk = std::make_unique<float[]>(kChunk * row_floats);
        for (int p = 0; p < kChunk; ++p) {
            float* cos = chunk.get() + static_cast<size_t>(p) * row_floats;
            float* sin = cos + rope_dim_;
            for (size_t i = 0; i < frequencies_.size(); ++i) {
                const double angle = (first + p) * frequencies_[i];
                const float c = static_cast<float>(scale_ * std::cos(angle));
                const float s = static_cast<float>(scale_ * std::sin(angle));
                if (interleaved_) {
                    cos[2 * i] = cos[2 * i + 1] = c;
                    sin[2 * i] = -s;
                    sin[2 * i + 1] = s;
                } else {
                    cos[i] = c;
                    sin[i] = s;
                }
            }
        }
        return chunk;
    }

    int rope_dim_;
    bool interleaved_;
    double scale_;
    std::vector<double> frequencies_;
    std::vector<std::unique_ptr<float[]>> chunks_;
};

}  // namespace segue
