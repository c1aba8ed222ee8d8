// A model as data: segue/models/program.py, whose names and docstrings these are.
#pragma once

#include <map>
#include <string>
#include <variant>
#include <vector>

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
    int dim;
    bool interleaved;
    std::vector<double> factors;

    bool operator==(const Rope&) const = default;
};

namespace program {

struct Embed {
    std::string weight;
    std::string out;
};
struct RMSNorm {
    std::string x;
    std::string weight;
    std::string out;
    float eps;
};
struct Linear {
    std::string x;
    std::vector<std::string> weights;
    std::string out;
    bool accumulate;
};
struct Attention {
    std::string x;
    std::string out;
    int layer;
    Heads heads;
    Rope rope;
};
struct SiluMul {
    std::string x;
    std::string out;
};
struct Logits {
    std::string x;
    std::string norm;
    float eps;
    std::string weight;
};

using Op = std::variant<Embed, RMSNorm, Linear, Attention, SiluMul, Logits>;

}  // namespace program

struct Program {
    std::vector<program::Op> ops;
    std::map<std::string, int> widths;
    int vocab_size;
    int max_model_len;
};

}  // namespace segue
