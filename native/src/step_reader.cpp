#include "step_reader.hpp"

#include <nanobind/stl/pair.h>

#include <algorithm>
#include <string>

namespace nb = nanobind;

namespace segue {
namespace {

constexpr size_t kMaxSpecs = 4096;

[[noreturn]] void refuse(const std::string& why) { throw nb::value_error(why.c_str()); }

// An attribute of SeqStep or Sampling, interned once.
struct Name {
    explicit Name(const char* name) : interned(PyUnicode_InternFromString(name)) {}
    PyObject* interned;  // lives as long as the module
};

nb::object get(nb::handle object, const Name& name) {
    PyObject* value = PyObject_GetAttr(object.ptr(), name.interned);
    if (value == nullptr) throw nb::python_error();
    return nb::steal(value);
}

int to_int(nb::handle value) {
    int overflow = 0;
    const long number = PyLong_AsLongAndOverflow(value.ptr(), &overflow);
    if (number == -1 && PyErr_Occurred() != nullptr) throw nb::python_error();
    if (overflow != 0 || number != static_cast<int>(number)) refuse("a number does not fit 32 bits");
    return static_cast<int>(number);
}

int get_int(nb::handle object, const Name& name) { return to_int(get(object, name)); }

float get_float(nb::handle object, const Name& name) {
    const double value = PyFloat_AsDouble(get(object, name).ptr());
    if (value == -1.0 && PyErr_Occurred() != nullptr) throw nb::python_error();
    return static_cast<float>(value);
}

// Calls visit(item) for every item of a list, tuple or any other sequence; returns how many there are.
template <class Visit>
size_t for_each(nb::handle sequence, const Visit& visit) {
    const nb::object fast = nb::steal(PySequence_Fast(sequence.ptr(), "expected a sequence"));
    if (!fast.is_valid()) throw nb::python_error();
    const Py_ssize_t size = PySequence_Fast_GET_SIZE(fast.ptr());
    PyObject** items = PySequence_Fast_ITEMS(fast.ptr());
    for (Py_ssize_t i = 0; i < size; ++i) visit(nb::handle(items[i]));
    return static_cast<size_t>(size);
}

// Appends ids in [0, limit); returns how many.
int append_ids(nb::handle sequence, int limit, const char* what, std::vector<int32_t>& to) {
    return static_cast<int>(for_each(sequence, [&](nb::handle item) {
        const int id = to_int(item);
        if (id < 0 || id >= limit)
            refuse(std::string(what) + ": " + std::to_string(id) + " is not in [0, " + std::to_string(limit) + ")");
        to.push_back(id);
    }));
}

// The first `size` ids of an array('i').
std::vector<int32_t> read_history(nb::handle history, int size, int vocab_size) {
    Py_buffer buffer;
    if (PyObject_GetBuffer(history.ptr(), &buffer, PyBUF_CONTIG_RO) != 0) throw nb::python_error();
    std::vector<int32_t> ids;
    const bool fits =
        buffer.itemsize == sizeof(int32_t) && buffer.len >= static_cast<Py_ssize_t>(size) * buffer.itemsize;
    if (fits) {
        const auto* first = static_cast<const int32_t*>(buffer.buf);
        ids.assign(first, first + size);
    }
    PyBuffer_Release(&buffer);
    if (!fits) refuse("history: fewer ids than positions");
    const auto known = [&](int32_t id) { return 0 <= id && id < vocab_size; };
    if (!std::all_of(ids.begin(), ids.end(), known)) refuse("history: an id is not in the vocabulary");
    return ids;
}

struct SeqNames {
    Name start{"start"}, tokens{"tokens"}, blocks{"blocks"}, drafts{"drafts"}, after{"after"}, sampling{"sampling"};
    Name history{"history"}, prompt_targets{"prompt_targets"}, num_prompt_logprobs{"num_prompt_logprobs"};
    Name masks{"masks"};
};

struct SamplingNames {
    Name temperature{"temperature"}, top_k{"top_k"}, top_p{"top_p"}, min_p{"min_p"};
    Name repetition_penalty{"repetition_penalty"}, presence_penalty{"presence_penalty"};
    Name frequency_penalty{"frequency_penalty"}, output_start{"output_start"}, logit_bias{"logit_bias"};
    Name banned{"banned"}, banned_until{"banned_until"}, seed{"seed"}, num_logprobs{"num_logprobs"};
};

const SeqNames& seq_names() {
    static const SeqNames names;
    return names;
}

SamplingSpec read_sampling(nb::handle sampling, int vocab_size) {
    static const SamplingNames names;
    SamplingSpec spec;
    spec.temperature = get_float(sampling, names.temperature);
    spec.top_k = get_int(sampling, names.top_k);
    spec.top_p = get_float(sampling, names.top_p);
    spec.min_p = get_float(sampling, names.min_p);
    spec.repetition_penalty = get_float(sampling, names.repetition_penalty);
    spec.presence_penalty = get_float(sampling, names.presence_penalty);
    spec.frequency_penalty = get_float(sampling, names.frequency_penalty);
    spec.output_start = get_int(sampling, names.output_start);
    for_each(get(sampling, names.logit_bias), [&](nb::handle item) {
        const auto [id, bias] = nb::cast<std::pair<int32_t, float>>(item);
        if (id < 0 || id >= vocab_size) refuse("logit_bias: an id is not in the vocabulary");
        spec.logit_bias.emplace_back(id, bias);
    });
    append_ids(get(sampling, names.banned), vocab_size, "banned", spec.banned);
    spec.banned_until = get_int(sampling, names.banned_until);
    spec.seed = nb::cast<uint64_t>(get(sampling, names.seed));
    const nb::object num_logprobs = get(sampling, names.num_logprobs);
    spec.num_logprobs = num_logprobs.is_none() ? -1 : std::min(to_int(num_logprobs), vocab_size);
    return spec;
}

bool needs_history(const SamplingSpec& spec) {
    return spec.repetition_penalty != 1.0f || spec.presence_penalty != 0.0f || spec.frequency_penalty != 0.0f;
}

std::vector<std::vector<uint8_t>> read_masks(nb::handle rows, int num_rows, int vocab_size) {
    std::vector<std::vector<uint8_t>> masks;
    for_each(rows, [&](nb::handle row) {
        std::vector<uint8_t>& mask = masks.emplace_back();
        if (row.is_none()) return;
        const nb::bytes bytes = nb::cast<nb::bytes>(row);
        if (bytes.size() * 8 < static_cast<size_t>(vocab_size)) refuse("masks: too few bits for the vocabulary");
        const auto* begin = static_cast<const uint8_t*>(bytes.data());
        mask.assign(begin, begin + bytes.size());
    });
    if (!masks.empty() && masks.size() != static_cast<size_t>(num_rows)) refuse("masks: one for each sampled row");
    return masks;
}

nb::tuple to_python(const TokenLogprobs& row) {
    nb::list ids;
    nb::list logprobs;
    for (const int32_t id : row.top_ids) ids.append(id);
    for (const float logprob : row.top_logprobs) logprobs.append(logprob);
    return nb::make_tuple(row.logprob, row.rank, nb::tuple(ids), nb::tuple(logprobs));
}

}  // namespace

std::vector<int32_t> read_ids(nb::handle sequence, int limit, const char* what) {
    std::vector<int32_t> ids;
    append_ids(sequence, limit, what, ids);
    return ids;
}

std::shared_ptr<const SamplingSpec> StepReader::spec_of(nb::handle sampling, int vocab_size) {
    const auto found = specs_.find(sampling.ptr());
    if (found != specs_.end()) return found->second.spec;
    if (specs_.size() >= kMaxSpecs) specs_.clear();
    auto spec = std::make_shared<const SamplingSpec>(read_sampling(sampling, vocab_size));
    specs_.emplace(sampling.ptr(), Spec{nb::borrow(sampling), spec});
    return spec;
}

void StepReader::read_sequence(nb::handle seq, const Model& model, StepInput& input) {
    const SeqNames& names = seq_names();
    const int vocab_size = model.sizes().vocab_size;
    if (!get(seq, names.after).is_none()) refuse("after: a reference must be resolved before it is executed");
    SequenceInput s;
    s.start = get_int(seq, names.start);
    s.first_input = static_cast<int>(input.tokens.size());
    s.first_block = static_cast<int>(input.blocks.size());
    const int num_tokens = append_ids(get(seq, names.tokens), vocab_size, "tokens", input.tokens);
    s.num_drafts = append_ids(get(seq, names.drafts), vocab_size, "drafts", input.tokens);
    s.num_inputs = num_tokens + s.num_drafts;
    if (num_tokens < 1 || s.start < 0) refuse("a sequence needs at least one token, at a position of 0 or more");
    if (s.start > model.sizes().max_model_len - s.num_inputs) refuse("a sequence is longer than max_model_len");
    const int64_t slots = static_cast<int64_t>(model.kv().block_size()) *
                          append_ids(get(seq, names.blocks), model.kv().num_blocks(), "blocks", input.blocks);
    if (slots < s.start + s.num_inputs) refuse("blocks: too few for the sequence's positions");

    s.first_target = static_cast<int>(input.targets.size());
    s.num_targets = append_ids(get(seq, names.prompt_targets), vocab_size, "prompt_targets", input.targets);
    if (s.num_targets > s.num_inputs) refuse("prompt_targets: more than inputs");
    s.num_prompt_logprobs = std::clamp(get_int(seq, names.num_prompt_logprobs), 0, vocab_size);

    const nb::object sampling = get(seq, names.sampling);
    if (!sampling.is_none()) {
        s.sampling = spec_of(sampling, vocab_size);
        if (needs_history(*s.sampling)) {
            s.history = read_history(get(seq, names.history), s.start + num_tokens, vocab_size);
            const auto drafts = input.tokens.end() - s.num_drafts;
            s.history.insert(s.history.end(), drafts, input.tokens.end());
        }
        s.masks = read_masks(get(seq, names.masks), 1 + s.num_drafts, vocab_size);
    }
    input.sequences.push_back(std::move(s));
}

StepInput StepReader::read(nb::handle seqs, nb::handle copies, const Model& model) {
    StepInput input;
    for_each(seqs, [&](nb::handle seq) { read_sequence(seq, model, input); });
    for_each(copies, [&](nb::handle item) {
        std::vector<int32_t> pair = read_ids(item, model.kv().num_blocks(), "copies");
        if (pair.size() != 2) refuse("copies: expected pairs of blocks");
        input.copies.emplace_back(pair[0], pair[1]);
    });
    return input;
}

nb::tuple write_output(const StepInput& input, const StepOutput& output) {
    nb::list tokens;
    nb::dict logprobs;
    for (size_t row = 0; row < output.tokens.size(); ++row) {
        tokens.append(output.tokens[row]);
        if (output.logprobs[row] != nullptr) logprobs[nb::int_(row)] = to_python(*output.logprobs[row]);
    }
    nb::dict prompt_logprobs;
    nb::set not_finite;
    for (size_t s = 0; s < input.sequences.size(); ++s) {
        const SequenceInput& seq = input.sequences[s];
        if (output.not_finite[s] != 0) not_finite.add(nb::int_(s));
        if (seq.num_targets == 0) continue;
        nb::list targets;
        for (int i = 0; i < seq.num_targets; ++i) {
            targets.append(to_python(output.prompt_logprobs[static_cast<size_t>(seq.first_target + i)]));
        }
        prompt_logprobs[nb::int_(s)] = targets;
    }
    return nb::make_tuple(tokens, logprobs, prompt_logprobs, not_finite);
}

}  // namespace segue
