// Attributes and items of Python objects, read without an exception of nanobind's own: those of its conversions to
// strings and containers end the process when memory runs out.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace segue {

// Why a value cannot be used, in one line that names it.
struct Refusal : std::invalid_argument {
    Refusal(const char* what, const std::string& why) : std::invalid_argument(std::string(what) + ": " + why) {}
};

// An attribute's name, interned once.
struct Name {
    explicit Name(const char* name);
    const char* text;
    PyObject* interned;  // lives as long as the module
};

// Raise AttributeError when there is no such attribute.
nanobind::object get(nanobind::handle object, const Name& name);
nanobind::object get(nanobind::handle object, const char* name);

// Turns a pending TypeError, ValueError or OverflowError into a refusal; raises anything else.
[[noreturn]] void refuse_pending(const char* what, const char* why);

// Raise Refusal, which names `what`, when the value is of another type or does not fit.
int to_int(nanobind::handle value, const char* what);
int64_t to_int64(nanobind::handle value, const char* what);
double to_double(nanobind::handle value, const char* what);
bool to_bool(nanobind::handle value, const char* what);
std::string to_string(nanobind::handle value, const char* what);

// Calls visit(item) for every item of a list, tuple or any other sequence; returns how many there are.
template <class Visit>
size_t for_each(nanobind::handle sequence, const char* what, const Visit& visit) {
    const nanobind::object fast = nanobind::steal(PySequence_Fast(sequence.ptr(), "expected a sequence"));
    if (!fast.is_valid()) refuse_pending(what, "expected a sequence");
    const Py_ssize_t size = PySequence_Fast_GET_SIZE(fast.ptr());
    PyObject** items = PySequence_Fast_ITEMS(fast.ptr());
    for (Py_ssize_t i = 0; i < size; ++i) visit(nanobind::handle(items[i]));
    return static_cast<size_t>(size);
}

}  // namespace segue
