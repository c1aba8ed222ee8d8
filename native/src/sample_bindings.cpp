// The sampler as Python sees it: for tests against its twin, segue/sample/reference.py.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "sample.hpp"
#include "step_reader.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace segue {
namespace {

using Logits = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Logprobs = std::tuple<float, int32_t, std::vector<int32_t>, std::vector<float>>;

std::span<const float> view(const Logits& logits) { return {logits.data(), logits.size()}; }

int32_t sample_row_of(const Logits& logits, nb::handle sampling, int32_t position, nb::handle history) {
    if (logits.size() == 0) throw nb::value_error("logits: empty");
    const int vocab = static_cast<int>(logits.size());
    std::vector<float> scratch;
    return sample_row(view(logits), *read_sampling(sampling, vocab), position, read_ids(history, vocab, "history"),
                      scratch);
}

Logprobs row_logprobs_of(const Logits& logits, int32_t token, int32_t num_top) {
    if (token < 0 || static_cast<size_t>(token) >= logits.size()) throw nb::value_error("token: not in the vocabulary");
    if (num_top < 0) throw nb::value_error("num_top: negative");
    TokenLogprobs row = row_logprobs(view(logits), token, num_top);
    return {row.logprob, row.rank, std::move(row.top_ids), std::move(row.top_logprobs)};
}

}  // namespace

void bind_sampling(nb::module_& m) {
    m.def("sample_row", &sample_row_of, "logits"_a, "sampling"_a, "position"_a, "history"_a);
    m.def("row_logprobs", &row_logprobs_of, "logits"_a, "token"_a, "num_top"_a);
    m.def("all_finite", [](const Logits& logits) { return all_finite(view(logits)); }, "logits"_a);
    m.def("philox4x32", &philox4x32, "counter"_a, "key"_a);
}

}  // namespace segue
