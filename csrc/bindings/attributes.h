// Attributes, methods and items of Python's objects, by names that are made once: Python compares
// such strings by their addresses.
#ifndef CXL_OFFLOAD_BINDINGS_ATTRIBUTES_H_
#define CXL_OFFLOAD_BINDINGS_ATTRIBUTES_H_

#include <pybind11/pybind11.h>

namespace cxl_offload::bindings {

// A name that lives as long as the process.
class Name {
 public:
  explicit Name(const char* text) : text_(PyUnicode_InternFromString(text)) {}
  PyObject* ptr() const { return text_; }
  operator pybind11::handle() const { return text_; }  // NOLINT(google-explicit-constructor)

 private:
  PyObject* text_;
};

// Takes over a new reference; throws Python's error where there is none.
inline pybind11::object owned(PyObject* made) {
  if (made == nullptr) throw pybind11::error_already_set();
  return pybind11::reinterpret_steal<pybind11::object>(made);
}

inline pybind11::object attribute(pybind11::handle object, const Name& name) {
  return owned(PyObject_GetAttr(object.ptr(), name.ptr()));
}

inline pybind11::object call(pybind11::handle object, const Name& method) {
  return owned(PyObject_CallMethodNoArgs(object.ptr(), method.ptr()));
}

// Calls a method that was found on the class of the object.
inline pybind11::object call_found(const pybind11::object& method, pybind11::handle object) {
  PyObject* arguments[] = {object.ptr()};
  return owned(PyObject_Vectorcall(method.ptr(), arguments, 1, nullptr));
}

// Returns null where a dict has no such item.
inline pybind11::object item_of(pybind11::handle dict, pybind11::handle name) {
  PyObject* found = PyDict_GetItemWithError(dict.ptr(), name.ptr());
  if (found == nullptr && PyErr_Occurred() != nullptr) throw pybind11::error_already_set();
  return pybind11::reinterpret_borrow<pybind11::object>(found);
}

}  // namespace cxl_offload::bindings

#endif  // CXL_OFFLOAD_BINDINGS_ATTRIBUTES_H_
