// The sampler as Python sees it: for tests against its twin, segue/sample/reference.py.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "sample.hpp"

namespace nb = nanobind;

namespace segue {
namespace {

using Logits = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ids = std::vector<int32_t>;
using Logprobs = std::tuple<float, int32_t, std::vector<int32_t>, std::vector<float>>;

std::span<const float> view(const Logits& logits) { return {logits.data(), logits.size()}; }

void check_ids(const std::vector<int32_t>& ids, const Logits& logits, const char* what) {
    const auto is_id = [&](int32_t id) { return 0 <= id && static_cast<size_t>(id) < logits.size(); };
    if (!std::all_of(ids.begin(), ids.end(), is_id)) throw nb::value_error(what);
}

int32_t sample_row_of(const Logits& logits, const SamplingSpec& spec, int32_t position, const Ids& history) {
    Ids biased;
    for (const auto& [id, bias] : spec.logit_bias) biased.push_back(id);
    check_ids(biased, logits, "logit_bias: an id is not in the vocabulary");
    check_ids(history, logits, "history: an id is not in the vocabulary");
    if (logits.size() == 0) throw nb::value_error("logits: empty");
    std::vector<float> scratch;
    return sample_row(view(logits), spec, position, history, scratch);
}

Logprobs row_logprobs_of(const Logits& logits, int32_t token, int32_t num_top) {
    check_ids({token}, logits, "token: not in the vocabulary");
    if (num_top < 0) throw nb::value_error("num_top: negative");
    TokenLogprobs row = row_logprobs(view(logits), token, num_top);
    return {row.logprob, row.rank, std::move(row.top_ids), std::move(row.top_logprobs)};
}

}  // namespace

void bind_sampling(nb::module_& m) {
    nb::class_<SamplingSpec>(m, "SamplingSpec")
        .def(
            "__init__",
            [](SamplingSpec* self, float temperature, int32_t top_k, float top_p, float min_p, float repetition_penalty,
               float presence_penalty, float frequency_penalty, int32_t output_start,
               std::vector<std::pair<int32_t, float>> logit_bias, Ids banned, int32_t banned_until, uint64_t seed,
               int32_t num_logprobs) {
                new (self) SamplingSpec{temperature,
                                        top_k,
                                        top_p,
                                        min_p,
                                        repetition_penalty,
                                        presence_penalty,
                                        frequency_penalty,
                                        output_start,
                                        std::move(logit_bias),
                                        std::move(banned),
                                        banned_until,
                                        seed,
                                        num_logprobs};
            },
            nb::kw_only(), nb::arg("temperature") = 0.0f, nb::arg("top_k") = 0, nb::arg("top_p") = 1.0f,
            nb::arg("min_p") = 0.0f, nb::arg("repetition_penalty") = 1.0f, nb::arg("presence_penalty") = 0.0f,
            nb::arg("frequency_penalty") = 0.0f, nb::arg("output_start") = 0,
            nb::arg("logit_bias") = std::vector<std::pair<int32_t, float>>{}, nb::arg("banned") = Ids{},
            nb::arg("banned_until") = 0, nb::arg("seed") = 0, nb::arg("num_logprobs") = -1);
    m.def("sample_row", &sample_row_of, nb::arg("logits"), nb::arg("spec"), nb::arg("position"),
          nb::arg("history") = Ids{});
    m.def("row_logprobs", &row_logprobs_of, nb::arg("logits"), nb::arg("token"), nb::arg("num_top"));
    m.def("all_finite", [](const Logits& logits) { return all_finite(view(logits)); }, nb::arg("logits"));
    m.def("philox4x32", &philox4x32, nb::arg("counter"), nb::arg("key"));
}

}  // namespace segue
