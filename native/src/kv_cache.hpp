// Paged memory for keys and values.
//
//   [layer][block][kv head]  K [head_dim][block_size] | V [block_size][v_stride]
//
// Layers may differ in their KV heads and head_dim. K is transposed inside a block, so that scores of consecutive keys
// are computed in lanes. v_stride is head_dim rounded up to 16; the rest of a row is zero.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "kernels/table.hpp"

namespace segue {

// What one layer keeps of a token.
struct KvLayer {
    int num_kv_heads;
    int head_dim;

    int v_stride() const { return round_up(head_dim, kPanel); }
    size_t elements_per_token() const {
        return static_cast<size_t>(num_kv_heads) * static_cast<size_t>(head_dim + v_stride());
    }
};

struct KvShape {
    std::vector<KvLayer> layers;
    bool f32 = false;  // else f16

    size_t element_bytes() const { return f32 ? sizeof(float) : sizeof(Half); }
    size_t bytes_per_token() const;
};

class KvCache {
   public:
    KvCache() = default;
    // Raises CapacityError when there is no memory for it.
    KvCache(KvShape shape, int64_t num_blocks, int64_t block_size);
    ~KvCache();
    KvCache(KvCache&& other) noexcept { swap(other); }
    KvCache& operator=(KvCache&& other) noexcept {
        swap(other);
        return *this;
    }

    int num_blocks() const { return num_blocks_; }
    int block_size() const { return block_size_; }
    const KvShape& shape() const { return shape_; }

    // The keys and values of one layer and KV head for a sequence with these blocks.
    KvView view(int layer, int kv_head, const int32_t* blocks) const;
    void* block(int layer, int kv_head, int32_t block) const;
    // Copies whole blocks of one layer, in order.
    void copy_blocks(int layer, std::span<const std::pair<int32_t, int32_t>> copies) const;

   private:
    // Where a layer lies.
    struct Place {
        size_t begin;  // from data_, bytes
        size_t block_bytes;
        size_t head_bytes;
    };

    const KvLayer& layer_of(int layer) const { return shape_.layers[static_cast<size_t>(layer)]; }
    const Place& place_of(int layer) const { return places_[static_cast<size_t>(layer)]; }
    void swap(KvCache& other) noexcept;

    KvShape shape_;
    std::vector<Place> places_;  // by layer
    int num_blocks_ = 0;
    int block_size_ = 1;
    uint8_t* data_ = nullptr;
    size_t mapped_bytes_ = 0;
};

}  // namespace segue
