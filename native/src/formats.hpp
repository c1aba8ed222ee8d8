// The formats of tensors: how each is stored (as GGML does), what it means, and how it is packed for the kernels.
//
// A format is a struct with
//   elements        of a row, in one stored block
//   Stored          such a block
//   dequantise()    its elements as f32
//   packed          what the kernels know it as; packed_bytes: 16 outputs of one block
//   pack()          writes the block of output r to where it lies among those 16. Stored{}: of an output that pads a
//   panel
// and a line of `with_format`.
#pragma once

#include <cstring>

#include "half.hpp"
#include "kernels/table.hpp"
#include "weights.hpp"

namespace segue::formats {

inline float to_float(float x) { return x; }
using segue::to_float;

template <class T, WeightFormat format>
struct Float {
    using Stored = T;
    static constexpr int elements = 1;
    static constexpr WeightFormat packed = format;
    static constexpr size_t packed_bytes = kPanel * sizeof(T);

    static void dequantise(const Stored& x, float* out) { *out = to_float(x); }
    static void pack(const Stored& x, int r, uint8_t* block) {
        std::memcpy(block + static_cast<size_t>(r) * sizeof(T), &x, sizeof(T));
    }
};
using F32 = Float<float, WeightFormat::kF32>;
using F16 = Float<Half, WeightFormat::kF16>;
using BF16 = Float<BFloat16, WeightFormat::kBF16>;

// 32 numbers of 4 bits: byte i holds elements i (low nibble) and i + 16. Packed with a scale and a minimum.
struct Nibbles {
    static constexpr int elements = kGroup;
    static constexpr WeightFormat packed = WeightFormat::kU4;
    static constexpr size_t packed_bytes = kU4BlockBytes;

    static void pack(const uint8_t* q, Half scale, Half minimum, int r, uint8_t* block) {
        constexpr uint32_t kLow = 0x0f0f0f0fu;
        for (int half = 0; half < 2; ++half) {  // elements 8·half + [0, 8) and, in the high nibbles, 16 more
            uint32_t a, b;
            std::memcpy(&a, q + 8 * half, 4);
            std::memcpy(&b, q + 8 * half + 4, 4);
            const uint32_t first = (a & kLow) | ((b & kLow) << 4);
            const uint32_t second = ((a >> 4) & kLow) | (b & ~kLow);
            std::memcpy(block + 64 * half + 4 * r, &first, 4);
            std::memcpy(block + 64 * (2 + half) + 4 * r, &second, 4);
        }
        std::memcpy(block + 256 + 2 * r, &scale, 2);
        std::memcpy(block + 256 + 2 * (kPanel + r), &minimum, 2);
    }
};

struct Q4_0 : Nibbles {  // x = d · (q - 8)
    struct Stored {
        Half d;
        uint8_t q[16];
    };
    static_assert(sizeof(Stored) == 18);

    static void dequantise(const Stored& block, float* out) {
        const float d = to_float(block.d);
        for (int i = 0; i < 16; ++i) {
            out[i] = d * static_cast<float>((block.q[i] & 15) - 8);
            out[i + 16] = d * static_cast<float>((block.q[i] >> 4) - 8);
        }
    }
    static void pack(const Stored& stored, int r, uint8_t* block) {
        const Half minimum = to_half(-8.0f * to_float(stored.d));  // a power of two: exact
        Nibbles::pack(stored.q, stored.d, minimum, r, block);
    }
};

struct Q4_1 : Nibbles {  // x = d · q + m
    struct Stored {
        Half d;
        Half m;
        uint8_t q[16];
    };
    static_assert(sizeof(Stored) == 20);

    static void dequantise(const Stored& block, float* out) {
        const float d = to_float(block.d);
        const float m = to_float(block.m);
        for (int i = 0; i < 16; ++i) {
            out[i] = d * static_cast<float>(block.q[i] & 15) + m;
            out[i + 16] = d * static_cast<float>(block.q[i] >> 4) + m;
        }
    }
    static void pack(const Stored& stored, int r, uint8_t* block) {
        Nibbles::pack(stored.q, stored.d, stored.m, r, block);
    }
};

struct Q8_0 {  // x = d · q
    struct Stored {
        Half d;
        int8_t q[32];
    };
    static_assert(sizeof(Stored) == 34);
    static constexpr int elements = kGroup;
    static constexpr WeightFormat packed = WeightFormat::kI8;
    static constexpr size_t packed_bytes = kI8BlockBytes;

    static void dequantise(const Stored& block, float* out) {
        const float d = to_float(block.d);
        for (int i = 0; i < kGroup; ++i) out[i] = d * static_cast<float>(block.q[i]);
    }
    static void pack(const Stored& stored, int r, uint8_t* block) {
        for (int s = 0; s < 8; ++s) {
            uint32_t four;
            std::memcpy(&four, stored.q + 4 * s, 4);
            four ^= 0x80808080u;  // q + 128
            std::memcpy(block + 64 * s + 4 * r, &four, 4);
        }
        std::memcpy(block + 512 + 2 * r, &stored.d, 2);
    }
};

// Returns visit.operator()<Format>() of the type's format. Raises ModelFileError for a type that has none.
template <class Visit>
auto with_format(TensorType type, const Visit& visit) {
    switch (type) {
        case TensorType::kF32:
            return visit.template operator()<F32>();
        case TensorType::kF16:
            return visit.template operator()<F16>();
        case TensorType::kBF16:
            return visit.template operator()<BF16>();
        case TensorType::kQ4_0:
            return visit.template operator()<Q4_0>();
        case TensorType::kQ4_1:
            return visit.template operator()<Q4_1>();
        case TensorType::kQ8_0:
            return visit.template operator()<Q8_0>();
    }
    throw ModelFileError("tensor type " + std::to_string(static_cast<int>(type)) + " is not supported");
}

}  // namespace segue::formats
