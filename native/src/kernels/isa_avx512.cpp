#include "kernels/vec_avx512.hpp"

#include "kernels/instantiate.hpp"

namespace segue {

const KernelTable& avx512_kernels() {
    static constexpr KernelTable table = make_kernel_table();
    return table;
}

}  // namespace segue
