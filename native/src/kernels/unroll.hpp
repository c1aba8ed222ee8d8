// Loops whose body the compiler sees once for every index, so that arrays of accumulators stay in registers.
#pragma once

#include <utility>

namespace segue {
namespace {

// body(i) for i in [0, N), i a compile-time constant.
template <int N, class Body>
[[gnu::always_inline]] inline void unroll(const Body& body) {
    [&]<int... i>(std::integer_sequence<int, i...>) __attribute__((always_inline)) {
        (body(std::integral_constant<int, i>{}), ...);
    }(std::make_integer_sequence<int, N>{});
}

}  // namespace
}  // namespace segue
