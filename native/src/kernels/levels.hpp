// What a code of 4 bits stands for where that is a table.
#pragma once

#include <cstdint>

namespace segue {

constexpr int8_t kLevelsIQ4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t kLevelsFP4[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};  // E2M1, doubled

}  // namespace segue
