#include "kernels/vec_avx2.hpp"

#include "kernels/instantiate.hpp"

namespace segue {

const KernelTable& avx2_vnni_kernels() {
    static constexpr KernelTable table = make_kernel_table();
    return table;
}

}  // namespace segue
