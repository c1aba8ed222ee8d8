#include "kernels/vec_portable.hpp"

#include "kernels/instantiate.hpp"

namespace segue {

const KernelTable& portable_kernels() {
    static constexpr KernelTable table = make_kernel_table();
    return table;
}

}  // namespace segue
