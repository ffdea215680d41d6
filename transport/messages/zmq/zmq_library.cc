#include "transport/messages/zmq/zmq_library.h"

#include <system_error>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "transport/shared_library.h"

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

// Its name contains a hash, such as libzmq-5d50ef84.so.5.2.5.
std::string WheelCopy() {
  const auto packages = WheelPackages();
  if (packages.empty()) return "";
  std::error_code unknown;
  for (const auto& file : std::filesystem::directory_iterator(packages / "pyzmq.libs", unknown)) {
    if (absl::StartsWith(file.path().filename().string(), "libzmq")) return file.path().string();
  }
  return "";
}

void FindAll(FunctionFinder& find, ZmqLibrary* zmq) {
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
}

}  // namespace

absl::StatusOr<std::shared_ptr<const ZmqLibrary>> LoadZmq(const std::string& path) {
  std::string name = path.empty() ? kFileName : path;
  void* handle = OpenLibrary(name);
  if (handle == nullptr) {
    const std::string why = WhyNotLoaded(name);
    const std::string wheel = path.empty() ? WheelCopy() : "";
    if (wheel.empty()) return Unusable(name, why);
    name = wheel;
    handle = OpenLibrary(name);
    if (handle == nullptr) return Unusable(name, WhyNotLoaded(name));
  }
  void (*get_version)(int*, int*, int*);
  int (*has)(const char*);
  FunctionFinder find(handle);
  find("zmq_version", &get_version);
  find("zmq_has", &has);
  if (!find.missing().empty()) return Unusable(name, absl::StrCat("it has no ", find.missing()));
  int major = 0, minor = 0, patch = 0;
  get_version(&major, &minor, &patch);
  auto zmq = std::make_shared<ZmqLibrary>();
  zmq->version = absl::StrCat(major, ".", minor, ".", patch);
  zmq->path = name;
  if (major != 4 || minor < 3) {
    return Unusable(
        name, absl::StrCat("its version is ", zmq->version, ", expected 4.3 or a newer one of 4"));
  }
  FindAll(find, zmq.get());
  if (!find.missing().empty()) {
    return Unusable(name, absl::StrCat("it has no ", find.missing()));
  }
  if (has("curve") == 0) return Unusable(name, "it was built without CURVE");
  return zmq;
}

}  // namespace thinwire
