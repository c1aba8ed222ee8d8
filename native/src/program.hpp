// A model as data: segue/models/program.py, whose names and docstrings these are.
#pragma once

#include <map>
#include <string>
#include <variant>
#include <vector>

#include "kernels/table.hpp"

namespace segue {

// Heads of an attention. Query head h reads KV head h / (num_heads / num_kv_heads).
struct Heads {
    int num_heads;
    int num_kv_heads;
    int head_dim;

    int group() const { return num_heads / num_kv_heads; }  // query heads of one KV head
    bool operator==(const Heads&) const = default;
};

struct Rope {
    double theta;
    int dim;  // 0: nothing is rotated
    bool interleaved;
    std::vector<double> factors;
    double scale;

    bool operator==(const Rope&) const = default;
};

// Which keys an attention's queries read.
struct AttentionShape {
    Heads heads;
    int window;  // 0: all

    bool operator==(const AttentionShape&) const = default;
};

namespace program {

// An empty name, or 0 for a cap: there is none.
struct Embed {
    std::string weight;
    std::string out;
    float scale;
    std::string positions;
    int first_position;
};
struct RMSNorm {
    std::string x;
    std::string weight;
    std::string out;
    float eps;
    bool accumulate;
};
struct LayerNorm {
    std::string x;
    std::string weight;
    std::string bias;
    std::string out;
    float eps;
};
struct NormParts {  // in place
    std::string x;
    std::string weight;
    int first;
    int count;
    int width;
    float eps;
};
struct Linear {
    std::string x;
    std::vector<std::string> weights;
    std::string out;
    bool accumulate;
    std::vector<std::string> biases;
    float scale;
};
struct Attention {
    std::string x;
    std::string out;
    int layer;
    AttentionShape shape;
    Rope rope;
    float scale;
    float softcap;
    std::string sinks;
};
struct Activation {
    std::string x;
    std::string out;
    Function function;
};
struct GLU {
    std::string x;
    std::string out;
    Function function;
};
struct Experts {  // added to out
    std::string x;
    std::string router;
    std::string gate;
    std::string up;
    std::string down;
    std::string out;
    int count;
    int used;
    int width;
    Function function;
};
struct Logits {
    std::string x;
    std::string weight;
    float scale;
    float softcap;
};

using Op = std::variant<Embed, RMSNorm, LayerNorm, NormParts, Linear, Attention, Activation, GLU, Experts, Logits>;

}  // namespace program

struct Program {
    std::vector<program::Op> ops;
    std::map<std::string, int> widths;
    int vocab_size;
    int max_model_len;
};

}  // namespace segue
