#include "weights.hpp"

#include <array>
#include <atomic>

#include "half.hpp"

namespace segue {
namespace {

// Blocks of 32 elements as GGML stores them.
struct BlockQ4_0 {  // x = d · (q - 8); byte i holds elements i (low nibble) and i + 16
    Half d;
    uint8_t q[16];
};
struct BlockQ4_1 {  // x = d · q + m
    Half d;
    Half m;
    uint8_t q[16];
};
struct BlockQ8_0 {  // x = d · q
    Half d;
    int8_t q[32];
};
static_assert(sizeof(BlockQ4_0) == 18 && sizeof(BlockQ4_1) == 20 && sizeof(BlockQ8_0) == 34);

template <class T>
T load(const uint8_t* p) {
    T value;
    std::memcpy(&value, p, sizeof(value));
    return value;
}

// One row of a panel: a stored row, or none where the panel is padded.
struct SourceRow {
    const uint8_t* data = nullptr;
    TensorType type = TensorType::kF32;
};
using SourcePanel = std::array<SourceRow, kPanel>;

// A group's nibbles [4 vectors][16 outputs][4] for output r, from GGML's order.
void pack_nibbles(const uint8_t* q, int r, uint8_t* block) {
    constexpr uint32_t kLow = 0x0f0f0f0fu;
    for (int half = 0; half < 2; ++half) {  // elements 8·half + [0, 8) and, in the high nibbles, 16 more
        const uint32_t a = load<uint32_t>(q + 8 * half);
        const uint32_t b = load<uint32_t>(q + 8 * half + 4);
        const uint32_t first = (a & kLow) | ((b & kLow) << 4);
        const uint32_t second = ((a >> 4) & kLow) | (b & ~kLow);
        std::memcpy(block + 64 * half + 4 * r, &first, 4);
        std::memcpy(block + 64 * (2 + half) + 4 * r, &second, 4);
    }
}

void pack_u4_row(const SourceRow& row, int group, int r, uint8_t* block) {
    Half scale{0};
    Half minimum{0};
    if (row.data == nullptr) {
        const uint8_t none[16] = {};
        pack_nibbles(none, r, block);
    } else if (row.type == TensorType::kQ4_0) {
        const auto stored = load<BlockQ4_0>(row.data + static_cast<size_t>(group) * sizeof(BlockQ4_0));
        scale = stored.d;
        minimum = to_half(-8.0f * to_float(stored.d));  // a power of two: exact
        pack_nibbles(stored.q, r, block);
    } else {
        const auto stored = load<BlockQ4_1>(row.data + static_cast<size_t>(group) * sizeof(BlockQ4_1));
        scale = stored.d;
        minimum = stored.m;
        pack_nibbles(stored.q, r, block);
    }
    std::memcpy(block + 256 + 2 * r, &scale, 2);
    std::memcpy(block + 256 + 2 * (kPanel + r), &minimum, 2);
}

void pack_i8_row(const SourceRow& row, int group, int r, uint8_t* block) {
    BlockQ8_0 stored = {};
    if (row.data != nullptr) stored = load<BlockQ8_0>(row.data + static_cast<size_t>(group) * sizeof(BlockQ8_0));
    for (int s = 0; s < 8; ++s) {
        const uint32_t biased = load<uint32_t>(reinterpret_cast<const uint8_t*>(stored.q) + 4 * s) ^ 0x80808080u;
        std::memcpy(block + 64 * s + 4 * r, &biased, 4);
    }
    std::memcpy(block + 512 + 2 * r, &stored.d, 2);
}

void pack_float_row(const SourceRow& row, int inputs, size_t element, int r, uint8_t* panel) {
    for (size_t k = 0; k < static_cast<size_t>(inputs); ++k) {
        uint8_t* to = panel + (k * kPanel + static_cast<size_t>(r)) * element;
        if (row.data == nullptr) {
            std::memset(to, 0, element);
        } else {
            std::memcpy(to, row.data + k * element, element);
        }
    }
}

size_t panel_bytes(WeightFormat format, int inputs) {
    const size_t k = static_cast<size_t>(inputs);
    switch (format) {
        case WeightFormat::kU4:
            return k / kGroup * kU4BlockBytes;
        case WeightFormat::kI8:
            return k / kGroup * kI8BlockBytes;
        case WeightFormat::kF32:
            return k * kPanel * 4;
        case WeightFormat::kF16:
        case WeightFormat::kBF16:
            return k * kPanel * 2;
    }
    __builtin_unreachable();
}

void pack_panel(const SourcePanel& rows, const PackedMatrix& m, uint8_t* panel) {
    for (int r = 0; r < kPanel; ++r) {
        const SourceRow& row = rows[static_cast<size_t>(r)];
        switch (m.format) {
            case WeightFormat::kU4:
                for (int g = 0; g < m.inputs / kGroup; ++g) {
                    pack_u4_row(row, g, r, panel + static_cast<size_t>(g) * kU4BlockBytes);
                }
                break;
            case WeightFormat::kI8:
                for (int g = 0; g < m.inputs / kGroup; ++g) {
                    pack_i8_row(row, g, r, panel + static_cast<size_t>(g) * kI8BlockBytes);
                }
                break;
            case WeightFormat::kF32:
                pack_float_row(row, m.inputs, 4, r, panel);
                break;
            case WeightFormat::kF16:
            case WeightFormat::kBF16:
                pack_float_row(row, m.inputs, 2, r, panel);
                break;
        }
    }
}

}  // namespace

size_t row_bytes(TensorType type, int64_t inputs) {
    const auto blocks = [&](size_t bytes) -> size_t {
        if (inputs % kGroup != 0) {
            throw ModelFileError("a quantised row of " + std::to_string(inputs) + " elements is no multiple of 32");
        }
        return static_cast<size_t>(inputs / kGroup) * bytes;
    };
    switch (type) {
        case TensorType::kF32:
            return static_cast<size_t>(inputs) * 4;
        case TensorType::kF16:
        case TensorType::kBF16:
            return static_cast<size_t>(inputs) * 2;
        case TensorType::kQ4_0:
            return blocks(sizeof(BlockQ4_0));
        case TensorType::kQ4_1:
            return blocks(sizeof(BlockQ4_1));
        case TensorType::kQ8_0:
            return blocks(sizeof(BlockQ8_0));
    }
    throw ModelFileError("tensor type " + std::to_string(static_cast<int>(type)) + " is not supported");
}

WeightFormat format_of(TensorType type) {
    switch (type) {
        case TensorType::kF32:
            return WeightFormat::kF32;
        case TensorType::kF16:
            return WeightFormat::kF16;
        case TensorType::kBF16:
            return WeightFormat::kBF16;
        case TensorType::kQ4_0:
        case TensorType::kQ4_1:
            return WeightFormat::kU4;
        case TensorType::kQ8_0:
            return WeightFormat::kI8;
    }
    throw ModelFileError("tensor type " + std::to_string(static_cast<int>(type)) + " is not supported");
}

void dequantise_row(const Tensor& tensor, int64_t row, float* out) {
    const uint8_t* p = tensor.row(row);
    const size_t n = static_cast<size_t>(tensor.columns);
    switch (tensor.type) {
        case TensorType::kF32:
            std::memcpy(out, p, n * sizeof(float));
            return;
        case TensorType::kF16:
            for (size_t k = 0; k < n; ++k) out[k] = to_float(load<Half>(p + 2 * k));
            return;
        case TensorType::kBF16:
            for (size_t k = 0; k < n; ++k) out[k] = to_float(load<BFloat16>(p + 2 * k));
            return;
        case TensorType::kQ4_0:
            for (size_t k = 0; k < n; k += kGroup, p += sizeof(BlockQ4_0)) {
                const auto block = load<BlockQ4_0>(p);
                const float d = to_float(block.d);
                for (size_t i = 0; i < 16; ++i) {
                    out[k + i] = d * static_cast<float>((block.q[i] & 15) - 8);
                    out[k + i + 16] = d * static_cast<float>((block.q[i] >> 4) - 8);
                }
            }
            return;
        case TensorType::kQ4_1:
            for (size_t k = 0; k < n; k += kGroup, p += sizeof(BlockQ4_1)) {
                const auto block = load<BlockQ4_1>(p);
                const float d = to_float(block.d);
                const float m = to_float(block.m);
                for (size_t i = 0; i < 16; ++i) {
                    out[k + i] = d * static_cast<float>(block.q[i] & 15) + m;
                    out[k + i + 16] = d * static_cast<float>(block.q[i] >> 4) + m;
                }
            }
            return;
        case TensorType::kQ8_0:
            for (size_t k = 0; k < n; k += kGroup, p += sizeof(BlockQ8_0)) {
                const auto block = load<BlockQ8_0>(p);
                const float d = to_float(block.d);
                for (size_t i = 0; i < kGroup; ++i) out[k + i] = d * static_cast<float>(block.q[i]);
            }
            return;
    }
}

PackedMatrix pack(const std::vector<Tensor>& stack, ThreadPool& pool) {
    PackedMatrix m;
    m.format = format_of(stack.front().type);
    m.inputs = static_cast<int>(stack.front().columns);
    int64_t outputs = 0;
    for (const Tensor& tensor : stack) outputs += tensor.rows;
    m.outputs = static_cast<int>(outputs);
    m.panel_bytes = panel_bytes(m.format, m.inputs);
    m.data = Buffer<uint8_t>(m.panel_bytes * static_cast<size_t>(m.panels()));

    std::vector<SourcePanel> panels(static_cast<size_t>(m.panels()));
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
            for (size_t p = begin; p < end; ++p) pack_panel(panels[p], m, m.data.data() + p * m.panel_bytes);
        }
    });
    return m;
}

}  // namespace segue
