// A model: compiled, with its packed weights and its KV memory.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "execution.hpp"
#include "plan.hpp"
#include "program.hpp"

namespace segue {

// A step is read from Python (step_reader), laid out (step_layout), computed by all threads (worker, attend), and what
// is wanted of it drawn and scored (use_logits). Calls must not be concurrent.
class Model {
   public:
    // The memory of `tensors` must outlive the model.
    Model(const Program& program, std::map<std::string, Tensor> tensors, const KernelTable& kernels, int threads,
          bool kv_f32);

    void allocate_kv(int64_t num_blocks, int64_t block_size) {
        kv_ = KvCache();
        kv_ = KvCache(kv_shape_, num_blocks, block_size);
    }
    void release_kv() { kv_ = KvCache(); }
    StepOutput forward(const StepInput& input) { return execute(input, kv_, nullptr); }
    // out [tokens, vocab]: the logits at every position, computed with a KV of their own.
    void logits(const std::vector<int32_t>& tokens, float* out);

    int vocab_size() const { return vocab_size_; }
    int max_model_len() const { return max_model_len_; }
    const KvCache& kv() const { return kv_; }
    size_t kv_bytes_per_token() const { return kv_shape_.bytes_per_token(); }
    const char* isa() const { return kernels_.name; }
    int threads() const { return pool_->size(); }

   private:
    // With logits_out, the logits of every input go there instead of being sampled.
    StepOutput execute(const StepInput& input, const KvCache& kv, float* logits_out);

    int vocab_size_;
    int max_model_len_;
    const KernelTable& kernels_;
    std::shared_ptr<ThreadPool> pool_;
    Plan plan_;
    KvShape kv_shape_;
    KvCache kv_;
    std::vector<RopeTable> ropes_;  // as Plan::ropes
    Scratch scratch_;
};

}  // namespace segue
