#include "isa.hpp"

#include <vector>

#include "common.hpp"

namespace segue {
namespace {

struct Isa {
    const char* name;
    bool supported;
    const KernelTable& (*table)();
};

// Best first.
std::vector<Isa> known_isas() {
#if defined(__x86_64__)
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                      __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi2");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                        __builtin_cpu_supports("avx512vnni");
    return {{"avx512", avx512, avx512_kernels}, {"avx2", avx2, avx2_kernels}, {"portable", true, portable_kernels}};
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
