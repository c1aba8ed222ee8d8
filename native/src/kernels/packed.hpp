// Weights as the kernels read them: a block of 16 outputs, never larger than what it is made of in the file.
//
// A panel (16 outputs, all of K) is its blocks one after the other. What an element stores is its code, cut into
// planes: a vector of 64 bytes has 4 consecutive k of each output, and in its bits those of several steps of 4 k:
//   nibbles  step s: vector s / 2, bits 4 (s mod 2) and up         4 vectors for 32 k
//   pairs    step s: vector s / 4, bits 2 (s mod 4) and up         2 vectors for 32 k
//   bits     step s: bit s                                         1 vector  for 32 k
// Only data, which every instruction set's kernels may include.
#pragma once

#include <cstdint>

#include "half.hpp"

namespace segue::packed {

constexpr int kOutputs = 16;

using Vector = uint8_t[4 * kOutputs];
using Nibbles = Vector[4];
using Pairs = Vector[2];
using Bits = Vector;
using Halves = Half[kOutputs];
using Bytes = uint8_t[kOutputs];
using Words = uint32_t[kOutputs];

template <class T>
struct Float {  // one k
    T x[kOutputs];
};

// 32 k

struct Q4_0 {
    Nibbles low;
    Halves d;
};
struct Q4_1 {
    Nibbles low;
    Halves d;
    Halves m;
};
struct Q5_0 {
    Nibbles low;
    Bits high;
    Halves d;
};
struct Q5_1 {
    Nibbles low;
    Bits high;
    Halves d;
    Halves m;
};
struct Q8_0 {
    Vector q[8];  // q + 128; vector s: step s
    Halves d;
};
struct MXFP4 {
    Nibbles low;
    Bytes e;
};

// 256 k: what is said of 32 k comes eight times

struct Q2_K {
    Pairs low[8];
    Bytes sm[16];  // by 16 k: low nibble s, high nibble m
    Halves d;
    Halves dmin;
};
struct Q3_K {
    Pairs low[8];
    Bits high[8];
    Words s[3];  // the 12 bytes of the file
    Halves d;
};
struct Q4_K {
    Nibbles low[8];
    Words sm[3];  // the 12 bytes of the file
    Halves d;
    Halves dmin;
};
struct Q5_K {
    Nibbles low[8];
    Bits high[8];
    Words sm[3];
    Halves d;
    Halves dmin;
};
struct Q6_K {
    Nibbles low[8];
    Pairs high[8];
    Bytes s[16];  // by 16 k, signed
    Halves d;
};
struct IQ4_XS {
    Nibbles low[8];
    Words s_low;                // by 32 k: 4 bits
    uint16_t s_high[kOutputs];  // by 32 k: 2 bits
    Halves d;
};

}  // namespace segue::packed
