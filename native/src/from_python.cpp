#include "from_python.hpp"

namespace nb = nanobind;

namespace segue {

Name::Name(const char* name) : text(name), interned(PyUnicode_InternFromString(name)) {
    if (interned == nullptr) throw nb::python_error();
}

nb::object get(nb::handle object, const Name& name) {
    PyObject* value = PyObject_GetAttr(object.ptr(), name.interned);
    if (value == nullptr) throw nb::python_error();
    return nb::steal(value);
}

nb::object get(nb::handle object, const char* name) {
    PyObject* value = PyObject_GetAttrString(object.ptr(), name);
    if (value == nullptr) throw nb::python_error();
    return nb::steal(value);
}

void refuse_pending(const char* what, const char* why) {
    nb::python_error error;
    if (!error.matches(PyExc_TypeError) && !error.matches(PyExc_ValueError) && !error.matches(PyExc_OverflowError)) {
        throw error;
    }
    throw Refusal(what, why);
}

int64_t to_int64(nb::handle value, const char* what) {
    const long long number = PyLong_AsLongLong(value.ptr());
    if (number == -1 && PyErr_Occurred() != nullptr) refuse_pending(what, "expected an integer of 64 bits");
    return number;
}

int to_int(nb::handle value, const char* what) {
    int overflow = 0;
    const long number = PyLong_AsLongAndOverflow(value.ptr(), &overflow);
    if (number == -1 && PyErr_Occurred() != nullptr) refuse_pending(what, "expected an integer");
    if (overflow != 0 || number != static_cast<int>(number)) throw Refusal(what, "a number does not fit 32 bits");
    return static_cast<int>(number);
}

double to_double(nb::handle value, const char* what) {
    const double number = PyFloat_AsDouble(value.ptr());
    if (number == -1.0 && PyErr_Occurred() != nullptr) refuse_pending(what, "expected a number");
    return number;
}

bool to_bool(nb::handle value, const char* what) {
    if (!PyBool_Check(value.ptr())) throw Refusal(what, "expected True or False");
    return value.is(Py_True);
}

std::string to_string(nb::handle value, const char* what) {
    Py_ssize_t size = 0;
    const char* text = PyUnicode_AsUTF8AndSize(value.ptr(), &size);
    if (text == nullptr) refuse_pending(what, "expected a string");
    return {text, static_cast<size_t>(size)};
}

}  // namespace segue
