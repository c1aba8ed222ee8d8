// What every part of the native runtime uses: typed errors, aligned memory, small integer helpers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

namespace segue {

// Become the Python errors of the same names (segue.errors) at the border.
struct ModelFileError : std::runtime_error {
    using std::runtime_error::runtime_error;
};
struct CapacityError : std::runtime_error {
    using std::runtime_error::runtime_error;
};
struct ParameterError : std::runtime_error {
    ParameterError(std::string parameter, std::string value, std::string why)
        : std::runtime_error(why), parameter(std::move(parameter)), value(std::move(value)) {}
    std::string parameter;
    std::string value;
};

template <class T>
constexpr T ceil_div(T a, T b) {
    return (a + b - 1) / b;
}

template <class T>
constexpr T round_up(T a, T multiple) {
    return ceil_div(a, multiple) * multiple;
}

// Uninitialised memory on a cache line's boundary. Grows, never shrinks; contents are lost when it grows.
template <class T>
class Buffer {
   public:
    Buffer() = default;
    explicit Buffer(size_t size) { reserve(size); }

    void reserve(size_t size) {
        if (size <= size_) return;
        data_.reset();
        size_ = 0;  // if there is no memory for more, there is none at all
        data_.reset(allocate(size));
        size_ = size;
    }
    void reserve_zeroed(size_t size) {
        if (size <= size_) return;
        reserve(size);
        std::memset(static_cast<void*>(data_.get()), 0, size * sizeof(T));
    }
    T* data() { return data_.get(); }
    const T* data() const { return data_.get(); }
    T& operator[](size_t i) { return data_.get()[i]; }
    const T& operator[](size_t i) const { return data_.get()[i]; }
    size_t size() const { return size_; }

   private:
    static constexpr size_t kAlignment = 64;
    struct Free {
        void operator()(T* p) const { std::free(p); }
    };
    static T* allocate(size_t size) {
        void* p = std::aligned_alloc(kAlignment, round_up(size * sizeof(T), kAlignment));
        if (p == nullptr) throw std::bad_alloc();
        return static_cast<T*>(p);
    }
    std::unique_ptr<T, Free> data_;
    size_t size_ = 0;
};

}  // namespace segue
