// Libraries that are loaded at run time. They stay loaded, because they have threads and hooks of
// their own.
#ifndef THINWIRE_TRANSPORT_SHARED_LIBRARY_H_
#define THINWIRE_TRANSPORT_SHARED_LIBRARY_H_

#include <dlfcn.h>

#include <filesystem>
#include <string>

#include "absl/strings/strip.h"

namespace thinwire {

// Null if it can't be loaded; WhyNotLoaded() returns the reason.
inline void* OpenLibrary(const std::string& name) {
  return dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
}

// dlerror() without the name that most of its messages begin with.
inline std::string WhyNotLoaded(const std::string& name) {
  return std::string(absl::StripPrefix(dlerror(), name + ": "));
}

// Finds functions of one library.
class FunctionFinder {
 public:
  explicit FunctionFinder(void* library) : library_(library) {}

  template <typename Function>
  void operator()(const char* name, Function* function) {
    *function = reinterpret_cast<Function>(dlsym(library_, name));
    if (*function == nullptr) missing_ = name;
  }
  // The name of a function that the library lacks; empty if it has all.
  const std::string& missing() const { return missing_; }

 private:
  void* const library_;
  std::string missing_;
};

// The folder in which wheels are installed, found from the library that has this code, which is in
// thinwire/lib there. Empty if unknown.
inline std::filesystem::path WheelPackages() {
  Dl_info here;
  if (dladdr(reinterpret_cast<const void*>(&WheelPackages), &here) == 0) return {};
  return std::filesystem::path(here.dli_fname).parent_path() / ".." / "..";
}

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_SHARED_LIBRARY_H_
