#include "model.hpp"

#include <algorithm>

#include "execution.hpp"
#include "step_layout.hpp"

namespace segue {

Model::Model(const Program& program, std::map<std::string, Tensor> tensors, const KernelTable& kernels, int threads,
             bool kv_f32)
    : vocab_size_(program.vocab_size),
      max_model_len_(program.max_model_len),
      kernels_(kernels),
      pool_(ThreadPool::shared(threads)),
      plan_(compile(program, std::move(tensors), *pool_)),
      kv_shape_{plan_.kv_layers, kv_f32},
      ropes_(plan_.ropes.begin(), plan_.ropes.end()),
      scratch_(plan_, vocab_size_, kernels_, threads) {}

StepOutput Model::execute(const StepInput& input, const KvCache& kv, float* logits_out) {
    const StepLayout layout = lay_out(input, plan_.shapes, pool_->size(), logits_out != nullptr);
    scratch_.reserve(plan_, layout);
    for (RopeTable& rope : ropes_) rope.extend(layout.end);
    Execution run(plan_, ropes_, kernels_, *pool_, scratch_, input, layout, kv, logits_out);
    if (layout.rows > 0 || !input.copies.empty()) {
        pool_->run([&](int thread) { work(run, thread); });
    }
    return std::move(run.output);
}

void Model::logits(const std::vector<int32_t>& tokens, float* out) {
    constexpr int kStepRows = 512;
    const int total = static_cast<int>(tokens.size());
    const KvCache kv(kv_shape_, 1, round_up(total, kPanel));
    for (int first = 0; first < total; first += kStepRows) {
        StepInput input;
        const int rows = std::min(kStepRows, total - first);
        input.tokens.assign(tokens.begin() + first, tokens.begin() + first + rows);
        input.blocks = {0};
        input.sequences.push_back({.index = 0,
                                   .start = first,
                                   .first_input = 0,
                                   .num_inputs = rows,
                                   .num_drafts = 0,
                                   .first_block = 0,
                                   .sampling = nullptr,
                                   .history = {},
                                   .masks = {}});
        execute(input, kv, out + static_cast<size_t>(first) * static_cast<size_t>(vocab_size_));
    }
}

}  // namespace segue
