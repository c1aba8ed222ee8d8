#include "isa.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <vector>

#include "common.hpp"

namespace segue {
namespace {

struct Isa {
    const char* name;
    bool supported;
    const KernelTable& (*table)();
};

#if defined(__x86_64__)
// These two by number: only recent compilers know their names.
bool has_avx_vnni() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    constexpr unsigned kAvxVnni = 1u << 4;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a & kAvxVnni) != 0;
}

bool has_amx_int8() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    constexpr unsigned kTile = 1u << 24, kInt8 = 1u << 25;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d & kTile) != 0 && (d & kInt8) != 0;
}
#endif

// Best first.
std::vector<Isa> known_isas() {
#if defined(__x86_64__)
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                      __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi2");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                        __builtin_cpu_supports("avx512vnni");
    return {{"avx512_amx", avx512 && has_amx_int8() && request_amx(), avx512_amx_kernels},
            {"avx512", avx512, avx512_kernels},
            {"avx2_vnni", avx2 && has_avx_vnni(), avx2_vnni_kernels},
            {"avx2", avx2, avx2_kernels},
            {"portable", true, portable_kernels}};
#else
    return {{"portable", true, portable_kernels}};
#endif
}

}  // namespace

const KernelTable& choose_kernels(const std::string& name) {
    std::string names;
    for (const Isa& isa : known_isas()) {
        if (name.empty() ? isa.supported : name == isa.name) {
            if (isa.supported) return isa.table();
            throw ParameterError("SEGUE_ISA", name, "this CPU has not all of its instructions; leave it unset");
        }
        names += (names.empty() ? "" : ", ") + std::string(isa.name);
    }
    throw ParameterError("SEGUE_ISA", name, "unknown; known are " + names);
}

}  // namespace segue
