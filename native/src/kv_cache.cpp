#include "kv_cache.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <limits>
#include <string>

#include "common.hpp"

namespace segue {
namespace {

// Memory this process may use: the machine's, or its control group's limit where that is less.
double memory_limit_bytes() {
    double limit = static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGE_SIZE));
    double group = 0;
    std::ifstream v2("/sys/fs/cgroup/memory.max");
    std::ifstream v1("/sys/fs/cgroup/memory/memory.limit_in_bytes");
    if ((v2 >> group || v1 >> group) && group > 0) limit = std::min(limit, group);
    return limit;
}

[[noreturn]] void refuse(int64_t num_blocks, int64_t block_size, double bytes) {
    char size[32];
    std::snprintf(size, sizeof(size), "%.1f GiB", bytes / (1024.0 * 1024.0 * 1024.0));
    throw CapacityError("no memory for " + std::to_string(num_blocks) + " KV blocks of " + std::to_string(block_size) +
                        " tokens (" + size + "): lower num_kv_blocks");
}

}  // namespace

size_t KvShape::bytes_per_token() const {
    size_t elements = 0;
    for (const KvLayer& layer : layers) elements += layer.elements_per_token();
    return elements * element_bytes();
}

KvCache::KvCache(KvShape shape, int64_t num_blocks, int64_t block_size) : shape_(std::move(shape)) {
    const double bytes = static_cast<double>(num_blocks) * static_cast<double>(block_size) *
                         static_cast<double>(shape_.bytes_per_token());
    constexpr int64_t kMost = std::numeric_limits<int>::max();
    if (bytes > memory_limit_bytes() || num_blocks > kMost || block_size > kMost) refuse(num_blocks, block_size, bytes);
    num_blocks_ = static_cast<int>(num_blocks);
    block_size_ = static_cast<int>(block_size);
    for (const KvLayer& layer : shape_.layers) {
        const size_t block_bytes =
            layer.elements_per_token() * static_cast<size_t>(block_size) * shape_.element_bytes();
        places_.push_back({mapped_bytes_, block_bytes, block_bytes / static_cast<size_t>(layer.num_kv_heads)});
        mapped_bytes_ += block_bytes * static_cast<size_t>(num_blocks);
    }
    if (mapped_bytes_ == 0) return;
    // Mapped, so that pages cost memory only once they are written, and are zero before.
    void* p = mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) {
        mapped_bytes_ = 0;
        refuse(num_blocks, block_size, bytes);
    }
    data_ = static_cast<uint8_t*>(p);
}

KvCache::~KvCache() {
    if (data_ != nullptr) munmap(data_, mapped_bytes_);
}

void KvCache::swap(KvCache& other) noexcept {
    std::swap(shape_, other.shape_);
    places_.swap(other.places_);
    std::swap(num_blocks_, other.num_blocks_);
    std::swap(block_size_, other.block_size_);
    std::swap(data_, other.data_);
    std::swap(mapped_bytes_, other.mapped_bytes_);
}

void* KvCache::block(int layer, int kv_head, int32_t block) const {
    const Place& place = place_of(layer);
    return data_ + place.begin + place.block_bytes * static_cast<size_t>(block) +
           place.head_bytes * static_cast<size_t>(kv_head);
}

KvView KvCache::view(int layer, int kv_head, const int32_t* blocks) const {
    const KvLayer& shape = layer_of(layer);
    return {
        .base = block(layer, kv_head, 0),
        .block_stride = place_of(layer).block_bytes / shape_.element_bytes(),
        .v_offset = static_cast<size_t>(shape.head_dim) * static_cast<size_t>(block_size_),
        .blocks = blocks,
        .block_size = block_size_,
        .head_dim = shape.head_dim,
        .v_stride = shape.v_stride(),
    };
}

void KvCache::copy_blocks(int layer, std::span<const std::pair<int32_t, int32_t>> copies) const {
    for (const auto& [source, destination] : copies) {
        std::memmove(block(layer, 0, destination), block(layer, 0, source), place_of(layer).block_bytes);
    }
}

}  // namespace segue
