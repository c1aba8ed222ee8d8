// Which instruction set the kernels use.
#pragma once

#include <string>

#include "kernels/table.hpp"

namespace segue {

// The best table this CPU can run, or the one named (SEGUE_ISA). Raises ParameterError for an unknown name and for
// instructions that the CPU lacks.
const KernelTable& choose_kernels(const std::string& name);

}  // namespace segue
