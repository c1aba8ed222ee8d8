#include "step_reader.hpp"

#include <algorithm>
#include <string>

#include "from_python.hpp"

namespace nb = nanobind;

namespace segue {
namespace {

// Refusals use the words of segue/runtime/refusal.py.
int get_int(nb::handle object, const Name& name) { return to_int(get(object, name), name.text); }

float to_float(nb::handle value, const char* what) { return static_cast<float>(to_double(value, what)); }

float get_float(nb::handle object, const Name& name) { return to_float(get(object, name), name.text); }

uint64_t get_uint64(nb::handle object, const Name& name) {
    const uint64_t number = PyLong_AsUnsignedLongLong(get(object, name).ptr());
    if (number == UINT64_MAX && PyErr_Occurred() != nullptr) refuse_pending(name.text, "expected an unsigned integer");
    return number;
}

int to_id(nb::handle item, int limit, const char* what) {
    const int id = to_int(item, what);
    if (id < 0 || id >= limit) {
        throw Refusal(what, std::to_string(id) + " is not in [0, " + std::to_string(limit) + ")");
    }
    return id;
}

// Appends ids in [0, limit); returns how many.
int append_ids(nb::handle sequence, int limit, const char* what, std::vector<int32_t>& to) {
    return static_cast<int>(for_each(sequence, what, [&](nb::handle item) { to.push_back(to_id(item, limit, what)); }));
}

int append_ids(nb::handle object, const Name& name, int limit, std::vector<int32_t>& to) {
    return append_ids(get(object, name), limit, name.text, to);
}

// The first `size` ids of an array('i').
std::vector<int32_t> read_history(nb::handle history, const char* what, int size, int vocab_size) {
    Py_buffer buffer;
    if (PyObject_GetBuffer(history.ptr(), &buffer, PyBUF_CONTIG_RO) != 0) {
        refuse_pending(what, "expected an array of 32-bit integers");
    }
    std::vector<int32_t> ids;
    const bool is_int32 = buffer.itemsize == sizeof(int32_t);
    const bool is_long_enough = buffer.len >= static_cast<Py_ssize_t>(size) * buffer.itemsize;
    if (is_int32 && is_long_enough) {
        const auto* first = static_cast<const int32_t*>(buffer.buf);
        ids.assign(first, first + size);
    }
    PyBuffer_Release(&buffer);
    if (!is_int32) throw Refusal(what, "expected an array of 32-bit integers");
    if (!is_long_enough) throw Refusal(what, "fewer ids than positions");
    const auto known = [&](int32_t id) { return 0 <= id && id < vocab_size; };
    if (!std::all_of(ids.begin(), ids.end(), known)) throw Refusal(what, "an id is not in the vocabulary");
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

std::pair<int32_t, float> read_bias(nb::handle item, int vocab_size, const char* what) {
    PyObject* const* pair =
        PyTuple_Check(item.ptr()) && PyTuple_GET_SIZE(item.ptr()) == 2 ? PySequence_Fast_ITEMS(item.ptr()) : nullptr;
    if (pair == nullptr) throw Refusal(what, "expected pairs of an id and a number");
    return {to_id(pair[0], vocab_size, what), to_float(pair[1], what)};
}

SamplingSpec new_spec(nb::handle sampling, int vocab_size) {
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
    const char* const bias = names.logit_bias.text;
    for_each(get(sampling, names.logit_bias), bias,
             [&](nb::handle item) { spec.logit_bias.push_back(read_bias(item, vocab_size, bias)); });
    append_ids(sampling, names.banned, vocab_size, spec.banned);
    spec.banned_until = get_int(sampling, names.banned_until);
    spec.seed = get_uint64(sampling, names.seed);
    const nb::object num_logprobs = get(sampling, names.num_logprobs);
    if (!num_logprobs.is_none()) {
        spec.num_logprobs = std::min(to_int(num_logprobs, names.num_logprobs.text), vocab_size);
        if (spec.num_logprobs < 0) throw Refusal(names.num_logprobs.text, "must be 0 or more");
    }
    return spec;
}

// What Sampling's __dict__ keeps: it is frozen and lives as long as its request, and so does this.
struct CachedSpec {
    static constexpr const char* kName = "segue.SamplingSpec";
    int vocab_size;  // that its ids were checked for
    std::shared_ptr<const SamplingSpec> spec;
};

bool needs_history(const SamplingSpec& spec) {
    return spec.repetition_penalty != 1.0f || spec.presence_penalty != 0.0f || spec.frequency_penalty != 0.0f;
}

std::vector<std::vector<uint8_t>> read_masks(nb::handle rows, const char* what, int num_rows, int vocab_size) {
    std::vector<std::vector<uint8_t>> masks;
    for_each(rows, what, [&](nb::handle row) {
        std::vector<uint8_t>& mask = masks.emplace_back();
        if (row.is_none()) return;
        if (!PyBytes_Check(row.ptr())) throw Refusal(what, "expected bytes");
        const auto* begin = reinterpret_cast<const uint8_t*>(PyBytes_AS_STRING(row.ptr()));
        mask.assign(begin, begin + PyBytes_GET_SIZE(row.ptr()));
        if (mask.size() * 8 < static_cast<size_t>(vocab_size)) throw Refusal(what, "too few bits for the vocabulary");
    });
    if (!masks.empty() && masks.size() != static_cast<size_t>(num_rows)) {
        throw Refusal(what, std::to_string(masks.size()) + " for " + std::to_string(num_rows) + " sampled rows");
    }
    return masks;
}

void read_sequence(nb::handle seq, int index, const Model& model, StepInput& input) {
    static const SeqNames names;
    const int vocab_size = model.vocab_size();
    if (!get(seq, names.after).is_none()) throw Refusal("after", "must be resolved before it is executed");
    SequenceInput s;
    s.index = index;
    s.start = get_int(seq, names.start);
    s.first_input = static_cast<int>(input.tokens.size());
    s.first_block = static_cast<int>(input.blocks.size());
    s.first_target = static_cast<int>(input.targets.size());
    const int num_tokens = append_ids(seq, names.tokens, vocab_size, input.tokens);
    s.num_drafts = append_ids(seq, names.drafts, vocab_size, input.tokens);
    s.num_inputs = num_tokens + s.num_drafts;
    if (num_tokens == 0) throw Refusal("tokens", "none");
    if (s.start < 0) throw Refusal("start", "must be 0 or more");
    if (s.start > model.max_model_len() - s.num_inputs) {
        throw Refusal("start", "the sequence is longer than " + std::to_string(model.max_model_len()) +
                                   " tokens, the most that the model can be given");
    }
    const int64_t slots = static_cast<int64_t>(model.kv().block_size()) *
                          append_ids(seq, names.blocks, model.kv().num_blocks(), input.blocks);
    if (slots < s.start + s.num_inputs) throw Refusal("blocks", "too few for the sequence's positions");
    s.num_targets = append_ids(seq, names.prompt_targets, vocab_size, input.targets);
    if (s.num_targets > s.num_inputs) throw Refusal("prompt_targets", "more than inputs");
    s.num_prompt_logprobs = std::min(get_int(seq, names.num_prompt_logprobs), vocab_size);
    if (s.num_prompt_logprobs < 0) throw Refusal("num_prompt_logprobs", "must be 0 or more");

    const nb::object sampling = get(seq, names.sampling);
    if (!sampling.is_none()) {
        s.sampling = read_sampling(sampling, vocab_size);
        if (needs_history(*s.sampling)) {
            s.history = read_history(get(seq, names.history), names.history.text, s.start + num_tokens, vocab_size);
            const auto drafts = input.tokens.end() - s.num_drafts;
            s.history.insert(s.history.end(), drafts, input.tokens.end());
        }
        s.masks = read_masks(get(seq, names.masks), names.masks.text, 1 + s.num_drafts, vocab_size);
    }
    input.sequences.push_back(std::move(s));
}

// Reads a sequence, or says in `refused` why it cannot be computed and leaves nothing else of it behind.
void read_or_refuse(nb::handle seq, int index, const Model& model, StepInput& input) {
    const size_t num_tokens = input.tokens.size();
    const size_t num_blocks = input.blocks.size();
    const size_t num_targets = input.targets.size();
    std::string why;
    try {
        return read_sequence(seq, index, model, input);
    } catch (const Refusal& refusal) {
        why = refusal.what();
    } catch (const nb::python_error& error) {  // no SeqStep at all
        if (!error.matches(PyExc_AttributeError)) throw;
        why = nb::str(error.value()).c_str();
    }
    input.tokens.resize(num_tokens);
    input.blocks.resize(num_blocks);
    input.targets.resize(num_targets);
    input.refused.emplace_back(index, std::move(why));
}

const char* words_for(SequenceError error) {
    switch (error) {
        case SequenceError::kNotFinite:
            return "the model's logits are not finite (NaN or infinity)";
        case SequenceError::kNoMemory:
            return "out of memory while a token was drawn";
        case SequenceError::kNone:
            break;
    }
    __builtin_unreachable();
}

nb::tuple to_python(const TokenLogprobs& row) {
    nb::list ids;
    nb::list logprobs;
    for (const int32_t id : row.top_ids) ids.append(id);
    for (const float logprob : row.top_logprobs) logprobs.append(logprob);
    return nb::make_tuple(row.logprob, row.rank, nb::tuple(ids), nb::tuple(logprobs));
}

}  // namespace

std::shared_ptr<const SamplingSpec> read_sampling(nb::handle sampling, int vocab_size) {
    static const Name key{"_native"};
    const nb::object dict = nb::steal(PyObject_GenericGetDict(sampling.ptr(), nullptr));
    if (!dict.is_valid()) {  // no Sampling: reading it says so
        PyErr_Clear();
        return std::make_shared<const SamplingSpec>(new_spec(sampling, vocab_size));
    }
    if (PyObject* found = PyDict_GetItemWithError(dict.ptr(), key.interned)) {
        const auto* cached = static_cast<const CachedSpec*>(PyCapsule_GetPointer(found, CachedSpec::kName));
        if (cached == nullptr) throw nb::python_error();
        if (cached->vocab_size == vocab_size) return cached->spec;
    }
    auto cached = std::make_unique<CachedSpec>(
        CachedSpec{vocab_size, std::make_shared<const SamplingSpec>(new_spec(sampling, vocab_size))});
    std::shared_ptr<const SamplingSpec> spec = cached->spec;
    const nb::capsule owner(cached.get(), CachedSpec::kName,
                            [](void* p) noexcept { delete static_cast<CachedSpec*>(p); });
    cached.release();
    if (PyDict_SetItem(dict.ptr(), key.interned, owner.ptr()) != 0) throw nb::python_error();
    return spec;
}

std::vector<int32_t> read_ids(nb::handle sequence, int limit, const char* what) {
    std::vector<int32_t> ids;
    append_ids(sequence, limit, what, ids);
    return ids;
}

StepInput read_step(nb::handle seqs, nb::handle copies, const Model& model) {
    StepInput input;
    int index = 0;
    for_each(seqs, "seqs", [&](nb::handle seq) { read_or_refuse(seq, index++, model, input); });
    for_each(copies, "copies", [&](nb::handle item) {
        std::vector<int32_t> pair = read_ids(item, model.kv().num_blocks(), "copies");
        if (pair.size() != 2) throw Refusal("copies", "expected pairs of blocks");
        input.copies.emplace_back(pair[0], pair[1]);
    });
    return input;
}

nb::tuple write_output(const StepInput& input, const StepOutput& output) {
    nb::list tokens;
    nb::dict logprobs;
    nb::dict prompt_logprobs;
    nb::dict errors;
    for (const auto& [index, why] : input.refused) errors[nb::int_(index)] = nb::str(why.c_str());
    size_t row = 0;
    for (size_t s = 0; s < input.sequences.size(); ++s) {
        const SequenceInput& seq = input.sequences[s];
        const size_t first = row;
        row += static_cast<size_t>(seq.num_samples());
        if (output.errors[s] != SequenceError::kNone) {
            errors[nb::int_(seq.index)] = nb::str(words_for(output.errors[s]));
            continue;
        }
        for (size_t r = first; r < row; ++r) {
            if (output.logprobs[r] != nullptr) logprobs[nb::int_(nb::len(tokens))] = to_python(*output.logprobs[r]);
            tokens.append(output.tokens[r]);
        }
        if (seq.num_targets == 0) continue;
        nb::list targets;
        for (int i = 0; i < seq.num_targets; ++i) {
            targets.append(to_python(output.prompt_logprobs[static_cast<size_t>(seq.first_target + i)]));
        }
        prompt_logprobs[nb::int_(seq.index)] = targets;
    }
    return nb::make_tuple(tokens, logprobs, prompt_logprobs, errors);
}

}  // namespace segue
