// The formats of tensors: how each is stored (as GGML does), what it means, and how it is packed for the kernels.
// `src/segue/weights/dequantize.py` has the same in words.
//
// A format is a struct with
//   elements        of a row, in one stored block
//   Stored          such a block
//   dequantise()    its elements as f32
//   Packed          16 outputs of one block (kernels/packed.hpp)
//   pack()          writes output r of them. Stored{}: of an output that pads a panel
// and a line of `with_format`.
#pragma once

#include <bit>
#include <cmath>
#include <cstring>

#include "half.hpp"
#include "kernels/levels.hpp"
#include "kernels/packed.hpp"
#include "weights.hpp"

namespace segue::formats {

inline float to_float(float x) { return x; }
using segue::to_float;

template <class T>
struct Float {
    using Stored = T;
    using Packed = packed::Float<T>;
    static constexpr int elements = 1;

    static void dequantise(const Stored& x, float* out) { *out = to_float(x); }
    static void pack(const Stored& x, int r, Packed& block) { block.x[r] = x; }
};

// Codes of 32 elements into the planes of a packed block.

constexpr uint32_t every_byte(uint32_t x) { return 0x01010101u * x; }

// The codes of step s, one a byte.
inline uint32_t step(const uint8_t* codes, int s) {
    uint32_t four;
    std::memcpy(&four, codes + 4 * s, 4);
    return four;
}

inline void put(uint32_t four, int r, packed::Vector& vector) { std::memcpy(vector + 4 * r, &four, 4); }

// Bits [from, from + width) of the codes, 8 / width steps to a vector.
template <int width, int from>
void put_plane(const uint8_t* codes, int r, packed::Vector* vectors) {
    constexpr int kSteps = 8 / width;
    for (int v = 0; v < 8 / kSteps; ++v) {
        uint32_t x = 0;
        for (int i = 0; i < kSteps; ++i) {
            x |= ((step(codes, kSteps * v + i) >> from) & every_byte((1u << width) - 1)) << (width * i);
        }
        put(x, r, vectors[v]);
    }
}
inline void put_low_nibbles(const uint8_t* codes, int r, packed::Nibbles& to) { put_plane<4, 0>(codes, r, to); }
inline void put_low_pairs(const uint8_t* codes, int r, packed::Pairs& to) { put_plane<2, 0>(codes, r, to); }
inline void put_high_pairs(const uint8_t* codes, int r, packed::Pairs& to) { put_plane<2, 4>(codes, r, to); }
template <int bit>
void put_bits(const uint8_t* codes, int r, packed::Bits& to) {
    put_plane<1, bit>(codes, r, &to);
}

// Adds n numbers of `width` bits to the codes `shift` bits up: a piece's lowest bits are its first elements.
template <int width, int shift = 0>
void add_bits(const uint8_t* stored, int n, int piece, uint8_t* codes) {
    constexpr int kMask = (1 << width) - 1;
    for (int i = 0; i < n; stored += piece) {
        for (int bit = 0; bit < 8; bit += width, i += piece) {
            for (int j = 0; j < piece; ++j) {
                codes[i + j] = static_cast<uint8_t>(codes[i + j] | (((stored[j] >> bit) & kMask) << shift));
            }
        }
    }
}

template <int n>
struct Codes {
    uint8_t q[n] = {};
};

// x = d · (q - offset) or d · q + m, 32 elements
template <class Derived>
struct Simple {
    static constexpr int elements = kGroup;

    template <class Stored>
    static void dequantise(const Stored& block, float* out) {
        const Codes<kGroup> codes = Derived::codes(block);
        const float d = to_float(block.d);
        for (int i = 0; i < kGroup; ++i) {
            if constexpr (requires { block.m; }) {
                out[i] = d * static_cast<float>(codes.q[i]) + to_float(block.m);
            } else {
                out[i] = d * static_cast<float>(Derived::value(codes.q[i]));
            }
        }
    }
    template <class Stored, class Packed>
    static void pack(const Stored& stored, int r, Packed& block) {
        const Codes<kGroup> codes = Derived::codes(stored);
        put_low_nibbles(codes.q, r, block.low);
        if constexpr (requires { block.high; }) put_bits<4>(codes.q, r, block.high);
        block.d[r] = stored.d;
        if constexpr (requires { block.m; }) block.m[r] = stored.m;
    }

   protected:
    template <class Stored>
    static Codes<kGroup> nibbles(const Stored& block) {
        Codes<kGroup> codes;
        add_bits<4>(block.q, kGroup, 16, codes.q);
        if constexpr (requires { block.high; }) add_bits<1, 4>(block.high, kGroup, 1, codes.q);
        return codes;
    }
};

struct Q4_0 : Simple<Q4_0> {
    struct Stored {
        Half d;
        uint8_t q[16];
    };
    static_assert(sizeof(Stored) == 18);
    using Packed = packed::Q4_0;
    static Codes<kGroup> codes(const Stored& block) { return nibbles(block); }
    static int value(int code) { return code - 8; }
};

struct Q4_1 : Simple<Q4_1> {
    struct Stored {
        Half d;
        Half m;
        uint8_t q[16];
    };
    static_assert(sizeof(Stored) == 20);
    using Packed = packed::Q4_1;
    static Codes<kGroup> codes(const Stored& block) { return nibbles(block); }
};

struct Q5_0 : Simple<Q5_0> {
    struct Stored {
        Half d;
        uint8_t high[4];
        uint8_t q[16];
    };
    static_assert(sizeof(Stored) == 22);
    using Packed = packed::Q5_0;
    static Codes<kGroup> codes(const Stored& block) { return nibbles(block); }
    static int value(int code) { return code - 16; }
};

struct Q5_1 : Simple<Q5_1> {
    struct Stored {
        Half d;
        Half m;
        uint8_t high[4];
        uint8_t q[16];
    };
    static_assert(sizeof(Stored) == 24);
    using Packed = packed::Q5_1;
    static Codes<kGroup> codes(const Stored& block) { return nibbles(block); }
};

struct IQ4_NL : Simple<IQ4_NL> {
    using Stored = Q4_0::Stored;
    using Packed = packed::Q4_0;
    static Codes<kGroup> codes(const Stored& block) { return nibbles(block); }
    static int value(int code) { return kLevelsIQ4[code]; }
};

struct MXFP4 : Simple<MXFP4> {  // x = 2^(e - 128) · level
    struct Stored {
        uint8_t e;
        uint8_t q[16];
    };
    static_assert(sizeof(Stored) == 17);
    using Packed = packed::MXFP4;

    static void dequantise(const Stored& block, float* out) {
        const Codes<kGroup> codes = nibbles(block);
        const float scale = std::ldexp(1.0f, block.e - 128);
        for (int i = 0; i < kGroup; ++i) out[i] = scale * static_cast<float>(kLevelsFP4[codes.q[i]]);
    }
    static void pack(const Stored& stored, int r, Packed& block) {
        put_low_nibbles(nibbles(stored).q, r, block.low);
        block.e[r] = stored.e;
    }
};

struct Q8_0 {  // x = d · q
    struct Stored {
        Half d;
        int8_t q[32];
    };
    static_assert(sizeof(Stored) == 34);
    using Packed = packed::Q8_0;
    static constexpr int elements = kGroup;

    static void dequantise(const Stored& block, float* out) {
        const float d = to_float(block.d);
        for (int i = 0; i < kGroup; ++i) out[i] = d * static_cast<float>(block.q[i]);
    }
    static void pack(const Stored& stored, int r, Packed& block) {
        for (int s = 0; s < 8; ++s) {
            uint32_t four;
            std::memcpy(&four, stored.q + 4 * s, 4);
            put(four ^ every_byte(0x80), r, block.q[s]);
        }
        block.d[r] = stored.d;
    }
};

constexpr int kSuper = 256;

// The 12 bytes of six-bit scales that a packed block keeps as three words.
inline void put_words(const uint8_t* bytes, int r, packed::Words (&to)[3]) {
    for (int i = 0; i < 3; ++i) std::memcpy(&to[i][r], bytes + 4 * i, 4);
}

// x = d s q - dmin m, by 32 elements
template <class Derived>
struct ScalesAndMinima {
    static constexpr int elements = kSuper;

    template <class Stored>
    static void dequantise(const Stored& block, float* out) {
        const Codes<kSuper> codes = Derived::codes(block);
        for (int g = 0; g < 8; ++g) {
            const uint8_t *a = block.sm, *b = block.sm + 4, *c = block.sm + 8;
            const int h = g % 4;
            const int s = g < 4 ? a[h] & 63 : (c[h] & 15) | ((a[h] >> 6) << 4);
            const int m = g < 4 ? b[h] & 63 : (c[h] >> 4) | ((b[h] >> 6) << 4);
            const float scale = to_float(block.d) * static_cast<float>(s);
            const float minimum = to_float(block.dmin) * static_cast<float>(m);
            for (int i = kGroup * g; i < kGroup * (g + 1); ++i) {
                out[i] = scale * static_cast<float>(codes.q[i]) - minimum;
            }
        }
    }
    template <class Stored, class Packed>
    static void pack(const Stored& stored, int r, Packed& block) {
        const Codes<kSuper> codes = Derived::codes(stored);
        for (int g = 0; g < 8; ++g) {
            put_low_nibbles(codes.q + kGroup * g, r, block.low[g]);
            if constexpr (requires { block.high; }) put_bits<4>(codes.q + kGroup * g, r, block.high[g]);
        }
        put_words(stored.sm, r, block.sm);
        block.d[r] = stored.d;
        block.dmin[r] = stored.dmin;
    }
};

struct Q4_K : ScalesAndMinima<Q4_K> {
    struct Stored {
        Half d;
        Half dmin;
        uint8_t sm[12];
        uint8_t q[128];
    };
    static_assert(sizeof(Stored) == 144);
    using Packed = packed::Q4_K;
    static Codes<kSuper> codes(const Stored& block) {
        Codes<kSuper> codes;
        add_bits<4>(block.q, kSuper, 32, codes.q);
        return codes;
    }
};

struct Q5_K : ScalesAndMinima<Q5_K> {
    struct Stored {
        Half d;
        Half dmin;
        uint8_t sm[12];
        uint8_t high[32];
        uint8_t q[128];
    };
    static_assert(sizeof(Stored) == 176);
    using Packed = packed::Q5_K;
    static Codes<kSuper> codes(const Stored& block) {
        Codes<kSuper> codes;
        add_bits<4>(block.q, kSuper, 32, codes.q);
        add_bits<1, 4>(block.high, kSuper, 32, codes.q);
        return codes;
    }
};

struct Q6_K {  // x = d s (q - 32), by 16 elements
    struct Stored {
        uint8_t q[128];
        uint8_t high[64];
        int8_t s[16];
        Half d;
    };
    static_assert(sizeof(Stored) == 210);
    using Packed = packed::Q6_K;
    static constexpr int elements = kSuper;

    static void dequantise(const Stored& block, float* out) {
        const Codes<kSuper> codes = codes_of(block);
        for (int i = 0; i < kSuper; ++i) {
            const float scale = to_float(block.d) * static_cast<float>(block.s[i / 16]);
            out[i] = scale * static_cast<float>(codes.q[i] - 32);
        }
    }
    static void pack(const Stored& stored, int r, Packed& block) {
        const Codes<kSuper> codes = codes_of(stored);
        for (int g = 0; g < 8; ++g) {
            put_low_nibbles(codes.q + kGroup * g, r, block.low[g]);
            put_high_pairs(codes.q + kGroup * g, r, block.high[g]);
        }
        for (int i = 0; i < 16; ++i) block.s[i][r] = static_cast<uint8_t>(stored.s[i]);
        block.d[r] = stored.d;
    }

   private:
    static Codes<kSuper> codes_of(const Stored& block) {
        Codes<kSuper> codes;
        add_bits<4>(block.q, kSuper, 64, codes.q);
        add_bits<2, 4>(block.high, kSuper, 32, codes.q);
        return codes;
    }
};

struct Q3_K {  // x = d (s - 32) (q - 4), by 16 elements
    struct Stored {
        uint8_t high[32];
        uint8_t q[64];
        uint8_t s[12];
        Half d;
    };
    static_assert(sizeof(Stored) == 110);
    using Packed = packed::Q3_K;
    static constexpr int elements = kSuper;

    static void dequantise(const Stored& block, float* out) {
        const Codes<kSuper> codes = codes_of(block);
        Codes<16> scales;
        add_bits<4>(block.s, 16, 8, scales.q);
        add_bits<2, 4>(block.s + 8, 16, 4, scales.q);
        for (int i = 0; i < kSuper; ++i) {
            const float scale = to_float(block.d) * static_cast<float>(scales.q[i / 16] - 32);
            out[i] = scale * static_cast<float>(codes.q[i] - 4);
        }
    }
    static void pack(const Stored& stored, int r, Packed& block) {
        const Codes<kSuper> codes = codes_of(stored);
        for (int g = 0; g < 8; ++g) {
            put_low_pairs(codes.q + kGroup * g, r, block.low[g]);
            put_bits<2>(codes.q + kGroup * g, r, block.high[g]);
        }
        put_words(stored.s, r, block.s);
        block.d[r] = stored.d;
    }

   private:
    static Codes<kSuper> codes_of(const Stored& block) {
        Codes<kSuper> codes;
        add_bits<2>(block.q, kSuper, 32, codes.q);
        add_bits<1, 2>(block.high, kSuper, 32, codes.q);
        return codes;
    }
};

struct Q2_K {  // x = d s q - dmin m, by 16 elements
    struct Stored {
        uint8_t sm[16];
        uint8_t q[64];
        Half d;
        Half dmin;
    };
    static_assert(sizeof(Stored) == 84);
    using Packed = packed::Q2_K;
    static constexpr int elements = kSuper;

    static void dequantise(const Stored& block, float* out) {
        const Codes<kSuper> codes = codes_of(block);
        for (int i = 0; i < kSuper; ++i) {
            const float scale = to_float(block.d) * static_cast<float>(block.sm[i / 16] & 15);
            const float minimum = to_float(block.dmin) * static_cast<float>(block.sm[i / 16] >> 4);
            out[i] = scale * static_cast<float>(codes.q[i]) - minimum;
        }
    }
    static void pack(const Stored& stored, int r, Packed& block) {
        const Codes<kSuper> codes = codes_of(stored);
        for (int g = 0; g < 8; ++g) put_low_pairs(codes.q + kGroup * g, r, block.low[g]);
        for (int i = 0; i < 16; ++i) block.sm[i][r] = stored.sm[i];
        block.d[r] = stored.d;
        block.dmin[r] = stored.dmin;
    }

   private:
    static Codes<kSuper> codes_of(const Stored& block) {
        Codes<kSuper> codes;
        add_bits<2>(block.q, kSuper, 32, codes.q);
        return codes;
    }
};

struct IQ4_XS {  // x = d (s - 32) · level, by 32 elements
    struct Stored {
        Half d;
        uint16_t s_high;
        uint8_t s_low[4];
        uint8_t q[128];
    };
    static_assert(sizeof(Stored) == 136);
    using Packed = packed::IQ4_XS;
    static constexpr int elements = kSuper;

    static void dequantise(const Stored& block, float* out) {
        const Codes<kSuper> codes = codes_of(block);
        for (int i = 0; i < kSuper; ++i) {
            const int g = i / kGroup;
            const int s = ((block.s_low[g / 2] >> (4 * (g % 2))) & 15) | (((block.s_high >> (2 * g)) & 3) << 4);
            const float scale = to_float(block.d) * static_cast<float>(s - 32);
            out[i] = scale * static_cast<float>(kLevelsIQ4[codes.q[i]]);
        }
    }
    static void pack(const Stored& stored, int r, Packed& block) {
        const Codes<kSuper> codes = codes_of(stored);
        for (int g = 0; g < 8; ++g) put_low_nibbles(codes.q + kGroup * g, r, block.low[g]);
        std::memcpy(&block.s_low[r], stored.s_low, 4);
        block.s_high[r] = stored.s_high;
        block.d[r] = stored.d;
    }

   private:
    static Codes<kSuper> codes_of(const Stored& block) {
        Codes<kSuper> codes;
        add_bits<4>(block.q, kSuper, 16, codes.q);
        return codes;
    }
};

// Returns visit.operator()<Format>() of the type's format. Raises ModelFileError for a type that has none.
template <class Visit>
auto with_format(TensorType type, const Visit& visit) {
    switch (type) {
        case TensorType::kF32:
            return visit.template operator()<Float<float>>();
        case TensorType::kF16:
            return visit.template operator()<Float<Half>>();
        case TensorType::kBF16:
            return visit.template operator()<Float<BFloat16>>();
        case TensorType::kQ4_0:
            return visit.template operator()<Q4_0>();
        case TensorType::kQ4_1:
            return visit.template operator()<Q4_1>();
        case TensorType::kQ5_0:
            return visit.template operator()<Q5_0>();
        case TensorType::kQ5_1:
            return visit.template operator()<Q5_1>();
        case TensorType::kQ8_0:
            return visit.template operator()<Q8_0>();
        case TensorType::kQ2_K:
            return visit.template operator()<Q2_K>();
        case TensorType::kQ3_K:
            return visit.template operator()<Q3_K>();
        case TensorType::kQ4_K:
            return visit.template operator()<Q4_K>();
        case TensorType::kQ5_K:
            return visit.template operator()<Q5_K>();
        case TensorType::kQ6_K:
            return visit.template operator()<Q6_K>();
        case TensorType::kIQ4_NL:
            return visit.template operator()<IQ4_NL>();
        case TensorType::kIQ4_XS:
            return visit.template operator()<IQ4_XS>();
        case TensorType::kMXFP4:
            return visit.template operator()<MXFP4>();
    }
    throw ModelFileError("tensor type " + std::to_string(static_cast<int>(type)) + " is not supported");
}

}  // namespace segue::formats
