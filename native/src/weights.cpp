#include "weights.hpp"

#include <algorithm>
#include <array>
#include <atomic>

#include "formats.hpp"

namespace segue {
namespace {

using formats::with_format;

// Block i of a stored row.
template <class Format>
typename Format::Stored load_block(const uint8_t* row, size_t i) {
    typename Format::Stored block;
    std::memcpy(&block, row + i * sizeof(block), sizeof(block));
    return block;
}

// Blocks of a stored row. Raises ModelFileError when its elements do not fill whole ones.
template <class Format>
size_t count_blocks(int64_t inputs) {
    if (inputs % Format::elements != 0) {
        throw ModelFileError("a quantised row of " + std::to_string(inputs) + " elements is no multiple of " +
                             std::to_string(Format::elements));
    }
    return static_cast<size_t>(inputs / Format::elements);
}

size_t panel_bytes(const Tensor& tensor) {
    return with_format(tensor.type, [&]<class Format>() {
        return count_blocks<Format>(tensor.columns) * sizeof(typename Format::Packed);
    });
}

// One row of a panel: a stored row, or none where the panel is padded.
struct SourceRow {
    const uint8_t* data;
    TensorType type;
};
using SourcePanel = std::array<SourceRow, kPanel>;

template <class Format>
void pack_row(const uint8_t* row, int inputs, int r, uint8_t* panel) {
    static_assert(sizeof(typename Format::Packed) == kPanel * sizeof(typename Format::Stored),
                  "no larger than the file");
    const size_t blocks = count_blocks<Format>(inputs);
    for (size_t i = 0; i < blocks; ++i) {
        const auto stored = row == nullptr ? typename Format::Stored{} : load_block<Format>(row, i);
        Format::pack(stored, r, reinterpret_cast<typename Format::Packed*>(panel)[i]);
    }
}

void pack_panel(const SourcePanel& rows, int inputs, uint8_t* panel) {
    for (int r = 0; r < kPanel; ++r) {
        const SourceRow& row = rows[static_cast<size_t>(r)];
        with_format(row.type, [&]<class Format>() { pack_row<Format>(row.data, inputs, r, panel); });
    }
}

}  // namespace

size_t row_bytes(TensorType type, int64_t inputs) {
    return with_format(type,
                       [&]<class Format>() { return count_blocks<Format>(inputs) * sizeof(typename Format::Stored); });
}

void dequantise_row(const Tensor& tensor, int64_t row, float* out) {
    const uint8_t* stored = tensor.row(row);
    with_format(tensor.type, [&]<class Format>() {
        const size_t blocks = count_blocks<Format>(tensor.columns);
        for (size_t i = 0; i < blocks; ++i) {
            Format::dequantise(load_block<Format>(stored, i), out + i * static_cast<size_t>(Format::elements));
        }
    });
}

PackedMatrix pack(const std::vector<Tensor>& stack, ThreadPool& pool) {
    PackedMatrix m;
    m.type = stack.front().type;
    m.inputs = static_cast<int>(stack.front().columns);
    int64_t outputs = 0;
    for (const Tensor& tensor : stack) outputs += tensor.rows;
    m.outputs = static_cast<int>(outputs);
    m.panel_bytes = panel_bytes(stack.front());
    m.data = Buffer<uint8_t>(m.panel_bytes * static_cast<size_t>(m.panels()));

    SourcePanel padding;
    padding.fill({nullptr, stack.front().type});
    std::vector<SourcePanel> panels(static_cast<size_t>(m.panels()), padding);
    size_t n = 0;
    for (const Tensor& tensor : stack) {
        for (int64_t row = 0; row < tensor.rows; ++row, ++n)
            panels[n / kPanel][n % kPanel] = {tensor.row(row), tensor.type};
    }
    std::atomic<size_t> next{0};
    pool.run([&](int) {
        constexpr size_t kClaim = 8;
        for (size_t begin; (begin = next.fetch_add(kClaim)) < panels.size();) {
            const size_t end = std::min(begin + kClaim, panels.size());
            for (size_t p = begin; p < end; ++p) pack_panel(panels[p], m.inputs, m.data.data() + p * m.panel_bytes);
        }
    });
    return m;
}

}  // namespace segue
