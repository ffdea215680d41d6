#include "transport/messages/zmq/zmq_library.h"

#include <dlfcn.h>

#include <filesystem>
#include <system_error>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace thinwire {
namespace {

constexpr char kFileName[] = "libzmq.so.5";
constexpr char kFix[] =
    "install libzmq5 of Debian or the wheel pyzmq beside thinwire's, or name the "
    "file in THINWIRE_ZMQ_LIB";

absl::Status Unusable(const std::string& path, const std::string& why) {
  return absl::UnimplementedError(
      absl::StrCat("ZeroMQ can't be used: ", path, ": ", why, "; ", kFix));
}

// Packages are neighbours: this function's library is in thinwire/lib, the copy in pyzmq.libs under
// a name with a hash, such as libzmq-5d50ef84.so.5.2.5.
std::string WheelCopy() {
  Dl_info here;
  if (dladdr(reinterpret_cast<const void*>(&WheelCopy), &here) == 0) return "";
  const auto packages = std::filesystem::path(here.dli_fname).parent_path() / ".." / "..";
  std::error_code unknown;
  for (const auto& file : std::filesystem::directory_iterator(packages / "pyzmq.libs", unknown)) {
    if (absl::StartsWith(file.path().filename().string(), "libzmq")) return file.path().string();
  }
  return "";
}

template <typename Function>
void Find(void* handle, const char* name, Function* function, std::string* missing) {
  *function = reinterpret_cast<Function>(dlsym(handle, name));
  if (*function == nullptr) *missing = name;
}

// The name of a function that the library lacks, or nothing.
std::string FindAll(void* handle, ZmqLibrary* zmq) {
  std::string missing;
  const auto find = [&](const char* name, auto* function) {
    Find(handle, name, function, &missing);
  };
  find("zmq_errno", &zmq->error_number);
  find("zmq_strerror", &zmq->strerror);
  find("zmq_ctx_new", &zmq->ctx_new);
  find("zmq_ctx_set", &zmq->ctx_set);
  find("zmq_ctx_term", &zmq->ctx_term);
  find("zmq_socket", &zmq->socket);
  find("zmq_close", &zmq->close);
  find("zmq_setsockopt", &zmq->setsockopt);
  find("zmq_getsockopt", &zmq->getsockopt);
  find("zmq_bind", &zmq->bind);
  find("zmq_connect", &zmq->connect);
  find("zmq_socket_monitor", &zmq->socket_monitor);
  find("zmq_poll", &zmq->poll);
  find("zmq_msg_init", &zmq->msg_init);
  find("zmq_msg_init_size", &zmq->msg_init_size);
  find("zmq_msg_send", &zmq->msg_send);
  find("zmq_msg_recv", &zmq->msg_recv);
  find("zmq_msg_close", &zmq->msg_close);
  find("zmq_msg_data", &zmq->msg_data);
  find("zmq_msg_size", &zmq->msg_size);
  find("zmq_z85_encode", &zmq->z85_encode);
  find("zmq_z85_decode", &zmq->z85_decode);
  find("zmq_curve_public", &zmq->curve_public);
  return missing;
}

}  // namespace

absl::StatusOr<std::shared_ptr<const ZmqLibrary>> LoadZmq(const std::string& path) {
  std::string name = path.empty() ? kFileName : path;
  void* handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (handle == nullptr) {
    const std::string why = dlerror();
    const std::string wheel = path.empty() ? WheelCopy() : "";
    if (wheel.empty()) return Unusable(name, why);
    name = wheel;
    handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (handle == nullptr) return Unusable(name, dlerror());
  }
  void (*get_version)(int*, int*, int*);
  int (*has)(const char*);
  std::string missing;
  Find(handle, "zmq_version", &get_version, &missing);
  Find(handle, "zmq_has", &has, &missing);
  if (!missing.empty()) return Unusable(name, absl::StrCat("it has no ", missing));
  int major = 0, minor = 0, patch = 0;
  get_version(&major, &minor, &patch);
  auto zmq = std::make_shared<ZmqLibrary>();
  zmq->version = absl::StrCat(major, ".", minor, ".", patch);
  zmq->path = name;
  if (major != 4 || minor < 3) {
    return Unusable(
        name, absl::StrCat("its version is ", zmq->version, ", expected 4.3 or a newer one of 4"));
  }
  if (missing = FindAll(handle, zmq.get()); !missing.empty()) {
    return Unusable(name, absl::StrCat("it has no ", missing));
  }
  if (has("curve") == 0) return Unusable(name, "it was built without CURVE");
  return zmq;
}

}  // namespace thinwire
