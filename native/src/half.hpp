// Scalar conversions of 16-bit floats, for loading weights and embedding rows. Kernels use the vector ones.
#pragma once

#include <bit>
#include <cstdint>

namespace segue {

// Storage only; distinct types so that overloads choose the conversion.
struct Half {
    uint16_t bits;
};
struct BFloat16 {
    uint16_t bits;
};

inline float to_float(BFloat16 h) { return std::bit_cast<float>(uint32_t{h.bits} << 16); }

inline float to_float(Half h) {
    const uint32_t sign = uint32_t{h.bits & 0x8000u} << 16;
    const uint32_t magnitude = h.bits & 0x7fffu;
    if (magnitude >= 0x7c00u) return std::bit_cast<float>(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
    if (magnitude >= 0x0400u) return std::bit_cast<float>(sign | ((magnitude << 13) + (112u << 23)));
    const float subnormal = static_cast<float>(magnitude) * 0x1p-24f;
    return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(subnormal));
}

// Rounds to nearest even; overflows to infinity.
inline Half to_half(float f) {
    const uint32_t bits = std::bit_cast<uint32_t>(f);
    const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
    const uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u)};
    if (magnitude >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};
    if (magnitude < 0x38800000u) {  // subnormal: adding 0.5 leaves multiples of 2^-24 in the mantissa
        const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
        return {static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000u))};
    }
    const uint32_t odd = (magnitude >> 13) & 1u;
    return {static_cast<uint16_t>(sign | ((magnitude - (112u << 23) + 0xfffu + odd) >> 13))};
}

}  // namespace segue
